"""Trainer shards -> rollout engine, by one of two paths over one plan, with every byte counted.

The contents of a sync are decided once: one sorted list of all stages' parameters in buckets, the
same on every rank. `gather` rebuilds full Hugging Face tensors: per bucket one broadcast over
pipeline stages and one all-gather over tensor-parallel ranks; any engine takes them. `aligned` is
for an engine with as many tensor-parallel ranks as the trainer: the shard of a rank is, after
de-interleaving q, k and v, the engine's shard of the same rank, so only the broadcast is left.
Experts lie whole on one of the ranks that share them, which broadcasts them in its stage first.
Every bucket has memory of its own that is never overwritten, so a receiver may copy it as late as
it likes.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ragen_mega.data import distributed
from ragen_mega.models.family import VALUE_HEAD
from ragen_mega.models.layout import Slot, expected_tensors, group_by_size
from ragen_mega.models.server_cut import stack_experts

BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of one pipeline stage, as every tensor-parallel rank of that stage holds it."""

    stage: int
    holder: int | None
    """Expert-parallel rank that holds an expert; None of what all of them hold."""
    slot: Slot
    piece: Tensor
    """Shape and type of one rank's slice, in Megatron's layout (on the device `meta`)."""

    def order(self) -> tuple[int, bool, str, list[str | int]]:
        """Stage by stage, experts last, and there by name with layer 2 before layer 10."""
        parts = re.split(r"(\d+)", self.slot.names[0])
        natural = [int(part) if part.isdigit() else part for part in parts]
        return self.stage, self.holder is not None, str(self.piece.dtype), natural


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel as one flat tensor: of one stage, one holder and one dtype."""

    entries: tuple[Entry, ...]

    @property
    def stage(self) -> int:
        return self.entries[0].stage

    @property
    def holder(self) -> int | None:
        return self.entries[0].holder

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
    ) -> ReshardPlan:
        """Return the plan for a model of which this rank holds `local`. Collective over all ranks.

        A gathered bucket, tensor-parallel ranks together, has at most `bucket_bytes`, or holds a
        single tensor. Raises ValueError, the same on all ranks, if their plans differ or if a name
        of the model is missing.
        """
        _check_allocator()
        stage, ep_rank = groups.pp.rank(), groups.ep.rank()
        held = [
            (stage, None if slot.expert is None else ep_rank, slot, tensor.shape, tensor.dtype)
            for slot, tensor in local
        ]
        for group in (groups.ep, groups.pp):
            if group.size() > 1:
                parts: list[Any] = [None] * group.size()
                dist.all_gather_object(parts, held, group=group)
                held = [entry for part in parts for entry in part]
        entries = _unique(
            Entry(stage, holder, slot, torch.empty(size, dtype=dtype, device="meta"))
            for stage, holder, slot, size, dtype in held
        )
        limit = bucket_bytes // groups.tp.size()
        buckets = tuple(
            Bucket(tuple(members))
            for _, alike in groupby(entries, key=lambda e: (e.stage, e.holder, e.piece.dtype))
            for members in group_by_size(alike, lambda entry: entry.piece.nbytes, limit)
        )
        plan = cls(groups, buckets)
        # everything that decides which collectives are called, in which order, with how many bytes
        text = "\n".join(
            f"{index} {entry.stage} {entry.holder} {entry.slot.names} {entry.slot.weight.cut}"
            f" {entry.piece.shape} {entry.piece.dtype}"
            for index, bucket in enumerate(plan.buckets)
            for entry in bucket.entries
        )
        check_same_on_all_ranks(hashlib.sha256(text.encode()).hexdigest())
        shape, names = entries[0].slot.shape, plan.names
        expected = expected_tensors(shape, is_critic=VALUE_HEAD in names).keys()
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
        return [name for entry in self.entries for name in entry.slot.names]

    @property
    def shard_bytes(self) -> int:
        """Bytes of one tensor-parallel rank's slices of the whole model, all pipeline stages
        together.
        """
        return sum(bucket.num_bytes for bucket in self.buckets)


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


@dataclass(slots=True)
class Traffic:
    """Traffic of all syncs since its creation, on this rank."""

    pp_bytes: int = 0
    """Bytes in broadcasts over pipeline stages, sent or received: one shard per sync, nothing
    without stages.
    """
    tp_bytes: int = 0
    """Received from other tensor-parallel ranks by all-gathers: tp - 1 shards per sync by `gather`,
    none by `aligned`.
    """
    ep_bytes: int = 0
    """Bytes of experts in broadcasts over the ranks of a stage that share them, sent or
    received.
    """
    shard_bytes: int = 0
    """This tensor-parallel rank's part of the weights that went through, moved or not."""
    seconds: float = 0.0
    """Time in flattening and collectives, without the receiver's work with the weights."""

    @property
    def moved_bytes(self) -> int:
        """Over all kinds of links."""
        return self.pp_bytes + self.tp_bytes + self.ep_bytes

    def metrics(self, bound: float | None = None) -> dict[str, float]:
        """Return the step's metrics; `bound` is the GB/s of plain collectives of this size
        (`measure_bound`).
        """
        values = {
            "sync_seconds": self.seconds,
            "sync_gbytes_pipeline": self.pp_bytes / 1e9,
            "sync_gbytes_tensor": self.tp_bytes / 1e9,
            "sync_gbytes_expert": self.ep_bytes / 1e9,
            "sync_gbytes_shard": self.shard_bytes / 1e9,
        }
        if self.moved_bytes:
            speed = values["sync_gbytes_per_second"] = self.moved_bytes / self.seconds / 1e9
            if bound:
                values["sync_share_of_bound"] = speed / bound
        return values


