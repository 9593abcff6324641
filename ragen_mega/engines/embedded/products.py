"""Products of rows and the weights of a decoder, compiled for a processor.

The result of a row depends on no other row, to the bit, as libraries' products do not promise: they
choose the order of a sum by the number of rows. bfloat16 factors have float32 results where the
processor sums products of pairs in one instruction (AVX512-BF16); torch has bfloat16 results alone.

Few rows meet all weights in a decoding step. So a panel of columns is read once from memory and
then from the nearest caches, and the sums of a few rows and a panel stay in registers (Goto and van
de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 2008).
"""

import numpy as np
import torch
import torch.nn.functional as F
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from ragen_mega.compiled.jit import EXACT, Reals, in_parts, jit
from ragen_mega.compiled.tiles import data_of, emit_tile

_PROCESSOR = torch.cpu.get_capabilities()
REGISTER = 64 if _PROCESSOR.get("avx512_f") else 32 if _PROCESSOR.get("avx2") else 16
"""Bytes of a vector register."""
MOST_ROWS = 4 if REGISTER == 32 else 8
"""Rows whose sums stay in registers together: AVX2 has 16 registers, the others have 32."""
VECTORS = 3
"""Registers for the columns of a panel, which take as many again for the sums of each row."""
_WORTH_THREADS = 2**21
"""Multiplications from which on several threads share a product; starting them takes 30 us. Fewer
than four rows wait for the weight and take as long as four.
"""
Pairs = NDArray[np.uint32]
"""Two neighbouring numbers of a row in bfloat16."""


class Panels:
    """A weight [in, out] in the order in which it is read, [panels, in, columns of a panel]; what
    is missing is 0. Numbers of bfloat16 stand in pairs, [panels, in / 2, columns].
    """

    def __init__(self, weight: Tensor) -> None:
        by_column = _factors(weight.t(), weight.dtype)  # [out, in]
        num_columns = VECTORS * REGISTER // max(by_column.itemsize, 4)
        missing = -len(by_column) % num_columns
        padded = np.pad(by_column, ((0, missing), (0, 0)))
        panels = padded.reshape(-1, num_columns, padded.shape[1])
        self._dtype = weight.dtype
        self._panels = np.ascontiguousarray(panels.transpose(0, 2, 1))

    def put(self, rows: Tensor, out: Tensor) -> None:
        """out [T, out] <- the products of rows [T, in], which are rounded to the weight's type."""
        self.add(rows, out.zero_())

    put_exactly = put

    def add(self, rows: Tensor, total: Tensor) -> None:
        """Add the products of rows [T, in] to total [T, out]."""
        arguments = (_factors(rows, self._dtype), self._panels, total.numpy())
        if self._panels.size * max(4, len(rows)) < _WORTH_THREADS:
            _add_products(0, len(self._panels), *arguments)
        else:
            in_parts(_add_products, len(self._panels), *arguments)


def _factors(rows: Tensor, dtype: torch.dtype) -> Reals | Pairs:
    """Return rows [T, in] as factors of a type: themselves, or [T, in / 2] pairs of bfloat16."""
    rows = rows.to(dtype)
    if dtype != torch.bfloat16:
        return rows.contiguous().numpy()
    even = F.pad(rows, (0, 1)) if rows.shape[1] % 2 else rows
    return even.contiguous().view(torch.int16).numpy().view(np.uint32)


def _tile(num_rows):
    """Return the function that adds products of so many rows with a panel."""

    @intrinsic
    def add(typing, x, x_at, w, w_at, y, y_at, y_step, depth):
        """Add the product of rows x [num_rows, depth] and a panel w [depth, columns] to
        y [num_rows, columns]. All lie in flat arrays from their places `_at` on; rows of y are
        `y_step` apart.
        """

        def emit(context, builder, signature, arguments):
            x, x_at, w, w_at, y, y_at, y_step, depth = data_of(
                context, builder, signature, arguments
            )
            widths = [REGISTER * 8 // signature.args[4].dtype.bitwidth] * VECTORS
            columns = depth.type(sum(widths))
            x, w, y = builder.gep(x, [x_at]), builder.gep(w, [w_at]), builder.gep(y, [y_at])
            emit_tile(
                builder, num_rows, widths, (x, depth, depth.type(1)), (w, columns), (y, y_step),
                depth, chains=1, adds=True,
            )  # fmt: skip
            return context.get_dummy_value()

        return types.void(x, types.intp, w, types.intp, y, types.intp, types.intp, types.intp), emit

    return add


_add_most, _add_4, _add_2, _add_1 = map(_tile, (MOST_ROWS, 4, 2, 1))


@jit(fastmath=EXACT)
def _add_products(
    first: int, last: int, rows: Reals | Pairs, panels: Reals | Pairs, out: Reals
) -> None:
    """Add the products of rows [T, in] with panels [first, last) of a weight to out [T, out]."""
    (count, depth), num_columns = rows.shape, panels.shape[2]
    x, w = rows.reshape(-1), panels.reshape(-1)
    room = np.empty((count, num_columns), out.dtype)
    for panel in range(first, last):
        w_at, column = panel * depth * num_columns, panel * num_columns
        width = min(num_columns, out.shape[1] - column)
        y, y_at, y_step = out.reshape(-1), column, out.shape[1]
        if width < num_columns:
            room[:] = 0
            y, y_at, y_step = room.reshape(-1), 0, num_columns
        t = 0
        while t < count:
            x_at, at = t * depth, y_at + t * y_step
            if t + MOST_ROWS <= count:
                _add_most(x, x_at, w, w_at, y, at, y_step, depth)
                t += MOST_ROWS
            elif t + 4 <= count:
                _add_4(x, x_at, w, w_at, y, at, y_step, depth)
                t += 4
            elif t + 2 <= count:
                _add_2(x, x_at, w, w_at, y, at, y_step, depth)
                t += 2
            else:
                _add_1(x, x_at, w, w_at, y, at, y_step, depth)
                t += 1
        if width < num_columns:
            for t in range(count):
                for i in range(width):
                    out[t, column + i] += room[t, i]
