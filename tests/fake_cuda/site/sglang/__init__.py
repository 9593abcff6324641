"""Stands where SGLang would on a machine without a GPU: see launch_server.py."""

__version__ = "0.5.17 (stand-in)"
