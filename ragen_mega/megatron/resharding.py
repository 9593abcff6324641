"""Trainer shards -> rollout engine, by one of two paths over one plan, with every byte counted.

The contents of a sync are decided once: one sorted list of all stages' parameters in buckets, the
same on every rank. A bucket holds equal parts of all ranks that divide its parameters: the
tensor-parallel ranks, of experts the expert-parallel ones, each of which holds whole experts.
A bucket is broadcast over pipeline stages first.

`gather` rebuilds full Hugging Face tensors by an all-gather over those ranks; any engine takes
them. `serve` gives each rank its part of a server. Where the server is divided as the trainer is,
this is the part that the rank holds, after de-interleaving q, k and v, and nothing moves. Elsewhere
experts go straight to the ranks whose servers hold them (an all-to-all), and all others are
gathered. Every bucket has memory of its own that is never overwritten, so a receiver may copy it as
late as it likes.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ragen_mega.config import LoraConfig
from ragen_mega.models.cuts import Group
from ragen_mega.models.family import VALUE_HEAD
from ragen_mega.models.layout import Slot, expected_tensors, group_by_size
from ragen_mega.models.lora import expected_adapters
from ragen_mega.models.server_cut import stack_experts
from ragen_mega.models.shape import ModelShape
from ragen_mega.ranks import collectives
from ragen_mega.rollout.engine import EngineShard

BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of one pipeline stage, as every tensor-parallel rank of that stage holds it, or
    one expert of each expert-parallel rank.
    """

    stage: int
    slots: tuple[Slot, ...]
    """The distinct slots of the ranks that divide it: of an expert one for each rank, of any other
    parameter a single one.
    """
    piece: Tensor
    """Shape and type of one rank's slice, in Megatron's layout (on the device `meta`)."""

    @property
    def group(self) -> Group:
        return self.slots[0].group

    @property
    def parameter(self) -> str:
        """Name in the module of every rank of the stage."""
        return self.slots[0].parameter

    @property
    def kind(self) -> tuple[int, Group, str]:
        """Stage, ranks and type, which all entries of a bucket share."""
        return self.stage, self.group, str(self.piece.dtype)

    def order(self) -> tuple[tuple[int, Group, str], list[str | int]]:
        """Stage by stage, experts last, and there by name with layer 2 before layer 10."""
        parts = re.split(r"(\d+)", self.slots[0].names[0])
        return self.kind, [int(part) if part.isdigit() else part for part in parts]

    def unshard(self, pieces: Sequence[Tensor]) -> Iterator[tuple[Slot, list[Tensor]]]:
        """Yield each slot and its Hugging Face tensors, from the slices of all ranks."""
        share = len(pieces) // len(self.slots)
        for number, slot in enumerate(self.slots):
            yield slot, slot.unshard(pieces[number * share : (number + 1) * share])


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel as one flat tensor: of one stage, one dtype, one group of ranks."""

    entries: tuple[Entry, ...]

    @property
    def stage(self) -> int:
        return self.entries[0].stage

    @property
    def group(self) -> Group:
        return self.entries[0].group

    @property
    def dtype(self) -> torch.dtype:
        return self.entries[0].piece.dtype

    @property
    def num_elements(self) -> int:
        return sum(entry.piece.numel() for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.piece.nbytes for entry in self.entries)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return the views into the flat tensor of a bucket: one per entry, in its shape."""
        parts = flat.split([entry.piece.numel() for entry in self.entries])
        return [part.view_as(entry.piece) for entry, part in zip(self.entries, parts, strict=True)]


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Built once per model by all ranks together; every later sync follows it without exchanging
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
        lora: LoraConfig | None = None,
    ) -> ReshardPlan:
        """Return the plan for a model of which this rank holds `local`, or for what of it is
        trained with `lora`. Collective over all ranks.

        A gathered bucket, all ranks together, has at most `bucket_bytes`, or holds a single entry.
        Raises ValueError, the same on all ranks, if their plans differ or if a name of the model is
        missing.
        """
        _check_allocator()
        held = [(slot, tensor.shape, tensor.dtype) for slot, tensor in local]
        entries = _unique(
            Entry(
                stage,
                tuple({slot.names: slot for slot in slots}.values()),
                torch.empty(sizes[0], dtype=dtypes[0], device="meta"),
            )
            for stage, of_ranks in enumerate(_exchanged(_exchanged(held, groups.ep), groups.pp))
            for slots, sizes, dtypes in (zip(*alike, strict=True) for alike in zip(*of_ranks))
        )
        buckets = tuple(
            Bucket(tuple(members))
            for (_, group, _), alike in groupby(entries, key=lambda entry: entry.kind)
            for members in group_by_size(
                alike,
                lambda entry: entry.piece.nbytes,
                bucket_bytes // ranks_of(groups, group).size(),
            )
        )
        plan = cls(groups, buckets)
        # everything that decides which collectives are called, in which order, with how many bytes
        text = "\n".join(
            f"{index} {entry.stage} {[slot.names for slot in entry.slots]}"
            f" {entry.slots[0].weight.cut} {entry.piece.shape} {entry.piece.dtype}"
            for index, bucket in enumerate(plan.buckets)
            for entry in bucket.entries
        )
        check_same_on_all_ranks(hashlib.sha256(text.encode()).hexdigest())
        names = plan.names
        expected = _expected(entries[0].slots[0].shape, lora, names)
        if differing := sorted(expected ^ set(names)):
            raise ValueError(
                f"a weight sync must send each of {len(expected)} weights, and all stages together"
                f" have {len(names)}; the first that is missing or unknown is {differing[0]}; does"
                " every rank build the same model?"
            )
        return plan

    @property
    def entries(self) -> list[Entry]:
        return [entry for bucket in self.buckets for entry in bucket.entries]

    @property
    def names(self) -> list[str]:
        """Hugging Face names of all tensors, in the order of the stream."""
        return [name for entry in self.entries for slot in entry.slots for name in slot.names]

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's slices of the whole model, all pipeline stages together."""
        return sum(bucket.num_bytes for bucket in self.buckets)


