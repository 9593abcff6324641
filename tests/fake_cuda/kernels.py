"""The project's kernels on the fake device: in plain torch, or interpreted from Triton's code where
a test sets `ragen_kernels.dispatch.KERNEL_DEVICES`; either way each launch is one operation.
"""

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
    from tests.kernels.interpreter_shim import interpreter

    interpreter.GridExecutor.__call__ = one_operation(interpreter.GridExecutor.__call__)
