"""What a processor does between matrix products, compiled: norms, rotary embedding, attention,
SwiGLU, and the draw from the logits; for the embedded engine, whose keys and values lie in blocks,
and with gradients for training (`trained.py`).

Source: Qwen2 (arXiv:2407.10671, section 2.2.1) and Qwen3 (arXiv:2505.09388, section 2); rotary
embeddings as in RoFormer (arXiv:2104.09864, Eq. 34); attention by rows that fit into the cache, of
which the backward pass computes the probabilities again, as in FlashAttention-2 (arXiv:2307.08691,
algorithms 1 and 2); exp as in Cephes (expf). On a small model torch needs as long to start an
operation as to do it, and each one reads and writes memory again.

What a kernel computes for one item of its batch depends on no other. Those that take most of the
time work on items [first, last), so that `in_parts` may cut the batch for several threads. All are
in this one file: numba's cache on disk knows a kernel by the file that it stands in, and would keep
one whose helper changed elsewhere.
"""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise, product
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Reals = NDArray[np.float32] | NDArray[np.float64]
Integers = NDArray[np.int64]

BLOCK = 16
"""Positions in one block of the cache."""
TILE = 16
"""Queries of one trajectory that read its keys together; bounds the scores that are held."""
KEYS = 32
"""Keys of a path that stand together in training."""
QUERIES = 32
"""Queries of all heads that read them together, about."""
ROWS = 256
"""Rows whose part of a norm's gradient is summed by itself, for any number of threads."""
VOCABULARY_BLOCK = 1024
"""Tokens whose probabilities are scanned for one draw. A smaller vocabulary is one block."""

# Of exp in float32: the interval, log 2 in two parts, and the polynomial.
_ZERO, _ONE, _LEAST = np.float32(0.0), np.float32(1.0), np.float32(-87.0)
_LOG2_E = np.float32(1.4426950408889634)
_ROUNDER, _BITS_OF_ONE = np.float32(1.5 * 2**23), 0x3F800000
_LOG_2_HIGH, _LOG_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(0.50000001201), np.float32(0.16666665459), np.float32(0.041665795894)
_P3, _P4 = np.float32(0.0083334519073), np.float32(0.0013981999507)
_P5 = np.float32(0.00019875691500)

_CACHE_LINE = 64
_EXACT = {"contract"}
_ANY_ORDER = {"contract", "reassoc", "nsz", "arcp"}
"""Sums may be taken in any order. Not finite-only: a NaN has to reach the logits."""


def _compiled(*, fastmath: Iterable[str]) -> Callable[[Callable], Callable]:
    """Compile at the first call, once for each dtype, and keep the result next to this file or in
    the user's cache; where neither can be written, for this process only.
    """

    def compile_lazily(function: Callable) -> Callable:
        options = {"nogil": True, "fastmath": set(fastmath), "error_model": "numpy"}
        try:
            return numba.njit(function, cache=True, **options)
        except RuntimeError:  # numba: "no locator available"
            return numba.njit(function, **options)

    return compile_lazily


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="compiled")


