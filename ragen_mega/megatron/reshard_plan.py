"""What a weight sync moves, decided once: one sorted list of all stages' parameters in buckets, the
same on every rank.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ragen_mega.data import distributed
from ragen_mega.models.family import VALUE_HEAD
from ragen_mega.models.layout import Slot, expected_tensors

BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of one pipeline stage, as every tensor-parallel rank of that stage holds it."""

    stage: int
    slot: Slot
    shape: tuple[int, ...]
    """Of one rank's slice, in Megatron's layout."""
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def order(self) -> tuple[int, str, list[str | int]]:
        """Stage by stage, and there by name with layer 2 before layer 10."""
        parts = re.split(r"(\d+)", self.slot.names[0])
        return (
            self.stage,
            str(self.dtype),
            [int(part) if part.isdigit() else part for part in parts],
        )


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel as one flat tensor: of one stage and one dtype."""

    entries: tuple[Entry, ...]

    @property
    def stage(self) -> int:
        return self.entries[0].stage

    @property
    def dtype(self) -> torch.dtype:
        return self.entries[0].dtype

    @property
    def num_elements(self) -> int:
        return sum(entry.num_elements for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """[num_elements] copy of this rank's parameters, one after the other."""
        return torch.cat(
            [tensors[entry.slot.parameter].detach().reshape(-1) for entry in self.entries]
        )

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views into what `flatten` made, one per entry, in their shapes."""
        pieces = flat.split([entry.num_elements for entry in self.entries])
        return [piece.view(entry.shape) for entry, piece in zip(self.entries, pieces, strict=True)]


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Built once per model by all ranks together; every later sync follows it without a word about
    names or shapes.
    """

    groups: ProcessGroupCollection
    buckets: tuple[Bucket, ...]

    @classmethod
    def build(
        cls,
        groups: ProcessGroupCollection,
        local: Iterable[tuple[Slot, Tensor]],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> ReshardPlan:
        """The plan of a model of which this rank holds `local`. Collective over all ranks.

        A gathered bucket, tensor-parallel ranks together, has at most `bucket_bytes`, or holds a
        single tensor. Raises ValueError, the same on all ranks, if their plans differ or if a name
        of the model is missing.
        """
        _check_allocator()
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
        mine = [(slot, tuple(tensor.shape), tensor.dtype) for slot, tensor in local]
        stages: list[list[tuple[Slot, tuple[int, ...], torch.dtype]]] = [mine]
        if groups.pp.size() > 1:
            stages = [[] for _ in range(groups.pp.size())]
            dist.all_gather_object(stages, mine, group=groups.pp)
        entries = _unique(
            [Entry(stage, *what) for stage, held in enumerate(stages) for what in held]
        )
        plan = cls(groups, tuple(_buckets(entries, bucket_bytes // groups.tp.size())))
        check_same_on_all_ranks(plan.digest())
        _check_complete(plan)
        return plan

    @property
    def entries(self) -> list[Entry]:
        return [entry for bucket in self.buckets for entry in bucket.entries]

    @property
    def names(self) -> list[str]:
        """Hugging Face names of all tensors, in the order of the stream."""
        return [name for entry in self.entries for name in entry.slot.names]

    @property
    def shard_bytes(self) -> int:
        """Of the whole model's slices on one tensor-parallel rank, all pipeline stages together."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def digest(self) -> str:
        """SHA-256 of everything that decides which collectives are called, in which order and with
        how many bytes.
        """
        text = "\n".join(
            f"{index} {entry.stage} {entry.slot.names} {entry.slot.cut} {entry.shape} {entry.dtype}"
            for index, bucket in enumerate(self.buckets)
            for entry in bucket.entries
        )
        return hashlib.sha256(text.encode()).hexdigest()


def check_same_on_all_ranks(digest: str) -> None:
    """Raise ValueError on every rank, naming those that differ from rank 0, unless all have the
    same digest. Collective.
    """
    digests = distributed.gather_objects(digest)
    if others := [rank for rank, other in enumerate(digests) if other != digests[0]]:
        raise ValueError(
            f"all ranks must plan the same weight sync, and ranks {', '.join(map(str, others))}"
            f" differ from rank 0 ({digests[others[0]][:8]} against {digests[0][:8]}); start all"
            " ranks with one config and one version"
        )


def _check_complete(plan: ReshardPlan) -> None:
    shape, names = plan.entries[0].slot.shape, plan.names
    expected = expected_tensors(shape, is_critic=VALUE_HEAD in names).keys()
    if differing := sorted(expected ^ set(names)):
        raise ValueError(
            f"a weight sync must send each of {len(expected)} weights, and all stages together have"
            f" {len(names)}; the first that is missing or unknown is {differing[0]}; does every"
            " rank build the same model?"
        )


def _unique(entries: Sequence[Entry]) -> list[Entry]:
    """Sorted; of weights that several stages hold, as the tied embedding, the copy of the first
    stage.
    """
    first: dict[tuple[str, ...], Entry] = {}
    for entry in sorted(entries, key=Entry.order):
        is_tied_copy = entry.slot.names == ("lm_head.weight",) and entry.slot.shape.is_tied
        if not is_tied_copy:
            first.setdefault(entry.slot.names, entry)
    return list(first.values())


def _buckets(entries: Sequence[Entry], limit: int) -> list[Bucket]:
    buckets: list[list[Entry]] = []
    num_bytes = 0
    for entry in entries:
        last = buckets[-1][0] if buckets else None
        fits = last is not None and (last.stage, last.dtype) == (entry.stage, entry.dtype)
        if not fits or num_bytes + entry.num_bytes > limit:
            buckets.append([])
            num_bytes = 0
        buckets[-1].append(entry)
        num_bytes += entry.num_bytes
    return [Bucket(tuple(members)) for members in buckets]


def _check_allocator() -> None:
    """Buckets are plain `torch.empty`, which with this setting is virtual memory that CUDA IPC
    cannot hand to an engine.
    """
    if not torch.cuda.is_available():
        return
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(variable, "").lower():
            raise ValueError(
                "weights cannot be sent from expandable segments; take expandable_segments out of"
                f" {variable}"
            )
