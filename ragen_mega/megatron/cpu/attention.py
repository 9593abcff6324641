"""Attention over a forest as an autograd function of loops compiled for a processor, in float32
(bfloat16 too) or float64: it gathers nothing, and scores few keys behind a query.

Source: scores that fit into the cache, whose probabilities the backward pass computes again, as in
FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2); exp as in Cephes (expf), as in
`engines/embedded/kernels.py`, a second time because of numba's cache (see `data/jit.py`). The
queries that read a head's keys together stand as columns, so that the softmax and its gradient are
the same operation in every column.
"""

import math
from itertools import product
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.autograd import Function

from ragen_mega.data.forest import Forest
from ragen_mega.data.jit import EXACT, Integers, Reals, in_parts, jit

QUERIES = 32
"""Queries of a chain that read a head's keys together, about; a column of scores each."""
KEYS = 128
"""Keys whose scores are held together in the backward pass; they fit into the nearest cache."""
LANES = 16
"""Numbers side by side in registers. The columns of scores are a multiple of it."""

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
    """Return the attention of the nodes of a forest to their paths, themselves included: query [N,
    heads, d], key and value [N, kv_heads, d] to [N, heads * d].
    """
    starts = np.array([*(chain.start for chain in forest.chains), forest.num_nodes])
    lengths = np.array([len(chain.path) for chain in forest.chains])
    return _ForestAttention.apply(query, key, value, (starts, lengths), scale).flatten(1)


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
        chains: tuple[Integers, Integers],
        scale: float,
    ) -> Tensor:
        output = query.new_empty(query.shape, dtype=_real(query))
        logs = output.new_empty(query.shape[:2])
        scale = output.new_tensor(scale).numpy()[()]
        arrays = _arrays(query, key, value, output, logs)
        in_parts(attend_forest, key.shape[1], *chains, scale, *arrays)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logs)
        ctx.chains, ctx.scale = chains, scale
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[:3]
        gradients = [torch.zeros(x.shape, dtype=_real(x)) for x in inputs]
        arrays = _arrays(*ctx.saved_tensors, d_output, *gradients)
        in_parts(attend_forest_backward, arrays[1].shape[1], *ctx.chains, ctx.scale, *arrays)
        return *(x.to(y.dtype) for x, y in zip(gradients, inputs)), None, None


_AT = types.intp
"""A place in an array, or a count."""


@intrinsic
def _add_product(typing, x, x_at, x_step, x_next, m, m_at, y, y_at, y_step, rows, depth, columns):
    """Add the product of x [rows, depth] and m [depth, columns] to y [rows, columns].

    Each matrix lies in a flat array from its place `_at` on; rows of x and y are `_step` apart, the
    items of a row of x are `x_next` apart. Depth and columns are even.
    """
    return _product(x, m, y, adds=True)


@intrinsic
def _put_product(typing, x, x_at, x_step, x_next, m, m_at, y, y_at, y_step, rows, depth, columns):
    """Write the product that `_add_product` adds."""
    return _product(x, m, y, adds=False)


def _product(x, m, y, *, adds):
    def emit(context, builder, signature, arguments):
        _Product(context, builder, signature, arguments, adds).emit()
        return context.get_dummy_value()

    return types.void(x, _AT, _AT, _AT, m, _AT, y, _AT, _AT, _AT, _AT, _AT), emit


