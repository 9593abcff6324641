"""Triton kernels on the fake device: interpreted, each launch one operation."""

from typing import Any

import fake_cuda_device

from tests.kernels.interpreter_shim import interpreter


def install() -> None:
    """Count launches instead of what the interpreter does for them, such as copies to the host."""
    launch = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        fake_cuda_device.enter_kernel()
        try:
            launch(self, *args, **kwargs)
        finally:
            fake_cuda_device.leave_kernel()

    interpreter.GridExecutor.__call__ = call
