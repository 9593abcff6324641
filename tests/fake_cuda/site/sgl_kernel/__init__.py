"""Stands where SGLang's kernels would, for what looks whether they are installed."""
