"""Helpers that several compiled kernels call: exp, and the product of small matrices.

Source: exp as in Cephes (expf).
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from ragen_mega.compiled.jit import EXACT, jit

LANES = 16
"""Numbers side by side in registers."""

# compiled callers leave out the first argument, which numba's own annotation asks for
intrinsic: Callable[[Callable], Callable[..., None]] = extending.intrinsic

# exp in float32: the smallest argument, log 2 in two parts, and the polynomial.
_ONE, _LEAST = np.float32(1.0), np.float32(-87.0)
_LOG2_E = np.float32(1.4426950408889634)
_ROUNDER, _BITS_OF_ONE = np.float32(1.5 * 2**23), np.int32(0x3F800000)
_LOG_2_HIGH, _LOG_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(0.50000001201), np.float32(0.16666665459), np.float32(0.041665795894)
_P3, _P4 = np.float32(0.0083334519073), np.float32(0.0013981999507)
_P5 = np.float32(0.00019875691500)


@jit(fastmath=EXACT)
def exp(x: np.float32) -> np.float32:
    """exp(x) of a float32 x <= 0; 0 below -87."""
    y = _LEAST if x < _LEAST else x  # a NaN stays
    # y = n log 2 + r; adding the rounder rounds, and leaves n in the last bits
    shifted = np.float32(y * _LOG2_E + _ROUNDER)
    power = np.int32((shifted.view(np.int32) << np.int32(23)) + _BITS_OF_ONE).view(np.float32)
    n = shifted - _ROUNDER
    r = y - n * _LOG_2_HIGH - n * _LOG_2_LOW
    p = ((((r * _P5 + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _P0
    return np.float32(0) if x < _LEAST else (p * (r * r) + r + _ONE) * power


_AT = types.intp
"""A place in an array, or a count."""
_ROWS = (4, 2, 1)
"""Rows of the tiles of a product."""
_WIDTHS = ((16, 16), (16, 8), (16,), (8,), (4,), (2,))
"""Columns of its tiles, in vectors: the widest as often as they fit, each of the others once."""


@intrinsic
def add_product(typing, x, x_at, x_step, x_next, m, m_at, y, y_at, y_step, rows, depth, columns):
    """Add the product of x [rows, depth] and m [depth, columns] to y [rows, columns].

    Each matrix lies in a flat array from its place `_at` on; rows of x and y are `_step` apart, the
    items of a row of x are `x_next` apart. Depth and columns are even.
    """
    return _product(x, m, y, adds=True)


@intrinsic
def put_product(typing, x, x_at, x_step, x_next, m, m_at, y, y_at, y_step, rows, depth, columns):
    """Write the product that `add_product` adds."""
    return _product(x, m, y, adds=False)


def _product(x, m, y, *, adds):
    def emit(context, builder, signature, arguments):
        values = data_of(context, builder, signature, arguments)
        kinds = [value.type for value in values]
        kind = ir.FunctionType(ir.VoidType(), kinds)
        name = f"{'add' if adds else 'put'}_product.{'.'.join(map(str, kinds))}"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        if not function.blocks:
            # One for each module: its tiles would be optimized anew wherever it is called.
            function.linkage = "internal"
            function.attributes.add("noinline")
            body = ir.IRBuilder(function.append_basic_block())
            _emit_product(body, *function.args, adds=adds)
            body.ret_void()
        builder.call(function, values)
        return context.get_dummy_value()

    return types.void(x, _AT, _AT, _AT, m, _AT, y, _AT, _AT, _AT, _AT, _AT), emit


def _emit_product(
    builder, x, x_at, x_step, x_next, m, m_at, y, y_at, y_step, rows, depth, columns, *, adds
):
    """Emit the tiles of a product, whose matrices are pointers."""
    x, m, y = builder.gep(x, [x_at]), builder.gep(m, [m_at]), builder.gep(y, [y_at])
    index, row_start = x_at.type, x_at.type(0)
    for num_rows in _ROWS:
        row_end = builder.and_(rows, index(-num_rows))
        with _steps(builder, row_start, row_end, num_rows) as row:
            column_start = index(0)
            for widths in _WIDTHS:
                width = sum(widths)
                left = builder.sub(columns, column_start)
                whole = builder.and_(left, index(-width)) if width == 32 else index(width)
                fits = builder.icmp_signed(">=", left, index(width))
                column_end = builder.add(column_start, builder.select(fits, whole, index(0)))
                with _steps(builder, column_start, column_end, width) as column:
                    place = builder.add(builder.mul(row, y_step), column)
                    emit_tile(
                        builder,
                        num_rows,
                        widths,
                        (builder.gep(x, [builder.mul(row, x_step)]), x_step, x_next),
                        (builder.gep(m, [column]), columns),
                        (builder.gep(y, [place]), y_step),
                        depth,
                        chains=2,
                        adds=adds,
                    )
                column_start = column_end
        row_start = row_end


def data_of(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments of an intrinsic, with pointers to their data in place of arrays."""
    return [
        context.make_array(kind)(context, builder, argument).data
        if isinstance(kind, types.Array)
        else argument
        for kind, argument in zip(signature.args, arguments)
    ]


