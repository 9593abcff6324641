"""What several compiled kernels call: exp, and the product of small matrices.

Source: exp as in Cephes (expf).
"""

from itertools import product

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ragen_mega.data.jit import EXACT, jit

LANES = 16
"""Numbers side by side in registers."""

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
        _Product(context, builder, signature, arguments, adds).emit()
        return context.get_dummy_value()

    return types.void(x, _AT, _AT, _AT, m, _AT, y, _AT, _AT, _AT, _AT, _AT), emit


class _Product:
    """The LLVM instructions of `add_product`, in which the sums of up to four rows and 32 columns
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