def ranks_of(groups: ProcessGroupCollection, group: Group) -> dist.ProcessGroup:
    """Return the dense or expert ranks of a stage, which hold equal parts of a bucket."""
    return {"dense": groups.tp, "expert": groups.ep}[group]


def check_same_on_all_ranks(digest: str) -> None:
    """Raise ValueError on every rank, naming those that differ from rank 0, unless all have the
    same digest. Collective.
    """
    digests = collectives.gather_objects(digest)
    if others := [rank for rank, other in enumerate(digests) if other != digests[0]]:
        raise ValueError(
            f"all ranks must plan the same weight sync, and ranks {', '.join(map(str, others))}"
            f" differ from rank 0 ({digests[others[0]][:8]} against {digests[0][:8]}); start all"
            " ranks with one config and one version"
        )


@dataclass(slots=True)
class Traffic:
    """Traffic of all syncs since its creation, on this rank."""

    pp_bytes: int = 0
    """Bytes in broadcasts over pipeline stages, sent or received: one shard per sync, nothing
    without stages.
    """
    group_bytes: Counter[Group] = field(default_factory=Counter)
    """Bytes received from other ranks of a group. From dense ranks: tp - 1 shards per sync by
    `gather`, none for a server that is divided as the trainer is. From expert ranks: all their
    experts by `gather`, only the experts of this rank's part of the server by `serve`.
    """
    shard_bytes: int = 0
    """This rank's part of the weights that went through, moved or not."""
    seconds: float = 0.0
    """Time in flattening and collectives, without the receiver's work with the weights."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds of the block, work of the device included."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics."""
        values = {
            "sync_seconds": self.seconds,
            "sync_gbytes_pipeline": self.pp_bytes / 1e9,
            "sync_gbytes_tensor": self.group_bytes["dense"] / 1e9,
            "sync_gbytes_expert": self.group_bytes["expert"] / 1e9,
            "sync_gbytes_shard": self.shard_bytes / 1e9,
        }
        if moved := self.pp_bytes + self.group_bytes.total():
            values["sync_gbytes_per_second"] = moved / self.seconds / 1e9
        return values