class _Product:
    """The LLVM instructions of `_add_product`, in which the sums of up to four rows and 32 columns
    stay in registers: compiled loops go to memory for every k, and take twice as long.
    """

    def __init__(self, context, builder, signature, arguments, adds):
        self.builder, self.index = builder, context.get_value_type(types.intp)
        self.real = context.get_data_type(signature.args[0].dtype)
        self.size, self.adds = context.get_abi_sizeof(self.real), adds
        values = [
            context.make_array(kind)(context, builder, argument).data
            if isinstance(kind, types.Array)
            else argument
            for kind, argument in zip(signature.args, arguments)
        ]
        self.x, self.x_at, self.x_step, self.x_next, self.m, self.m_at = values[:6]
        self.y, self.y_at, self.y_step, self.rows, self.depth, self.columns = values[6:]

    def emit(self):
        builder, index = self.builder, self.index
        row_start = index(0)
        for num_rows in (4, 2, 1):
            row_end = builder.and_(self.rows, index(-num_rows))
            with self._steps(row_start, row_end, num_rows) as (row, _):
                column_start = index(0)
                for widths in ((16, 16), (16, 8), (16,), (8,), (4,), (2,)):
                    width = sum(widths)
                    left = builder.sub(self.columns, column_start)
                    # the widest as often as it fits, each of the others at most once
                    whole = builder.and_(left, index(-32)) if width == 32 else index(width)
                    fits = builder.icmp_signed(">=", left, index(width))
                    column_end = builder.add(column_start, builder.select(fits, whole, index(0)))
                    with self._steps(column_start, column_end, width) as (column, _):
                        self._tile(row, num_rows, column, widths)
                    column_start = column_end
            row_start = row_end

    def _tile(self, row, num_rows, column, widths):
        """Multiply `num_rows` rows from `row` on with columns in vectors of `widths`."""
        builder, kinds = self.builder, [ir.VectorType(self.real, width) for width in widths]
        rows = [builder.add(row, self.index(i)) for i in range(num_rows)]
        starts = [builder.add(column, self.index(sum(widths[:j]))) for j in range(len(widths))]
        # Sums for even and odd k apart, as an addition takes several cycles.
        keys = list(product(range(num_rows), range(len(widths)), range(2)))
        sums = {key: cgutils.alloca_once(builder, kinds[key[1]]) for key in keys}
        for key, place in sums.items():
            builder.store(ir.Constant(kinds[key[1]], None), place)
        with self._steps(self.index(0), self.depth, 2) as (even, _):
            for odd in range(2):
                k = builder.add(even, self.index(odd))
                line = builder.add(self.m_at, builder.mul(self.columns, k))
                lines = [
                    builder.load(self._vector(self.m, kind, line, start), align=self.size)
                    for start, kind in zip(starts, kinds)
                ]
                item = builder.add(self.x_at, builder.mul(k, self.x_next))
                for i, at in enumerate(rows):
                    place = builder.add(item, builder.mul(self.x_step, at))
                    factor = builder.load(builder.gep(self.x, [place]))
                    for j, numbers in enumerate(lines):
                        factors = self._spread(factor, kinds[j])
                        term = builder.fmul(numbers, factors, flags=("contract",))
                        total = builder.load(sums[i, j, odd])
                        builder.store(
                            builder.fadd(total, term, flags=("contract",)), sums[i, j, odd]
                        )
        for (i, at), (j, start) in product(enumerate(rows), enumerate(starts)):
            total = builder.fadd(builder.load(sums[i, j, 0]), builder.load(sums[i, j, 1]))
            place = builder.add(self.y_at, builder.mul(self.y_step, at))
            pointer = self._vector(self.y, kinds[j], place, start)
            if self.adds:
                total = builder.fadd(builder.load(pointer, align=self.size), total)
            builder.store(total, pointer, align=self.size)

    def _steps(self, start, end, step):
        return cgutils.for_range_slice(self.builder, start, end, self.index(step), self.index)

    def _vector(self, array, kind, *places):
        """A pointer to a vector at the sum of two places."""
        place = self.builder.gep(array, [self.builder.add(*places)])
        return self.builder.bitcast(place, kind.as_pointer())

    def _spread(self, number, kind):
        """A number in every lane."""
        lane = ir.IntType(32)
        undefined = ir.Constant(kind, ir.Undefined)
        first_lane = ir.Constant(ir.VectorType(lane, kind.count), None)
        number = self.builder.insert_element(undefined, number, lane(0))
        return self.builder.shuffle_vector(number, undefined, first_lane)


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
def _subtract_and_exponentiate(x, tops):
    """x [n] <- exp(x - tops [n]), where no x exceeds its top."""
    if x.itemsize == 8:
        for i in range(len(x)):
            x[i] = math.exp(x[i] - tops[i])
    else:
        for i in range(len(x)):
            x[i] = _exp(np.float32(x[i] - tops[i]))


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
    d, group = q.shape[2], q.shape[1] // k.shape[1]
    tile, room = max(1, QUERIES // group), (lengths.max() + 1) // 2 * 2
    most = (tile * group + LANES - 1) // LANES * LANES
    keys, values = np.zeros(room * d, q.dtype), np.zeros(room * d, q.dtype)
    rows, queries = np.empty(most * d, q.dtype), np.empty(most * d, q.dtype)
    scores, sums = np.empty(room * most, q.dtype), np.empty(most * d, q.dtype)
    tops, totals = np.empty(most, q.dtype), np.empty(most, q.dtype)
    for g in range(first, last):
        for c in range(len(lengths)):
            before = lengths[c] - starts[c + 1]  # and the number of a node: the keys above it
            _fill(k, g, starts[c], starts[c + 1], before + starts[c], keys)
            _fill(v, g, starts[c], starts[c + 1], before + starts[c], values)
            for start in range(starts[c], starts[c + 1], tile):
                end = min(start + tile, starts[c + 1])
                count, used = (end - start) * group, (before + end + 1) // 2 * 2
                width = (count + LANES - 1) // LANES * LANES
                _fill_columns(q, g, group, start, end, scale, rows, queries, width)
                _put_product(keys, 0, d, 1, queries, 0, scores, 0, width, used, d, width)
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
                _put_product(scores, 0, 1, width, values, 0, sums, 0, d, count, used, d)
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
    tile, room = max(1, QUERIES // group), (lengths.max() + 1) // 2 * 2
    most = (tile * group + LANES - 1) // LANES * LANES
    keys, values = np.zeros(room * d, q.dtype), np.zeros(room * d, q.dtype)
    d_keys, d_values = np.empty(room * d, q.dtype), np.empty(room * d, q.dtype)
    path = np.empty(room, np.int64)
    rows, d_rows = np.zeros((most + 1) * d, q.dtype), np.zeros((most + 1) * d, q.dtype)
    queries, d_outs = np.empty(most * d, q.dtype), np.empty(most * d, q.dtype)
    p, ds = np.empty(KEYS * most, q.dtype), np.empty(KEYS * most, q.dtype)
    tops, means, sums = (
        np.zeros(most, q.dtype),
        np.zeros(most, q.dtype),
        np.empty(most * d, q.dtype),
    )
    for g in range(first, last):
        for c in range(len(lengths)):
            before = lengths[c] - starts[c + 1]
            _fill(k, g, starts[c], starts[c + 1], before + starts[c], keys)
            _fill(v, g, starts[c], starts[c + 1], before + starts[c], values)
            for t in range(starts[c], starts[c + 1]):
                path[before + t] = t
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
                    _put_product(keys, at, d, 1, queries, 0, p, 0, width, some, d, width)
                    _put_product(values, at, d, 1, d_outs, 0, ds, 0, width, some, d, width)
                    _mask_future(p, j, some, before + start + 1, group, width)
                    for i in range(some):
                        weights, slopes = p[i * width :][:width], ds[i * width :][:width]
                        _subtract_and_exponentiate(weights, tops[:width])
                        for n in range(width):
                            slopes[n] = weights[n] * (slopes[n] - means[n])
                    _add_product(ds, 0, 1, width, keys, at, sums, 0, d, count, some, d)
                    _add_product(p, 0, width, 1, d_rows, 0, d_values, at, d, some, depth, d)
                    _add_product(ds, 0, width, 1, rows, 0, d_keys, at, d, some, depth, d)
                for n in range(count):
                    for i in range(d):
                        d_q[start + n // group, g * group + n % group, i] = sums[n * d + i] * scale
            for j in range(lengths[c]):
                for i in range(d):
                    d_k[path[j], g, i] += d_keys[j * d + i]
                    d_v[path[j], g, i] += d_values[j * d + i]
