"""What a decoding step does between its matrix products, compiled: norms, rotary embedding, keys and
values, attention, SwiGLU, and the draw from the logits.

Source: Qwen2 (arXiv:2407.10671, section 2.2.1) and Qwen3 (arXiv:2505.09388, section 2); rotary
embeddings as in RoFormer (arXiv:2104.09864, Eq. 34); exp as in Cephes (expf). On a small model torch
needs as long to start an operation as to do it, and each one reads and writes memory again.

Every kernel works on the items [first, last) of its batch, and what it computes for one depends on
no other, so `in_parts` may cut the batch for several threads. All are in this one file: numba's
cache on disk knows a kernel by the file that it stands in, and would keep one whose helper changed
elsewhere.
"""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BLOCK = 32
"""Positions in one block of the cache."""
TILE = 8
"""Queries of one trajectory that read its keys together; bounds the scores that are held."""
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
    return ThreadPoolExecutor(count, thread_name_prefix="embedded-engine")


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
def _add_product(typing, x, x_at, x_step, m, m_at, y, y_at, y_step, rows, depth, columns):
    """Add the product of x [rows, depth] and m [depth, columns] to y [rows, columns].

    Each lies in a flat array from its place `_at` on; rows of x and y are `_step` apart, depth and
    columns are even. The sums of two rows and up to 32 columns stay in registers: numba's own loops
    would go to memory for every k.
    """

    def emit(context, builder, signature, arguments):
        real = context.get_data_type(signature.args[0].dtype)
        size = context.get_abi_sizeof(real)
        index, lane = arguments[1].type, ir.IntType(32)
        x, m, y = (
            context.make_array(signature.args[i])(context, builder, arguments[i]).data
            for i in (0, 3, 5)
        )
        x_at, x_step, m_at, y_at, y_step, rows, depth, columns = (
            arguments[i] for i in (1, 2, 4, 6, 7, 8, 9, 10)
        )
        no_bits = {step: index(-step) for step in (1, 2, 4, 8, 16, 32)}

        def place(array, start, *steps):
            for step, count in steps:
                start = builder.add(start, builder.mul(step, count))
            return builder.gep(array, [start])

        def steps(start, end, step):
            return cgutils.for_range_slice(builder, start, end, index(step), intp=index)

        def add_tile(row, num_rows, column, width):
            vector = ir.VectorType(real, width)
            undefined = ir.Constant(vector, ir.Undefined)
            first_lane = ir.Constant(ir.VectorType(lane, width), None)
            zero = ir.Constant(vector, None)
            # [rows][2]: even and odd k apart, for an addition takes several cycles
            sums = [
                [cgutils.alloca_once(builder, vector) for _ in range(2)] for _ in range(num_rows)
            ]
            for one in (one for of_row in sums for one in of_row):
                builder.store(zero, one)
            with steps(index(0), depth, 2) as (even, _):
                for odd in range(2):
                    k = builder.add(even, index(odd))
                    line = place(m, builder.add(m_at, column), (columns, k))
                    line = builder.load(builder.bitcast(line, vector.as_pointer()), align=size)
                    for i in range(num_rows):
                        start = builder.add(x_at, k)
                        factor = builder.load(
                            place(x, start, (x_step, builder.add(row, index(i))))
                        )
                        factor = builder.insert_element(undefined, factor, lane(0))
                        factor = builder.shuffle_vector(factor, undefined, first_lane)
                        product = builder.fmul(line, factor, flags=["contract"])
                        total = builder.fadd(
                            product, builder.load(sums[i][odd]), flags=["contract"]
                        )
                        builder.store(total, sums[i][odd])
            for i in range(num_rows):
                target = place(
                    y, builder.add(y_at, column), (y_step, builder.add(row, index(i)))
                )
                target = builder.bitcast(target, vector.as_pointer())
                total = builder.fadd(*map(builder.load, sums[i]))
                total = builder.fadd(builder.load(target, align=size), total)
                builder.store(total, target, align=size)

        row_start = index(0)
        for num_rows in (2, 1):
            row_end = builder.and_(rows, no_bits[num_rows])
            with steps(row_start, row_end, num_rows) as (row, _):
                column_start = index(0)
                for width in (32, 16, 8, 4, 2):
                    column_end = builder.and_(columns, no_bits[width])
                    with steps(column_start, column_end, width) as (column, _):
                        add_tile(row, num_rows, column, width)
                    column_start = column_end
            row_start = row_end
        return context.get_dummy_value()

    at = types.intp
    return types.void(x, at, at, m, at, y, at, at, at, at, at), emit


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
def normalize(first, last, x, weight, epsilon, out):
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
def gate(first, last, gate_up, out):
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
def rotate_and_store(
    first, last, qkv, bias, q_norm, k_norm, epsilon, cosines, sines, rows, positions, table, blocks
):
    """Add the bias to qkv [T, heads + 2 * kv_heads, 2, d / 2], norm and rotate q and k in place,
    scale q by d ** -0.5, and write k and v to where rows [T] have positions [T].

    bias [heads + 2 * kv_heads, 2, d / 2], q_norm and k_norm [1, 2, d / 2], or [0, 2, d / 2];
    cosines and sines [max_context, d / 2]; table and blocks are the cache's.
    """
    kv_heads, half = blocks.shape[1], qkv.shape[3]
    heads = qkv.shape[1] - 2 * kv_heads
    scale = qkv.dtype.type(1.0 / math.sqrt(2.0 * half))
    for t in range(first, last):
        block, place = table[rows[t], positions[t] // BLOCK], positions[t] % BLOCK
        if len(bias):
            for h in range(qkv.shape[1]):
                for part in range(2):
                    for i in range(half):
                        qkv[t, h, part, i] += bias[h, part, i]
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
def attend(first, last, qkv, queries, rows, positions, table, blocks, out):
    """out [W, heads, d] <- causal attention of the tokens queries [W] among those of
    `rotate_and_store`, of which those of a row stand in order.
    """
    kv_heads, d = blocks.shape[1], out.shape[2]
    group = out.shape[1] // kv_heads
    most = 0
    for n in range(first, last):
        most = max(most, positions[queries[n]])
    width = (most // BLOCK + 1) * BLOCK
    scores = np.empty((TILE * group, width), out.dtype)
    q = np.empty((TILE * group, 2, d // 2), out.dtype)
    attended = np.empty((TILE * group, d), out.dtype)
    flat_blocks, flat_scores = blocks.reshape(-1), scores.reshape(-1)
    flat_q, flat_attended = q.reshape(-1), attended.reshape(-1)
    start = first
    while start < last:
        row, end = rows[queries[start]], start + 1
        while end < last and end - start < TILE and rows[queries[end]] == row:
            end += 1
        num_blocks = positions[queries[end - 1]] // BLOCK + 1
        num_queries = (end - start) * group
        for h in range(kv_heads):
            for n in range(num_queries):
                t, head = queries[start + n // group], h * group + n % group
                for part in range(2):
                    for i in range(d // 2):
                        q[n, part, i] = qkv[t, head, part, i]
                for i in range(d):
                    attended[n, i] = 0
                for i in range(num_blocks * BLOCK):
                    scores[n, i] = 0
            for b in range(num_blocks):
                keys = (table[row, b] * kv_heads + h) * 2 * d * BLOCK
                _add_product(
                    flat_q, 0, d, flat_blocks, keys,
                    flat_scores, b * BLOCK, width, num_queries, d, BLOCK,
                )  # fmt: skip
                _fetch(flat_blocks, keys + d * BLOCK, d * BLOCK)  # the values
            for n in range(num_queries):
                count = positions[queries[start + n // group]] + 1
                _exponentials(scores, n, count, _largest(scores, n, count))
                for i in range(count, num_blocks * BLOCK):
                    scores[n, i] = 0
            next_row, next_h = (row, h + 1) if h + 1 < kv_heads else (rows[queries[min(end, last - 1)]], 0)
            for b in range(num_blocks):
                _fetch(flat_blocks, (table[next_row, b] * kv_heads + next_h) * 2 * d * BLOCK, d * BLOCK)
                values = (table[row, b] * kv_heads + h) * 2 * d * BLOCK + d * BLOCK
                _add_product(
                    flat_scores, b * BLOCK, width, flat_blocks, values,
                    flat_attended, 0, d, num_queries, BLOCK, d,
                )  # fmt: skip
            for n in range(num_queries):
                count = positions[queries[start + n // group]] + 1
                share = _ONE / _sum(scores, n, 0, count, out.dtype.type(0))
                w, head = start + n // group, h * group + n % group
                for i in range(d):
                    out[w, head, i] = attended[n, i] * share
        start = end


@_compiled(fastmath=_EXACT)
def exponentiate(first, last, logits, inverse_temperature, greedy, best, masses):
    """logits [n, V] <- proportional to the probabilities, at most 1; masses [n, blocks] <- sums of
    VOCABULARY_BLOCK of them, best [n] <- the first of the largest of greedy [n] rows.
    """
    vocabulary = logits.shape[1]
    for n in range(first, last):
        if inverse_temperature[n] != 1:
            for i in range(vocabulary):
                logits[n, i] *= inverse_temperature[n]
        largest = _largest(logits, n, vocabulary)
        best[n] = 0
        while greedy[n] and best[n] < vocabulary - 1 and logits[n, best[n]] < largest:
            best[n] += 1
        _exponentials(logits, n, vocabulary, largest)
        for block in range(masses.shape[1]):
            start = block * VOCABULARY_BLOCK
            end = min(start + VOCABULARY_BLOCK, vocabulary)
            masses[n, block] = _sum(logits, n, start, end, logits.dtype.type(0))


@_compiled(fastmath=_EXACT)
def draw(first, last, probabilities, masses, uniform, tokens):
    """tokens [n] <- where the CDF of each row [V] reaches uniform [n] of its total: over the masses
    [n, blocks] of blocks, then within one of them.
    """
    vocabulary, num_blocks = probabilities.shape[1], masses.shape[1]
    for n in range(first, last):
        share, block = uniform[n], 0
        if num_blocks > 1:
            reached = share * masses[n].sum()
            while reached >= masses[n, block] and block < num_blocks - 1:
                reached -= masses[n, block]
                block += 1
            share = reached / masses[n, block]
        start = block * VOCABULARY_BLOCK
        end = min(start + VOCABULARY_BLOCK, vocabulary)
        reached, cdf = share * _sum(probabilities, n, start, end, 0.0), 0.0
        # Rounding must not lead to the ends of the block, where tokens of probability 0 may be.
        for i in range(start, end):
            if probabilities[n, i] > 0:
                cdf += probabilities[n, i]
                tokens[n] = i
                if cdf > reached:
                    break
