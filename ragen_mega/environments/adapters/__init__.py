"""Environments of other libraries played here, and ours offered through their interfaces."""
