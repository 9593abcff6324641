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

import functools
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
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
REALS = torch.float32, torch.float64
"""What kernels are compiled for."""

BLOCK = 16
"""Positions in one block of the cache."""
TILE = 16
"""Queries of one trajectory that read its keys together; bounds the scores that are held."""
QUERIES = 32
"""Queries of a chain that read a head's keys together in training, about; a column each."""
KEYS = 128
"""Keys whose scores are held together in the backward pass; they fit into the nearest cache."""
LANES = 16
"""Numbers side by side in registers. The columns are a multiple of it."""
ROWS = 256
"""Rows whose part of a norm's gradient is summed by itself, for any number of threads."""
VOCABULARY_BLOCK = 1024
"""Tokens whose probabilities are scanned for one draw. A smaller vocabulary is one block."""

# Of exp in float32: the interval, log 2 in two parts, and the polynomial.
_ONE, _LEAST = np.float32(1.0), np.float32(-87.0)
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


def jit(*, fastmath: Iterable[str]) -> Callable[[Callable], Callable]:
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


@functools.cache
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


class _Lanes:
    """Numbers side by side in registers, in the instructions of an intrinsic."""

    def __init__(self, builder, value):
        self.builder, self.value = builder, value

    def __add__(self, other):
        return self._with(self.builder.fadd, other)

    def __sub__(self, other):
        return self._with(self.builder.fsub, other)

    def __mul__(self, other):
        return self._with(self.builder.fmul, other)

    def __truediv__(self, other):
        return self._with(self.builder.fdiv, other)

    def __neg__(self):
        return _Lanes(self.builder, self.builder.fneg(self.value))

    def __lt__(self, other):
        """In which lanes it is less; a NaN is not."""
        return self.builder.fcmp_ordered("<", self.value, self._like(other))

    def __gt__(self, other):
        return self.builder.fcmp_ordered(">", self.value, self._like(other))

    def where(self, condition, other):
        """`other` in these lanes."""
        return _Lanes(self.builder, self.builder.select(condition, self._like(other), self.value))

    def exp(self):
        """Of what is not positive; in float32 0 below 1e-37."""
        builder, kind = self.builder, self.value.type
        if isinstance(kind.element, ir.DoubleType):
            return _Lanes(builder, self._call("exp", kind, self.value))
        is_lost = self < _LEAST  # not so a NaN
        y = self.where(is_lost, _LEAST)
        # y = n log 2 + r; adding the rounder rounds, and leaves n in the last bits
        shifted = y * _LOG2_E + _ROUNDER
        bits = ir.VectorType(ir.IntType(32), kind.count)
        exponent, one = (ir.Constant(bits, [x] * kind.count) for x in (23, _BITS_OF_ONE))
        power = builder.shl(builder.bitcast(shifted.value, bits), exponent)
        power = _Lanes(builder, builder.bitcast(builder.add(power, one), kind))
        n = shifted - _ROUNDER
        r = y - n * _LOG_2_HIGH - n * _LOG_2_LOW
        p = ((((r * _P5 + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
        return ((p * (r * r) + r + 1.0) * power).where(is_lost, 0.0)

    def larger(self, other):
        """Of both in each lane; either if one is a NaN."""
        return self.where(self < other, other)

    def sum(self):
        """One number, taken in any order."""
        kind = self.value.type
        start = ir.Constant(kind.element, 0.0)
        options = {"fastmath": ("reassoc", "nsz")}
        return self._call("vector.reduce.fadd", kind.element, start, self.value, **options)

    def _call(self, name, result, *arguments, **options):
        """What LLVM has for such lanes under this name."""
        kind = self.value.type
        name = f"llvm.{name}.v{kind.count}{kind.element.intrinsic_name}"
        code = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, code, name)
        return self.builder.call(function, arguments, **options)

    def _with(self, operation, other):
        value = operation(self.value, self._like(other), flags=("contract",))
        return _Lanes(self.builder, value)

    def _like(self, other):
        """Lanes, or a constant in all of them."""
        if isinstance(other, _Lanes):
            return other.value
        return ir.Constant(self.value.type, [float(other)] * self.value.type.count)


class _Variable:
    """Lanes that change; they stay in registers too."""

    def __init__(self, builder, lanes):
        self.builder, self.place = builder, cgutils.alloca_once(builder, lanes.value.type)
        self.lanes = lanes

    @property
    def lanes(self):
        return _Lanes(self.builder, self.builder.load(self.place))

    @lanes.setter
    def lanes(self, lanes):
        self.builder.store(lanes.value, self.place)


class _Code:
    """Writes the instructions of an intrinsic, whose arguments are flat arrays of one type, places
    in them, and numbers. numba's own loops take a row as short as a head's number by number.
    """

    def __init__(self, context, builder, signature, arguments):
        self.builder, self.index = builder, context.get_value_type(types.intp)
        self.real = context.get_data_type(signature.args[0].dtype)
        self.size = context.get_abi_sizeof(self.real)
        self.arguments = [
            context.make_array(kind)(context, builder, argument).data
            if isinstance(kind, types.Array)
            else argument
            for kind, argument in zip(signature.args, arguments)
        ]

    def steps(self, start, end, step):
        """A loop, whose number `with` gives."""
        return cgutils.for_range_slice(self.builder, start, end, self.index(step), self.index)

    def in_lanes(self, count, widths=(LANES, 8, 4, 2, 1)):
        """Loops over `count` numbers, some at a time: the first, and how many."""
        start = self.index(0)
        for width in widths:
            whole = self.builder.and_(self.builder.sub(count, start), self.index(-width))
            end = self.builder.add(start, whole)
            with self.steps(start, end, width) as (at, _):
                yield at, width
            start = end

    def load(self, array, width, *places):
        """`width` numbers from the sum of places on."""
        pointer = self._pointer(array, width, places)
        return _Lanes(self.builder, self.builder.load(pointer, align=self.size))

    def store(self, lanes, array, *places):
        pointer = self._pointer(array, lanes.value.type.count, places)
        self.builder.store(lanes.value, pointer, align=self.size)

    def rows(self, first, count, width):
        """Places of rows that are `width` long."""
        return [
            self.builder.mul(self.builder.add(first, self.index(i)), width) for i in range(count)
        ]

    def number(self, array, *places):
        """The one at the sum of places."""
        return self.builder.load(self.builder.gep(array, [self._sum(places)]))

    def spread(self, number, width):
        """A number in every lane."""
        lane = ir.IntType(32)
        undefined = ir.Constant(ir.VectorType(self.real, width), ir.Undefined)
        first_lane = ir.Constant(ir.VectorType(lane, width), None)
        number = self.builder.insert_element(undefined, number, lane(0))
        return _Lanes(self.builder, self.builder.shuffle_vector(number, undefined, first_lane))

    def variable(self, lanes):
        return _Variable(self.builder, lanes)

    def total(self, width):
        """A variable that is 0."""
        return self.variable(
            _Lanes(self.builder, ir.Constant(ir.VectorType(self.real, width), None))
        )

    def _pointer(self, array, width, places):
        pointer = ir.VectorType(self.real, width).as_pointer()
        return self.builder.bitcast(self.builder.gep(array, [self._sum(places)]), pointer)

    def _sum(self, places):
        return functools.reduce(self.builder.add, places)


def _written(write):
    """What an intrinsic returns beside its signature: write(code, *arguments)."""

    def emit(context, builder, signature, arguments):
        code = _Code(context, builder, signature, arguments)
        write(code, *code.arguments)
        return context.get_dummy_value()

    return emit


_AT = types.intp
"""A place in an array, or a count."""


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

    return types.void(x, _AT, _AT, _AT, m, _AT, y, _AT, _AT, _AT, _AT, _AT), emit


class _ProductCode(_Code):
    """The instructions of `_add_product`, in which the sums of up to four rows and 32 columns stay
    in registers: numba's own loops would go to memory for every k.
    """

    def __init__(self, context, builder, signature, arguments, adds):
        super().__init__(context, builder, signature, arguments)
        self.adds = adds
        self.x, self.x_at, self.x_step, self.x_next, self.m, self.m_at = self.arguments[:6]
        self.y, self.y_at, self.y_step, self.rows, self.depth, self.columns = self.arguments[6:]

    def emit(self):
        builder, index = self.builder, self.index
        row_start = index(0)
        for num_rows in (4, 2, 1):
            row_end = builder.and_(self.rows, index(-num_rows))
            with self.steps(row_start, row_end, num_rows) as (row, _):
                column_start = index(0)
                for widths in ((16, 16), (16, 8), (16,), (8,), (4,), (2,)):
                    width = sum(widths)
                    left = builder.sub(self.columns, column_start)
                    # the widest as often as it fits, of the others each at most once
                    whole = builder.and_(left, index(-32)) if width == 32 else index(width)
                    fits = builder.icmp_signed(">=", left, index(width))
                    column_end = builder.add(column_start, builder.select(fits, whole, index(0)))
                    with self.steps(column_start, column_end, width) as (column, _):
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
            key: self.total(widths[key[1]])
            for key in product(range(num_rows), range(len(widths)), range(2))
        }
        with self.steps(self.index(0), self.depth, 2) as (even, _):
            for odd in range(2):
                k = builder.add(even, self.index(odd))
                line = builder.mul(self.columns, k)
                lines = [
                    self.load(self.m, width, self.m_at, start, line)
                    for start, width in zip(starts, widths)
                ]
                item = builder.mul(k, self.x_next)
                for i, at in enumerate(rows):
                    row = builder.mul(self.x_step, at)
                    factor = self.number(self.x, self.x_at, item, row)
                    for j, line in enumerate(lines):
                        sums[i, j, odd].lanes += line * self.spread(factor, widths[j])
        for (i, at), (j, start) in product(enumerate(rows), enumerate(starts)):
            places = self.y_at, start, builder.mul(self.y_step, at)
            total = sums[i, j, 0].lanes + sums[i, j, 1].lanes
            if self.adds:
                total = self.load(self.y, widths[j], *places) + total
            self.store(total, self.y, *places)


@intrinsic
def _put_line(typing, x, x_at, factor, y, y_at, count):
    """y[y_at : y_at + count] <- factor * x[x_at : x_at + count]."""

    def write(code, x, x_at, factor, y, y_at, count):
        for i, width in code.in_lanes(count):
            code.store(code.load(x, width, x_at, i) * code.spread(factor, width), y, y_at, i)

    return types.void(x, _AT, x.dtype, y, _AT, _AT), _written(write)


@intrinsic
def _add_line(typing, x, x_at, y, y_at, count):
    """Add x[x_at : x_at + count] to y[y_at : y_at + count]."""

    def write(code, x, x_at, y, y_at, count):
        for i, width in code.in_lanes(count):
            code.store(code.load(y, width, y_at, i) + code.load(x, width, x_at, i), y, y_at, i)

    return types.void(x, _AT, y, _AT, _AT), _written(write)


@intrinsic
def _rotate(typing, x, x_at, factor, cosines, sines, angle_at, sign, y, y_at, half):
    """y[y_at:] <- factor * x[x_at:], pairs of `half` first and `half` second numbers, turned by the
    angles at `angle_at`, back if sign is -1. The two may be the same.
    """

    def write(code, x, x_at, factor, cosines, sines, angle_at, sign, y, y_at, half):
        for i, width in code.in_lanes(half):
            cosine = code.load(cosines, width, angle_at, i)
            sine = code.load(sines, width, angle_at, i) * code.spread(sign, width)
            factors = code.spread(factor, width)
            a = code.load(x, width, x_at, i) * factors
            b = code.load(x, width, x_at, half, i) * factors
            code.store(a * cosine - b * sine, y, y_at, i)
            code.store(b * cosine + a * sine, y, y_at, half, i)

    real = x.dtype
    kinds = x, _AT, real, cosines, sines, _AT, real, y, _AT, _AT
    return types.void(*kinds), _written(write)


@intrinsic
def _exponentials(typing, x, at, count, top):
    """x[at : at + count] <- exp(x[at : at + count] - top), where nothing exceeds `top`."""

    def write(code, x, at, count, top):
        for i, width in code.in_lanes(count):
            code.store((code.load(x, width, at, i) - code.spread(top, width)).exp(), x, at, i)

    return types.void(x, _AT, _AT, x.dtype), _written(write)


def _sigmoid(x):
    """Of lanes."""
    e = (-x).where(x < 0.0, x).exp()
    return e.where(x > 0.0, 1.0) / (e + 1.0)


@intrinsic
def _gate_line(typing, gate_up, at, out, out_at, count):
    """out[out_at : out_at + count] <- silu(gate) * up; both stand in gate_up from `at` on."""

    def write(code, gate_up, at, out, out_at, count):
        for i, width in code.in_lanes(count):
            x = code.load(gate_up, width, at, i)
            up = code.load(gate_up, width, at, count, i)
            code.store(x * _sigmoid(x) * up, out, out_at, i)

    return types.void(gate_up, _AT, out, _AT, _AT), _written(write)


@intrinsic
def _gate_line_backward(typing, gate_up, at, d_out, out_at, d_gate_up, count):
    """d_gate_up[at:] <- gradient of `_gate_line`."""

    def write(code, gate_up, at, d_out, out_at, d_gate_up, count):
        for i, width in code.in_lanes(count):
            x = code.load(gate_up, width, at, i)
            up = code.load(gate_up, width, at, count, i)
            d = code.load(d_out, width, out_at, i)
            sigmoid = _sigmoid(x)
            slope = sigmoid * (x - x * sigmoid + 1.0)
            code.store(d * up * slope, d_gate_up, at, i)
            code.store(d * x * sigmoid, d_gate_up, at, count, i)

    return types.void(gate_up, _AT, d_out, _AT, d_gate_up, _AT), _written(write)


@intrinsic
def _soften(typing, scores, count, width, tops, totals):
    """scores [count, width] <- their exp over the largest of each column; tops and totals [width]
    <- that, and the sum of the column. The count is a multiple of 4, the width of LANES.
    """

    def write(code, scores, count, width, tops, totals):
        zero = code.index(0)
        for n, lanes in code.in_lanes(width, (LANES,)):
            top = code.variable(code.load(scores, lanes, n))
            sums = [code.total(lanes) for _ in range(2)]
            with code.steps(zero, count, 4) as (first, _):
                a, b, c, d = (
                    code.load(scores, lanes, n, place) for place in code.rows(first, 4, width)
                )
                top.lanes = top.lanes.larger(a.larger(b).larger(c.larger(d)))
            with code.steps(zero, count, 2) as (first, _):
                for total, place in zip(sums, code.rows(first, 2, width)):
                    weight = (code.load(scores, lanes, n, place) - top.lanes).exp()
                    code.store(weight, scores, n, place)
                    total.lanes += weight
            code.store(top.lanes, tops, n)
            code.store(sums[0].lanes + sums[1].lanes, totals, n)

    return types.void(scores, _AT, _AT, tops, totals), _written(write)


@intrinsic
def _score_gradients(typing, p, ds, count, width, tops, means):
    """p [count, width], at first scores, <- exp(p - tops [width]), which are probabilities; ds
    [count, width], at first gradients of these, <- p * (ds - means [width]), those of the scores.
    """

    def write(code, p, ds, count, width, tops, means):
        for n, lanes in code.in_lanes(width, (LANES,)):
            top, mean = code.load(tops, lanes, n), code.load(means, lanes, n)
            with code.steps(code.index(0), count, 1) as (first, _):
                for place in code.rows(first, 1, width):
                    weight = (code.load(p, lanes, n, place) - top).exp()
                    code.store(weight, p, n, place)
                    gradient = code.load(ds, lanes, n, place) - mean
                    code.store(weight * gradient, ds, n, place)

    return types.void(p, ds, _AT, _AT, tops, means), _written(write)


@intrinsic
def _put_dot(typing, x, x_at, y, y_at, count, out, out_at):
    """out[out_at] <- the product of x[x_at : x_at + count] and y[y_at : y_at + count]."""

    def write(code, x, x_at, y, y_at, count, out, out_at):
        widths = LANES, 8, 4, 2, 1
        sums = {width: code.total(width) for width in widths}
        for i, width in code.in_lanes(count, widths):
            sums[width].lanes += code.load(x, width, x_at, i) * code.load(y, width, y_at, i)
        total = functools.reduce(code.builder.fadd, (part.lanes.sum() for part in sums.values()))
        code.builder.store(total, code.builder.gep(out, [out_at]))

    return types.void(x, _AT, y, _AT, _AT, out, _AT), _written(write)


@intrinsic
def _put_row_sums(typing, x, at, count, factor, top, sums):
    """sums [2] <- of exp(z - top) and of z * exp(z - top), over z = factor * x[at : at + count],
    which nothing exceeds `top` in.
    """

    def write(code, x, at, count, factor, top, sums):
        widths = LANES, 8, 4, 2, 1
        totals = {width: [code.total(width) for _ in range(2)] for width in widths}
        for i, width in code.in_lanes(count, widths):
            z = code.load(x, width, at, i) * code.spread(factor, width)
            weight = (z - code.spread(top, width)).exp()
            masses, moments = totals[width]
            masses.lanes += weight
            moments.lanes += weight * z
        for place, parts in enumerate(zip(*totals.values())):
            total = functools.reduce(code.builder.fadd, (part.lanes.sum() for part in parts))
            code.builder.store(total, code.builder.gep(sums, [code.index(place)]))

    return types.void(x, _AT, _AT, x.dtype, x.dtype, sums), _written(write)


@intrinsic
def _put_row_gradient(typing, x, at, count, factor, lse, constant, slope, out, out_at):
    """out[out_at :] <- exp(z - lse) * (constant + slope * z), with z = factor * x[at : at + count].
    The two may be the same.
    """

    def write(code, x, at, count, factor, lse, constant, slope, out, out_at):
        for i, width in code.in_lanes(count):
            z = code.load(x, width, at, i) * code.spread(factor, width)
            weight = (z - code.spread(lse, width)).exp()
            outer = code.spread(slope, width) * z + code.spread(constant, width)
            code.store(weight * outer, out, out_at, i)

    real = x.dtype
    return types.void(x, _AT, _AT, real, real, real, real, out, _AT), _written(write)


@intrinsic
def _fetch(typing, array, at, count):
    """Ask for array[at : at + count] before it is needed: a block is too short for the processor to
    see where the next lines will be.
    """

    def write(code, array, at, count):
        builder, number, pointer = code.builder, ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        with code.steps(at, builder.add(at, count), _CACHE_LINE // code.size) as (place, _):
            target = builder.bitcast(builder.gep(array, [place]), pointer)
            # to read; into the second-level cache; data
            builder.call(prefetch, [target, number(0), number(2), number(1)])

    return types.void(array, _AT, _AT), _written(write)


@jit(fastmath=_ANY_ORDER)
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


@jit(fastmath=_ANY_ORDER | {"nnan"})
def _largest(x, at, count):
    """Of x[at : at + count]; any number if there is a NaN."""
    largest = x[at]
    for i in range(count):
        largest = _larger(largest, x[at + i])
    return largest


@jit(fastmath=_ANY_ORDER)
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


@jit(fastmath=_EXACT)
def gate(first: int, last: int, gate_up: Reals, out: Reals) -> None:
    """out [T, ffn] <- silu(gate) * up, of gate_up [T, 2, ffn]."""
    width, flat_gate_up, flat_out = out.shape[1], gate_up.reshape(-1), out.reshape(-1)
    for t in range(first, last):
        _gate_line(flat_gate_up, 2 * t * width, flat_out, t * width, width)


@jit(fastmath=_ANY_ORDER)
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


@jit(fastmath=_EXACT)
def gate_backward(first: int, last: int, gate_up: Reals, d_out: Reals, d_gate_up: Reals) -> None:
    """d_gate_up [T, 2, ffn] <- gradient of `gate`."""
    width, flat_gate_up = d_out.shape[1], gate_up.reshape(-1)
    flat_d_out, flat_d_gate_up = d_out.reshape(-1), d_gate_up.reshape(-1)
    for t in range(first, last):
        _gate_line_backward(
            flat_gate_up, 2 * t * width, flat_d_out, t * width, flat_d_gate_up, width
        )


@jit(fastmath=_ANY_ORDER)
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
    scale, one = qkv.dtype.type(1.0 / math.sqrt(2.0 * half)), qkv.dtype.type(1)
    flat_qkv, flat_bias, numbers = qkv.reshape(len(qkv), -1), bias.reshape(-1), qkv.reshape(-1)
    flat_cosines, flat_sines = cosines.reshape(-1), sines.reshape(-1)
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
            factor = scale if h < heads else one
            if len(norm):
                squares = qkv.dtype.type(0)
                for part in range(2):
                    for i in range(half):
                        squares += qkv[t, h, part, i] * qkv[t, h, part, i]
                factor *= qkv.dtype.type(1.0 / math.sqrt(squares / (2 * half) + epsilon))
                for part in range(2):
                    for i in range(half):
                        qkv[t, h, part, i] *= norm[0, part, i]
            head = (t * qkv.shape[1] + h) * 2 * half
            _rotate(
                numbers, head, factor, flat_cosines, flat_sines, positions[t] * half, one,
                numbers, head, half,
            )  # fmt: skip
        for h in range(kv_heads):
            keys = (block * kv_heads + h) * 2 * size
            key = (t * qkv.shape[1] + heads + h) * 2 * half
            for i in range(2 * half):
                flat_blocks[keys + i * BLOCK + place] = numbers[key + i]
            value = key + kv_heads * 2 * half
            _put_line(numbers, value, one, flat_blocks, keys + size + place * 2 * half, 2 * half)


@jit(fastmath=_EXACT)
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
                for i in range(d):
                    sums[n, i] = 0
            for b in range(num_blocks):
                keys = (table[row, b] * kv_heads + h) * 2 * size
                _put_product(
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
                _exponentials(flat_scores, n * width, seen, _largest(flat_scores, n * width, seen))
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


@jit(fastmath=_EXACT)
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
        flat, at = logits.reshape(-1), n * vocabulary
        _exponentials(flat, at, vocabulary, _largest(flat, at, vocabulary))
        for block in range(masses.shape[1]):
            start = block * VOCABULARY_BLOCK
            end = min(start + VOCABULARY_BLOCK, vocabulary)
            masses[n, block] = _sum(logits, n, start, end, logits.dtype.type(0))


@jit(fastmath=_EXACT)
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


@jit(fastmath=_EXACT)
def row_statistics(
    first: int,
    last: int,
    logits: Reals,
    step: int,
    vocabulary: int,
    factor: float,
    columns: Integers,
    lse: Reals,
    mean: Reals,
    target: Reals,
) -> None:
    """Of T rows of logits, `step` apart in a flat array, times `factor`: lse, mean and target [T]
    as in `vocab.RowStatistics`; columns [T] of their labels, -1 where there is none.
    """
    real, sums = logits.dtype.type, np.empty(2, logits.dtype)
    factor_here = real(factor)
    for t in range(first, last):
        top = _largest(logits, t * step, vocabulary) * factor_here
        mass, moment = 0.0, 0.0
        for start in range(0, vocabulary, VOCABULARY_BLOCK):
            count = min(VOCABULARY_BLOCK, vocabulary - start)
            _put_row_sums(logits, t * step + start, count, factor_here, top, sums)
            mass += sums[0]
            moment += sums[1]
        lse[t] = top + real(math.log(mass))
        mean[t] = real(moment / mass)
        target[t] = logits[t * step + columns[t]] * factor_here if columns[t] >= 0 else 0


@jit(fastmath=_EXACT)
def logits_gradient(
    first: int,
    last: int,
    logits: Reals,
    step: int,
    vocabulary: int,
    factor: float,
    columns: Integers,
    lse: Reals,
    mean: Reals,
    d_logprobs: Reals,
    d_entropy: Reals,
    out: Reals,
    out_step: int,
    width: int,
) -> None:
    """T rows of out [.., :width], `out_step` apart in a flat array, <- gradient in the logits of
    `row_statistics`, 0 behind the vocabulary; d_entropy [T], or [0] for none.
    """
    real = logits.dtype.type
    factor_here = real(factor)
    for t in range(first, last):
        d_logprob = d_logprobs[t] * factor_here
        slope = -d_entropy[t] * factor_here if len(d_entropy) else real(0)
        constant = -slope * mean[t] - d_logprob
        _put_row_gradient(
            logits, t * step, vocabulary, factor_here, lse[t], constant, slope, out, t * out_step
        )
        if columns[t] >= 0:
            out[t * out_step + columns[t]] += d_logprob
        for i in range(vocabulary, width):
            out[t * out_step + i] = 0


@jit(fastmath=_EXACT)
def _fill_path(path, shared, g, k, v, cosines, sines, keys, values):
    """keys and values [.., d] <- those of head g of the nodes path[shared:], keys rotated."""
    kv_heads, d = k.shape[1], k.shape[2]
    flat_k, flat_v, one = k.reshape(-1), v.reshape(-1), k.dtype.type(1)
    flat_cosines, flat_sines, half = cosines.reshape(-1), sines.reshape(-1), d // 2
    for j in range(shared, len(path)):
        row = (path[j] * kv_heads + g) * d
        _rotate(flat_k, row, one, flat_cosines, flat_sines, path[j] * half, one, keys, j * d, half)
        _put_line(flat_v, row, one, values, j * d, d)


@jit(fastmath=_EXACT)
def _fill_queries(asks, g, group, q, cosines, sines, scale, rows):
    """rows [.., d] <- the queries of the nodes `asks` that read the keys of head g, rotated and
    scaled.
    """
    heads, d, real = q.shape[1], q.shape[2], q.dtype.type
    flat_q, flat_cosines, flat_sines = q.reshape(-1), cosines.reshape(-1), sines.reshape(-1)
    half = d // 2
    for n in range(len(asks) * group):
        t = asks[n // group]
        row = (t * heads + g * group + n % group) * d
        _rotate(
            flat_q, row, real(scale), flat_cosines, flat_sines, t * half, real(1), rows, n * d, half
        )


@jit(fastmath=_EXACT)
def _return_queries(asks, g, group, rows, cosines, sines, scale, d_q):
    """d_q of the nodes `asks` <- gradients of what `_fill_queries` made of their queries."""
    heads, d, real = d_q.shape[1], d_q.shape[2], d_q.dtype.type
    flat_d_q, flat_cosines, flat_sines = d_q.reshape(-1), cosines.reshape(-1), sines.reshape(-1)
    half = d // 2
    for n in range(len(asks) * group):
        t = asks[n // group]
        row = (t * heads + g * group + n % group) * d
        _rotate(
            rows, n * d, real(scale), flat_cosines, flat_sines, t * half, -real(1), flat_d_q, row,
            half,
        )  # fmt: skip


@jit(fastmath=_EXACT)
def _stand(rows, count, d, width, columns):
    """columns [d, width] <- rows [count, d], and 0."""
    for i in range(d):
        for n in range(count):
            columns[i * width + n] = rows[n * d + i]
        for n in range(count, width):
            columns[i * width + n] = 0


@jit(fastmath=_EXACT)
def _hide(scores, first, count, seen, group, width):
    """No query scores keys behind itself, among `count` keys from `first` on: seen [.., in order]
    is how many those of a node see.
    """
    hidden = 0
    for j in range(max(first, seen[0]), first + count):
        while hidden < len(seen) and seen[hidden] <= j:
            hidden += 1
        for n in range(hidden * group):
            scores[(j - first) * width + n] = -np.inf


@jit(fastmath=_EXACT)
def _room(bounds):
    """For the longest path: its nodes, up to a multiple of 4."""
    longest = 0
    for c in range(len(bounds) - 1):
        longest = max(longest, bounds[c + 1] - bounds[c])
    return (longest + 3) // 4 * 4


@jit(fastmath=_EXACT)
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
    heads, d, group, real = q.shape[1], q.shape[2], q.shape[1] // k.shape[1], q.dtype.type
    tile, room = max(1, QUERIES // group), _room(bounds)
    most = (tile * group + LANES - 1) // LANES * LANES
    keys, values = np.zeros(room * d, q.dtype), np.zeros(room * d, q.dtype)
    rows, queries = np.empty(most * d, q.dtype), np.empty(most * d, q.dtype)
    scores, sums = np.empty(room * most, q.dtype), np.empty(most * d, q.dtype)
    tops, totals = np.empty(most, q.dtype), np.empty(most, q.dtype)
    flat_out = out.reshape(-1)
    for g in range(first, last):
        for c in range(len(starts) - 1):
            path = paths[bounds[c] : bounds[c + 1]]
            shared = len(path) - (starts[c + 1] - starts[c])
            _fill_path(path, shared, g, k, v, cosines, sines, keys, values)
            before = shared - starts[c] + 1  # and the number of a node: how many keys it sees
            for start in range(ask_bounds[c], ask_bounds[c + 1], tile):
                asked = asks[start : min(start + tile, ask_bounds[c + 1])]
                count, seen = len(asked) * group, before + asked
                used, width = (seen[-1] + 3) // 4 * 4, (count + LANES - 1) // LANES * LANES
                _fill_queries(asked, g, group, q, cosines, sines, scale, rows)
                _stand(rows, count, d, width, queries)
                _put_product(keys, 0, d, 1, queries, 0, scores, 0, width, used, d, width)
                _hide(scores, 0, used, seen, group, width)
                _soften(scores, used, width, tops, totals)
                _put_product(scores, 0, 1, width, values, 0, sums, 0, d, count, used, d)
                for n in range(count):
                    a, head = start + n // group, g * group + n % group
                    logs[a, head] = tops[n] + math.log(totals[n])
                    place = (a * heads + head) * d
                    _put_line(sums, n * d, real(1) / totals[n], flat_out, place, d)


@jit(fastmath=_EXACT)
def _turn_back(g, d_k, cosines, sines):
    """Gradients of head g of rotated keys become those of the keys."""
    kv_heads, d, one = d_k.shape[1], d_k.shape[2], d_k.dtype.type(1)
    flat, flat_cosines, flat_sines = d_k.reshape(-1), cosines.reshape(-1), sines.reshape(-1)
    half = d // 2
    for t in range(len(d_k)):
        row = (t * kv_heads + g) * d
        _rotate(flat, row, one, flat_cosines, flat_sines, t * half, -one, flat, row, half)


@jit(fastmath=_EXACT)
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
    kv_heads, heads, d, real = k.shape[1], q.shape[1], q.shape[2], q.dtype.type
    group, one = heads // kv_heads, real(1)
    tile, room = max(1, QUERIES // group), _room(bounds)
    most = (tile * group + LANES - 1) // LANES * LANES
    keys, values = np.zeros(room * d, q.dtype), np.zeros(room * d, q.dtype)
    sums_k, sums_v = np.empty(room * d, q.dtype), np.empty(room * d, q.dtype)
    rows, d_rows = np.empty(most * d, q.dtype), np.empty(most * d, q.dtype)
    queries, d_outs = np.empty(most * d, q.dtype), np.empty(most * d, q.dtype)
    p, ds = np.empty(KEYS * most, q.dtype), np.empty(KEYS * most, q.dtype)
    tops, means = np.zeros(most, q.dtype), np.zeros(most, q.dtype)
    sums_q, flat_out, flat_d_out = np.empty(most * d, q.dtype), out.reshape(-1), d_out.reshape(-1)
    flat_d_k, flat_d_v = d_k.reshape(-1), d_v.reshape(-1)
    for g in range(first, last):
        for c in range(len(starts) - 1):
            path = paths[bounds[c] : bounds[c + 1]]
            shared = len(path) - (starts[c + 1] - starts[c])
            _fill_path(path, shared, g, k, v, cosines, sines, keys, values)
            sums_k[: len(path) * d] = 0
            sums_v[: len(path) * d] = 0
            before = shared - starts[c] + 1  # and the number of a node: how many keys it sees
            for start in range(ask_bounds[c], ask_bounds[c + 1], tile):
                asked = asks[start : min(start + tile, ask_bounds[c + 1])]
                count, seen = len(asked) * group, before + asked
                used, width = (seen[-1] + 3) // 4 * 4, (count + LANES - 1) // LANES * LANES
                depth = count + count % 2  # of a product, which is even
                _fill_queries(asked, g, group, q, cosines, sines, scale, rows)
                for n in range(count):
                    a, h = start + n // group, g * group + n % group
                    tops[n], place = logs[a, h], (a * heads + h) * d
                    _put_line(flat_d_out, place, one, d_rows, n * d, d)
                    _put_dot(d_rows, n * d, flat_out, place, d, means, n)
                rows[count * d : depth * d] = 0
                d_rows[count * d : depth * d] = 0
                sums_q[: count * d] = 0
                # so that the weights of columns without a query are 1, never infinite
                tops[count:width] = 0
                means[count:width] = 0
                _stand(rows, count, d, width, queries)
                _stand(d_rows, count, d, width, d_outs)
                for j in range(0, used, KEYS):
                    at, some = j * d, min(KEYS, used - j)
                    _put_product(keys, at, d, 1, queries, 0, p, 0, width, some, d, width)
                    _put_product(values, at, d, 1, d_outs, 0, ds, 0, width, some, d, width)
                    _hide(p, j, some, seen, group, width)
                    _score_gradients(p, ds, some, width, tops, means)
                    _add_product(ds, 0, 1, width, keys, at, sums_q, 0, d, count, some, d)
                    _add_product(p, 0, width, 1, d_rows, 0, sums_v, at, d, some, depth, d)
                    _add_product(ds, 0, width, 1, rows, 0, sums_k, at, d, some, depth, d)
                _return_queries(asked, g, group, sums_q, cosines, sines, scale, d_q)
            for j in range(len(path)):
                place = (path[j] * kv_heads + g) * d
                _add_line(sums_k, j * d, flat_d_k, place, d)
                _add_line(sums_v, j * d, flat_d_v, place, d)
        _turn_back(g, d_k, cosines, sines)
