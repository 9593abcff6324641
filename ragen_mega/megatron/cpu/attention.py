"""Attention over a forest as an autograd function of loops compiled for a processor, in float32
(bfloat16 too) or float64: it gathers nothing, and scores few keys behind a query.

Source: scores that fit into the cache, whose probabilities the backward pass computes again, as in
FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2). The queries that read a head's keys
together stand as columns, so that the softmax and its gradient are the same operation in every
column.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ragen_mega.compiled.jit import EXACT, Integers, Reals, in_parts, jit
from ragen_mega.compiled.tiles import LANES, add_product, exp, put_product
from ragen_mega.data.forest import Forest

QUERIES = 32
"""Queries of a chain that read a head's keys together, about; a column of scores each."""
KEYS = 128
"""Keys whose scores are held together in the backward pass; they fit into the nearest cache."""


def forest_attention(
    query: Tensor, key: Tensor, value: Tensor, forest: Forest, scale: float
) -> Tensor:
    """Return the attention of the nodes of a forest to their paths, themselves included: query [N,
    heads, d], key and value [M, kv_heads, d] to [N, heads * d].
    """
    starts = np.array([*(chain.start for chain in forest.chains), forest.num_nodes])
    chains = starts, np.array([len(chain.path) for chain in forest.chains]), sum(forest.received)
    return _ForestAttention.apply(query, key, value, chains, scale).flatten(1)


def _arrays(*tensors: Tensor) -> list[Reals]:
    """Share the memory of the tensors, whose storage can no longer be resized, or copy those in
    bfloat16 to float32.
    """
    return [tensor.detach().to(_real(tensor)).contiguous().numpy() for tensor in tensors]


