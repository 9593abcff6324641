"""Words that are to be written in the opposite order."""