def in_parts(kernel: Callable[..., None], count: int, *arguments: Any) -> None:
    """kernel(first, last, *arguments) over the items [0, count), in as many threads as torch
    has.
    """
    parts = min(torch.get_num_threads(), count)
    if parts <= 1:
        kernel(0, count, *arguments)
        return
    runs = list(pairwise(count * part // parts for part in range(parts + 1)))
    others: list[Future[None]] = [
        _threads(parts - 1).submit(kernel, *run, *arguments) for run in runs[1:]
    ]
    kernel(*runs[0], *arguments)
    for other in others:
        other.result()


@intrinsic
def _add_product(typing, x, x_at, x_step, x_next, m, m_at, y, y_at, y_step, rows, depth, columns):
    """Add the product of x [rows, depth] and m [depth, columns] to y [rows, columns].

    Each lies in a flat array from its place `_at` on; rows of x and y are `_step` apart, the items
    of a row of x are `x_next` apart. Depth and columns are even.
    """

    return _product(x, m, y, adds=True)


@intrinsic
def _put_product(typing, x, x_at, x_step, x_next, m, m_at, y, y_at, y_step, rows, depth, columns):
    """As `_add_product`, but y is the product, whatever it was."""
    return _product(x, m, y, adds=False)


def _product(x, m, y, *, adds):
    def emit(context, builder, signature, arguments):
        _ProductCode(context, builder, signature, arguments, adds).emit()
        return context.get_dummy_value()

    at = types.intp
    return types.void(x, at, at, at, m, at, y, at, at, at, at, at), emit


class _ProductCode:
    """The instructions of `_add_product`, in which the sums of up to four rows and 32 columns stay
    in registers: numba's own loops would go to memory for every k.
    """

    def __init__(self, context, builder, signature, arguments, adds):
        self.builder, self.adds = builder, adds
        self.real = context.get_data_type(signature.args[0].dtype)
        self.size = context.get_abi_sizeof(self.real)
        self.index = arguments[1].type
        self.x, self.m, self.y = (
            context.make_array(signature.args[i])(context, builder, arguments[i]).data
            for i in (0, 4, 6)
        )
        self.x_at, self.x_step, self.x_next, self.m_at, self.y_at, self.y_step = (
            arguments[i] for i in (1, 2, 3, 5, 7, 8)
        )
        self.rows, self.depth, self.columns = arguments[9:]

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
                    # the widest as often as it fits, of the others each at most once
                    whole = builder.and_(left, index(-32)) if width == 32 else index(width)
                    fits = builder.icmp_signed(">=", left, index(width))
                    column_end = builder.add(column_start, builder.select(fits, whole, index(0)))
                    with self._steps(column_start, column_end, width) as (column, _):
                        self._tile(row, num_rows, column, widths)
                    column_start = column_end
            row_start = row_end

    def _tile(self, row, num_rows, column, widths):
        """Of `num_rows` rows from `row` on, and of columns in vectors of `widths`."""
        builder = self.builder
        rows = [builder.add(row, self.index(i)) for i in range(num_rows)]
        starts = [builder.add(column, self.index(sum(widths[:j]))) for j in range(len(widths))]
        # For even and odd k apart, as an addition takes several cycles.
        sums = {
            key: cgutils.alloca_once(builder, ir.VectorType(self.real, widths[key[1]]))
            for key in product(range(num_rows), range(len(widths)), range(2))
        }
        for total in sums.values():
            builder.store(ir.Constant(total.type.pointee, None), total)
        with self._steps(self.index(0), self.depth, 2) as (even, _):
            for odd in range(2):
                k = builder.add(even, self.index(odd))
                pointers = [
                    self._vector(self.m, width, self.m_at, start, self.columns, k)
                    for start, width in zip(starts, widths)
                ]
                lines = [builder.load(pointer, align=self.size) for pointer in pointers]
                item = builder.mul(k, self.x_next)
                for i, at in enumerate(rows):
                    factor = builder.load(self._place(self.x, self.x_at, item, self.x_step, at))
                    for j, line in enumerate(lines):
                        factors = self._spread(factor, widths[j])
                        term = builder.fmul(line, factors, flags=("contract",))
                        total = builder.load(sums[i, j, odd])
                        total = builder.fadd(term, total, flags=("contract",))
                        builder.store(total, sums[i, j, odd])
        for (i, at), (j, start) in product(enumerate(rows), enumerate(starts)):
            target = self._vector(self.y, widths[j], self.y_at, start, self.y_step, at)
            total = builder.fadd(builder.load(sums[i, j, 0]), builder.load(sums[i, j, 1]))
            if self.adds:
                total = builder.fadd(builder.load(target, align=self.size), total)
            builder.store(total, target, align=self.size)

    def _steps(self, start, end, step):
        return cgutils.for_range_slice(self.builder, start, end, self.index(step), self.index)

    def _place(self, array, start, offset, step, count):
        builder = self.builder
        offset = builder.add(builder.add(start, offset), builder.mul(step, count))
        return builder.gep(array, [offset])

    def _vector(self, array, width, *place):
        pointer = ir.VectorType(self.real, width).as_pointer()
        return self.builder.bitcast(self._place(array, *place), pointer)

    def _spread(self, number, width):
        """The number in every lane."""
        lane = ir.IntType(32)
        undefined = ir.Constant(ir.VectorType(self.real, width), ir.Undefined)
        first_lane = ir.Constant(ir.VectorType(lane, width), None)
        number = self.builder.insert_element(undefined, number, lane(0))
        return self.builder.shuffle_vector(number, undefined, first_lane)


@intrinsic
def _fetch(typing, array, at, count):
    """Ask for array[at : at + count] before it is needed: a block is too short for the processor to
    see where the next lines will be.
    """

    def emit(context, builder, signature, arguments):
        real, number = context.get_data_type(signature.args[0].dtype), ir.IntType(32)
        base = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = ir.IntType(8).as_pointer()
        prefetch = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [pointer, number, number, number]),
            "llvm.prefetch.p0",
        )
        start, index = arguments[1], arguments[1].type
        line = index(_CACHE_LINE // context.get_abi_sizeof(real))
        end = builder.add(start, arguments[2])
        with cgutils.for_range_slice(builder, start, end, line, intp=index) as (place, _):
            target = builder.bitcast(builder.gep(base, [place]), pointer)
            # to read; into the second-level cache; data
            builder.call(prefetch, [target, number(0), number(2), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), emit


@intrinsic
def _bits_of(typing, real):
    """The bits of a float as an integer of its size."""
    integer = {types.float32: types.int32, types.float64: types.int64}[real]
    return integer(real), _reinterpret


@intrinsic
def _real_of(typing, integer):
    """The reverse of `_bits_of`."""
    real = {types.int32: types.float32, types.int64: types.float64}[integer]
    return real(integer), _reinterpret


def _reinterpret(context, builder, signature, arguments):
    return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))


