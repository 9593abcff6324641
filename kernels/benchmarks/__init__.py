"""Cost of the kernels: timed beside other implementations on a GPU, and counted in sm_90 machine
code without one.

Not part of the installed package: `tools/` and pytest put the folder `kernels/` on their path.
"""
