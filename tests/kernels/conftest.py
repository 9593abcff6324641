"""Where the kernel tests run: on the GPU if there is one, else in Triton's interpreter with its
sanitizers on.
"""

import importlib.util
import os
from dataclasses import dataclass

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
if HAS_TRITON and INTERPRETED:
    import tests.kernels.interpreter_shim  # noqa: F401 before anything imports triton


@dataclass(frozen=True)
class Backend:
    """An implementation by where its tensors live, its widest arithmetic and that one's error."""

    device: str
    dtype: torch.dtype
    tolerance: float


@pytest.fixture
def kernel_device(monkeypatch):
    """Device of the tensors for Triton kernels; skips where triton is not installed."""
    if not HAS_TRITON:
        pytest.skip("the Triton kernels need triton, which CPU-only torch does not bring along")
    if not INTERPRETED:
        yield "cuda"
        return
    from ragen_kernels import dispatch

    from tests.kernels.interpreter_shim import sanitize

    monkeypatch.setattr(dispatch, "KERNEL_DEVICES", {"cpu", "cuda"})
    with sanitize(order="reverse"):
        yield "cpu"


@pytest.fixture
def small_blocks(kernel_device, monkeypatch):
    """Blocks so small that a short row has full blocks and a tail, on the device of the kernels."""
    from ragen_kernels import triton_policy, triton_returns, triton_rows, triton_token

    monkeypatch.setattr(triton_rows, "BLOCK", 256)
    monkeypatch.setattr(triton_policy, "BLOCK", 256)
    monkeypatch.setattr(triton_token, "BLOCK", 16)
    monkeypatch.setattr(triton_returns, "SCAN_BLOCK", 32)
    return kernel_device


@pytest.fixture(params=["reference", "triton"])
def backend(request):
    """Both implementations of every operation."""
    if request.param == "reference":
        return Backend("cpu", torch.float64, 1e-12)
    return Backend(request.getfixturevalue("small_blocks"), torch.float32, 1e-5)
