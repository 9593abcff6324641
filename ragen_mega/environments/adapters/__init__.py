"""Environments of other libraries seen from here, and ours seen from there."""
