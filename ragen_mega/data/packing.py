"""Trajectories -> one packed TokenBatch; minibatches of one optimizer step, microbatches of one
forward pass.

The shift from tokens to labels happens here and nowhere else.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragen_mega.data.types import TokenBatch, Trajectory, offsets_of


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
    segments = [(one, start, end) for one in trajectories for start, end in one.segments]
    lengths = torch.tensor([len(one) - 1 - len(one.breaks) for one in trajectories])
    cu_seqlens = offsets_of(lengths)
    rewards = torch.zeros(int(cu_seqlens[-1]))
    turn_ids = torch.full_like(rewards, -1, dtype=torch.int32)
    for trajectory, offset in zip(trajectories, cu_seqlens.tolist()):
        for turn_id, turn in enumerate(trajectory.turns):
            # The first token of every segment up to here is nobody's label.
            first = offset - 1 - bisect_right(trajectory.breaks, turn.start)
            turn_ids[first + turn.start : first + turn.end] = turn_id
            rewards[first + turn.end - 1] = turn.reward
    segment_lengths = torch.tensor([end - start - 1 for _, start, end in segments])
    return TokenBatch(
        tokens=_concatenate([one.tokens[i : j - 1] for one, i, j in segments], torch.int64),
        labels=_concatenate([one.tokens[i + 1 : j] for one, i, j in segments], torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in segment_lengths]),
        cu_seqlens=cu_seqlens,
        loss_mask=_concatenate([one.loss_mask[i + 1 : j] for one, i, j in segments], torch.bool),
        turn_ids=turn_ids,
        rewards=rewards,
        group_ids=torch.tensor([t.group_id for t in trajectories]),
        rollout_logprobs=_concatenate(
            [one.rollout_logprobs[i + 1 : j] for one, i, j in segments], torch.float32
        ),
        cu_segments=offsets_of(segment_lengths) if len(segments) > len(trajectories) else None,
    )


def _concatenate(rows: Sequence[Sequence], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)


def minibatches(
    batch: TokenBatch, minibatch_size: int, *, num_passes: int, generator: torch.Generator
) -> Iterator[TokenBatch]:
    """Shuffled minibatches of `minibatch_size` trajectories, `num_passes` times over the batch.

    A remainder smaller than half a minibatch joins the last one, so that no step rests on a handful
    of trajectories.
    """
    num_minibatches = max(1, round(batch.num_trajectories / minibatch_size))
    for _ in range(num_passes):
        order = torch.randperm(batch.num_trajectories, generator=generator)
        for ids in order.tensor_split(num_minibatches):
            yield batch.select(sorted(ids.tolist()))


def microbatches(
    batch: TokenBatch, max_tokens: int, trajectory_ids: Sequence[int]
) -> list[list[int]]:
    """Divide the given trajectories of a batch into microbatches of at most `max_tokens` positions.

    Trajectories are placed longest first into the first microbatch with room, which keeps the
    number of microbatches low. One trajectory longer than `max_tokens` stands alone.
    """
    lengths = batch.lengths.tolist()
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


def pad(batch: TokenBatch, multiple: int) -> TokenBatch:
    """Append masked positions, as one extra trajectory, until the positions are a multiple of
    `multiple`.
    """
    num_padding = -batch.num_positions % multiple
    if num_padding == 0:
        return batch
    added = {"cu_seqlens": batch.cu_seqlens[-1:] + num_padding}
    added["cu_segments"] = added["cu_seqlens"]
    added["group_ids"] = batch.group_ids.new_full((1,), -1)
    added["turn_ids"] = batch.turn_ids.new_full((num_padding,), -1)
    return replace(
        batch,
        **{
            name: torch.cat([value, added.get(name, value.new_zeros(num_padding))])
            for name, value in batch.tensors()
        },
    )
