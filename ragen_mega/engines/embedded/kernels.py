"""The decoder's operations between matrix products, compiled for a processor: norm, rotary
embedding, attention over the blocks of the cache, SwiGLU, and the draw from the logits.

Source: Qwen2 (arXiv:2407.10671, section 2.2.1) and Qwen3 (arXiv:2505.09388, section 2); rotary
embeddings as in RoFormer (arXiv:2104.09864, Eq. 34). On a small model torch needs as long to start
an operation as to do it, and each operation reads and writes memory.

The result for one item of a batch depends on no other item. The kernels that take most of the time
work on items [first, last), so that `in_parts` may cut the batch for several threads. Inner loops
run over slices, whose indices numba knows to be no less than 0: LLVM then takes them in vectors.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from ragen_mega.compiled.jit import ANY_ORDER, EXACT, Integers, Reals, jit
from ragen_mega.compiled.tiles import add_product, exp, put_product

BLOCK = 32
"""Positions in one block of the cache."""
Cached = Reals | NDArray[np.uint16]
"""Numbers of the cache; uint16 are the bits of bfloat16, which numpy does not know."""
TOGETHER = 16
"""Queries that go through the blocks of the cache together, and multiply together where they share
one.
"""
VOCABULARY_BLOCK = 1024
"""Tokens whose probabilities are scanned for one draw. A smaller vocabulary is one block."""


@jit(fastmath=EXACT)
def _exponentials(x, top):
    """x [n] <- exp(x - top), where no x exceeds `top`."""
    if x.itemsize == 8:
        for i in range(len(x)):
            x[i] = math.exp(x[i] - top)
    else:
        for i in range(len(x)):
            x[i] = exp(np.float32(x[i] - top))


@jit(fastmath=ANY_ORDER)
def _sum(x, total):
    """`total`, whose type the sum is taken in, plus x [n]."""
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


def _cached(number, blocks):
    """Return a float as the number that `blocks` hold: itself, or the nearest bfloat16."""
    raise NotImplementedError("compiled code alone calls this")


@overload(_cached, jit_options={"fastmath": EXACT})
def _compile_cached(number, blocks):
    def rounded(number, blocks):
        bits = np.float32(number).view(np.uint32)
        is_odd = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
        return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16))

    return rounded if blocks.dtype == types.uint16 else lambda number, blocks: number


def _floats(cached, start, size, room):
    """Return an array and the place in it of the floats cached[start : start + size]: where they
    are, or in `room`, which takes the floats of a bfloat16 cache.
    """
    raise NotImplementedError("compiled code alone calls this")


@overload(_floats, jit_options={"fastmath": EXACT})
def _compile_floats(cached, start, size, room):
    def widened(cached, start, size, room):
        bits, numbers = cached[start : start + size], room.view(np.uint32)
        for i in range(size):
            numbers[i] = np.uint32(bits[i]) << np.uint32(16)
        return room, 0

    def themselves(cached, start, size, room):
        return cached, start

    return widened if cached.dtype == types.uint16 else themselves


@intrinsic
def _fetch_line(typing, numbers, at):
    """Ask for the cache line of numbers[at] before it is needed."""

    def emit(context, builder, signature, arguments):
        number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        line = builder.bitcast(builder.gep(data, [arguments[1]]), pointer)
        # to read; into the second-level cache; data
        builder.call(prefetch, [line, number(0), number(2), number(1)])
        return context.get_dummy_value()

    return types.void(numbers, types.intp), emit


@jit(fastmath=EXACT)
def _fetch(numbers, start, size):
    """Ask for the lines of numbers[start : start + size] before they are needed."""
    for at in range(start, start + size, 64 // numbers.itemsize):
        _fetch_line(numbers, at)


@jit(fastmath=ANY_ORDER)
def normalize(x: Reals, weight: Reals, epsilon: float, out: Reals) -> None:
    """out [T, hidden] <- the RMS norm of x [T, hidden] with weight [hidden]."""
    width = x.shape[1]
    for t in range(len(x)):
        squares = x.dtype.type(0)
        for i in range(width):
            squares += x[t, i] * x[t, i]
        factor = x.dtype.type(1.0 / math.sqrt(squares / width + epsilon))
        for i in range(width):
            out[t, i] = x[t, i] * factor * weight[i]


@jit(fastmath=EXACT)
def gate(gate_up: Reals, out: Reals) -> None:
    """out [T, ffn] <- silu(gate) * up, of gate_up [T, 2, ffn]."""
    unit = out.dtype.type(1)
    for t in range(len(out)):
        x, up, y = gate_up[t, 0], gate_up[t, 1], out[t]
        for i in range(len(y)):
            y[i] = -abs(x[i])
        _exponentials(y, out.dtype.type(0))
        for i in range(len(y)):
            sigmoid = (unit if x[i] > 0 else y[i]) / (unit + y[i])
            y[i] = x[i] * sigmoid * up[i]


@jit(fastmath=ANY_ORDER)
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
    blocks: Cached,
) -> None:
    """Add the bias to qkv [T, heads + 2 * kv_heads, 2, d / 2], norm and rotate q and k in place,
    scale q by d ** -0.5, and write k and v to where rows [T] have positions [T].

    bias [heads + 2 * kv_heads, 2, d / 2], q_norm and k_norm [1, 2, d / 2], or [0, 2, d / 2];
    cosines and sines [max_context, d / 2]; table and blocks are the cache's.
    """
    kv_heads, half, real = blocks.shape[1], qkv.shape[3], qkv.dtype.type
    heads = qkv.shape[1] - 2 * kv_heads
    scale = real(1.0 / math.sqrt(2.0 * half))
    flat_qkv, flat_bias = qkv.reshape(len(qkv), -1), bias.reshape(-1)
    by_head = qkv.reshape(len(qkv), -1, 2 * half)
    for t in range(len(qkv)):
        numbers, cosine, sine = flat_qkv[t], cosines[positions[t]], sines[positions[t]]
        for i in range(len(flat_bias)):
            numbers[i] += flat_bias[i]
        for h in range(heads + kv_heads):
            head, norm = by_head[t, h], q_norm if h < heads else k_norm
            factor = scale if h < heads else real(1)
            if len(norm):
                factor *= real(1.0 / math.sqrt(_sum(head * head, real(0)) / len(head) + epsilon))
                head *= norm.reshape(-1)
            a, b = qkv[t, h, 0], qkv[t, h, 1]
            for i in range(half):
                x, y = a[i] * factor, b[i] * factor
                a[i], b[i] = x * cosine[i] - y * sine[i], y * cosine[i] + x * sine[i]
        block, place = table[rows[t], positions[t] // BLOCK], positions[t] % BLOCK
        for h in range(kv_heads):
            keys, values = blocks[block, h, 0], blocks[block, h, 1, place * 2 * half :]
            for i in range(2 * half):
                keys[i * BLOCK + place] = _cached(by_head[t, heads + h, i], blocks)
                values[i] = _cached(by_head[t, heads + kv_heads + h, i], blocks)


@jit(fastmath=EXACT)
def _next_readers(b, start, end, queries, rows, positions, table):
    """Return the first range of queries in [start, end) that see block b of their rows and have it
    in one place; an empty one if none sees it.
    """
    while start < end and positions[queries[start]] < b * BLOCK:
        start += 1
    stop = start
    while stop < end:
        t, first = queries[stop], queries[start]
        if positions[t] < b * BLOCK or table[rows[t], b] != table[rows[first], b]:
            break
        stop += 1
    return start, stop


@jit(fastmath=EXACT)
def _seen_in_block(b, start, stop, queries, positions):
    """Return how many positions of block b the queries [start, stop) see, rounded up to an even
    number.
    """
    most = 0
    for w in range(start, stop):
        most = max(most, positions[queries[w]] + 1 - b * BLOCK)
    return min(BLOCK, (most + 1) // 2 * 2)


@jit(fastmath=EXACT)
def attend(
    first: int,
    last: int,
    qkv: Reals,
    queries: Integers,
    rows: Integers,
    positions: Integers,
    table: Integers,
    blocks: Cached,
    out: Reals,
) -> None:
    """out [W, heads, d] <- causal attention of the tokens queries [W] among the tokens of
    `rotate_and_store`.

    Neighbouring queries with a block in common are the rows of its products.
    """
    heads, d, kv_heads, real = out.shape[1], out.shape[2], blocks.shape[1], out.dtype.type
    group, by_head = heads // kv_heads, qkv.reshape(len(qkv), -1, d)
    cached, size, width = blocks.reshape(-1), d * BLOCK, 0
    for w in range(first, last):
        width = max(width, (positions[queries[w]] // BLOCK + 1) * BLOCK)
    lines = np.empty((TOGETHER * group, width), out.dtype)  # scores, then weights
    query = np.empty((TOGETHER * group, d), out.dtype)
    sums, room = np.empty_like(query), np.empty(size, out.dtype)
    x, p, y = query.reshape(-1), lines.reshape(-1), sums.reshape(-1)
    end = first
    while end < last:  # all queries of rows with the same beginning, a key head at a time
        start, beginning, num_blocks = end, table[rows[queries[end]], 0], 0
        while end < min(start + TOGETHER, last) and table[rows[queries[end]], 0] == beginning:
            num_blocks = max(num_blocks, positions[queries[end]] // BLOCK + 1)
            end += 1
        for h in range(kv_heads):
            for w in range(start, end):
                for n in range(group):
                    head, row = by_head[queries[w], h * group + n], (w - start) * group + n
                    for i in range(d):
                        query[row, i] = head[i]
            sums[:] = 0
            for b in range(num_blocks):
                w, stop = _next_readers(b, start, end, queries, rows, positions, table)
                while w < stop:
                    row, count = (w - start) * group, (stop - w) * group
                    at = (table[rows[queries[w]], b] * kv_heads + h) * 2 * size
                    _fetch(cached, at + size, size)  # the values
                    keys, at = _floats(cached, at, size, room)
                    place = row * width + b * BLOCK
                    put_product(x, row * d, d, 1, keys, at, p, place, width, count, d, BLOCK)
                    w, stop = _next_readers(b, stop, end, queries, rows, positions, table)
            next_h = (h + 1) % kv_heads
            for w in range(start, end):
                row, seen = (w - start) * group, positions[queries[w]] + 1
                after = w if next_h else min(end, last - 1)
                following = table[rows[queries[after]]]
                for n in range(group):
                    for b in range(n, (seen - 1) // BLOCK + 1, group):  # the next keys
                        _fetch(cached, (following[b] * kv_heads + next_h) * 2 * size, size)
                    line = lines[row + n]
                    _exponentials(line[:seen], _largest(line[:seen]))
                    line[seen : num_blocks * BLOCK] = 0
            for b in range(num_blocks):
                w, stop = _next_readers(b, start, end, queries, rows, positions, table)
                while w < stop:
                    row, count = (w - start) * group, (stop - w) * group
                    at = ((table[rows[queries[w]], b] * kv_heads + h) * 2 + 1) * size
                    values, at = _floats(cached, at, size, room)
                    depth = _seen_in_block(b, w, stop, queries, positions)
                    place = row * width + b * BLOCK
                    add_product(p, place, width, 1, values, at, y, row * d, d, count, depth, d)
                    w, stop = _next_readers(b, stop, end, queries, rows, positions, table)
            for w in range(start, end):
                row = (w - start) * group
                for n in range(group):
                    total = _sum(lines[row + n, : positions[queries[w]] + 1], real(0))
                    head, numbers = out[w, h * group + n], sums[row + n]
                    for i in range(d):
                        head[i] = numbers[i] / total


@jit(fastmath=EXACT)
def exponentiate(
    first: int,
    last: int,
    logits: Reals,
    inverse_temperature: Reals,
    masses: NDArray[np.float64],
) -> None:
    """logits [n, V] <- numbers proportional to the probabilities, 1 for the most likely token;
    masses [n, blocks] <- sums of VOCABULARY_BLOCK such numbers.
    """
    for n in range(first, last):
        row = logits[n]
        if inverse_temperature[n] != 1:
            for i in range(len(row)):
                row[i] *= inverse_temperature[n]
        _exponentials(row, _largest(row))
        for block in range(masses.shape[1]):
            start = block * VOCABULARY_BLOCK
            masses[n, block] = _sum(row[start : start + VOCABULARY_BLOCK], logits.dtype.type(0))


@jit(fastmath=EXACT)
def draw(
    weights: Reals,
    masses: NDArray[np.float64],
    uniform: NDArray[np.float64],
    greedy: NDArray[np.bool_],
    tokens: Integers,
) -> None:
    """tokens [n] <- the token at which the CDF of each row of weights [V] reaches uniform [n] of
    its total: over the masses [n, blocks] of blocks, then within one block. In greedy [n] rows the
    most likely token, whose weight is 1.
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
            reached = 0.0
            for mass in masses[n]:
                reached += mass
            reached *= share
            while reached >= masses[n, block] and block < num_blocks - 1:
                reached -= masses[n, block]
                block += 1
            share = reached / masses[n, block]
        start = block * VOCABULARY_BLOCK
        end = min(start + VOCABULARY_BLOCK, vocabulary)
        reached, cdf = share * _sum(weights[n, start:end], 0.0), 0.0
        # Rounding must not lead to the ends of the block, where tokens of weight 0 may be.
        for i in range(start, end):
            if weights[n, i] > 0:
                cdf += weights[n, i]
                tokens[n] = i
                if cdf > reached:
                    break