def emit_tile(
    builder: Any,
    rows: int,
    widths: Sequence[int],
    x: tuple[Any, Any, Any],
    m: tuple[Any, Any],
    y: tuple[Any, Any],
    depth: Any,
    *,
    chains: int,
    adds: bool,
) -> None:
    """Emit y [rows, columns] <- x [rows, depth] times m [depth, columns], plus y if it `adds`.

    The columns are vectors of `widths`, whose sums stay in registers: compiled loops go to memory
    for every k, and take twice as long. x is a pointer with the distances of its rows and of their
    items, m and y are pointers with the distances of their rows. An item of x and m that is uint32
    is a pair of bfloat16. Each sum has `chains` parts, because an addition takes several cycles;
    they divide the depth, and are the same for any number of rows.
    """
    (x_at, x_step, x_next), (m_at, m_step), (y_at, y_step), index = x, m, y, depth.type
    factors, sums = (
        [ir.VectorType(pointer.type.pointee, width) for width in widths] for pointer in (x_at, y_at)
    )
    starts = [index(sum(widths[:j])) for j in range(len(widths))]

    def vector(pointer, kind, start):
        return builder.bitcast(builder.gep(pointer, [start]), kind.as_pointer())

    totals = {}
    for row, (j, kind), chain in product(range(rows), enumerate(sums), range(chains)):
        totals[row, j, chain] = place = cgutils.alloca_once(builder, kind)
        builder.store(ir.Constant(kind, None), place)
    with _steps(builder, index(0), depth, chains) as first:
        for chain in range(chains):
            k = builder.add(first, index(chain))
            line, item = builder.gep(m_at, [builder.mul(k, m_step)]), builder.mul(k, x_next)
            columns = [
                builder.load(vector(line, kind, start), align=4)
                for kind, start in zip(factors, starts)
            ]
            for row in range(rows):
                place = builder.add(item, builder.mul(x_step, index(row)))
                factor = builder.load(builder.gep(x_at, [place]))
                for j, numbers in enumerate(columns):
                    total = totals[row, j, chain]
                    spread = _spread(builder, factor, factors[j])
                    builder.store(_fused(builder, spread, numbers, builder.load(total)), total)
    for row, (j, start) in product(range(rows), enumerate(starts)):
        line = builder.gep(y_at, [builder.mul(y_step, index(row))])
        pointer = vector(line, sums[j], start)
        parts = [builder.load(totals[row, j, chain]) for chain in range(chains)]
        parts += [builder.load(pointer, align=4)] if adds else []
        builder.store(reduce(builder.fadd, parts), pointer, align=4)


def _fused(builder, x, y, total):
    """x * y + total, of vectors; of pairs of bfloat16 both products are added."""
    kind = total.type
    if x.type == kind:
        width = "f64" if kind.element == ir.DoubleType() else "f32"
        name, arguments = f"llvm.fmuladd.v{kind.count}{width}", [x, y, total]
    else:
        factors = ir.VectorType(_Bfloat16(), 2 * kind.count)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        arguments = [total, builder.bitcast(x, factors), builder.bitcast(y, factors)]
    function = ir.FunctionType(kind, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


class _Bfloat16(ir.Type):
    """LLVM's type, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _Bfloat16)

    def __hash__(self):
        return hash(_Bfloat16)


def _spread(builder, number, kind):
    """A number in every lane."""
    lane, undefined = ir.IntType(32), ir.Constant(kind, ir.Undefined)
    number = builder.insert_element(undefined, number, lane(0))
    first = ir.Constant(ir.VectorType(lane, kind.count), None)
    return builder.shuffle_vector(number, undefined, first)


@contextmanager
def _steps(builder, start, end, step):
    """A loop over start, start + step, .. below end."""
    index = start.type
    with cgutils.for_range_slice(builder, start, end, index(step), index) as (at, _):
        yield at
