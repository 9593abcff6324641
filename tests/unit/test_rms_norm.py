"""The norm of the local layers against its formula in float64, and in bfloat16 within as many
roundings as each result has.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ragen_mega.megatron.layers import RMSNorm

U = 2.0**-8
"""Largest relative change of a number that is rounded to bfloat16, of 8 significant bits, with
room for the sums in float32.
"""
EPS = 1e-5


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS) * weight


def ours(x: Tensor, weight: Tensor) -> Tensor:
    config = SimpleNamespace(params_dtype=x.dtype, sequence_parallel=False)
    norm = RMSNorm(config, x.shape[-1], EPS)
    return torch.func.functional_call(norm, {"weight": weight}, x)


def with_gradients(function, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    output = function(*leaves)
    gradient = torch.randn(output.shape, dtype=torch.float64).bfloat16()
    output.backward(gradient.to(dtype))
    return [output.detach().double(), *(leaf.grad.double() for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape).bfloat16() for shape in ((40, 1, 24), (24,))]
    found = with_gradients(ours, inputs, dtype)
    expected = with_gradients(plain, inputs, torch.float64)
    # an intermediate result and the result itself are rounded
    relative = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2 * U}[dtype]
    for got, truth in zip(found, expected, strict=True):
        assert ((got - truth).abs() <= relative * (truth.abs() + 1e-2)).all()
