"""Trainer shards -> rollout engine, by one of two paths over one plan, with every byte counted.

`gather` rebuilds full Hugging Face tensors: per bucket one broadcast over pipeline stages and one
all-gather over tensor- parallel ranks; any engine takes them. `aligned` is for an engine with as
many tensor-parallel ranks as the trainer: the shard of a rank is, after de-interleaving q, k and v,
the engine's shard of the same rank, so that only the broadcast is left. Every bucket is memory of
its own that is never written again, so a receiver may copy it as late as it likes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ragen_mega.data import distributed
from ragen_mega.megatron.reshard_plan import Bucket, ReshardPlan
from ragen_mega.models.layout import unshard
from ragen_mega.models.server_cut import engine_name, from_trainer


@dataclass(slots=True)
class Traffic:
    """What the syncs since its creation moved, on this rank."""

    pp_bytes: int = 0
    """Length of all broadcasts over pipeline stages, sent or received: one shard per sync, nothing
    without stages.
    """
    tp_bytes: int = 0
    """Received from other tensor-parallel ranks by all-gathers: tp - 1 shards per sync by `gather`,
    none by `aligned`.
    """
    shard_bytes: int = 0
    """This tensor-parallel rank's part of the weights that went through, moved or not."""
    seconds: float = 0.0
    """In flattening and collectives, without what the receiver does with the weights."""

    @property
    def gbytes_per_second(self) -> float:
        """Bytes over both kinds of links per second; 0 if nothing had to move."""
        moved = self.pp_bytes + self.tp_bytes
        return moved / self.seconds / 1e9 if moved else 0.0

    def metrics(self, bound: float | None = None) -> dict[str, float]:
        """For the step's metrics; `bound` is the GB/s of plain collectives of this size
        (`measure_bound`).
        """
        values = {
            "sync_seconds": self.seconds,
            "sync_gbytes_pipeline": self.pp_bytes / 1e9,
            "sync_gbytes_tensor": self.tp_bytes / 1e9,
            "sync_gbytes_shard": self.shard_bytes / 1e9,
        }
        if self.pp_bytes + self.tp_bytes:
            values["sync_gbytes_per_second"] = self.gbytes_per_second
            if bound:
                values["sync_share_of_bound"] = self.gbytes_per_second / bound
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
        start = time.perf_counter()
        if tp.size() == 1:
            shards = [_of_stage(plan, bucket, tensors, traffic)]
        else:
            flat = _broadcast(plan, bucket, tensors, traffic)
            gathered = all_gather(flat.new_empty(tp.size() * len(flat)), flat, tp)
            traffic.tp_bytes += (tp.size() - 1) * bucket.num_bytes
            shards = [bucket.split(part) for part in gathered.chunk(tp.size())]
        _count(bucket, traffic, start)
        for entry, *pieces in zip(bucket.entries, *shards, strict=True):
            yield from zip(entry.slot.names, unshard(entry.slot, pieces), strict=True)


def aligned(
    plan: ReshardPlan,
    tensors: Mapping[str, Tensor],
    rollout_tp: int,
    traffic: Traffic | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Stream (engine parameter, its shard of the engine rank that equals this tensor-parallel
    rank), without any of its peers.

    A collective over pipeline stages only. Without stages the shards are views of the parameters
    where the layouts are one. Raises ValueError unless `rollout_tp` is the trainer's
    tensor-parallel size.
    """
    if rollout_tp != plan.groups.tp.size():
        raise ValueError(
            f"the aligned path needs rollout_tensor_parallel_size ({rollout_tp}) equal to"
            f" tensor_model_parallel_size ({plan.groups.tp.size()}); make them equal or send full"
            " tensors by the gather path"
        )
    traffic = traffic or Traffic()
    for bucket in plan.buckets:
        start = time.perf_counter()
        pieces = _of_stage(plan, bucket, tensors, traffic)
        _count(bucket, traffic, start)
        for entry, piece in zip(bucket.entries, pieces, strict=True):
            yield engine_name(entry.slot.names[0]), from_trainer(entry.slot, piece, rollout_tp)


def all_gather(gathered: Tensor, flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`flat` of every rank, one after the other, in `gathered`, which is returned."""
    # torch 2.13 warns of the name that 2.11 knows.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(gathered, flat, group=group)
    return gathered


def measure_bound(plan: ReshardPlan, *, with_tp: bool, repeats: int = 3) -> float:
    """GB/s of this rank's plain broadcast over pp, and all-gather over tp if `with_tp`, of a buffer
    like the largest bucket.

    What no sync over these links can exceed by more than noise; 0 if nothing has to move.
    Collective over both groups.
    """
    tp, pp = plan.groups.tp, plan.groups.pp
    largest = max(plan.buckets, key=lambda bucket: bucket.num_bytes)
    flat = torch.zeros(largest.num_elements, dtype=largest.dtype, device=distributed.device())
    gathered = flat.new_empty(tp.size() * len(flat))
    bytes_pp = largest.num_bytes if pp.size() > 1 else 0
    bytes_tp = (tp.size() - 1) * largest.num_bytes if with_tp else 0
    if not bytes_pp + bytes_tp:
        return 0.0
    best = float("inf")
    for _ in range(repeats + 1):  # the first time opens the connections
        _wait()
        start = time.perf_counter()
        if bytes_pp:
            dist.broadcast(flat, src=dist.get_global_rank(pp, 0), group=pp)
        if bytes_tp:
            all_gather(gathered, flat, tp)
        _wait()
        best = min(best, time.perf_counter() - start)
    return (bytes_pp + bytes_tp) / best / 1e9


def _of_stage(
    plan: ReshardPlan, bucket: Bucket, tensors: Mapping[str, Tensor], traffic: Traffic
) -> list[Tensor]:
    """This tensor-parallel rank's slices of a bucket, from whatever stage; without stages the
    parameters themselves.
    """
    if plan.groups.pp.size() == 1:
        return [tensors[entry.slot.parameter].detach() for entry in bucket.entries]
    return bucket.split(_broadcast(plan, bucket, tensors, traffic))


def _broadcast(
    plan: ReshardPlan, bucket: Bucket, tensors: Mapping[str, Tensor], traffic: Traffic
) -> Tensor:
    pp = plan.groups.pp
    if pp.rank() == bucket.stage:
        flat = bucket.flatten(tensors)
    else:
        flat = torch.empty(bucket.num_elements, dtype=bucket.dtype, device=distributed.device())
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
