"""Norm and gated activation against their formulas in float64, and in bfloat16 within as many
roundings as each result has.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ragen_mega.data.forest import Forest
from ragen_mega.megatron.cpu.attention import forest_attention
from ragen_mega.megatron.elementwise import rms_norm, swiglu

U = 2.0**-8
"""Largest relative change of a number that is rounded to bfloat16, of 8 significant bits, with
room for the sums in float32.
"""
EPS = 1e-5


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS) * weight


def plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def ours_norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)


CASES = {
    "norm": (ours_norm, plain_norm, [(40, 1, 24), (24,)]),
    "swiglu": (swiglu, plain_swiglu, [(40, 1, 32)]),
}


def with_gradients(function, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    output = function(*leaves)
    gradient = torch.randn(output.shape, dtype=torch.float64).bfloat16()
    output.backward(gradient.to(dtype))
    return [output.detach().double(), *(leaf.grad.double() for leaf in leaves)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    ours, plain, shapes = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]
    found = with_gradients(ours, inputs, dtype)
    expected = with_gradients(plain, inputs, torch.float64)
    # an intermediate result and the result itself are rounded
    relative = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2 * U}[dtype]
    for got, truth in zip(found, expected, strict=True):
        assert ((got - truth).abs() <= relative * (truth.abs() + 1e-2)).all()


def test_attention_in_bfloat16_rounds_its_result_once() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(60, heads, 16).bfloat16() for heads in (6, 2, 2))
    forest = Forest.of([30, 30], [0, 0])
    found, expected = (
        forest_attention(*(x.to(dtype) for x in (query, key, value)), forest, 0.25).double()
        for dtype in (torch.bfloat16, torch.float64)
    )
    assert ((found - expected).abs() <= U * (expected.abs() + 1e-3)).all()
