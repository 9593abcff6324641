"""The exchange of trajectories among ranks, from the rollout to the update.

Every rank knows the outlines of all trajectories (`data.compact`): their turns and the rewards
of these. Tokens stay on the rank that sampled them, and rank 0, which writes the rollout to disk
and makes its metrics, has them all until the filter has spoken. Then each rank gets the
trajectories that it trains, and keeps no others.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

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
from ragen_mega.data.types import TokenBatch, Trajectory, TrajectoryGroup, in_groups
from ragen_mega.ranks import collectives

_PICKLE = pickle.HIGHEST_PROTOCOL  # arrays are copied once


def gather_to_main(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    """Return the trajectories of every rank, in rank order: rank 0 gets them whole, the others
    outlines of those that they do not have. Collective.
    """
    if collectives.world_size() == 1:
        return [trajectories]
    mine = collectives.rank()
    for trajectory in trajectories:
        trajectory.rank = mine
    outlines = collectives.gather_objects(outlines_of(trajectories))
    whole = b"" if mine == 0 else pickle.dumps(compact(trajectories), _PICKLE)
    arrived = collectives.exchange_bytes([whole] + [b""] * (len(outlines) - 1))
    return [
        trajectories
        if rank == mine
        else outlined(outlines[rank])
        if mine
        else expand(pickle.loads(data))
        for rank, data in enumerate(arrived)
    ]


def read_on_main(
    read: Callable[[], list[TrajectoryGroup] | None],
) -> list[TrajectoryGroup] | None:
    """Return the groups that `read` returns on rank 0; the other ranks get outlines. Collective.
    Raises what `on_main` does.
    """
    groups: list[TrajectoryGroup] | None = None

    def outline() -> Outlines | None:
        nonlocal groups
        groups = read()
        if groups is None or collectives.world_size() == 1:
            return None
        return outlines_of([trajectory for group in groups for trajectory in group.trajectories])

    found = collectives.on_main(outline)
    return groups if found is None or collectives.is_main() else in_groups(outlined(found))


def send_to_owners(trajectories: Sequence[Trajectory], wanted: Sequence[Sequence[int]]) -> None:
    """Send rank r its trajectories `wanted[r]`, which rank 0 all holds: a trajectory comes from the
    rank that sampled it, as long as that rank has it. Collective.
    """
    mine = collectives.rank()
    held = torch.tensor([mine if trajectory.is_held else 0 for trajectory in trajectories])
    holders = collectives.max_over_ranks(held).tolist()

    def sent(sender: int, receiver: int) -> tuple[int, ...]:
        is_sent = receiver not in (0, sender)
        return tuple(i for i in wanted[receiver] if is_sent and holders[i] == sender)

    @cache  # several ranks often want the same
    def content(part: tuple[int, ...]) -> bytes:
        return pickle.dumps(contents_of([trajectories[i] for i in part]), _PICKLE) if part else b""

    outgoing = [content(sent(mine, receiver)) for receiver in range(len(wanted))]
    for rank, data in enumerate(collectives.exchange_bytes(outgoing)):
        if data:
            fill([trajectories[i] for i in sent(rank, mine)], pickle.loads(data))


def keep_trained(
    groups: Sequence[TrajectoryGroup],
    trajectories: Sequence[Trajectory],
    owners: Tensor | None,
    *,
    homes: Sequence[int],
    num_shown: int = 0,
) -> None:
    """Send every rank the `trajectories` that it trains as `packing.choose_owners` says (None: all,
    with the infos of their turns), and release everything else of the `groups`, except that rank 0
    keeps the first `num_shown` groups. `homes` [ranks] is the data-parallel rank of each rank. Does
    nothing on a rank without others. Collective.
    """
    if collectives.world_size() == 1:
        return
    wanted: list[Sequence[int]] = [range(len(trajectories))] * len(homes)
    if owners is None:
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        infos = collectives.on_main(lambda: [turn.info for turn in turns])
        for turn, info in zip(turns, infos, strict=True):
            turn.info = info
    else:
        wanted = [(owners == home).any(0).nonzero()[:, 0].tolist() for home in homes]
    send_to_owners(trajectories, wanted)
    shown = groups[:num_shown] if collectives.is_main() else ()
    stay = {id(trajectories[i]) for i in wanted[collectives.rank()]}
    stay |= {id(trajectory) for group in shown for trajectory in group.trajectories}
    for group in groups:
        for trajectory in group.trajectories:
            if id(trajectory) not in stay:
                trajectory.release()


def gather_field(batch: TokenBatch, name: str) -> Tensor:
    """Return a field [T], of which each rank has its own trajectories, for all. Collective."""
    values = dict(batch.tensors())[name]
    if batch.here is None:
        return values
    is_here = batch.here.repeat_interleave(batch.lengths.long())
    known = values.new_full(values.shape, TOKEN_FIELDS[name].least)
    known[is_here] = values[is_here]
    return collectives.max_over_ranks(known)


def gather_batch(batch: TokenBatch) -> TokenBatch:
    """Return the batch with all tokens on every rank. Collective."""
    if batch.here is None:
        return batch
    values = {name: gather_field(batch, name) for name in filled_by_trajectories()}
    return replace(batch.with_fields(**values), here=None)