@_compiled(fastmath=_EXACT)
def _exponentials(x, row, count, top):
    """x[row, :count] <- exp(x[row, :count] - top), where nothing exceeds `top`; in float32 0 for
    what is below 1e-37.
    """
    if x.itemsize == 8:
        for i in range(count):
            x[row, i] = math.exp(x[row, i] - top)
        return
    for i in range(count):
        distance = x[row, i] - top
        is_lost = distance < _LEAST  # not so a NaN
        y = _LEAST if is_lost else distance
        # y = n log 2 + r; adding the rounder rounds, and leaves n in the last bits
        shifted = y * _LOG2_E + _ROUNDER
        power = _real_of(np.int32((_bits_of(np.float32(shifted)) << 23) + _BITS_OF_ONE))
        n = shifted - _ROUNDER
        r = y - n * _LOG_2_HIGH - n * _LOG_2_LOW
        p = ((((_P5 * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
        x[row, i] = _ZERO if is_lost else (p * (r * r) + r + _ONE) * power


@_compiled(fastmath=_ANY_ORDER)
def _sum(x, row, first, last, total):
    """`total`, whose type it is taken in, plus x[row, first:last]."""
    for i in range(first, last):
        total += x[row, i]
    return total


@intrinsic
def _larger(typing, a, b):
    """Of two floats; either if one is a NaN. `max` and comparisons are not taken in lanes."""

    def emit(context, builder, signature, arguments):
        real = arguments[0].type
        maxnum = builder.module.declare_intrinsic(
            "llvm.maxnum", [real], ir.FunctionType(real, [real, real])
        )
        return builder.call(maxnum, arguments, fastmath=("nnan", "nsz"))

    return a(a, b), emit


@_compiled(fastmath=_ANY_ORDER | {"nnan"})
def _largest(x, row, count):
    """Of x[row, :count]; any number if there is a NaN."""
    largest = x[row, 0]
    for i in range(count):
        largest = _larger(largest, x[row, i])
    return largest


@_compiled(fastmath=_ANY_ORDER)
def normalize(first: int, last: int, x: Reals, weight: Reals, epsilon: float, out: Reals) -> None:
    """out [T, hidden] <- the RMS norm of x [T, hidden] with weight [hidden]."""
    width = x.shape[1]
    for t in range(first, last):
        squares = x.dtype.type(0)
        for i in range(width):
            squares += x[t, i] * x[t, i]
        factor = x.dtype.type(1.0 / math.sqrt(squares / width + epsilon))
        for i in range(width):
            out[t, i] = x[t, i] * factor * weight[i]


@_compiled(fastmath=_EXACT)
def gate(first: int, last: int, gate_up: Reals, out: Reals) -> None:
    """out [T, ffn] <- silu(gate) * up, of gate_up [T, 2, ffn]."""
    width = out.shape[1]
    for t in range(first, last):
        for i in range(width):
            out[t, i] = -abs(gate_up[t, 0, i])
        _exponentials(out, t, width, out.dtype.type(0))
        for i in range(width):
            x, e = gate_up[t, 0, i], out[t, i]
            sigmoid = (e if x < 0 else _ONE) / (e + _ONE)
            out[t, i] = x * sigmoid * gate_up[t, 1, i]


@_compiled(fastmath=_ANY_ORDER)
def normalize_backward(
    first: int,
    last: int,
    x: Reals,
    weight: Reals,
    epsilon: float,
    d_out: Reals,
    d_x: Reals,
    d_weight: NDArray[np.float64],
) -> None:
    """d_x [T, hidden] and d_weight [T / ROWS, hidden] <- gradients of `normalize`, that of the
    weight for each ROWS rows, which are an item.
    """
    width = x.shape[1]
    for item in range(first, last):
        for i in range(width):
            d_weight[item, i] = 0
        for t in range(item * ROWS, min(len(x), (item + 1) * ROWS)):
            squares, product = x.dtype.type(0), x.dtype.type(0)
            for i in range(width):
                squares += x[t, i] * x[t, i]
                product += d_out[t, i] * weight[i] * x[t, i]
            factor = x.dtype.type(1.0 / math.sqrt(squares / width + epsilon))
            share = product * factor * factor * factor / width
            for i in range(width):
                d_weight[item, i] += d_out[t, i] * x[t, i] * factor
                d_x[t, i] = d_out[t, i] * weight[i] * factor - x[t, i] * share


@_compiled(fastmath=_EXACT)
def gate_backward(first: int, last: int, gate_up: Reals, d_out: Reals, d_gate_up: Reals) -> None:
    """d_gate_up [T, 2, ffn] <- gradient of `gate`."""
    width = d_out.shape[1]
    scratch = np.empty((1, width), d_out.dtype)
    for t in range(first, last):
        for i in range(width):
            scratch[0, i] = -abs(gate_up[t, 0, i])
        _exponentials(scratch, 0, width, d_out.dtype.type(0))
        for i in range(width):  # one result in each loop, or none would be taken in lanes
            e = scratch[0, i]
            scratch[0, i] = (e if gate_up[t, 0, i] < 0 else _ONE) / (e + _ONE)
        for i in range(width):
            d_gate_up[t, 1, i] = d_out[t, i] * gate_up[t, 0, i] * scratch[0, i]
        for i in range(width):
            slope = scratch[0, i] * (_ONE + gate_up[t, 0, i] * (_ONE - scratch[0, i]))
            d_gate_up[t, 0, i] = d_out[t, i] * gate_up[t, 1, i] * slope


@_compiled(fastmath=_ANY_ORDER)
def rotate_and_store(
    qkv: Reals,
    bias: Reals,
    q_norm: Reals,
    k_norm: Reals,
    epsilon: float,
    cosines: Reals,
    sines: Reals,
    rows: Integers,
    positions: Integers,
    table: Integers,
    blocks: Reals,
) -> None:
    """Add the bias to qkv [T, heads + 2 * kv_heads, 2, d / 2], norm and rotate q and k in place,
    scale q by d ** -0.5, and write k and v to where rows [T] have positions [T].

    bias [heads + 2 * kv_heads, 2, d / 2], q_norm and k_norm [1, 2, d / 2], or [0, 2, d / 2];
    cosines and sines [max_context, d / 2]; table and blocks are the cache's.
    """
    kv_heads, half = blocks.shape[1], qkv.shape[3]
    heads = qkv.shape[1] - 2 * kv_heads
    scale = qkv.dtype.type(1.0 / math.sqrt(2.0 * half))
    flat_qkv, flat_bias = qkv.reshape(len(qkv), -1), bias.reshape(-1)
    flat_blocks, size = blocks.reshape(-1), 2 * half * BLOCK  # of the keys of one head in a block
    for t in range(len(qkv)):
        block, place = table[rows[t], positions[t] // BLOCK], positions[t] % BLOCK
        # The keys of a token go to a line of memory each: ask for those of the next one.
        following = min(t + 1, len(qkv) - 1)
        next_block = table[rows[following], positions[following] // BLOCK]
        for h in range(kv_heads):
            _fetch(flat_blocks, (next_block * kv_heads + h) * 2 * size, size)
        for i in range(flat_bias.size):
            flat_qkv[t, i] += flat_bias[i]
        for h in range(heads + kv_heads):
            norm = q_norm if h < heads else k_norm
            factor = scale if h < heads else qkv.dtype.type(1)
            if len(norm):
                squares = qkv.dtype.type(0)
                for part in range(2):
                    for i in range(half):
                        squares += qkv[t, h, part, i] * qkv[t, h, part, i]
                factor *= qkv.dtype.type(1.0 / math.sqrt(squares / (2 * half) + epsilon))
                for part in range(2):
                    for i in range(half):
                        qkv[t, h, part, i] *= norm[0, part, i]
            for i in range(half):
                a, b = qkv[t, h, 0, i] * factor, qkv[t, h, 1, i] * factor
                cosine, sine = cosines[positions[t], i], sines[positions[t], i]
                qkv[t, h, 0, i] = a * cosine - b * sine
                qkv[t, h, 1, i] = b * cosine + a * sine
        for h in range(kv_heads):
            for part in range(2):
                for i in range(half):
                    channel = part * half + i
                    blocks[block, h, 0, channel * BLOCK + place] = qkv[t, heads + h, part, i]
                    v = qkv[t, heads + kv_heads + h, part, i]
                    blocks[block, h, 1, place * 2 * half + channel] = v


@_compiled(fastmath=_EXACT)
def attend(
    first: int,
    last: int,
    qkv: Reals,
    queries: Integers,
    rows: Integers,
    positions: Integers,
    table: Integers,
    blocks: Reals,
    out: Reals,
) -> None:
    """out [W, heads, d] <- causal attention of the tokens queries [W] among those of
    `rotate_and_store`, of which those of a row stand in order.
    """
    kv_heads, d = blocks.shape[1], out.shape[2]
    group, half = out.shape[1] // kv_heads, d // 2
    most = 0
    for n in range(first, last):
        most = max(most, positions[queries[n]])
    width = (most // BLOCK + 1) * BLOCK
    q = np.empty((TILE * group, 2, half), out.dtype)
    scores = np.empty((TILE * group, width), out.dtype)
    sums = np.empty((TILE * group, d), out.dtype)
    flat_blocks, size = blocks.reshape(-1), d * BLOCK  # of the keys of one head in a block
    flat_q, flat_scores, flat_sums = q.reshape(-1), scores.reshape(-1), sums.reshape(-1)
    start = first
    while start < last:
        row, end = rows[queries[start]], start + 1
        while end < last and end - start < TILE and rows[queries[end]] == row:
            end += 1
        num_blocks = positions[queries[end - 1]] // BLOCK + 1
        num_queries = (end - start) * group  # of each key
        for h in range(kv_heads):
            for n in range(num_queries):
                t, head = queries[start + n // group], h * group + n % group
                for i in range(half):
                    q[n, 0, i], q[n, 1, i] = qkv[t, head, 0, i], qkv[t, head, 1, i]
                for i in range(num_blocks * BLOCK):
                    scores[n, i] = 0
                for i in range(d):
                    sums[n, i] = 0
            for b in range(num_blocks):
                keys = (table[row, b] * kv_heads + h) * 2 * size
                _add_product(
                    flat_q, 0, d, 1, flat_blocks, keys,
                    flat_scores, b * BLOCK, width, num_queries, d, BLOCK,
                )  # fmt: skip
                _fetch(flat_blocks, keys + size, size)  # the values
            next_h = (h + 1) % kv_heads
            next_row = row if next_h else rows[queries[min(end, last - 1)]]
            for n in range(num_queries):
                for b in range(n, num_blocks, num_queries):  # the next keys, all queries together
                    _fetch(flat_blocks, (table[next_row, b] * kv_heads + next_h) * 2 * size, size)
                seen = positions[queries[start + n // group]] + 1
                _exponentials(scores, n, seen, _largest(scores, n, seen))
                for i in range(seen, num_blocks * BLOCK):
                    scores[n, i] = 0
            for b in range(num_blocks):
                values = (table[row, b] * kv_heads + h) * 2 * size + size
                _add_product(
                    flat_scores, b * BLOCK, width, 1, flat_blocks, values,
                    flat_sums, 0, d, num_queries, BLOCK, d,
                )  # fmt: skip
            for n in range(num_queries):
                w, head = start + n // group, h * group + n % group
                share = _ONE / _sum(scores, n, 0, positions[queries[w]] + 1, out.dtype.type(0))
                for i in range(d):
                    out[w, head, i] = sums[n, i] * share
        start = end


@_compiled(fastmath=_EXACT)
def exponentiate(
    first: int,
    last: int,
    logits: Reals,
    inverse_temperature: Reals,
    masses: NDArray[np.float64],
) -> None:
    """logits [n, V] <- what is proportional to the probabilities, 1 for the most likely token;
    masses [n, blocks] <- sums of VOCABULARY_BLOCK of them.
    """
    vocabulary = logits.shape[1]
    for n in range(first, last):
        if inverse_temperature[n] != 1:
            for i in range(vocabulary):
                logits[n, i] *= inverse_temperature[n]
        _exponentials(logits, n, vocabulary, _largest(logits, n, vocabulary))
        for block in range(masses.shape[1]):
            start = block * VOCABULARY_BLOCK
            end = min(start + VOCABULARY_BLOCK, vocabulary)
            masses[n, block] = _sum(logits, n, start, end, logits.dtype.type(0))


@_compiled(fastmath=_EXACT)
def draw(
    weights: Reals,
    masses: NDArray[np.float64],
    uniform: NDArray[np.float64],
    greedy: NDArray[np.bool_],
    tokens: Integers,
) -> None:
    """tokens [n] <- where the CDF of each row of weights [V] reaches uniform [n] of its total: over
    the masses [n, blocks] of blocks, then within one of them. In greedy [n] rows the most likely
    token, whose weight is 1.
    """
    vocabulary, num_blocks = weights.shape[1], masses.shape[1]
    for n in range(len(weights)):
        if greedy[n]:
            tokens[n] = 0
            while weights[n, tokens[n]] != 1 and tokens[n] < vocabulary - 1:
                tokens[n] += 1
            continue
        share, block = uniform[n], 0
        if num_blocks > 1:
            reached = share * masses[n].sum()
            while reached >= masses[n, block] and block < num_blocks - 1:
                reached -= masses[n, block]
                block += 1
            share = reached / masses[n, block]
        start = block * VOCABULARY_BLOCK
        end = min(start + VOCABULARY_BLOCK, vocabulary)
        reached, cdf = share * _sum(weights, n, start, end, 0.0), 0.0
        # Rounding must not lead to the ends of the block, where tokens of weight 0 may be.
        for i in range(start, end):
            if weights[n, i] > 0:
                cdf += weights[n, i]
                tokens[n] = i
                if cdf > reached:
                    break


@_compiled(fastmath=_EXACT)
def _rotate(x, row, cosines, sines, t, sign, factor, out, place):
    """out[place] <- factor * x[row], turned by the angles of node t, back if sign is -1."""
    half = cosines.shape[1]
    for i in range(half):
        a, b = x[row, i] * factor, x[row, half + i] * factor
        sine = sign * sines[t, i]
        out[place, i] = a * cosines[t, i] - b * sine
        out[place, half + i] = b * cosines[t, i] + a * sine


@_compiled(fastmath=_EXACT)
def _pack(rows, first, last, columns):
    """columns <- rows[first:last] [.., d], in blocks [d, KEYS]."""
    d = rows.shape[1]
    for j in range(first, last):
        at, place = j // KEYS * KEYS * d, j % KEYS
        for i in range(d):
            columns[at + i * KEYS + place] = rows[j, i]


@_compiled(fastmath=_EXACT)
def _fill_path(path, shared, g, k, v, cosines, sines, keys, values):
    """keys and values [.., d] <- those of head g of the nodes path[shared:], keys rotated."""
    kv_heads, d = k.shape[1], k.shape[2]
    rows_k, rows_v, one = k.reshape(-1, d), v.reshape(-1, d), k.dtype.type(1)
    for j in range(shared, len(path)):
        row = path[j] * kv_heads + g
        _rotate(rows_k, row, cosines, sines, path[j], one, one, keys, j)
        values[j] = rows_v[row]


@_compiled(fastmath=_EXACT)
def _fill_queries(asks, g, group, q, cosines, sines, scale, queries):
    """queries [.., d] <- those of the nodes `asks` that read the keys of head g, rotated and
    scaled.
    """
    heads, d = q.shape[1], q.shape[2]
    rows_q, real = q.reshape(-1, d), q.dtype.type
    for n in range(len(asks) * group):
        t = asks[n // group]
        row = t * heads + g * group + n % group
        _rotate(rows_q, row, cosines, sines, t, real(1), real(scale), queries, n)


@_compiled(fastmath=_EXACT)
def _longest_path(bounds):
    """Nodes of it, up to a multiple of KEYS."""
    longest = 0
    for c in range(len(bounds) - 1):
        longest = max(longest, bounds[c + 1] - bounds[c])
    return (longest + KEYS - 1) // KEYS * KEYS


@_compiled(fastmath=_EXACT)
def attend_forest(
    first: int,
    last: int,
    q: Reals,
    k: Reals,
    v: Reals,
    cosines: Reals,
    sines: Reals,
    starts: Integers,
    bounds: Integers,
    paths: Integers,
    asks: Integers,
    ask_bounds: Integers,
    scale: float,
    out: Reals,
    logs: Reals,
) -> None:
    """out [A, heads, d] <- attention of the nodes asks [A] of a forest to their paths, themselves
    included; logs [A, heads] <- log of the sum of exp of their scores. Items are the heads of k.

    q [N, heads, d], k and v [N, kv_heads, d], before rotation; cosines and sines [N, d / 2]. Of C
    chains, in order, starts [C + 1] are the first nodes and paths[bounds[c] : bounds[c + 1]] the
    path to the end of chain c; what is not of chain c in it the path of chain c - 1 begins with.
    asks[ask_bounds[c] : ask_bounds[c + 1]] are of chain c, in order.
    """
    d, group = q.shape[2], q.shape[1] // k.shape[1]
    tile, width = max(1, QUERIES // group), _longest_path(bounds)
    real = q.dtype.type
    keys, values = np.empty((width, d), q.dtype), np.zeros((width, d), q.dtype)
    queries, sums = np.empty((tile * group, d), q.dtype), np.empty((tile * group, d), q.dtype)
    scores, columns = np.empty((tile * group, width), q.dtype), np.zeros(width * d, q.dtype)
    totals = np.empty(tile * group, q.dtype)
    flat_values, flat_queries = values.reshape(-1), queries.reshape(-1)
    flat_sums, flat_scores = sums.reshape(-1), scores.reshape(-1)
    for g in range(first, last):
        for c in range(len(starts) - 1):
            path = paths[bounds[c] : bounds[c + 1]]
            shared = len(path) - (starts[c + 1] - starts[c])
            _fill_path(path, shared, g, k, v, cosines, sines, keys, values)
            _pack(keys, shared, len(path), columns)
            before = shared - starts[c] + 1  # and the number of a node: how many keys it sees
            for start in range(ask_bounds[c], ask_bounds[c + 1], tile):
                end = min(start + tile, ask_bounds[c + 1])
                rows, seen = (end - start) * group, before + asks[start:end]
                used = (seen[-1] + KEYS - 1) // KEYS * KEYS
                _fill_queries(asks[start:end], g, group, q, cosines, sines, scale, queries)
                for b in range(0, used, KEYS):
                    _put_product(
                        flat_queries, 0, d, 1, columns, b * d, flat_scores, b, width, rows, d, KEYS
                    )
                for n in range(rows):
                    a, head, count = start + n // group, g * group + n % group, seen[n // group]
                    largest = _largest(scores, n, count)
                    _exponentials(scores, n, count, largest)
                    totals[n] = _sum(scores, n, 0, count, real(0))
                    logs[a, head] = largest + math.log(totals[n])
                    scores[n, count:used] = 0
                _put_product(
                    flat_scores, 0, width, 1, flat_values, 0, flat_sums, 0, d, rows, used, d
                )
                for n in range(rows):
                    share = _ONE / totals[n]
                    for i in range(d):
                        out[start + n // group, g * group + n % group, i] = sums[n, i] * share


@_compiled(fastmath=_EXACT)
def _score_gradients(start, g, group, seen, used, out, d_out, logs, p, ds):
    """p[:, :used] <- probabilities of queries start to start + len(seen) - 1, of scores;
    ds[:, :used] <- gradients of the scores, of those of the probabilities.
    """
    d = out.shape[2]
    for n in range(len(seen) * group):
        a, h, count = start + n // group, g * group + n % group, seen[n // group]
        mean = out.dtype.type(0)
        for i in range(d):
            mean += d_out[a, h, i] * out[a, h, i]
        _exponentials(p, n, count, logs[a, h])
        for i in range(count):
            ds[n, i] = p[n, i] * (ds[n, i] - mean)
        p[n, count:used] = 0
        ds[n, count:used] = 0


@_compiled(fastmath=_EXACT)
def _turn_back(g, d_k, cosines, sines):
    """Gradients of head g of rotated keys become those of the keys."""
    kv_heads, d = d_k.shape[1], d_k.shape[2]
    rows, one = d_k.reshape(-1, d), d_k.dtype.type(1)
    for t in range(len(d_k)):
        row = t * kv_heads + g
        _rotate(rows, row, cosines, sines, t, -one, one, rows, row)


@_compiled(fastmath=_EXACT)
def attend_forest_backward(
    first: int,
    last: int,
    q: Reals,
    k: Reals,
    v: Reals,
    cosines: Reals,
    sines: Reals,
    starts: Integers,
    bounds: Integers,
    paths: Integers,
    asks: Integers,
    ask_bounds: Integers,
    scale: float,
    out: Reals,
    logs: Reals,
    d_out: Reals,
    d_q: Reals,
    d_k: Reals,
    d_v: Reals,
) -> None:
    """d_q[asks] <- gradient of `attend_forest`; those of k and v are added to d_k and d_v."""
    heads, d, group = q.shape[1], q.shape[2], q.shape[1] // k.shape[1]
    tile, width = max(1, QUERIES // group), _longest_path(bounds)
    most, real = tile * group + tile * group % 2, q.dtype.type
    keys, values = np.zeros((width, d), q.dtype), np.empty((width, d), q.dtype)
    key_columns, value_columns = np.zeros(width * d, q.dtype), np.zeros(width * d, q.dtype)
    sums_k, sums_v = np.empty((width, d), q.dtype), np.empty((width, d), q.dtype)
    queries, d_rows = np.zeros((most, d), q.dtype), np.zeros((most, d), q.dtype)
    sums_q = np.empty((most, d), q.dtype)
    p, ds = np.empty((most, width), q.dtype), np.empty((most, width), q.dtype)
    flat_p, flat_ds, flat_keys = p.reshape(-1), ds.reshape(-1), keys.reshape(-1)
    flat_queries, flat_d_rows = queries.reshape(-1), d_rows.reshape(-1)
    flat_sums_q, rows_dq = sums_q.reshape(-1), d_q.reshape(-1, d)
    flat_sums_k, flat_sums_v = sums_k.reshape(-1), sums_v.reshape(-1)
    for g in range(first, last):
        for c in range(len(starts) - 1):
            path = paths[bounds[c] : bounds[c + 1]]
            shared = len(path) - (starts[c + 1] - starts[c])
            _fill_path(path, shared, g, k, v, cosines, sines, keys, values)
            _pack(keys, shared, len(path), key_columns)
            _pack(values, shared, len(path), value_columns)
            sums_k[: len(path)] = 0
            sums_v[: len(path)] = 0
            before = shared - starts[c] + 1  # and the number of a node: how many keys it sees
            for start in range(ask_bounds[c], ask_bounds[c + 1], tile):
                end = min(start + tile, ask_bounds[c + 1])
                rows, seen = (end - start) * group, before + asks[start:end]
                used = (seen[-1] + KEYS - 1) // KEYS * KEYS
                rows_even = rows + rows % 2  # a product's depth is even
                _fill_queries(asks[start:end], g, group, q, cosines, sines, scale, queries)
                for n in range(rows):
                    d_rows[n] = d_out[start + n // group, g * group + n % group]
                p[rows:rows_even, :used] = 0
                ds[rows:rows_even, :used] = 0
                for b in range(0, used, KEYS):
                    _put_product(
                        flat_queries, 0, d, 1, key_columns, b * d, flat_p, b, width, rows, d, KEYS
                    )
                    _put_product(
                        flat_d_rows, 0, d, 1, value_columns, b * d, flat_ds, b, width, rows, d, KEYS
                    )
                _score_gradients(start, g, group, seen, used, out, d_out, logs, p, ds)
                _put_product(flat_ds, 0, width, 1, flat_keys, 0, flat_sums_q, 0, d, rows, used, d)
                _add_product(
                    flat_p, 0, 1, width, flat_d_rows, 0, flat_sums_v, 0, d, used, rows_even, d
                )
                _add_product(
                    flat_ds, 0, 1, width, flat_queries, 0, flat_sums_k, 0, d, used, rows_even, d
                )
                for n in range(rows):
                    t = asks[start + n // group]
                    row = t * heads + g * group + n % group
                    _rotate(sums_q, n, cosines, sines, t, -real(1), real(scale), rows_dq, row)
            for j in range(len(path)):
                for i in range(d):
                    d_k[path[j], g, i] += sums_k[j, i]
                    d_v[path[j], g, i] += sums_v[j, i]
        _turn_back(g, d_k, cosines, sines)
