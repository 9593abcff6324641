"""Trajectories -> one packed TokenBatch; minibatches of one optimizer step, microbatches of one
forward pass.

The shift from tokens to labels happens here and nowhere else.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ragen_mega.data.distributed import balanced_split
from ragen_mega.data.forest import Forest, PrefixOrder
from ragen_mega.data.types import Edges, Microbatch, TokenBatch, Trajectory, move, offsets_of


def pack(trajectories: Sequence[Trajectory]) -> TokenBatch:
    """Pack S trajectories of L_s tokens into T = sum(L_s - 1) positions (less with several segments
    each); position t predicts the next token.

    Two turns (see `Trajectory`), one trajectory:

        tokens     O0 O0 O0 A0 A0 O1 O1      turn_ids  -1 -1  0  0 -1 -1  1
        labels     O0 O0 A0 A0 O1 O1 A1      rewards    0  0  0 r0  0  0 r1
        loss_mask   0  0  1  1  0  0  1
    """
    if not trajectories:
        raise ValueError("cannot pack zero trajectories; the filter kept no group, skip the update")
    lengths = torch.tensor([len(one) - 1 - len(one.breaks) for one in trajectories])
    cu_seqlens = offsets_of(lengths)
    spans = [end - start for one in trajectories for start, end in one.segments]
    whole = torch.tensor(spans)  # [G]
    cu_segments = offsets_of(whole - 1)
    tokens = flatten((t.tokens for t in trajectories), np.int64)  # [T + G]
    is_label = torch.ones_like(tokens, dtype=torch.bool)
    is_label[whole.cumsum(0) - whole] = False  # the first token of each segment
    is_input = torch.ones_like(is_label)
    is_input[whole.cumsum(0) - 1] = False  # and its last
    turn_ids, rewards = _of_turns(trajectories, cu_seqlens[:-1].long(), int(cu_seqlens[-1]))
    mask = flatten((t.loss_mask for t in trajectories), np.bool_)
    logprobs = flatten((t.rollout_logprobs for t in trajectories), np.float32)
    starts = cu_segments[:-1].long().repeat_interleave(whole - 1)
    return TokenBatch(
        tokens=tokens[is_input],
        labels=tokens[is_label],
        position_ids=torch.arange(len(turn_ids)) - starts,
        cu_seqlens=cu_seqlens,
        loss_mask=mask[is_label],
        turn_ids=turn_ids,
        rewards=rewards,
        group_ids=torch.tensor([t.group_id for t in trajectories]),
        rollout_logprobs=logprobs[is_label],
        cu_segments=cu_segments if len(spans) > len(trajectories) else None,
    )


def _of_turns(
    trajectories: Sequence[Trajectory], starts: Tensor, num_positions: int
) -> tuple[Tensor, Tensor]:
    """Turn [T] int32 of every label, -1 where it was not sampled, and rewards [T] of the turns on
    their last labels.
    """
    turn_ids = torch.full((num_positions,), -1, dtype=torch.int32)
    rewards = torch.zeros(num_positions)
    counts = torch.tensor([len(trajectory.turns) for trajectory in trajectories])
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    # The first token of every further segment is nobody's label.
    lost = [bisect_right(one.breaks, turn.start) for one in trajectories for turn in one.turns]
    bounds = [(turn.start - n, turn.end - n) for turn, n in zip(turns, lost, strict=True)]
    spans = torch.tensor(bounds, dtype=torch.int64).reshape(-1, 2)
    spans += starts.repeat_interleave(counts)[:, None] - 1  # token t is the label of position t - 1
    sizes = spans[:, 1] - spans[:, 0]
    within = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    numbers = torch.arange(len(turns)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    turn_ids[spans[:, 0].repeat_interleave(sizes) + within] = numbers.repeat_interleave(sizes).int()
    rewards[spans[:, 1] - 1] = torch.tensor([turn.reward for turn in turns], dtype=torch.float32)
    return turn_ids, rewards


def behind_first_message(batch: TokenBatch, end_of_message: int) -> Tensor:
    """[T] whether a label comes after the first `end_of_message` of its trajectory, which in a chat
    closes the system message; for a batch without padding.
    """
    is_end = (batch.labels == end_of_message).long()
    ends_before = is_end.cumsum(0) - is_end
    at_start = ends_before[batch.cu_seqlens[:-1].long()]  # [S]
    return ends_before > at_start.repeat_interleave(batch.lengths.long())


def flatten(rows: Iterable[Sequence], dtype: type[np.generic]) -> Tensor:
    """The values of all rows in one tensor, several times faster than torch.tensor of a list."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype))


