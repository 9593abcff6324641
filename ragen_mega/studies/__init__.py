"""Arms and seeds side by side: what a study varies, its runs, and the tables of their results."""
