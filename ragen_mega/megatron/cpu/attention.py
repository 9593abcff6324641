"""Attention over a forest as an autograd function of loops compiled for a processor, in float32 or
float64: it gathers nothing, and computes no score behind a query.

Source: rows of scores that fit into the cache, whose probabilities the backward pass computes
again, as in FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2); exp as in Cephes (expf). The
helpers are those of `engines/embedded/kernels.py`, a second time because of numba's cache; `jit.py`
has the reason.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ragen_mega.data.forest import Forest
from ragen_mega.jit import ANY_ORDER, EXACT, Integers, Reals, in_parts, jit

BLOCK = 64
"""Keys whose scores are held together; a head's block of keys and values fits the nearest cache."""
QUERIES = 16
"""Queries that read a block of keys together, about."""
LANES = 16
"""Numbers that a processor may take at once; rows of scores are rounded up to them."""

# exp in float32: the smallest argument, log 2 in two parts, and the polynomial.
_ONE, _LEAST = np.float32(1.0), np.float32(-87.0)
_LOG2_E = np.float32(1.4426950408889634)
_ROUNDER, _BITS_OF_ONE = np.float32(1.5 * 2**23), np.int32(0x3F800000)
_LOG_2_HIGH, _LOG_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(0.50000001201), np.float32(0.16666665459), np.float32(0.041665795894)
_P3, _P4 = np.float32(0.0083334519073), np.float32(0.0013981999507)
_P5 = np.float32(0.00019875691500)


def forest_attention(
    query: Tensor, key: Tensor, value: Tensor, forest: Forest, scale: float
) -> Tensor:
    """Attention of the nodes of a forest to their paths, themselves included: query [N, heads, d],
    key and value [N, kv_heads, d] to [N, heads * d].
    """
    starts = np.array([*(chain.start for chain in forest.chains), forest.num_nodes])
    lengths = np.array([len(chain.path) for chain in forest.chains])
    return _ForestAttention.apply(query, key, value, (starts, lengths), scale).flatten(1)


def _arrays(*tensors: Tensor) -> list[Reals]:
    """Share the memory of the tensors, whose storage can no longer be resized."""
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


class _ForestAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        chains: tuple[Integers, Integers],
        scale: float,
    ) -> Tensor:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        logs = query.new_empty(query.shape[:2])
        scale = query.new_tensor(scale).numpy()[()]
        arrays = _arrays(query, key, value, output, logs)
        in_parts(attend_forest, key.shape[1], *chains, scale, *arrays)
        ctx.save_for_backward(query, key, value, output, logs)
        ctx.chains, ctx.scale = chains, scale
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [torch.zeros(x.shape, dtype=x.dtype) for x in ctx.saved_tensors[:3]]
        arrays = _arrays(*ctx.saved_tensors, d_output, *gradients)
        in_parts(attend_forest_backward, arrays[1].shape[1], *ctx.chains, ctx.scale, *arrays)
        return *gradients, None, None


