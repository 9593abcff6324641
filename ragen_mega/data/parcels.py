"""Tensors that travel as one: names, types, shapes, and the bytes of all, each behind the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parcel:
    """Tensors in a row of bytes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    memory: Tensor | None
    """[bytes] uint8; None where they come another way."""

    @classmethod
    def packed(
        cls,
        tensors: Sequence[tuple[str, Tensor]],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> Parcel:
        """Copy named tensors into a parcel on `device`, as `dtype`, or each as it is."""
        empty = torch.empty(0, dtype=torch.uint8, device=device)  # there may be no tensors
        there = [(name, part.detach().to(device, dtype)) for name, part in tensors]
        return Parcel(
            [name for name, _ in there],
            [str(part.dtype).removeprefix("torch.") for _, part in there],
            [[*part.shape] for _, part in there],
            torch.cat(
                [empty, *(part.contiguous().view(-1).view(torch.uint8) for _, part in there)]
            ),
        )

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        kinds = [getattr(torch, dtype) for dtype in self.dtypes]
        return [
            math.prod(shape) * kind.itemsize for shape, kind in zip(self.shapes, kinds, strict=True)
        ]

    def tensors(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, copy of the tensor) from the bytes, [bytes] uint8."""
        parts = memory.split(self.sizes)
        for name, dtype, shape, part in zip(
            self.names, self.dtypes, self.shapes, parts, strict=True
        ):
            # of its own memory, because a view of a type begins at a multiple of its size
            yield name, part.clone().view(getattr(torch, dtype)).view(shape)
