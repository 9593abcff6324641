"""One run: built from its configuration, and what happens around the loop of `train`."""
