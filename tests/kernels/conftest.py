"""Where the kernel tests run: on the GPU if there is one, else in Triton's interpreter with its sanitizers on."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported


@pytest.fixture
def kernel_device():
    """Device of the tensors for Triton kernels; skips where triton is not installed."""
    pytest.importorskip("triton", reason="the Triton kernels need triton, which CPU-only torch does not bring along")
    if not INTERPRETED:
        yield "cuda"
        return
    from tests.kernels.interpreter_shim import sanitize

    with sanitize(order="reverse"):
        yield "cpu"
