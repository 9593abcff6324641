"""The project's kernels on the fake device: in plain torch, or interpreted from Triton's code where
a test sets `ragen_kernels.dispatch.KERNEL_DEVICES`; either way each launch is one operation.
"""

import importlib
import sys
from types import ModuleType

from tests.fake_cuda.counts import one_operation


def in_plain_torch(dispatch: ModuleType) -> None:
    """Use plain torch, because the interpreter's milliseconds per program are too slow for whole
    steps.
    """
    dispatch.KERNEL_DEVICES.clear()
    for name, function in list(vars(dispatch).items()):
        if hasattr(function, "__wrapped__"):
            setattr(dispatch, name, one_operation(function))


def count_interpreted(triton: ModuleType) -> None:
    """Count launches instead of what the interpreter does for them, such as copies to the host."""
    shim = "tests.kernels.interpreter_shim"
    if shim not in sys.modules:  # else it imports triton at this moment
        importlib.import_module(shim)
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    executor.__call__ = one_operation(executor.__call__)
