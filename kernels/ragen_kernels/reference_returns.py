"""Advantage estimation and the value loss in plain torch: the specification of the scan kernels.

GAE: arXiv:1506.02438 eq. (16), over the sampled tokens of a trajectory: the successor of a sampled token is the next
sampled token, whatever the environment wrote in between. Bi-level GAE (turns, then tokens): RAGEN, arXiv:2504.20073.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AdvantageEstimate(NamedTuple):
    """Attributes:
    advantages: [T] float32, 0 where not sampled.
    returns: [T] float32, advantages + values, 0 where not sampled.
    moments: [S, 3] float32, per trajectory the count, sum and sum of squares of its advantages, for whitening.
    """

    advantages: Tensor
    returns: Tensor
    moments: Tensor


def check_gae_arguments(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    turn_ends: Tensor | None,
    discounts: dict[str, float],
) -> None:
    """Raise ValueError for shapes that differ or discounts outside [0, 1]."""
    shapes = {"rewards": rewards.shape, "values": values.shape, "loss_mask": loss_mask.shape}
    if turn_ends is not None:
        shapes["turn_ends"] = turn_ends.shape
    if rewards.dim() != 1 or len(set(shapes.values())) != 1:
        described = {name: tuple(shape) for name, shape in shapes.items()}
        raise ValueError(f"all inputs must be packed to one shape [T], got {described}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
        raise ValueError(f"cu_seqlens must be [S + 1] offsets, got shape {tuple(cu_seqlens.shape)}")
    for name, value in discounts.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {value}; use 1.0 for no discount")


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float,
    turn_ends: Tensor | None = None,
    turn_gamma: float = 1.0,
    turn_lam: float = 1.0,
) -> AdvantageEstimate:
    """Generalised advantage estimation over packed trajectories, token-level or bi-level.

    Token level: A_i = r_i + gamma V_{i+1} - V_i + gamma lam A_{i+1} over the sampled tokens i of a trajectory, with
    V = A = 0 behind the last. Bi-level, with `turn_ends`: the last token e_k of turn k gets the turn's advantage
    A_{e_k} = r_{e_k} + turn_gamma V_{e_{k+1}} - V_{e_k} + turn_gamma turn_lam A_{e_{k+1}}, and the other tokens follow
    the token-level rule, which starts anew from it in every turn.

    Args:
        rewards, values: [T] float; entries that were not sampled are ignored.
        loss_mask: [T] bool, True where the policy sampled the token.
        cu_seqlens: [S + 1] offsets of the trajectories; positions behind cu_seqlens[S] are padding.
        gamma, lam: discount and trace decay per token, in [0, 1].
        turn_ends: [T] bool, True at the last sampled token of each turn. None: token level.
        turn_gamma, turn_lam: discount and trace decay per turn, in [0, 1].

    Raises:
        ValueError: shapes differ, or a discount is outside [0, 1].
    """
    discounts = {"gamma": gamma, "lam": lam, "turn_gamma": turn_gamma, "turn_lam": turn_lam}
    check_gae_arguments(rewards, values, loss_mask, cu_seqlens, turn_ends, discounts)
    num_trajectories = len(cu_seqlens) - 1
    positions = loss_mask[: int(cu_seqlens[-1])].nonzero().squeeze(1)  # [N] sampled tokens
    owners = torch.searchsorted(cu_seqlens[1:].long(), positions, right=True)  # [N]
    counts = torch.bincount(owners, minlength=num_trajectories)  # [S]
    ranks = torch.arange(len(positions)) - (counts.cumsum(0) - counts)[owners]  # [N] index among its trajectory's
    length = int(counts.max()) if num_trajectories else 0

    def spread(x: Tensor) -> Tensor:  # [T] -> [length, S], one row per time step; zeros behind the end
        steps = torch.zeros(length, num_trajectories, dtype=torch.float64)
        return steps.index_put_((ranks, owners), x[positions].double())

    reward, value = spread(rewards), spread(values)
    is_end = torch.zeros_like(reward, dtype=torch.bool) if turn_ends is None else spread(turn_ends) > 0
    advantage = torch.zeros_like(reward)
    # A_{i+1} and V_{i+1}, and the same for the next turn end.
    following, next_value, turn_following, next_turn_value = reward.new_zeros(4, num_trajectories)
    for step in reversed(range(length)):
        r, v, end = reward[step], value[step], is_end[step]
        following = r + gamma * next_value - v + gamma * lam * following
        if turn_ends is not None:
            turn = r + turn_gamma * next_turn_value - v + turn_gamma * turn_lam * turn_following
            following = torch.where(end, turn, following)
            turn_following = torch.where(end, turn, turn_following)
            next_turn_value = torch.where(end, v, next_turn_value)
        advantage[step], next_value = following, v

    packed = advantage[ranks, owners]  # [N]
    advantages = torch.zeros(len(rewards)).index_put_((positions,), packed.float())
    returns = torch.zeros(len(rewards)).index_put_((positions,), (packed + values[positions]).float())
    moments = torch.stack([counts.double(), advantage.sum(0), advantage.square().sum(0)], dim=1).float()
    return AdvantageEstimate(advantages, returns, moments)


@torch.no_grad()
def whiten(advantages: Tensor, loss_mask: Tensor, moments: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """(A - mean) / sqrt(var + epsilon) at the sampled tokens, 0 elsewhere.

    Args:
        advantages: [T].
        loss_mask: [T] bool.
        moments: [3] count, sum and sum of squares over all ranks: the sum of `AdvantageEstimate.moments`. With fewer
            than two tokens the variance counts as 1.
    """
    count, total, squares = moments.double().unbind()
    mean = total / count.clamp(min=1)
    variance = (squares - count * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
    variance = torch.where(count > 1, variance, 1.0)
    return torch.where(loss_mask, (advantages - mean) * torch.rsqrt(variance + epsilon), 0.0).float()


@torch.no_grad()
def group_normalize(scores: Tensor, group_ids: Tensor, *, scale_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Group-relative advantage of whole trajectories: (score - group mean) / (group std + epsilon).

    GRPO, arXiv:2402.03300 section 4.1.2; without the division Dr.GRPO, arXiv:2503.20783. The standard deviation is the
    unbiased one; the only trajectory of a group gets 0.

    Args:
        scores: [S] float, one per trajectory.
        group_ids: [S] int, any labels.
        scale_by_std: divide by the group's standard deviation.
    """
    check_groups(scores, group_ids)
    _, groups = torch.unique(group_ids, return_inverse=True)
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    counts = torch.bincount(groups, minlength=num_groups)
    zeros = torch.zeros(num_groups, dtype=torch.float64)
    mean = zeros.index_add(0, groups, scores.double()) / counts.clamp(min=1)
    centred = scores.double() - mean[groups]
    if scale_by_std:
        variance = zeros.index_add(0, groups, centred.square()) / (counts - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + epsilon)[groups]
    return centred.float()


