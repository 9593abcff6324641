"""Arms and seeds side by side: the settings that a study varies, its runs, and the tables of their
results.
"""
