"""Runs inside the SGLang server: takes the shards that the trainer has put into buckets, and proves
that they arrived.

The server gets a copy of this file and of those that it imports, so it needs torch and numpy alone.
SGLang calls `load` on every tensor-parallel rank, as the custom weight loader of
`/update_weights_from_tensor`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ragen_mega.data.checksums import check_checksums, check_names, checksums

LOADER = f"{__name__}.load"
"""By which SGLang finds it."""


class Place(NamedTuple):
    """Where a tensor stands in the bytes of a bucket."""

    offset: int
    dtype: str
    shape: list[int]

    def view(self, memory: Tensor) -> Tensor:
        """The tensor in `memory`, [bytes] uint8."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        num_bytes = torch.Size(self.shape).numel() * dtype.itemsize
        return memory[self.offset : self.offset + num_bytes].view(dtype).view(self.shape)


class Contents(NamedTuple):
    """What a bucket must hold; a JSON file of its own."""

    places: dict[str, Place]
    """By SGLang's names."""
    sums: dict[str, str]
    all_names: list[str] | None
    """In the last bucket, the names of the whole set."""

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(self._asdict()))

    @classmethod
    def read(cls, file: Path) -> Contents:
        places, *others = json.loads(file.read_text()).values()
        return cls({name: Place(*place) for name, place in places.items()}, *others)


def bytes_of(file: Path) -> Path:
    """Where the bytes of a bucket stand that does not come along."""
    return file.with_suffix(".bytes")


def map_bytes(file: Path) -> Tensor:
    """[bytes] uint8 of the bucket that `file` describes, in memory that processes share."""
    path = bytes_of(file)
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


def report_of(file: Path) -> Path:
    """Where this rank of the server says what became of a bucket."""
    return file.with_suffix(".report")


def load(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy buckets into the parameters: (file of the contents, the bytes; none where they are to be
    mapped).

    Never raises, because an exception ends the server: `report_of` each file says what went wrong,
    or that nothing did.
    """
    parameters = dict(model.named_parameters())
    for source, memory in named_tensors:
        file, error = Path(source), None
        try:
            _copy(file, memory, parameters)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        report_of(file).write_text(json.dumps({"error": error}))


def _copy(file: Path, memory: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
    places, sums, all_names = Contents.read(file)
    if unknown := places.keys() - parameters.keys():
        raise ValueError(
            f"SGLang's model has no {min(unknown)}; this version lays out its layers differently"
        )
    if not memory.numel():
        memory = map_bytes(file)
    for name, place in places.items():
        held, sent = parameters[name].detach(), place.view(memory)
        if sent.shape != held.shape or sent.dtype != held.dtype:
            raise ValueError(
                f"SGLang holds {name} as {list(held.shape)} {held.dtype} and got"
                f" {list(sent.shape)} {sent.dtype}"
            )
        held.copy_(sent)
    # The sums wait for the device: when the server answers, the bucket has been read.
    check_checksums(sums, checksums((name, parameters[name]) for name in places))
    if all_names is not None:
        check_names(all_names, parameters)
