"""Random packed trajectories with their advantages: float64 Python loops."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Trajectories:
    rewards: Tensor  # [T] float32
    values: Tensor
    loss_mask: Tensor  # [T] bool
    turn_ends: Tensor  # [T] bool
    cu_seqlens: Tensor  # [S + 1] int32


def make_trajectories(
    lengths: tuple[int, ...], *, seed: int, padding: int = 5, sampled: float = 0.6
) -> Trajectories:
    """Alternating runs of environment and sampled tokens, some turn ends inside, sampled tokens
    after the last.
    """
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths) + padding
    loss_mask = torch.rand(num_tokens, generator=random) < sampled
    loss_mask[sum(lengths) :] = False
    turn_ends = loss_mask & (torch.rand(num_tokens, generator=random) < 0.15)
    rewards, values = torch.randn(2, num_tokens, generator=random)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return Trajectories(rewards, values, loss_mask, turn_ends, offsets)


def gae_truth(
    case: Trajectories,
    *,
    gamma: float,
    lam: float,
    turn_ends: Tensor | None = None,
    turn_gamma: float = 1.0,
    turn_lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Two passes per trajectory: turn-level advantages at the turn ends first, then all tokens."""
    advantages = torch.zeros(len(case.rewards), dtype=torch.float64)
    returns = torch.zeros_like(advantages)
    offsets = case.cu_seqlens.tolist()
    for start, stop in itertools.pairwise(offsets):
        own = [t for t in range(start, stop) if case.loss_mask[t]]
        r = {t: float(case.rewards[t]) for t in own}
        v = {t: float(case.values[t]) for t in own}
        at_end: dict[int, float] = {}
        if turn_ends is not None:
            ends = [t for t in own if turn_ends[t]]
            for k in reversed(range(len(ends))):
                follows = ends[k + 1] if k + 1 < len(ends) else None
                at_end[ends[k]] = r[ends[k]] - v[ends[k]]
                if follows is not None:
                    at_end[ends[k]] += turn_gamma * (v[follows] + turn_lam * at_end[follows])
        for i in reversed(range(len(own))):
            t = own[i]
            advantages[t] = r[t] - v[t]
            if i + 1 < len(own):
                advantages[t] += gamma * (v[own[i + 1]] + lam * float(advantages[own[i + 1]]))
            advantages[t] = at_end.get(t, advantages[t])
            returns[t] = advantages[t] + v[t]
    return advantages, returns