def gather(
    plan: ReshardPlan, tensors: Mapping[str, Tensor], traffic: Traffic | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, full tensor) in the plan's order. A collective: every rank
    consumes the whole stream.

    `tensors` are this rank's slices by parameter name, of the shapes and dtypes of the plan.
    """
    traffic = traffic or Traffic()
    for bucket in plan.buckets:
        for slot, full in _gathered(plan, bucket, tensors, traffic):
            yield from zip(slot.names, full, strict=True)


def serve(
    plan: ReshardPlan,
    tensors: Mapping[str, Tensor],
    part: EngineShard,
    traffic: Traffic | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Stream (SGLang's name, shard) of this rank's part of a server, which consecutive ranks share.

    A collective over pipeline stages, and over the ranks that divide a parameter unless the server
    divides it alike. Raises ValueError where SGLang cannot be divided so.
    """
    traffic, tp = traffic or Traffic(), plan.groups.tp

    def shards() -> Iterator[tuple[Slot, Tensor]]:
        for bucket in plan.buckets:
            if bucket.group == "expert":
                yield from _experts(plan, bucket, tensors, part, traffic)
            elif part.size == tp.size():
                pieces = _of_stage(plan, bucket, tensors, traffic)
                for entry, piece in zip(bucket.entries, pieces, strict=True):
                    slot = entry.slots[0]
                    yield slot, slot.shard_to_server(piece, tp.rank(), tp.size())
            else:
                for slot, full in _gathered(plan, bucket, tensors, traffic):
                    yield slot, slot.to_server(full, part.rank, part.size)

    yield from stack_experts(shards(), part.ep)