def check_groups(scores: Tensor, group_ids: Tensor) -> None:
    """Raise ValueError unless every trajectory has one score and one group."""
    if scores.shape != group_ids.shape or scores.dim() != 1:
        raise ValueError(f"need scores [S] and group_ids [S], got {tuple(scores.shape)} and {tuple(group_ids.shape)}")


def check_value_clip(clip: float | None) -> None:
    """Raise ValueError for a bound that lets no value move."""
    if clip is not None and not clip > 0.0:
        raise ValueError(f"clip must be > 0, got {clip}; use 0.5, or None to switch it off")


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half squared error of the critic with the clipped branch of PPO, differentiable in `values`.

    loss = sum(weights * 0.5 * max((v - R)^2, (v_clipped - R)^2)) with v_clipped = old + clip(v - old, -clip, clip). At
    a tie the unclipped branch is taken.

    Args:
        values, old_values, returns: [T].
        weights: [T]; 0 takes the token out entirely.
        clip: largest change of a value that still is rewarded; None: plain squared error.

    Returns:
        The scalar loss and is_clipped [T] float32, 1 where the clipped branch was taken.
    """
    check_value_clip(clip)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    active = weights != 0
    values, old_values, returns, weights = (
        torch.where(active, x, 0).to(dtype) for x in (values, old_values, returns, weights)
    )
    losses = (values - returns).square()
    is_clipped = torch.zeros_like(active)
    if clip is not None:
        change = values - old_values
        bounded = old_values + torch.clamp(change, -clip, clip)
        clipped = torch.where(change.abs() > clip, (bounded - returns).square(), losses)
        is_clipped = clipped > losses
        losses = torch.where(is_clipped, clipped, losses)
    return 0.5 * torch.sum(weights * losses), is_clipped.float()
