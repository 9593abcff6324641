"""The decoder's operations between matrix products, compiled for a processor: norm, rotary
embedding, attention over the blocks of the cache, SwiGLU, and the draw from the logits.

Source: Qwen2 (arXiv:2407.10671, section 2.2.1) and Qwen3 (arXiv:2505.09388, section 2); rotary
embeddings as in RoFormer (arXiv:2104.09864, Eq. 34); exp as in Cephes (expf). On a small model
torch needs as long to start an operation as to do it, and each operation reads and writes memory.

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

from ragen_mega.data.jit import ANY_ORDER, EXACT, Integers, Reals, jit

BLOCK = 32
"""Positions in one block of the cache."""
Cached = Reals | NDArray[np.uint16]
"""Numbers of the cache; uint16 are the bits of bfloat16, which numpy does not know."""
TOGETHER = 8
"""Queries that take turns at each block of the cache: rows that share it read it once."""
LANES = 16
"""Numbers that a processor may take at once; rows of scores are rounded up to them."""
VOCABULARY_BLOCK = 1024
"""Tokens whose probabilities are scanned for one draw. A smaller vocabulary is one block."""

# exp in float32: the smallest argument, log 2 in two parts, and the polynomial.
_ONE, _LEAST = np.float32(1.0), np.float32(-87.0)
_LOG2_E = np.float32(1.4426950408889634)
_ROUNDER, _BITS_OF_ONE = np.float32(1.5 * 2**23), np.int32(0x3F800000)
_LOG_2_HIGH, _LOG_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(0.50000001201), np.float32(0.16666665459), np.float32(0.041665795894)
_P3, _P4 = np.float32(0.0083334519073), np.float32(0.0013981999507)
_P5 = np.float32(0.00019875691500)


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
def _rounded_up(count):
    """The least multiple of LANES that is no smaller."""
    return (count + LANES - 1) // LANES * LANES


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


@jit(fastmath=EXACT)
def _put_sum(weights, rows, out):
    """out [m] <- weights [n] @ rows [n, at least m]; eight rows for each pass over `out`."""
    whole = len(weights) // 8 * 8
    for j in range(len(out)):
        out[j] = 0
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


def _floats(block, room):
    """Return a block of the cache itself if it holds floats, else its numbers, put into `room`."""
    raise NotImplementedError("compiled code alone calls this")


@overload(_floats, jit_options={"fastmath": EXACT})
def _compile_floats(block, room):
    def widened(block, room):
        bits, numbers = block.reshape(-1), room.reshape(-1).view(np.uint32)
        for i in range(len(bits)):
            numbers[i] = np.uint32(bits[i]) << np.uint32(16)
        return room

    return widened if block.dtype == types.uint16 else lambda block, room: block


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
def _fetch(blocks, block, head, which):
    """Ask for the keys (`which` is 0) or values (1) of a head in a block."""
    size = blocks.shape[3] * BLOCK
    start = ((block * blocks.shape[1] + head) * 2 + which) * size
    numbers = blocks.reshape(-1)
    for at in range(start, start + size, 64 // numbers.itemsize):
        _fetch_line(numbers, at)


@jit(fastmath=ANY_ORDER)
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


@jit(fastmath=EXACT)
def gate(first: int, last: int, gate_up: Reals, out: Reals) -> None:
    """out [T, ffn] <- silu(gate) * up, of gate_up [T, 2, ffn]."""
    unit = out.dtype.type(1)
    for t in range(first, last):
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
            for i in range(2 * half):
                key, value = by_head[t, heads + h, i], by_head[t, heads + kv_heads + h, i]
                blocks[block, h, 0, i, place] = _cached(key, blocks)
                blocks[block, h, 1, i, place] = _cached(value, blocks)


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
    """out [W, heads, d] <- causal attention of the tokens queries [W] among those of
    `rotate_and_store`.
    """
    heads, d, kv_heads, real = out.shape[1], out.shape[2], blocks.shape[1], out.dtype.type
    group, by_head = heads // kv_heads, qkv.reshape(len(qkv), -1, d)
    most = 0
    for w in range(first, last):
        most = max(most, positions[queries[w]])
    lines = np.empty((TOGETHER, group, most + LANES), out.dtype)
    room = np.empty((d, BLOCK), out.dtype)
    end = first
    while end < last:  # all queries of rows with the same beginning, a key head at a time
        start, beginning, num_blocks = end, table[rows[queries[end]], 0], 0
        while end < min(start + TOGETHER, last) and table[rows[queries[end]], 0] == beginning:
            num_blocks = max(num_blocks, positions[queries[end]] // BLOCK + 1)
            end += 1
        for h in range(kv_heads):
            held = -1
            keys = values = _floats(blocks[0, h, 0], room)
            for b in range(num_blocks):
                for w in range(start, end):
                    t = queries[w]
                    if positions[t] < b * BLOCK:
                        continue
                    if table[rows[t], b] != held:
                        held = table[rows[t], b]
                        _fetch(blocks, held, h, 1)
                        keys = _floats(blocks[held, h, 0], room)
                    stop = min((b + 1) * BLOCK, _rounded_up(positions[t] + 1))
                    for n in range(group):
                        part = lines[w - start, n, b * BLOCK : stop]
                        _put_sum(by_head[t, h * group + n], keys, part)
            next_h = (h + 1) % kv_heads
            for w in range(start, end):
                t = queries[w]
                seen = positions[t] + 1
                after = w if next_h else min(end, last - 1)
                following = table[rows[queries[after]]]
                for n in range(group):
                    for b in range(n, (seen - 1) // BLOCK + 1, group):  # the next keys
                        _fetch(blocks, following[b], next_h, 0)
                    line = lines[w - start, n]
                    _exponentials(line[:seen], _largest(line[:seen]))
                    line[seen : _rounded_up(seen)] = 0
                out[w, h * group : (h + 1) * group] = 0
            held = -1
            for b in range(num_blocks):
                for w in range(start, end):
                    t = queries[w]
                    if positions[t] < b * BLOCK:
                        continue
                    if table[rows[t], b] != held:
                        held = table[rows[t], b]
                        values = _floats(blocks[held, h, 1], room)
                    stop = min((b + 1) * BLOCK, _rounded_up(positions[t] + 1))
                    for n in range(group):
                        part = lines[w - start, n, b * BLOCK : stop]
                        _add_products(values, part, out[w, h * group + n])
            for w in range(start, end):
                for n in range(group):
                    line = lines[w - start, n, : positions[queries[w]] + 1]
                    out[w, h * group + n] /= _sum(line, real(0))


@jit(fastmath=EXACT)
def exponentiate(
    first: int,
    last: int,
    logits: Reals,
    inverse_temperature: Reals,
    masses: NDArray[np.float64],
) -> None:
    """logits [n, V] <- numbers proportional to the probabilities, 1 for the most likely token;
    masses [n, blocks] <- sums of VOCABULARY_BLOCK of them.
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
            reached = share * masses[n].sum()
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
