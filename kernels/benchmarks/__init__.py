"""Cost of the kernels, timed beside other implementations.

Not part of the installed package: `tools/` and pytest put the folder `kernels/` on their path.
"""
