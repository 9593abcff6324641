"""Trajectories -> one packed TokenBatch; minibatches of one optimizer step, microbatches of one
forward pass.

The shift from tokens to labels happens here and nowhere else.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ragen_mega.data.balance import TOKENS, Cost, balanced_split
from ragen_mega.data.fields import ROUTES, TOKEN_FIELDS, filled_by_trajectories, recorded_fields
from ragen_mega.data.forest import Forest, PrefixOrder, even_runs
from ragen_mega.data.types import (
    Edges,
    Microbatch,
    TokenBatch,
    Trajectory,
    arguments_of,
    counts_of,
    move,
    offsets_of,
    ranges,
)


def pack(trajectories: Sequence[Trajectory], here: Tensor | None = None) -> TokenBatch:
    """Pack S trajectories of L_s tokens into T = sum(L_s - 1) positions (less with several segments
    each); position t predicts the next token. Tokens that another rank holds (`Elsewhere`), and
    what was recorded with them, have the defaults of their fields. `here`: see `TokenBatch`.

    Two turns (see `Trajectory`), one trajectory:

        tokens     O0 O0 O0 A0 A0 O1 O1      turn_ids  -1 -1  0  0 -1 -1  1
        labels     O0 O0 A0 A0 O1 O1 A1      rewards    0  0  0 r0  0  0 r1
        loss_mask   0  0  1  1  0  0  1
    """
    if not trajectories:
        raise ValueError("cannot pack zero trajectories; the filter kept no group, skip the update")
    lengths = torch.tensor(
        [len(trajectory) - 1 - len(trajectory.breaks) for trajectory in trajectories]
    )
    cu_seqlens = offsets_of(lengths)
    spans = [end - start for trajectory in trajectories for start, end in trajectory.segments]
    whole = torch.tensor(spans)  # [G]
    cu_segments = offsets_of(whole - 1)
    recorded = {  # [T + G, ...]
        name: _recorded(trajectories, name).to(TOKEN_FIELDS[name].dtype)
        for name in filled_by_trajectories()
        if name in recorded_fields()
    }
    tokens = recorded.pop("tokens")
    is_label = torch.ones_like(tokens, dtype=torch.bool)
    is_label[whole.cumsum(0) - whole] = False  # the first token of each segment
    is_input = torch.ones_like(is_label)
    is_input[whole.cumsum(0) - 1] = False  # and its last
    turn_ids, rewards = _of_turns(trajectories, cu_seqlens[:-1].long(), int(cu_seqlens[-1]))
    starts = cu_segments[:-1].long().repeat_interleave(whole - 1)
    return TokenBatch(
        tokens=tokens[is_input],
        labels=tokens[is_label],
        position_ids=torch.arange(len(turn_ids)) - starts,
        cu_seqlens=cu_seqlens,
        loss_mask=turn_ids >= 0,
        turn_ids=turn_ids,
        rewards=rewards,
        group_ids=torch.tensor([t.group_id for t in trajectories]),
        cu_segments=cu_segments if len(spans) > len(trajectories) else None,
        here=here,
        **arguments_of(
            {
                name: values[is_input if TOKEN_FIELDS[name].is_of_inputs else is_label]
                for name, values in recorded.items()
            }
        ),
    )


def _recorded(trajectories: Sequence[Trajectory], name: str) -> Tensor:
    """Return the values [sum L, ...] of a recorded field; the defaults where another rank holds
    them.
    """
    row = TOKEN_FIELDS[name]
    parts = [
        row.array(trajectory.token_fields[name])
        if trajectory.is_held
        else row.defaults(len(trajectory))
        for trajectory in trajectories
    ]
    return torch.from_numpy(np.concatenate(parts))


def _of_turns(
    trajectories: Sequence[Trajectory], starts: Tensor, num_positions: int
) -> tuple[Tensor, Tensor]:
    """Return the turn [T] int32 of every label, -1 where it was not sampled, and the rewards [T] of
    the turns on their last labels; a turn without tokens has none.
    """
    turn_ids = torch.full((num_positions,), -1, dtype=torch.int32)
    rewards = torch.zeros(num_positions)
    counts = torch.tensor([len(trajectory.turns) for trajectory in trajectories])
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    # The first token of every further segment is nobody's label.
    lost = [
        bisect_right(trajectory.breaks, turn.start)
        for trajectory in trajectories
        for turn in trajectory.turns
    ]
    bounds = [(turn.start - n, turn.end - n) for turn, n in zip(turns, lost, strict=True)]
    spans = torch.tensor(bounds, dtype=torch.int64).reshape(-1, 2)
    spans += starts.repeat_interleave(counts)[:, None] - 1  # token t is the label of position t - 1
    sizes = spans[:, 1] - spans[:, 0]
    numbers = ranges(torch.zeros_like(counts), counts)
    turn_ids[ranges(spans[:, 0], sizes)] = numbers.repeat_interleave(sizes).int()
    earned = torch.tensor([turn.reward for turn in turns], dtype=torch.float32)
    rewards[spans[sizes > 0, 1] - 1] = earned[sizes > 0]
    return turn_ids, rewards


def behind_first_message(batch: TokenBatch, end_of_message: int) -> Tensor:
    """Return [T] whether a label comes after the first `end_of_message` of its trajectory, which in
    a chat closes the system message. The batch has no padding.
    """
    is_end = (batch.labels == end_of_message).long()
    ends_before = is_end.cumsum(0) - is_end
    at_start = ends_before[batch.cu_seqlens[:-1].long()]  # [S]
    return ends_before > at_start.repeat_interleave(batch.lengths.long())


def flatten(rows: Iterable[Sequence], dtype: type[np.generic]) -> Tensor:
    """Return the values of all rows in one tensor. It is several times faster than torch.tensor."""
    return torch.from_numpy(
        np.concatenate([np.empty(0, dtype), *(np.asarray(r, dtype) for r in rows)])
    )


def minibatch_ids(
    num_trajectories: int, minibatch_size: int, num_passes: int, generator: torch.Generator
) -> Iterator[list[int]]:
    """Yield shuffled minibatches of `minibatch_size` trajectories, `num_passes` times the batch.

    A remainder smaller than half a minibatch joins the last one, so that no step rests on a handful
    of trajectories.
    """
    num_minibatches = count_minibatches(num_trajectories, minibatch_size)
    for _ in range(num_passes):
        order = torch.randperm(num_trajectories, generator=generator)
        for ids in order.tensor_split(num_minibatches):
            yield sorted(ids.tolist())


def count_minibatches(num_trajectories: int, minibatch_size: int) -> int:
    """Return the number of minibatches in one pass over that many trajectories."""
    return max(1, round(num_trajectories / minibatch_size))


def costs_of(batch: TokenBatch, cost: Cost) -> list[int]:
    """Return the costs [S] of the trajectories, each computed by itself."""
    labels = counts_of(_active(batch), batch.cu_seqlens).tolist()
    if batch.cu_segments is None:
        return [cost.of(*sizes) for sizes in zip(batch.lengths.tolist(), labels)]
    segments = [cost.of(size) for size in batch.cu_segments.diff().tolist()]
    bounds = torch.bucketize(batch.cu_seqlens, batch.cu_segments).tolist()
    return [
        sum(segments[first:end]) + cost.per_label * count
        for (first, end), count in zip(pairwise(bounds), labels)
    ]


def shares(
    tokens: Tensor,
    cu_seqlens: Tensor,
    costs: Sequence[int],
    num_ranks: int,
    *,
    ids: Sequence[int] | None = None,
    homes: Sequence[int] | None = None,
    cost: Cost = TOKENS,
    most_nodes: float = 0.0,
) -> list[list[int]]:
    """Divide the trajectories `ids` (None: all), packed in `tokens` [T], among the data-parallel
    ranks that train them, so that all ranks have about as much to compute.

    If the distinct positions are fewer than `most_nodes` of all, shares are runs in the order of
    the tokens, so that trajectories that begin alike stay together. Otherwise trajectories stay on
    the ranks `homes` [S] as far as that costs no balance.
    """
    ids = range(len(costs)) if ids is None else ids
    if num_ranks == 1:
        return [list(ids)]
    if order := _shared_order(tokens, cu_seqlens, ids, costs, cost, most_nodes):
        runs = [run.ids for run in order.cut(num_ranks, order.num_nodes)]
        return runs + [[] for _ in range(num_ranks - len(runs))]
    at_home = None if homes is None else [homes[i] for i in ids]
    parts = balanced_split([costs[i] for i in ids], num_ranks, at_home)
    return [[ids[place] for place in part] for part in parts]


def _shared_order(
    tokens: Tensor,
    cu_seqlens: Tensor,
    ids: Sequence[int],
    costs: Sequence[int],
    cost: Cost,
    most_nodes: float,
    routes: Tensor | None = None,
) -> PrefixOrder | None:
    """Return the trajectories in order if they share enough, else None."""
    if not most_nodes:
        return None
    order = PrefixOrder.of(tokens, cu_seqlens, ids, routes=routes, cost=cost, costs=costs)
    return order if order.num_nodes < most_nodes * sum(order.lengths) else None


def choose_owners(
    trajectories: Sequence[Trajectory],
    minibatches: Sequence[Sequence[int]],
    num_parts: int,
    *,
    homes: Sequence[int],
    cost: Cost,
    most_nodes: float,
) -> Tensor:
    """Return [passes, S] which of `num_parts` data-parallel ranks trains each trajectory, so that
    in every minibatch all have about as much to compute (see `shares`). Needs all tokens.

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
    divide = partial(
        shares, tokens, offsets, costs, num_parts, homes=at_home, cost=cost, most_nodes=most_nodes
    )
    owners = torch.full((sum(map(len, minibatches)) // len(costs), len(costs)), -1)
    seen = 0
    for ids in minibatches:
        for part, share in enumerate(divide(ids=ids)):
            owners[seen // len(costs), share] = part
        seen += len(ids)
    return owners


class Share(NamedTuple):
    """The trajectories of one microbatch."""

    ids: list[int]
    shared: list[int]
    """Number of first positions that each trajectory shares with the one before it."""


def parts_of(
    batch: TokenBatch,
    ids: Sequence[int],
    max_tokens: int,
    *,
    cost: Cost = TOKENS,
    costs: Sequence[int] | None = None,
    most_nodes: float = 0.0,
    num_stages: int = 1,
) -> list[Share]:
    """Divide the given trajectories of a batch into microbatches of at most `max_tokens` nodes,
    which are the distinct positions where these are fewer than `most_nodes` of all, see `shares`.
    `costs` [S] of all trajectories by themselves (None: what `cost` says).
    """
    costs = costs_of(batch, cost) if costs is None else costs
    routes = batch.further_fields.get(ROUTES)
    if order := _shared_order(batch.tokens, batch.cu_seqlens, ids, costs, cost, most_nodes, routes):
        runs = order.cut(4 * num_stages if num_stages > 1 else 1, max_tokens, num_stages)
        return [Share(run.ids, run.shared) for run in runs]
    found = microbatches(batch, max_tokens, ids, cost=cost, costs=costs, num_stages=num_stages)
    return [Share(chosen, [0] * len(chosen)) for chosen in found]


def microbatches(
    batch: TokenBatch,
    max_tokens: int,
    trajectory_ids: Sequence[int],
    *,
    cost: Cost = TOKENS,
    costs: Sequence[int] | None = None,
    num_stages: int = 1,
) -> list[list[int]]:
    """Divide the given trajectories of a batch into microbatches of at most `max_tokens` positions.

    Without a pipeline they are as few as the budget allows: trajectories are placed longest first
    into the first microbatch with room. A pipeline of `num_stages` is idle for (num_stages - 1) /
    (microbatches + num_stages - 1) of a pass (1F1B, arXiv:2104.04473 sec. 2.2), so there are at
    least 4 x num_stages microbatches as long as there are trajectories, of near-equal cost: all
    wait for the slowest. Their number is a multiple of num_stages, since the interleaved schedule
    passes so many at a time through a chunk of layers. A trajectory longer than `max_tokens` is a
    microbatch by itself. `costs`: see `parts_of`.
    """
    lengths = batch.lengths.tolist()
    if num_stages > 1:
        costs = costs_of(batch, cost) if costs is None else costs
        items = [(i, lengths[i], costs[i]) for i in trajectory_ids]
        return _balanced(items, max_tokens, num_stages, cost)
    bins: list[list[int]] = []
    taken: list[int] = []
    for item in sorted(trajectory_ids, key=lambda i: (-lengths[i], i)):
        fits = (i for i, used in enumerate(taken) if used + lengths[item] <= max_tokens)
        if (target := next(fits, None)) is None:
            bins.append([item])
            taken.append(lengths[item])
        else:
            bins[target].append(item)
            taken[target] += lengths[item]
    return [sorted(ids) for ids in bins]


def _balanced(
    items: Sequence[tuple[int, int, int]], max_tokens: int, num_stages: int, cost: Cost
) -> list[list[int]]:
    """Divide items (id, length, cost) into at least 4 x `num_stages` parts, as long as there are
    items; each part is within the budget or has one item. The parts are balanced by cost or by
    length, whichever makes a pass faster: all are padded to the length of the longest.
    """
    if not items:
        return []
    ids, lengths, costs = zip(*items)

    def split(sizes: Sequence[int]) -> list[list[int]]:
        least = num_stages * max(4, -(-sum(lengths) // (max_tokens * num_stages)))
        for num_parts in (*range(least, len(items), num_stages), len(items)):
            found = balanced_split(sizes, num_parts)
            if all(len(part) == 1 or tokens(part) <= max_tokens for part in found):
                break
        return found

    def tokens(part: list[int]) -> int:
        return sum(lengths[i] for i in part)

    def duration(found: list[list[int]]) -> int:
        longest = max(map(tokens, found))
        padded = (sum(costs[i] for i in part) + cost.of(longest - tokens(part)) for part in found)
        return (len(found) + num_stages - 1) * max(padded)

    best = min((split(sizes) for sizes in (lengths, costs)), key=duration)
    return [[ids[i] for i in part] for part in best]


class ContextRank(NamedTuple):
    """The context-parallel rank that computes a part of each microbatch."""

    rank: int = 0
    size: int = 1
    cost: Cost = TOKENS
    """Cost of which each rank gets about the same share."""
    max_nodes: int = 0
    """Number of nodes that a rank computes at most, as long as the ranks together have room."""


ALONE = ContextRank()


class Part(NamedTuple):
    """The positions of a microbatch that one rank computes."""

    batch: TokenBatch
    positions: Tensor  # [T] int64 in the whole batch
    forest: Forest


def part_of(batch: TokenBatch, share: Share, context: ContextRank = ALONE) -> Part:
    """Return what a context-parallel rank computes of the given trajectories: a run of nodes, and
    all positions that they stand for, with their labels.
    """
    whole, positions = batch.select(share.ids), batch.positions(share.ids)
    forest = Forest.of(whole.lengths.tolist(), share.shared)
    if context.size == 1:
        return Part(whole, positions, forest)
    cost, sources = context.cost, torch.from_numpy(forest.sources)
    active = _active(whole)
    pairs = torch.stack([sources[active], whole.labels[active]]).unique(dim=1)[0].numpy()
    costs = cost.per_token + cost.per_pair * (forest.depths().numpy() + 1)
    costs = costs + cost.per_label * np.bincount(pairs, minlength=forest.num_nodes)
    bounds = even_runs(costs, context.size, context.max_nodes)
    first, end = bounds[context.rank : context.rank + 2]
    kept = (first <= sources) & (sources < end)
    return Part(whole.at(kept), positions[kept], forest.cut(bounds, context.rank))


def _active(batch: TokenBatch) -> Tensor:
    """Return [T] whether a position has a weight; without weights, whether it is under the mask."""
    return batch.loss_mask if batch.weights is None else batch.weights != 0


def microbatch(part: Part, *, multiple: int, device: torch.device) -> Microbatch:
    """Return a part of a batch on `device`, its input padded to a multiple of nodes."""
    whole, forest = part.batch, part.forest.padded(multiple)
    nodes = torch.from_numpy(forest.sources)
    rows, sources, edges = _active(whole).nonzero().squeeze(1), None, None
    if forest.is_shared:
        sources = move(nodes, device)
        base = int(whole.labels.max()) + 1
        found = (nodes * base + whole.labels)[rows].unique(return_inverse=True, return_counts=True)
        pairs, edge_of, repeats = found
        edge_of, order = edge_of.sort(stable=True)
        edges = Edges(
            move(pairs // base, device),
            move(pairs % base, device),
            repeats,
            move(edge_of, device),
        )
        rows = rows[order]
    further = {name for name in whole.further_fields if TOKEN_FIELDS[name].is_of_inputs}
    return Microbatch(
        **arguments_of(
            {
                name: move(forest.per_node(value) if name in further else value, device)
                for name, value in whole.tensors()
                if name != "here"
            }
        ),
        forest=forest,
        batch_positions=part.positions,
        input_ids=move(forest.per_node(whole.tokens), device),
        depths=move(forest.depths(), device),
        sources=sources,
        rows=move(rows, device),
        edges=edges,
    )