def all_gather(gathered: Tensor, flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`flat` of every rank, one after the other, in `gathered`, which is returned."""
    # torch 2.13 warns about the name that 2.11 has.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(gathered, flat, group=group)
    return gathered


def _expected(shape: ModelShape, lora: LoraConfig | None, names: Sequence[str]) -> set[str]:
    """Return the names that a plan of `names` must have."""
    if lora is None or not lora.rank:
        return {*expected_tensors(shape, is_critic=VALUE_HEAD in names)}
    return {*expected_adapters(shape, lora), *({VALUE_HEAD} & {*names})}


def _unique(entries: Iterable[Entry]) -> list[Entry]:
    """Sort the weights, and keep the first stage's copy of a weight that several stages hold, such
    as the tied embedding.
    """
    first: dict[tuple[str, ...], Entry] = {}
    for entry in sorted(entries, key=Entry.order):
        first.setdefault(entry.slots[0].names, entry)
    return list(first.values())


def _exchanged(mine: list[Any], group: dist.ProcessGroup) -> list[list[Any]]:
    """Return the lists of all ranks of a group."""
    lists = [mine] * group.size()
    if group.size() > 1:
        dist.all_gather_object(lists, mine, group=group)
    return lists


def _check_allocator() -> None:
    """Refuse the setting under which `torch.empty`, which makes the buckets, is virtual memory that
    CUDA IPC cannot hand to an engine.
    """
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        is_set = "expandable_segments:true" in os.environ.get(variable, "").lower()
        if is_set and torch.cuda.is_available():
            raise ValueError(
                "weights cannot be sent from expandable segments; take expandable_segments out of"
                f" {variable}"
            )


def _of_stage(
    plan: ReshardPlan, bucket: Bucket, tensors: Mapping[str, Tensor], traffic: Traffic
) -> list[Tensor]:
    """Return this rank's slices of a bucket, from whatever stage; the parameters themselves where
    every rank has them.
    """
    pp, is_own = plan.groups.pp, plan.groups.pp.rank() == bucket.stage
    traffic.shard_bytes += bucket.num_bytes
    pieces = [tensors[entry.parameter].detach() for entry in bucket.entries] if is_own else []
    if pp.size() == 1:
        return pieces
    with traffic.timed():
        if is_own:
            flat = _flat(pieces)
        else:
            flat = torch.empty(bucket.num_elements, dtype=bucket.dtype, device=collectives.device())
        dist.broadcast(flat, src=dist.get_global_rank(pp, bucket.stage), group=pp)
    traffic.pp_bytes += bucket.num_bytes
    return bucket.split(flat)


def _gathered(
    plan: ReshardPlan, bucket: Bucket, tensors: Mapping[str, Tensor], traffic: Traffic
) -> Iterator[tuple[Slot, list[Tensor]]]:
    """Yield each parameter of a bucket and its full Hugging Face tensors."""
    shards = [_of_stage(plan, bucket, tensors, traffic)]
    group = ranks_of(plan.groups, bucket.group)
    if group.size() > 1:
        with traffic.timed():
            flat = _flat(shards[0])
            gathered = all_gather(flat.new_empty(group.size() * len(flat)), flat, group)
        shards = [bucket.split(part) for part in gathered.chunk(group.size())]
        traffic.group_bytes[bucket.group] += (group.size() - 1) * bucket.num_bytes
    for entry, *pieces in zip(bucket.entries, *shards, strict=True):
        yield from entry.unshard(pieces)


def _experts(
    plan: ReshardPlan,
    bucket: Bucket,
    tensors: Mapping[str, Tensor],
    part: EngineShard,
    traffic: Traffic,
) -> Iterator[tuple[Slot, Tensor]]:
    """Yield the experts of a bucket that a part of a server holds, cut as it holds them."""
    pieces, group = _of_stage(plan, bucket, tensors, traffic), plan.groups.ep
    own = [entry.slots[group.rank()] for entry in bucket.entries]

    def cuts(part: EngineShard) -> list[tuple[Slot, Tensor]]:
        """Cut what a rank of a server holds out of this rank's experts."""
        held = [(slot, t) for slot, t in zip(own, pieces, strict=True) if slot.is_served(*part)]
        return [(slot, slot.shard_to_server(piece, *part)) for slot, piece in held]

    if group.size() in (1, part.ep):  # both are consecutive ranks, so this rank holds its own
        yield from cuts(part)
        return
    with traffic.timed():
        parts = [[cut for _, cut in cuts(part._replace(rank=r))] for r in range(part.size)]
        sent = [parts[rank % part.size] for rank in dist.get_process_group_ranks(group)]
        shapes = [
            slot.shard_to_server(entry.piece, *part).shape
            for slot, entry in zip(own, bucket.entries, strict=True)
        ]
        expected = [
            [
                (slot, shape)
                for slot, shape in zip(slots, shapes, strict=True)
                if slot.is_served(*part)
            ]
            for slots in zip(*(entry.slots for entry in bucket.entries), strict=True)
        ]
        sizes = [sum(shape.numel() for _, shape in found) for found in expected]
        counts = [sum(map(torch.numel, tensors)) for tensors in sent]
        packed = _flat([pieces[0][:0], *chain(*sent)])  # there may be nothing to send
        flat = packed.new_empty(sum(sizes))
        dist.all_to_all_single(flat, packed, sizes, counts, group=group)
    traffic.group_bytes[bucket.group] += (sum(sizes) - sizes[group.rank()]) * bucket.dtype.itemsize
    found = [*chain(*expected)]
    received = flat.split([shape.numel() for _, shape in found])
    for (slot, shape), elements in zip(found, received, strict=True):
        yield slot, elements.view(shape)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