@jit(fastmath=EXACT)
def _exp(x):
    """exp(x) of a float32 x <= 0; 0 below -87."""
    y = _LEAST if x < _LEAST else x  # a NaN stays
    # y = n log 2 + r; adding the rounder rounds, and leaves n in the last bits
    shifted = np.float32(y * _LOG2_E + _ROUNDER)
    power = np.int32((shifted.view(np.int32) << np.int32(23)) + _BITS_OF_ONE).view(np.float32)
    n = shifted - _ROUNDER
    r = y - n * _LOG_2_HIGH - n * _LOG_2_LOW
    p = ((((r * _P5 + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
    return np.float32(0) if x < _LEAST else (p * (r * r) + r + _ONE) * power


@jit(fastmath=EXACT)
def _exponentials(x, top):
    """x [n] <- exp(x - top), where no x exceeds `top`."""
    if x.itemsize == 8:
        for i in range(len(x)):
            x[i] = math.exp(x[i] - top)
    else:
        for i in range(len(x)):
            x[i] = _exp(np.float32(x[i] - top))


@jit(fastmath=ANY_ORDER)
def _sum(x):
    """The sum of x [n]."""
    total = x.dtype.type(0)
    for i in range(len(x)):
        total += x[i]
    return total


@jit(fastmath=ANY_ORDER | {"nnan"})
def _largest(x):
    """The largest of x [n]; any number if there is a NaN."""
    largest = x[0]
    for i in range(len(x)):
        largest = x[i] if x[i] > largest else largest
    return largest


@jit(fastmath=EXACT)
def _add_sum(weights, rows, out):
    """Add weights [n] @ rows [n, at least m] to out [m]; eight rows for each pass over `out`."""
    whole = len(weights) // 8 * 8
    for i in range(0, whole, 8):
        a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        e, f, g, h = weights[i + 4], weights[i + 5], weights[i + 6], weights[i + 7]
        p, q, r, s = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        t, u, v, w = rows[i + 4], rows[i + 5], rows[i + 6], rows[i + 7]
        for j in range(len(out)):
            first = a * p[j] + b * q[j] + c * r[j] + d * s[j]
            out[j] += first + (e * t[j] + f * u[j] + g * v[j] + h * w[j])
    for i in range(whole, len(weights)):
        a, p = weights[i], rows[i]
        for j in range(len(out)):
            out[j] += a * p[j]


@jit(fastmath=ANY_ORDER)
def _add_products(rows, x, out):
    """Add rows [n, at least m] @ x [m] to out [n]; four rows at a time."""
    whole, zero = len(out) // 4 * 4, x.dtype.type(0)
    for i in range(0, whole, 4):
        a = b = c = d = zero
        w, y, z, u = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        for j in range(len(x)):
            a += w[j] * x[j]
            b += y[j] * x[j]
            c += z[j] * x[j]
            d += u[j] * x[j]
        out[i] += a
        out[i + 1] += b
        out[i + 2] += c
        out[i + 3] += d
    for i in range(whole, len(out)):
        a, w = zero, rows[i]
        for j in range(len(x)):
            a += w[j] * x[j]
        out[i] += a


@jit(fastmath=EXACT)
def _fill(x, head, start, stop, place, blocks):
    """Write a head of the nodes start .. stop to the places of blocks [.., d, BLOCK] from `place`
    on.
    """
    for t in range(start, stop):
        block, j = blocks[(place + t - start) // BLOCK], (place + t - start) % BLOCK
        for i in range(x.shape[2]):
            block[i, j] = x[t, head, i]


@jit(fastmath=EXACT)
def attend_forest(
    first: int,
    last: int,
    starts: Integers,
    lengths: Integers,
    scale: float,
    q: Reals,
    k: Reals,
    v: Reals,
    out: Reals,
    logs: Reals,
) -> None:
    """out [N, heads, d] <- attention of the nodes of a forest to their paths, themselves included;
    logs [N, heads] <- log of the sum of exp of their scores. Items are the heads of k.

    q [N, heads, d], k and v [N, kv_heads, d]; starts [C + 1] are the first nodes of the chains, and
    lengths [C] the lengths of their paths. The path of a chain ends with its own nodes, and begins
    as the path of the chain before it.
    """
    heads, d, one = q.shape[1], q.shape[2], q.dtype.type(1)
    group = heads // k.shape[1]
    tile, num_blocks = max(1, QUERIES // group), (lengths.max() - 1) // BLOCK + 1
    keys, values = np.zeros((num_blocks, d, BLOCK), q.dtype), np.zeros((num_blocks, d, BLOCK), q.dtype)
    scores = np.empty((tile * group, num_blocks * BLOCK), q.dtype)
    shares = np.empty(tile * group, q.dtype)
    for g in range(first, last):
        for c in range(len(lengths)):
            before = lengths[c] - starts[c + 1]  # and the number of a node: the keys above it
            _fill(k, g, starts[c], starts[c + 1], before + starts[c], keys)
            _fill(v, g, starts[c], starts[c + 1], before + starts[c], values)
            for start in range(starts[c], starts[c + 1], tile):
                end = min(start + tile, starts[c + 1])
                count, used = (end - start) * group, before + end
                width = (used + LANES - 1) // LANES * LANES
                scores[:count, :width] = 0
                for b in range(0, used, BLOCK):
                    for n in range(count):
                        query = q[start + n // group, g * group + n % group]
                        _add_sum(query, keys[b // BLOCK], scores[n, b : min(b + BLOCK, width)])
                for n in range(count):
                    t, head = start + n // group, g * group + n % group
                    seen = scores[n, : before + t + 1]
                    for j in range(len(seen)):
                        seen[j] *= scale
                    top = _largest(seen)
                    _exponentials(seen, top)
                    total = _sum(seen)
                    logs[t, head], shares[n] = top + math.log(total), one / total
                    scores[n, before + t + 1 : width] = 0
                    out[t, head] = 0
                for b in range(0, used, BLOCK):
                    for n in range(count):
                        result = out[start + n // group, g * group + n % group]
                        weights = scores[n, b : min(b + BLOCK, width)]
                        _add_products(values[b // BLOCK], weights, result)
                for n in range(count):
                    result = out[start + n // group, g * group + n % group]
                    for i in range(d):
                        result[i] *= shares[n]


@jit(fastmath=EXACT)
def attend_forest_backward(
    first: int,
    last: int,
    starts: Integers,
    lengths: Integers,
    scale: float,
    q: Reals,
    k: Reals,
    v: Reals,
    out: Reals,
    logs: Reals,
    d_out: Reals,
    d_q: Reals,
    d_k: Reals,
    d_v: Reals,
) -> None:
    """Add the gradients of `attend_forest` to d_q, d_k and d_v."""
    heads, d, real = q.shape[1], q.shape[2], q.dtype.type
    group = heads // k.shape[1]
    tile, num_blocks = max(1, QUERIES // group), (lengths.max() - 1) // BLOCK + 1
    keys, values = np.zeros((num_blocks, d, BLOCK), q.dtype), np.zeros((num_blocks, d, BLOCK), q.dtype)
    d_keys, d_values = np.empty_like(keys), np.empty_like(values)
    path = np.empty(num_blocks * BLOCK, np.int64)
    p, ds = np.empty((tile * group, BLOCK), q.dtype), np.empty((tile * group, BLOCK), q.dtype)
    queries, d_outs = np.empty((d, tile * group), q.dtype), np.empty((d, tile * group), q.dtype)
    for g in range(first, last):
        for c in range(len(lengths)):
            before = lengths[c] - starts[c + 1]
            _fill(k, g, starts[c], starts[c + 1], before + starts[c], keys)
            _fill(v, g, starts[c], starts[c + 1], before + starts[c], values)
            for t in range(starts[c], starts[c + 1]):
                path[before + t] = t
            d_keys[: (lengths[c] - 1) // BLOCK + 1] = 0
            d_values[: (lengths[c] - 1) // BLOCK + 1] = 0
            for start in range(starts[c], starts[c + 1], tile):
                end = min(start + tile, starts[c + 1])
                count, used = (end - start) * group, before + end
                for n in range(count):
                    t, head = start + n // group, g * group + n % group
                    for i in range(d):
                        queries[i, n], d_outs[i, n] = q[t, head, i], d_out[t, head, i]
                for b in range(0, used, BLOCK):
                    width = min(BLOCK, (used - b + LANES - 1) // LANES * LANES)
                    key, value = keys[b // BLOCK], values[b // BLOCK]
                    p[:count, :width] = 0
                    ds[:count, :width] = 0
                    for n in range(count):
                        t, head = start + n // group, g * group + n % group
                        seen = max(0, min(width, before + t + 1 - b))
                        weights, slopes = p[n, :seen], ds[n, :seen]
                        _add_sum(q[t, head], key, weights)
                        for j in range(seen):
                            weights[j] *= scale
                        _exponentials(weights, logs[t, head])
                        _add_sum(d_out[t, head], value, slopes)
                        mean = real(0)
                        for i in range(d):
                            mean += d_out[t, head, i] * out[t, head, i]
                        for j in range(seen):
                            slopes[j] = weights[j] * (slopes[j] - mean) * scale
                        _add_products(key, ds[n, :width], d_q[t, head])
                    for i in range(d):
                        _add_sum(queries[i, :count], ds, d_keys[b // BLOCK, i, :width])
                        _add_sum(d_outs[i, :count], p, d_values[b // BLOCK, i, :width])
            for j in range(lengths[c]):
                for i in range(d):
                    d_k[path[j], g, i] += d_keys[j // BLOCK, i, j % BLOCK]
                    d_v[path[j], g, i] += d_values[j // BLOCK, i, j % BLOCK]
