"""The placement of trajectories on ranks, from the rollout to the update.

Every rank knows the outlines of all trajectories (`data.compact`): their turns and the rewards
of these. Tokens stay on the rank that sampled them, and rank 0, which writes the rollout to disk
and makes its metrics, has them all until the filter has spoken. Then each rank gets the
trajectories that it trains, and keeps no others.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ragen_mega.algorithm.filters import has_return, with_returns
from ragen_mega.algorithm.rewards import IDENTITY, shape_rewards
from ragen_mega.algorithm.tables import is_judge
from ragen_mega.data import distributed
from ragen_mega.data.balance import Cost
from ragen_mega.data.compact import (
    Outlines,
    compact,
    contents_of,
    expand,
    fill,
    outlined,
    outlines_of,
)
from ragen_mega.data.fields import TOKEN_FIELDS, filled_by_trajectories
from ragen_mega.data.packing import flatten, shares
from ragen_mega.data.types import TokenBatch, Trajectory, TrajectoryGroup, offsets_of
from ragen_mega.rollout.collector import in_groups

_PICKLE = pickle.HIGHEST_PROTOCOL  # arrays are copied once


def share(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    """Return the trajectories of every rank, in rank order: rank 0 gets them whole, the others
    outlines of those that they do not have. Collective.
    """
    if distributed.world_size() == 1:
        return [trajectories]
    mine = distributed.rank()
    for trajectory in trajectories:
        trajectory.rank = mine
    outlines = distributed.gather_objects(outlines_of(trajectories))
    whole = b"" if mine == 0 else pickle.dumps(compact(trajectories), _PICKLE)
    arrived = distributed.exchange_bytes([whole] + [b""] * (len(outlines) - 1))
    return [
        trajectories
        if rank == mine
        else outlined(outlines[rank])
        if mine
        else expand(pickle.loads(data))
        for rank, data in enumerate(arrived)
    ]


def from_main(
    read: Callable[[], list[TrajectoryGroup] | None],
) -> list[TrajectoryGroup] | None:
    """Return the groups that `read` returns on rank 0; the other ranks get outlines. Collective.
    Raises what `on_main` does.
    """
    groups: list[TrajectoryGroup] | None = None

    def outline() -> Outlines | None:
        nonlocal groups
        groups = read()
        if groups is None or distributed.world_size() == 1:
            return None
        return outlines_of([trajectory for group in groups for trajectory in group.trajectories])

    found = distributed.on_main(outline)
    return groups if found is None or distributed.is_main() else in_groups(outlined(found))


def shape_on_main(
    groups: Sequence[TrajectoryGroup], terms: Mapping[str, float]
) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup], dict[str, float]]:
    """Return the groups with the rewards of the terms, those of them that can be trained on, with
    their samples alone, and metrics to log, as `shape_rewards` has them.

    Samples are the members that have a return. Rank 0, which has all tokens and infos, finds them
    and shapes them alone, so that none is compared with anything else; the others get what it
    found. Collective. Raises PlugInError on all ranks.
    """
    judges = [name for name, weight in terms.items() if is_judge(name) and weight]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    found = distributed.on_main(
        lambda: [
            (has_return(trajectory, judges), has_return(trajectory)) for trajectory in trajectories
        ]
    )
    worth = {id(trajectory) for trajectory, (is_judged, _) in zip(trajectories, found) if is_judged}
    samples = with_returns(groups, lambda trajectory: id(trajectory) in worth)
    metrics: dict[str, float] = {}
    if judges:
        metrics["missing_verdicts"] = float(sum(played for _, played in found) - len(worth))
    if dict(terms) == IDENTITY or not samples:
        return list(groups), samples, metrics
    shaped: list[TrajectoryGroup] = []

    def shape() -> tuple[list[float], dict[str, float]]:
        nonlocal shaped
        shaped, means = shape_rewards(samples, terms)
        played = (trajectory for group in shaped for trajectory in group.trajectories)
        return [turn.reward for trajectory in played for turn in trajectory.turns], means

    rewards, means = distributed.on_main(shape)
    if not distributed.is_main():
        earned = iter(rewards)
        shaped = [
            replace(
                group,
                trajectories=[
                    replace(
                        trajectory,
                        turns=[replace(turn, reward=next(earned)) for turn in trajectory.turns],
                    )
                    for trajectory in group.trajectories
                ],
            )
            for group in samples
        ]
    before = (trajectory for group in samples for trajectory in group.trajectories)
    after = (trajectory for group in shaped for trajectory in group.trajectories)
    changed = {id(old): new for old, new in zip(before, after, strict=True)}
    whole = [
        replace(
            group,
            trajectories=[
                changed.get(id(trajectory), trajectory) for trajectory in group.trajectories
            ],
        )
        for group in groups
    ]
    return whole, shaped, metrics | means


def deliver(trajectories: Sequence[Trajectory], wanted: Sequence[Sequence[int]]) -> None:
    """Let rank r hold `wanted[r]` of the trajectories, which rank 0 all holds: what it lacks comes
    from the rank that sampled it, where that still has it. Collective.
    """
    mine = distributed.rank()
    held = torch.tensor([mine if trajectory.is_held else 0 for trajectory in trajectories])
    holders = distributed.max_over_ranks(held).tolist()

    def sent(sender: int, receiver: int) -> list[Trajectory]:
        if receiver in (0, sender):
            return []
        return [trajectories[i] for i in wanted[receiver] if holders[i] == sender]

    outgoing = [sent(mine, rank) for rank in range(len(wanted))]
    arrived = distributed.exchange_bytes(
        [pickle.dumps(contents_of(part), _PICKLE) if part else b"" for part in outgoing]
    )
    for rank, data in enumerate(arrived):
        if data:
            fill(sent(rank, mine), pickle.loads(data))


def assign(
    trajectories: Sequence[Trajectory],
    minibatches: Sequence[Sequence[int]],
    num_parts: int,
    *,
    homes: Sequence[int],
    cost: Cost,
    most_nodes: float,
) -> Tensor:
    """Return [passes, S] which of `num_parts` data-parallel ranks trains each trajectory, so that
    in every minibatch all have about as much to compute (see `packing.shares`). Needs all tokens.

    `minibatches` go over all trajectories, once or several times; `homes` [ranks] is the
    data-parallel rank of each rank.
    """
    costs = [
        sum(cost.of(end - start - 1) for start, end in trajectory.segments)
        + cost.per_label * trajectory.num_sampled_tokens
        for trajectory in trajectories
    ]
    tokens = flatten((trajectory.tokens for trajectory in trajectories), np.int32)
    offsets = offsets_of(torch.tensor([len(trajectory) for trajectory in trajectories]))
    at_home = [homes[trajectory.rank % len(homes)] for trajectory in trajectories]
    options = {"homes": at_home, "cost": cost, "most_nodes": most_nodes}
    owners = torch.full((sum(map(len, minibatches)) // len(costs), len(costs)), -1)
    seen = 0
    for ids in minibatches:
        found = shares(tokens, offsets, costs, num_parts, ids=ids, **options)
        for part, share in enumerate(found):
            owners[seen // len(costs), share] = part
        seen += len(ids)
    return owners


def hold(
    groups: Sequence[TrajectoryGroup],
    trajectories: Sequence[Trajectory],
    owners: Tensor | None,
    *,
    homes: Sequence[int],
    num_shown: int = 0,
) -> None:
    """Let every rank hold those of the `trajectories` that it trains as `assign` says (None: all,
    with the infos of their turns), and of all `groups` nothing else; rank 0 also the first
    `num_shown` groups. Collective.
    """
    if owners is None:
        wanted = [range(len(trajectories))] * len(homes)
        _tell_infos(trajectories)
    else:
        wanted = [(owners == home).any(0).nonzero()[:, 0].tolist() for home in homes]
    deliver(trajectories, wanted)
    shown = groups[:num_shown] if distributed.is_main() else ()
    stay = {id(trajectories[i]) for i in wanted[distributed.rank()]}
    stay |= {id(trajectory) for group in shown for trajectory in group.trajectories}
    for group in groups:
        for trajectory in group.trajectories:
            if id(trajectory) not in stay:
                trajectory.release()


def _tell_infos(trajectories: Sequence[Trajectory]) -> None:
    """Give every rank the infos of all turns, which rank 0 has. Collective."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    infos = distributed.on_main(lambda: [turn.info for turn in turns])
    for turn, info in zip(turns, infos, strict=True):
        turn.info = info


def everywhere(batch: TokenBatch, name: str) -> Tensor:
    """Return a field [T], of which each rank has its own trajectories, for all. Collective."""
    values = dict(batch.tensors())[name]
    if batch.here is None:
        return values
    is_here = batch.here.repeat_interleave(batch.lengths.long())
    known = values.new_full(values.shape, TOKEN_FIELDS[name].least)
    known[is_here] = values[is_here]
    return distributed.max_over_ranks(known)


def whole(batch: TokenBatch) -> TokenBatch:
    """Return the batch with all tokens on every rank. Collective."""
    if batch.here is None:
        return batch
    values = {name: everywhere(batch, name) for name in filled_by_trajectories()}
    return replace(batch.with_fields(**values), here=None)
