"""Runs inside the SGLang server: loads the shards that the trainer has put into buckets, and
verifies that they arrived.

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

from ragen_mega.data.checksums import check_names, checksum

LOADER = f"{__name__}.load"
"""The name by which SGLang finds it."""
ALIGNMENT = 16
"""Alignment of a parameter in a bucket, in bytes."""
CACHE_SCALE = "_skip_weight_check"
"""SGLang's mark of the scales of keys and values in its cache. FP8 models of Qwen2, Llama and
Mistral have them, no trainer sends them, and they are lost with the weights of a sleeping server:
every sync sets them to 1.
"""


class Extent(NamedTuple):
    """Position of a run of a parameter's elements in the bytes of a bucket."""

    offset: int
    dtype: str
    shape: list[int]
    """Shape of the whole parameter."""
    start: int
    """The first of the elements, in the flattened parameter."""
    length: int

    @property
    def end(self) -> int:
        """End of the run in the bucket, in bytes; the next begins at a multiple of ALIGNMENT."""
        return self.offset + self.length * self._dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """Return the elements in `memory`, [bytes] uint8."""
        return memory[self.offset : self.end].view(self._dtype)

    def of(self, parameter: Tensor) -> Tensor:
        """Return the elements in the parameter."""
        return parameter.view(-1)[self.start : self.start + self.length]

    def fill(self, memory: Tensor, elements: Tensor) -> None:
        """Copy the elements into `memory`, with zeros up to the next run."""
        self.view(memory).copy_(elements)
        if padding := -self.end % ALIGNMENT:
            memory[self.end : self.end + padding].zero_()

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class Contents(NamedTuple):
    """Required contents of a bucket, written as a JSON file."""

    places: list[tuple[str, Extent]]
    """Places of the parameters, by SGLang's names."""
    num_bytes: int
    checksum: int
    """Checksum of these bytes."""
    all_names: list[str] | None
    """Names of the whole set, in the last bucket only."""

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(self._asdict()))

    @classmethod
    def read(cls, file: Path) -> Contents:
        places, *others = json.loads(file.read_text()).values()
        return cls([(name, Extent(*place)) for name, place in places], *others)


def bytes_of(file: Path) -> Path:
    """Return the file with a bucket's bytes, where they are not sent along."""
    return file.with_suffix(".bytes")


def map_bytes(file: Path) -> Tensor:
    """[bytes] uint8 of the bucket that `file` describes, in memory that processes share."""
    path = bytes_of(file)
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


def report_of(file: Path) -> Path:
    """Return the file in which this rank of the server reports what became of a bucket."""
    return file.with_suffix(".report")


def load(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy buckets into the parameters: (file of the contents, the bytes; none where they are to be
    mapped).

    Never raises, because an exception ends the server: `report_of` each file says what went wrong,
    or that nothing did.
    """
    # beside a layer with adapters stands its own weight
    named = model.named_parameters()
    parameters = {name.replace(".base_layer.", "."): parameter for name, parameter in named}
    for source, memory in named_tensors:
        file, error = Path(source), None
        try:
            _copy(file, memory, parameters)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        report_of(file).write_text(json.dumps({"error": error}))


def _copy(file: Path, memory: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
    """Copy a bucket into the parameters, and read it back from there for the checksum."""
    contents = Contents.read(file)
    if unknown := {name for name, _ in contents.places} - parameters.keys():
        raise ValueError(
            f"SGLang's model has no {min(unknown)}; this version lays out its layers differently"
        )
    if not memory.numel():
        memory = map_bytes(file)
    device = parameters[contents.places[0][0]].device
    held = torch.empty(contents.num_bytes, dtype=torch.uint8, device=device)
    for name, place in contents.places:
        parameter = parameters[name].detach()
        if [*parameter.shape] != place.shape or str(parameter.dtype) != f"torch.{place.dtype}":
            raise ValueError(
                f"SGLang holds {name} as {list(parameter.shape)} {parameter.dtype} and got"
                f" {place.shape} torch.{place.dtype}"
            )
        place.of(parameter).copy_(place.view(memory))
        place.fill(held, place.of(parameter))
    # The sum waits for the device: when the server answers, the bucket has been read.
    if checksum(held) != contents.checksum:
        differing = [
            name
            for name, place in contents.places
            if not torch.equal(
                held[place.offset : place.end], memory[place.offset : place.end].to(device)
            )
        ]
        raise ValueError(
            "the engine must hold the bits that were sent, and"
            f" {', '.join(differing) or 'all of a bucket that has changed since'} differ; send all"
            " weights again"
        )
    if contents.all_names is not None:
        scales = {name for name, parameter in parameters.items() if hasattr(parameter, CACHE_SCALE)}
        for name in scales:
            parameters[name].detach().fill_(1.0)
        check_names(contents.all_names, parameters.keys() - scales)
