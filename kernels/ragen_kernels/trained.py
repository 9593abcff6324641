"""The layers' operations beside matrix products as autograd functions of the kernels in
`compiled.py`, for training on a processor in float32 or float64.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ragen_kernels import compiled
from ragen_kernels.compiled import ROWS, Integers, Reals, in_parts


class Paths(NamedTuple):
    """C chains of nodes that stand in depth-first order, their paths from the roots, and the A
    nodes whose attention is asked for.
    """

    starts: Integers  # [C + 1] first node of each, and the number of nodes
    bounds: Integers  # [C + 1] where the path of each begins in `nodes`
    nodes: Integers
    asks: Integers  # [A] in order
    ask_bounds: Integers  # [C + 1] where those of each chain begin

    def of_nodes(self, asks: Integers) -> "Paths":
        """The same, but for what is asked."""
        return self._replace(asks=asks, ask_bounds=np.searchsorted(asks, self.starts))


def forest_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosines: Tensor,
    sines: Tensor,
    paths: Paths,
    scale: float,
) -> Tensor:
    """Attention of nodes of a forest to their paths, themselves included: query [N, heads, d], key
    and value [N, kv_heads, d] to [A, heads * d].

    Query and key are rotated by the angles of their nodes, whose cosines and sines are [N, d / 2].
    """
    return _ForestAttention.apply(query, key, value, cosines, sines, paths, scale).flatten(1)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The root mean square norm of x [..., hidden] with weight [hidden] (arXiv:1910.07467)."""
    return _RMSNorm.apply(x, weight, epsilon)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 * ffn], in which the gates stand before the ups, to [..., ffn]
    (arXiv:2002.05202).
    """
    return _SwiGLU.apply(gate_up)


def _arrays(*tensors: Tensor) -> list[Reals]:
    """They share the memory, whose storage can no longer be resized."""
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


def _rows(x: Tensor) -> Reals:
    """Of the last dimension, in the memory of x if that is contiguous."""
    return x.detach().contiguous().numpy().reshape(-1, x.shape[-1])


class _ForestAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cosines: Tensor,
        sines: Tensor,
        paths: Paths,
        scale: float,
    ) -> Tensor:
        q, k, v, cos, sin = _arrays(query, key, value, cosines.to(query), sines.to(query))
        # torch's memory, which may have huge pages
        output = query.new_empty(len(paths.asks), *q.shape[1:])
        logs = query.new_empty(output.shape[:2])
        in_parts(
            compiled.attend_forest, k.shape[1], q, k, v, cos, sin, *paths, scale,
            *_arrays(output, logs),
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, cosines, sines, output, logs)
        ctx.paths, ctx.scale = paths, scale
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, cosines, sines, *results = ctx.saved_tensors
        q, k, v, cos, sin, out, logs, d_out = _arrays(
            query, key, value, cosines.to(query), sines.to(query), *results, d_output
        )
        gradients = query.new_zeros(q.shape), key.new_zeros(k.shape), value.new_zeros(v.shape)
        in_parts(
            compiled.attend_forest_backward, k.shape[1], q, k, v, cos, sin, *ctx.paths, ctx.scale,
            out, logs, d_out, *_arrays(*gradients),
        )  # fmt: skip
        return *gradients, None, None, None, None


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        output = x.new_empty(x.shape)
        # a copy: what numpy has seen can no longer be resized, and weights may be offloaded
        rows, factors, out = _rows(x), weight.clone().numpy(), _rows(output)
        in_parts(compiled.normalize, len(rows), rows, factors, epsilon, out)
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_x = x.new_empty(x.shape)
        rows, factors = _rows(x), weight.clone().numpy()
        parts = -(-len(rows) // ROWS)
        d_weight = np.empty((parts, rows.shape[1]))
        in_parts(
            compiled.normalize_backward, parts, rows, factors, ctx.epsilon, _rows(d_output),
            _rows(d_x), d_weight,
        )  # fmt: skip
        return d_x, torch.from_numpy(d_weight.sum(0)).to(weight), None


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[-1] // 2
        output = gate_up.new_empty(*gate_up.shape[:-1], width)
        pairs = _rows(gate_up).reshape(-1, 2, width)
        in_parts(compiled.gate, len(pairs), pairs, _rows(output))
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        d_gate_up = gate_up.new_empty(gate_up.shape)
        pairs, d_pairs = (
            _rows(one).reshape(-1, 2, d_output.shape[-1]) for one in (gate_up, d_gate_up)
        )
        in_parts(compiled.gate_backward, len(pairs), pairs, _rows(d_output), d_pairs)
        return d_gate_up
