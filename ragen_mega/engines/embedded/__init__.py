"""Decoding in this process, on the CPU: every trajectory keeps its keys and values."""
