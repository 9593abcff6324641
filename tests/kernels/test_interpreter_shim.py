"""The test bench itself: planted faults are found and bfloat16 is computed as bfloat16."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="the interpreter is part of triton")

from tests.kernels.conftest import INTERPRETED  # noqa: E402

if not INTERPRETED:
    pytest.skip("the interpreter is switched off: kernels run on the GPU", allow_module_level=True)

import triton.language as tl  # noqa: E402

from tests.kernels.interpreter_shim import sanitize  # noqa: E402


@triton.jit
def shifted_copy(X, Y, size, offset, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + index, tl.load(X + index + offset, mask=index < size), mask=index < size)


@triton.jit
def store_to_one_cell(X):
    tl.store(X, tl.program_id(0))


@triton.jit
def prefix(X, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(X + pid + 1, tl.load(X + pid) + 1)


@triton.jit
def bf16_math(X, Y, OUT, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    x, y = tl.load(X + index), tl.load(Y + index)
    tl.store(OUT + index, x * y + x)
    square = tl.load(X + index[:, None] * 0 + index[None, :])
    tl.store(OUT + BLOCK + index, tl.sum(tl.dot(square, tl.trans(square)), 0).to(tl.bfloat16))


def test_out_of_bounds_is_found():
    x, y = torch.zeros(8), torch.zeros(8)
    with sanitize():
        shifted_copy[(1,)](x, y, 8, 0, BLOCK=8)
        with pytest.raises(Exception, match="out of bounds"):
            shifted_copy[(1,)](x, y, 8, 1, BLOCK=8)


def test_two_writers_are_found():
    with sanitize(), pytest.raises(Exception, match="store where program"):
        store_to_one_cell[(2,)](torch.zeros(1, dtype=torch.int32))


def test_reading_what_another_program_wrote_is_found():
    with sanitize(), pytest.raises(Exception, match="load where program"):
        prefix[(3,)](torch.zeros(5), BLOCK=1)


@pytest.mark.parametrize("order", ["reverse", 3])
def test_order_of_programs_changes(order):
    x = torch.zeros(9)
    with sanitize(order=order):
        from tests.kernels.interpreter_shim import SANITIZER

        check, SANITIZER.check = SANITIZER.check, lambda *_: None
        try:
            prefix[(8,)](x, BLOCK=1)
        finally:
            SANITIZER.check = check
    assert x.tolist() != list(range(9))


def test_bfloat16_arithmetic_is_rounded_to_nearest():
    x, y = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(32, dtype=torch.bfloat16)
    with sanitize():
        bf16_math[(1,)](x, y, out, BLOCK=16)
    torch.testing.assert_close(out[:16], (x * y) + x, rtol=2**-7, atol=1e-2)
    expected = 16 * (x.float() @ x.float())
    torch.testing.assert_close(out[16:].float(), expected.expand(16), rtol=2**-7, atol=1e-2)