def gather(
    plan: ReshardPlan, tensors: Mapping[str, Tensor], traffic: Traffic | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, full tensor) in the plan's order. A collective: every rank
    consumes the whole stream.

    `tensors` are this rank's slices by parameter name, of the shapes and dtypes of the plan.
    """
    traffic = traffic or Traffic()
    tp = plan.groups.tp
    for bucket in plan.buckets:
        if tp.size() == 1 or bucket.holder is not None:
            shards = [_of_stage(plan, bucket, tensors, traffic)]
        else:
            start = time.perf_counter()
            flat = _broadcast(plan, bucket, tensors, traffic)
            gathered = all_gather(flat.new_empty(tp.size() * len(flat)), flat, tp)
            traffic.tp_bytes += (tp.size() - 1) * bucket.num_bytes
            shards = [bucket.split(part) for part in gathered.chunk(tp.size())]
            _count(bucket, traffic, start)
        for entry, *pieces in zip(bucket.entries, *shards, strict=True):
            yield from zip(entry.slot.names, entry.slot.unshard(pieces), strict=True)


def aligned(
    plan: ReshardPlan, tensors: Mapping[str, Tensor], traffic: Traffic | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Stream (engine parameter, its shard for the rank of this tensor-parallel rank's number in an
    engine of as many ranks), without involving other tensor-parallel ranks.

    A collective over pipeline stages and the ranks that share experts. Without those the shards are
    views of the parameters where the layouts agree.
    """
    tp = plan.groups.tp
    yield from stack_experts(
        (entry.slot, entry.slot.shard_to_server(piece, tp.rank(), tp.size()))
        for bucket in plan.buckets
        for entry, piece in zip(
            bucket.entries, _of_stage(plan, bucket, tensors, traffic or Traffic()), strict=True
        )
    )


def all_gather(gathered: Tensor, flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`flat` of every rank, one after the other, in `gathered`, which is returned."""
    # torch 2.13 warns about the name that 2.11 has.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(gathered, flat, group=group)
    return gathered


def measure_bound(plan: ReshardPlan) -> float:
    """GB/s of this rank's plain broadcasts over pipeline stages and expert-parallel ranks, and
    all-gather over tensor-parallel ranks, of a buffer like the largest bucket.

    No sync over these links can be faster by more than noise; 0 if nothing has to move. Collective
    over these groups.
    """
    tp = plan.groups.tp
    broadcasts = [group for group in (plan.groups.pp, plan.groups.ep) if group.size() > 1]
    largest = max(plan.buckets, key=lambda bucket: bucket.num_bytes)
    flat = torch.zeros(largest.num_elements, dtype=largest.dtype, device=distributed.device())
    gathered = flat.new_empty(tp.size() * len(flat))
    num_bytes = (len(broadcasts) + tp.size() - 1) * largest.num_bytes
    best = float("inf")
    for _ in range(4):  # the first time opens the connections
        _wait()
        start = time.perf_counter()
        for group in broadcasts:
            dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
        if tp.size() > 1:
            all_gather(gathered, flat, tp)
        _wait()
        best = min(best, time.perf_counter() - start)
    return num_bytes / best / 1e9


def _unique(entries: Iterable[Entry]) -> list[Entry]:
    """Sort the weights, and keep the first stage's copy of a weight that several stages hold, such
    as the tied embedding.
    """
    first: dict[tuple[str, ...], Entry] = {}
    for entry in sorted(entries, key=Entry.order):
        first.setdefault(entry.slot.names, entry)
    return list(first.values())


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
    """Return this tensor-parallel rank's slices of a bucket, from whatever stage and holder; the
    parameters themselves where every rank has them.
    """
    start = time.perf_counter()
    num_holders = 1 if bucket.holder is None else plan.groups.ep.size()
    if plan.groups.pp.size() == num_holders == 1:
        pieces = [tensors[entry.slot.parameter].detach() for entry in bucket.entries]
    else:
        pieces = bucket.split(_broadcast(plan, bucket, tensors, traffic))
    _count(bucket, traffic, start)
    return pieces


def _broadcast(
    plan: ReshardPlan, bucket: Bucket, tensors: Mapping[str, Tensor], traffic: Traffic
) -> Tensor:
    pp, ep, is_of_stage = plan.groups.pp, plan.groups.ep, plan.groups.pp.rank() == bucket.stage
    if is_of_stage and bucket.holder in (None, ep.rank()):
        mine = [tensors[entry.slot.parameter].detach().reshape(-1) for entry in bucket.entries]
        flat = torch.cat(mine)
    else:
        flat = torch.empty(bucket.num_elements, dtype=bucket.dtype, device=distributed.device())
    if is_of_stage and bucket.holder is not None and ep.size() > 1:
        dist.broadcast(flat, src=dist.get_global_rank(ep, bucket.holder), group=ep)
        traffic.ep_bytes += bucket.num_bytes
    if pp.size() > 1:
        dist.broadcast(flat, src=dist.get_global_rank(pp, bucket.stage), group=pp)
        traffic.pp_bytes += bucket.num_bytes
    return flat


def _count(bucket: Bucket, traffic: Traffic, start: float) -> None:
    _wait()
    traffic.shard_bytes += bucket.num_bytes
    traffic.seconds += time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
