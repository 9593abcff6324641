"""Where the kernel tests run: on the GPU if there is one, else in Triton's interpreter with its
sanitizers on.
"""

import importlib.util
import os

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
if HAS_TRITON and INTERPRETED:
    import tests.kernels.interpreter_shim  # noqa: F401 before anything imports triton


@pytest.fixture
def kernel_device():
    """Device of the tensors for Triton kernels; skips where triton is not installed."""
    if not HAS_TRITON:
        pytest.skip("the Triton kernels need triton, which CPU-only torch does not bring along")
    if not INTERPRETED:
        yield "cuda"
        return
    from tests.kernels.interpreter_shim import sanitize

    with sanitize(order="reverse"):
        yield "cpu"