def minibatches(
    batch: TokenBatch, minibatch_size: int, *, num_passes: int, generator: torch.Generator
) -> Iterator[TokenBatch]:
    """Shuffled minibatches of `minibatch_size` trajectories, `num_passes` times over the batch.

    A remainder smaller than half a minibatch joins the last one, so that no step rests on a handful
    of trajectories.
    """
    num_minibatches = count_minibatches(batch, minibatch_size)
    for _ in range(num_passes):
        order = torch.randperm(batch.num_trajectories, generator=generator)
        for ids in order.tensor_split(num_minibatches):
            yield batch.select(sorted(ids.tolist()))


def count_minibatches(batch: TokenBatch, minibatch_size: int) -> int:
    """The number of minibatches in one pass over the batch."""
    return max(1, round(batch.num_trajectories / minibatch_size))


def microbatches(
    batch: TokenBatch, max_tokens: int, trajectory_ids: Sequence[int], *, num_stages: int = 1
) -> list[list[int]]:
    """Divide the given trajectories of a batch into microbatches of at most `max_tokens` positions.

    Without a pipeline they are as few as the budget allows: trajectories are placed longest first
    into the first microbatch with room. A pipeline of `num_stages` is idle for (num_stages - 1) /
    (microbatches + num_stages - 1) of a pass (1F1B, arXiv:2104.04473 sec. 2.2), so there are at
    least 4 x num_stages microbatches as long as there are trajectories, of near-equal size: all
    wait for the longest. A trajectory longer than `max_tokens` is a microbatch of its own.
    """
    lengths = batch.lengths.tolist()
    if num_stages > 1:
        return _balanced([(i, lengths[i]) for i in trajectory_ids], max_tokens, 4 * num_stages)
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


def _balanced(items: Sequence[tuple[int, int]], max_tokens: int, fewest: int) -> list[list[int]]:
    """At least `fewest` parts of (id, length), as long as there are items; each within the budget
    or alone.
    """
    lengths = [length for _, length in items]
    least = max(fewest, -(-sum(lengths) // max_tokens))
    for num_parts in range(min(least, len(items)), len(items) + 1):
        parts = balanced_split(lengths, num_parts)
        if all(len(part) == 1 or sum(lengths[i] for i in part) <= max_tokens for part in parts):
            break
    return [[items[i][0] for i in part] for part in parts] if items else []


class Part(NamedTuple):
    """Trajectories of one microbatch."""

    ids: list[int]
    shared: list[int]
    """First positions that each has in common with the one before it and shares with it."""


def shared_parts(
    order: PrefixOrder, max_tokens: int, *, rank: int = 0, num_ranks: int = 1, num_stages: int = 1
) -> list[Part]:
    """Divide a data-parallel rank's share of trajectories that share prefixes into microbatches of
    at most `max_tokens` nodes, as `microbatches` does it for those that share nothing.

    Ranks and microbatches are runs of the order, so that what begins alike stays together.
    """
    ranks = order.cut(num_ranks, order.num_nodes)
    if rank >= len(ranks):
        return []
    runs = ranks[rank].cut(4 * num_stages if num_stages > 1 else 1, max_tokens)
    return [Part(run.ids, run.shared) for run in runs]


def microbatch(batch: TokenBatch, part: Part, *, multiple: int, device: torch.device) -> Microbatch:
    """The given trajectories on `device`, the model's input padded to a multiple of nodes."""
    whole = batch.select(part.ids)
    forest = Forest.of(whole.lengths.tolist(), part.shared, multiple=multiple)
    nodes = torch.from_numpy(forest.sources)
    input_ids, depths = torch.zeros(forest.num_nodes, dtype=torch.int64), forest.depths()
    input_ids[nodes] = whole.tokens
    active = whole.loss_mask if whole.weights is None else whole.weights != 0
    rows, sources, edges = active.nonzero().squeeze(1), None, None
    if forest.is_shared:
        sources = move(nodes, device)
        base = int(whole.labels.max()) + 1
        found = (nodes * base + whole.labels)[rows].unique(return_inverse=True, return_counts=True)
        pairs, edge_of, repeats = found
        edges = Edges(
            *(move(one, device) for one in (pairs // base, pairs % base)),
            repeats,
            move(edge_of.sort().values, device),
        )
        rows = rows[edge_of.argsort(stable=True)]
    return Microbatch(
        **{name: move(value, device) for name, value in whole.tensors()},
        forest=forest,
        input_ids=move(input_ids, device),
        depths=move(depths, device),
        sources=sources,
        rows=move(rows, device),
        edges=edges,
    )
