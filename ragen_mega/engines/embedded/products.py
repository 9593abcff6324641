"""Products of bfloat16 rows and weights with float32 results, compiled for a processor that sums
products of pairs in one instruction (AVX512-BF16), where torch has bfloat16 results alone.

Few rows meet all weights in a decoding step. So a panel of 48 columns is read once from memory and
then from the nearest caches, and the sums of eight rows and a panel stay in registers (Goto and van
de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 2008).
"""

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from ragen_mega.data.jit import EXACT, Reals, jit

PANEL = 48
"""Columns of a panel: three registers of 16 sums for each row."""
LANES = 16
Pairs = NDArray[np.uint32]
"""Two neighbouring numbers of a row in bfloat16."""


def panels_of(weight: Tensor) -> Pairs:
    """Return a weight [out, in] as [panels, in / 2, PANEL]; what is missing is 0."""
    outputs, inputs = weight.shape
    padded = F.pad(weight.bfloat16(), (0, inputs % 2, 0, -outputs % PANEL))
    return pairs_of(padded).reshape(-1, PANEL, -(-inputs // 2)).transpose(0, 2, 1).copy()


def pairs_of(rows: Tensor) -> Pairs:
    """Return rows [T, in] as [T, in / 2], rounded to bfloat16."""
    even = F.pad(rows.bfloat16(), (0, 1)) if rows.shape[1] % 2 else rows.bfloat16()
    return even.contiguous().view(torch.int16).numpy().view(np.uint32)


class _Bfloat16(ir.Type):
    """LLVM's type, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _Bfloat16)

    def __hash__(self):
        return hash(_Bfloat16)


def _tile(num_rows):
    """Return the function that adds products of so many rows with a panel."""

    @intrinsic
    def add(typing, x, x_at, w, w_at, y, y_at, y_step, depth):
        """Add the product of rows [num_rows, depth] and a panel [depth, PANEL] of pairs to
        y [num_rows, PANEL]. All lie in flat arrays from their places `_at` on; rows of y are
        `y_step` apart.
        """

        def emit(context, builder, signature, arguments):
            numbers = dict(zip("x x_at w w_at y y_at y_step depth".split(), arguments))
            for place, name in ((0, "x"), (2, "w"), (4, "y")):
                array = context.make_array(signature.args[place])
                numbers[name] = array(context, builder, numbers[name]).data
            _emit_tile(builder, num_rows, **numbers)
            return context.get_dummy_value()

        return types.void(x, types.intp, w, types.intp, y, types.intp, types.intp, types.intp), emit

    return add


def _emit_tile(builder, num_rows, x, x_at, w, w_at, y, y_at, y_step, depth):
    index, lane = ir.IntType(64), ir.IntType(32)
    pairs, sums = ir.VectorType(lane, LANES), ir.VectorType(ir.FloatType(), LANES)
    factors = ir.VectorType(_Bfloat16(), 2 * LANES)
    kind = ir.FunctionType(sums, [sums, factors, factors])
    add_dots = cgutils.get_or_insert_function(
        builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512"
    )
    parts = range(PANEL // LANES)

    def at(array, place, part, kind):
        place = builder.add(place, index(part * LANES))
        return builder.bitcast(builder.gep(array, [place]), kind.as_pointer())

    lines = [builder.add(y_at, builder.mul(y_step, index(row))) for row in range(num_rows)]
    totals = {}
    for row, line in enumerate(lines):
        for part in parts:
            totals[row, part] = cgutils.alloca_once(builder, sums)
            start = builder.load(at(y, line, part, sums), align=4)
            builder.store(start, totals[row, part])
    with cgutils.for_range_slice(builder, index(0), depth, index(1), index) as (k, _):
        line = builder.add(w_at, builder.mul(k, index(PANEL)))
        columns = [
            builder.bitcast(builder.load(at(w, line, part, pairs), align=4), factors)
            for part in parts
        ]
        for row in range(num_rows):
            place = builder.add(builder.add(x_at, builder.mul(depth, index(row))), k)
            pair = builder.load(builder.gep(x, [place]))
            undefined = ir.Constant(pairs, ir.Undefined)
            first = builder.insert_element(undefined, pair, lane(0))
            spread = builder.shuffle_vector(first, undefined, ir.Constant(pairs, None))
            for part in parts:
                total = builder.load(totals[row, part])
                dots = [total, builder.bitcast(spread, factors), columns[part]]
                builder.store(builder.call(add_dots, dots), totals[row, part])
    for (row, part), total in totals.items():
        builder.store(builder.load(total), at(y, lines[row], part, sums), align=4)


_add_8, _add_4, _add_2, _add_1 = map(_tile, (8, 4, 2, 1))


@jit(fastmath=EXACT)
def add_products(first: int, last: int, rows: Pairs, panels: Pairs, out: Reals) -> None:
    """Add the products of rows [T, in / 2] with panels [first, last) of a weight to out [T, out],
    in float32.
    """
    count, depth = rows.shape
    x, w = rows.reshape(-1), panels.reshape(-1)
    room = np.empty((count, PANEL), np.float32)
    for panel in range(first, last):
        w_at, column = panel * depth * PANEL, panel * PANEL
        width = min(PANEL, out.shape[1] - column)
        y, y_at, y_step = out.reshape(-1), column, out.shape[1]
        if width < PANEL:
            room[:] = 0
            y, y_at, y_step = room.reshape(-1), 0, PANEL
        t = 0
        while t < count:
            x_at, at = t * depth, y_at + t * y_step
            if t + 8 <= count:
                _add_8(x, x_at, w, w_at, y, at, y_step, depth)
                t += 8
            elif t + 4 <= count:
                _add_4(x, x_at, w, w_at, y, at, y_step, depth)
                t += 4
            elif t + 2 <= count:
                _add_2(x, x_at, w, w_at, y, at, y_step, depth)
                t += 2
            else:
                _add_1(x, x_at, w, w_at, y, at, y_step, depth)
                t += 1
        if width < PANEL:
            for t in range(count):
                for i in range(width):
                    out[t, column + i] += room[t, i]
