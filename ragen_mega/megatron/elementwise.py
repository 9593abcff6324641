"""Norm and gated activation of megatron-core's local layers as autograd functions that keep their
inputs alone, where plain torch keeps every intermediate, in float32 too: half the bytes that a
layer saves in bfloat16, and fewer passes over them.

Source: root mean square norm (arXiv:1910.07467), SwiGLU (arXiv:2002.05202).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) in float32, rounded to the dtype of x [.., H], times weight
    [H].
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _widened(x)
        squares = torch.linalg.vecdot(wide, wide).unsqueeze(-1)
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()  # [.., 1]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normal, wide, factor = _widened(x) * scale, _widened(gradient), _widened(weight)
        # its sums over rows and over columns are products with a vector
        both = (normal * wide).flatten(0, -2)
        d_weight = torch.mv(both.t(), both.new_ones(len(both)))
        mean = torch.mv(both, factor).div_(x.shape[-1]).view(scale.shape)
        d_x = (wide * factor).addcmul_(normal, mean, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), None


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up [.., F] of x [.., 2 F], which holds the gate before up."""
    return _SwiGLU.apply(x)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        d_x = torch.empty_like(x)
        (gate, up), (d_gate, d_up) = x.chunk(2, dim=-1), d_x.chunk(2, dim=-1)
        torch.mul(F.silu(gate), gradient, out=d_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=d_gate)
        return d_x


def _widened(x: Tensor) -> Tensor:
    """Return x in the dtype in which norms are computed."""
    return x if x.dtype == torch.float64 else x.float()