def _real(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is computed."""
    return torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype


class _ForestAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        chains: tuple[Integers, Integers, int],
        scale: float,
    ) -> Tensor:
        output = query.new_empty(query.shape, dtype=_real(query))
        logs = output.new_empty(query.shape[:2])
        factor = output.new_tensor(scale).numpy()[()]
        arrays = _arrays(query, key, value, output, logs)
        in_parts(attend_forest, key.shape[1], *chains, factor, *arrays)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logs)
        ctx.chains, ctx.scale = chains, factor
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:3]
        gradients = [torch.zeros(x.shape, dtype=_real(x)) for x in inputs]
        arrays = _arrays(*ctx.saved_tensors, d_output, *gradients)
        in_parts(attend_forest_backward, arrays[1].shape[1], *ctx.chains, ctx.scale, *arrays)
        return *(x.to(y.dtype) for x, y in zip(gradients, inputs)), None, None


@jit(fastmath=EXACT)
def _subtract_and_exponentiate(x, tops):
    """x [n] <- exp(x - tops [n]), where no x exceeds its top."""
    if x.itemsize == 8:
        for i in range(len(x)):
            x[i] = math.exp(x[i] - tops[i])
    else:
        for i in range(len(x)):
            x[i] = exp(np.float32(x[i] - tops[i]))


@jit(fastmath=EXACT)
def _fill(x, head, start, stop, place, rows):
    """Write a head of the nodes start .. stop to flat rows [.., d] from row `place` on."""
    d = x.shape[2]
    for t in range(start, stop):
        row = rows[(place + t - start) * d : (place + t - start + 1) * d]
        for i in range(d):
            row[i] = x[t, head, i]


@jit(fastmath=EXACT)
def _fill_columns(x, g, group, start, stop, factor, rows, columns, width):
    """rows [.., d] and columns [d, width] <- factor * the heads of key head g of the nodes
    start .. stop, and 0 in the other columns.
    """
    d, count = x.shape[2], (stop - start) * group
    for n in range(count):
        head = x[start + n // group, g * group + n % group]
        for i in range(d):
            rows[n * d + i] = columns[i * width + n] = head[i] * factor
    for i in range(d):
        columns[i * width + count : (i + 1) * width] = 0


@jit(fastmath=EXACT)
def _longest(lengths):
    longest = 0
    for length in lengths:
        longest = max(longest, length)
    return longest


@jit(fastmath=EXACT)
def _mask_future(scores, first, count, seen, group, width):
    """Let no query score a key behind itself: of `count` keys from key `first` on, the query nodes
    see `seen` and one more each.
    """
    for j in range(max(0, seen - first), count):
        scores[j * width : j * width + min(width, (first + j - seen + 1) * group)] = -np.inf


@jit(fastmath=EXACT)
def attend_forest(
    first: int,
    last: int,
    starts: Integers,
    lengths: Integers,
    given: int,
    scale: float,
    q: Reals,
    k: Reals,
    v: Reals,
    out: Reals,
    logs: Reals,
) -> None:
    """out [N, heads, d] <- attention of the nodes of a forest to their paths, themselves included;
    logs [N, heads] <- log of the sum of exp of their scores. Items are the heads of k.

    q [N, heads, d], k and v [given + N, kv_heads, d]; starts [C + 1] are the first nodes of the
    chains, and lengths [C] the lengths of their paths. The path of a chain ends with its own nodes,
    and begins as the path of the chain before it; the path before the first chain consists of the
    `given` first keys, of nodes that other ranks compute.
    """
    d, group = q.shape[2], q.shape[1] // k.shape[1]
    tile, room = max(1, QUERIES // group), (_longest(lengths) + 1) // 2 * 2
    most = (tile * group + LANES - 1) // LANES * LANES
    keys, values = np.zeros(room * d, q.dtype), np.zeros(room * d, q.dtype)
    rows, queries = np.empty(most * d, q.dtype), np.empty(most * d, q.dtype)
    scores, sums = np.empty(room * most, q.dtype), np.empty(most * d, q.dtype)
    tops, totals = np.empty(most, q.dtype), np.empty(most, q.dtype)
    for g in range(first, last):
        _fill(k, g, 0, given, 0, keys)
        _fill(v, g, 0, given, 0, values)
        for c in range(len(lengths)):
            before = lengths[c] - starts[c + 1]  # and the number of a node: the keys above it
            _fill(k, g, starts[c] + given, starts[c + 1] + given, before + starts[c], keys)
            _fill(v, g, starts[c] + given, starts[c + 1] + given, before + starts[c], values)
            for start in range(starts[c], starts[c + 1], tile):
                end = min(start + tile, starts[c + 1])
                count, used = (end - start) * group, (before + end + 1) // 2 * 2
                width = (count + LANES - 1) // LANES * LANES
                _fill_columns(q, g, group, start, end, scale, rows, queries, width)
                put_product(keys, 0, d, 1, queries, 0, scores, 0, width, used, d, width)
                _mask_future(scores, 0, used, before + start + 1, group, width)
                columns = scores[: used * width].reshape(used, width)
                top, total = tops[:width], totals[:width]
                top[:] = -np.inf
                total[:] = 0
                for j in range(used):
                    row = columns[j]
                    for n in range(width):
                        top[n] = row[n] if row[n] > top[n] else top[n]
                for j in range(used):
                    row = columns[j]
                    _subtract_and_exponentiate(row, top)
                    for n in range(width):
                        total[n] += row[n]
                put_product(scores, 0, 1, width, values, 0, sums, 0, d, count, used, d)
                for n in range(count):
                    t, head = start + n // group, g * group + n % group
                    logs[t, head] = top[n] + math.log(total[n])
                    for i in range(d):
                        out[t, head, i] = sums[n * d + i] / total[n]


@jit(fastmath=EXACT)
def attend_forest_backward(
    first: int,
    last: int,
    starts: Integers,
    lengths: Integers,
    given: int,
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
    d, group, real = q.shape[2], q.shape[1] // k.shape[1], q.dtype.type
    tile, room = max(1, QUERIES // group), (_longest(lengths) + 1) // 2 * 2
    most = (tile * group + LANES - 1) // LANES * LANES
    keys, values = np.zeros(room * d, q.dtype), np.zeros(room * d, q.dtype)
    d_keys, d_values = np.empty(room * d, q.dtype), np.empty(room * d, q.dtype)
    path = np.empty(room, np.int64)
    rows, d_rows = np.zeros((most + 1) * d, q.dtype), np.zeros((most + 1) * d, q.dtype)
    queries, d_outs = np.empty(most * d, q.dtype), np.empty(most * d, q.dtype)
    p, ds = np.empty(KEYS * most, q.dtype), np.empty(KEYS * most, q.dtype)
    tops, means = np.zeros(most, q.dtype), np.zeros(most, q.dtype)
    sums = np.empty(most * d, q.dtype)
    for g in range(first, last):
        _fill(k, g, 0, given, 0, keys)
        _fill(v, g, 0, given, 0, values)
        for j in range(given):
            path[j] = j
        for c in range(len(lengths)):
            before = lengths[c] - starts[c + 1]
            _fill(k, g, starts[c] + given, starts[c + 1] + given, before + starts[c], keys)
            _fill(v, g, starts[c] + given, starts[c + 1] + given, before + starts[c], values)
            for t in range(starts[c], starts[c + 1]):
                path[before + t] = t + given
            d_keys[: room * d] = 0
            d_values[: room * d] = 0
            for start in range(starts[c], starts[c + 1], tile):
                end = min(start + tile, starts[c + 1])
                count, used = (end - start) * group, (before + end + 1) // 2 * 2
                width = (count + LANES - 1) // LANES * LANES
                depth = count + count % 2  # depth of a product, which is even
                _fill_columns(q, g, group, start, end, scale, rows, queries, width)
                _fill_columns(d_out, g, group, start, end, real(1), d_rows, d_outs, width)
                rows[count * d : depth * d] = 0
                d_rows[count * d : depth * d] = 0
                # so that the weights of columns without a query are 1, never infinite
                tops[count:width] = 0
                means[count:width] = 0
                for n in range(count):
                    t, head = start + n // group, g * group + n % group
                    tops[n], means[n] = logs[t, head], 0
                    for i in range(d):
                        means[n] += d_out[t, head, i] * out[t, head, i]
                sums[: count * d] = 0
                for j in range(0, used, KEYS):
                    at, some = j * d, min(KEYS, used - j)
                    put_product(keys, at, d, 1, queries, 0, p, 0, width, some, d, width)
                    put_product(values, at, d, 1, d_outs, 0, ds, 0, width, some, d, width)
                    _mask_future(p, j, some, before + start + 1, group, width)
                    for i in range(some):
                        weights, slopes = p[i * width :][:width], ds[i * width :][:width]
                        _subtract_and_exponentiate(weights, tops[:width])
                        for n in range(width):
                            slopes[n] = weights[n] * (slopes[n] - means[n])
                    add_product(ds, 0, 1, width, keys, at, sums, 0, d, count, some, d)
                    add_product(p, 0, width, 1, d_rows, 0, d_values, at, d, some, depth, d)
                    add_product(ds, 0, width, 1, rows, 0, d_keys, at, d, some, depth, d)
                for n in range(count):
                    for i in range(d):
                        d_q[start + n // group, g * group + n % group, i] = sums[n * d + i] * scale
            for j in range(lengths[c]):
                for i in range(d):
                    d_k[path[j], g, i] += d_keys[j * d + i]
                    d_v[path[j], g, i] += d_values[j * d + i]
