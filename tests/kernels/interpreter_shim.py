"""Makes Triton's CPU interpreter a trustworthy test bench: right bfloat16, bounds and race checks,
program order.

Stock, the interpreter multiplies the bit patterns of bfloat16 operands and truncates when it casts
to bfloat16. It also reads and writes out of bounds silently and always runs programs in order,
which hides races between them. Importing this module switches the interpreter on for this process
and patches it; `sanitize` switches the checks on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "triton was imported to compile, it cannot be interpreted any more: import this module"
        " first"
    )
os.environ["TRITON_INTERPRET"] = "1"  # triton decides at its own import
import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

knobs.propagate_env = False
knobs.runtime.interpret = True
del os.environ["TRITON_INTERPRET"]  # the processes that other tests start compile as usual

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle


# --------------------------------------------------------------------------------------------------
# bfloat16


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns -> float32."""
    return (
        (np.ascontiguousarray(bits).astype(np.uint32) << 16)
        .view(np.float32)
        .reshape(np.shape(bits))
    )


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bit patterns, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.reshape(np.shape(values)))


def is_bf16(handle: Handle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def as_fp32(handle: Handle) -> Handle:
    return Handle(widen(handle.data), tl.float32) if is_bf16(handle) else handle


def as_bf16(handle: Handle) -> Handle:
    return Handle(narrow(handle.data), tl.bfloat16) if handle.data.dtype == np.float32 else handle


def patch_bfloat16() -> None:
    convert, binary, unary, dot = (
        interpreter._convert_float,
        Builder.binary_op,
        Builder.unary_op,
        Builder.create_dot,
    )

    def convert_float(data, source, target, rounding):
        if (
            source == tl.float32
            and target == tl.bfloat16
            and rounding != interpreter._ir.ROUNDING_MODE.RTZ
        ):
            return narrow(data)
        if source == tl.bfloat16 and target == tl.float32:
            return widen(data)
        return convert(data, source, target, rounding)

    def binary_op(self, left, right, op):
        if is_bf16(left) and is_bf16(right):
            return as_bf16(binary(self, as_fp32(left), as_fp32(right), op))
        return binary(self, left, right, op)

    def unary_op(self, value, op):
        return (
            as_bf16(unary(self, as_fp32(value), op)) if is_bf16(value) else unary(self, value, op)
        )

    def create_dot(self, a, b, accumulator, *args):
        result = dot(self, as_fp32(a), as_fp32(b), as_fp32(accumulator), *args)
        return as_bf16(result) if is_bf16(accumulator) else result

    interpreter._convert_float = convert_float
    Builder.binary_op, Builder.unary_op, Builder.create_dot = binary_op, unary_op, create_dot


# --------------------------------------------------------------------------------------------------
# sanitizers


class Sanitizer:
    """Shadow memory of one launch: which program stored each byte of each argument's storage."""

    def __init__(self) -> None:
        self.enabled = False
        self.order: str | int | None = None
        self.shadows: list[tuple[int, int, np.ndarray]] = []

    def begin(self, tensors: Iterator[Any]) -> None:
        self.shadows, seen = [], set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            if start not in seen and storage.nbytes():
                seen.add(start)
                self.shadows.append(
                    (start, start + storage.nbytes(), np.full(storage.nbytes(), -1, np.int32))
                )

    def check(
        self, kind: str, pointers: np.ndarray, mask: np.ndarray, num_bytes: int, program: int
    ) -> None:
        pointers, mask = np.broadcast_arrays(pointers, mask)
        addresses = pointers[mask].astype(np.int64)
        if addresses.size == 0:
            return
        for start, stop, owners in self.shadows:  # noqa: B007 read behind the loop
            if ((addresses >= start) & (addresses + num_bytes <= stop)).all():
                break
        else:
            raise IndexError(
                f"program {program}: {kind} out of bounds,"
                f" {addresses.min():#x}..{addresses.max():#x}"
            )
        previous = owners[addresses - start]
        foreign = previous[(previous >= 0) & (previous != program)]
        if foreign.size and kind in ("store", "load"):
            raise RuntimeError(f"program {program}: {kind} where program {foreign[0]} stored")
        if kind == "store":
            owners[addresses - start] = program


SANITIZER = Sanitizer()


def program_index(builder: Builder) -> int:
    x, y, z = builder.grid_idx
    _, num_y, num_z = builder.grid_dim
    return (x * num_y + y) * num_z + z


def patch_memory() -> None:
    load, store, atomic = (
        Builder.create_masked_load,
        Builder.create_masked_store,
        Builder.create_atomic_rmw,
    )

    def check(builder, kind, pointers, mask):
        if SANITIZER.enabled:
            num_bytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            lanes = mask.data if isinstance(mask, Handle) else np.asarray(mask)
            SANITIZER.check(kind, pointers.data, lanes, num_bytes, program_index(builder))

    def create_masked_load(self, pointers, mask, *args, **kwargs):
        check(self, "load", pointers, mask)
        return load(self, pointers, mask, *args, **kwargs)

    def create_masked_store(self, pointers, value, mask, *args, **kwargs):
        check(self, "store", pointers, mask)
        return store(self, pointers, value, mask, *args, **kwargs)

    def create_atomic_rmw(self, op, pointers, value, mask, *args, **kwargs):
        check(self, "atomic", pointers, mask)
        return atomic(self, op, pointers, value, mask, *args, **kwargs)

    Builder.create_masked_load, Builder.create_masked_store = (
        create_masked_load,
        create_masked_store,
    )
    Builder.create_atomic_rmw = create_atomic_rmw


def patch_launch() -> None:
    set_grid_index, launch = Builder.set_grid_idx, interpreter.GridExecutor.__call__

    def set_grid_idx(self, x, y, z):
        if SANITIZER.order is not None:
            num_x, num_y, num_z = self.grid_dim
            total = num_x * num_y * num_z
            order = np.arange(total)[::-1]
            if SANITIZER.order != "reverse":
                order = np.random.default_rng(SANITIZER.order).permutation(total)
            x, rest = divmod(int(order[(x * num_y + y) * num_z + z]), num_y * num_z)
            y, z = divmod(rest, num_z)
        return set_grid_index(self, x, y, z)

    def call(self, *args, **kwargs):
        if SANITIZER.enabled:
            SANITIZER.begin(
                value for value in (*args, *kwargs.values()) if hasattr(value, "untyped_storage")
            )
        return launch(self, *args, **kwargs)

    Builder.set_grid_idx = set_grid_idx
    interpreter.GridExecutor.__call__ = call


@contextmanager
def sanitize(order: str | int | None = None) -> Iterator[None]:
    """Check every memory access; run programs in order, in "reverse", or shuffled by a seed.

    Raises:
        IndexError: an unmasked lane lies outside all arguments of the launch.
        RuntimeError: a program stores or loads what another program of the launch stored.
    """
    SANITIZER.enabled, SANITIZER.order = True, order
    try:
        yield
    finally:
        SANITIZER.enabled, SANITIZER.order = False, None


patch_bfloat16()
patch_memory()
patch_launch()
