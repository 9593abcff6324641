"""Advantage estimation and the value loss in plain torch: the specification of the scan kernels.

GAE: arXiv:1506.02438 eq. (16), over the sampled tokens of a trajectory: the successor of a sampled
token is the next sampled token, whatever the environment wrote in between. Bi-level GAE (turns,
then tokens): RAGEN, arXiv:2504.20073.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CONSTANT_STD = 1e-6
"""Scores of a group whose standard deviation is not above this count as equal."""


class AdvantageEstimate(NamedTuple):
    """Attributes: advantages: [T], 0 where not sampled; float32, or float64 where the reference
    gets float64 rewards. returns: [T], advantages + values, 0 where not sampled; same dtype.
    moments: [S, 3], per trajectory the count, sum and sum of squares of its advantages, for
    whitening; same dtype.
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

    Token level: A_i = r_i + gamma V_{i+1} - V_i + gamma lam A_{i+1} over the sampled tokens i of a
    trajectory, with V = A = 0 behind the last. Bi-level, with `turn_ends`: the last token e_k of
    turn k gets the turn's advantage A_{e_k} = r_{e_k} + turn_gamma V_{e_{k+1}} - V_{e_k} +
    turn_gamma turn_lam A_{e_{k+1}}, and the other tokens follow the token-level rule, which starts
    anew from it in every turn. All in float64, by doubling instead of a loop.

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
    longest = int(counts.max()) if num_trajectories else 0
    r, v = rewards[positions].double(), values[positions].double()  # [N]

    in_chain = _continues(owners)  # [N] A_{i+1} is the next token's
    deltas = r + gamma * _next(v, in_chain) - v
    if turn_ends is not None:
        is_end = turn_ends[positions]
        ends = is_end.nonzero().squeeze(1)  # [K]
        r_end, v_end, has_next_turn = r[ends], v[ends], _continues(owners[ends])
        turn_deltas = r_end + turn_gamma * _next(v_end, has_next_turn) - v_end
        turn_advantages = _accumulate_from_right(
            turn_deltas, turn_gamma * turn_lam, has_next_turn, longest
        )
        deltas = deltas.index_copy(0, ends, turn_advantages)
        in_chain = in_chain & ~is_end
    advantages = _accumulate_from_right(deltas, gamma * lam, in_chain, longest)

    zeros = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    sums = zeros.new_zeros(num_trajectories, 2)
    sums = sums.index_add(0, owners, torch.stack([advantages, advantages.square()], dim=1))
    dtype = _result_dtype(rewards)
    return AdvantageEstimate(
        zeros.index_copy(0, positions, advantages).to(dtype),
        zeros.index_copy(0, positions, advantages + v).to(dtype),
        torch.cat([counts.unsqueeze(1).double(), sums], dim=1).to(dtype),
    )


def _continues(owners: Tensor) -> Tensor:
    """[N] bool, whether the next entry belongs to the same trajectory."""
    continues = torch.zeros_like(owners, dtype=torch.bool)
    continues[:-1] = owners[1:] == owners[:-1]
    return continues


def _next(x: Tensor, continues: Tensor) -> Tensor:
    """x_{i+1}, 0 where the chain ends."""
    return torch.where(continues, x.roll(-1), 0.0)


def _accumulate_from_right(deltas: Tensor, decay: float, continues: Tensor, longest: int) -> Tensor:
    """Solve x_i = deltas_i + decay x_{i+1} for all i at once, x_{i+1} = 0 where the chain ends.

    Doubling: after n rounds `totals` sums up to 2^n terms of a chain and `decays` holds
    decay^(2^n), 0 behind a chain's end, so log2(`longest`) rounds reach every end of chains of at
    most that length.
    """
    totals, decays = deltas, decay * continues.to(deltas.dtype)
    shift = 1
    while shift < longest and shift < len(totals):
        own, left = totals[:-shift], decays[:-shift]
        # Without the condition a NaN would cross from one trajectory into another, as 0 * NaN.
        reached = torch.where(left != 0, own + left * totals[shift:], own)
        totals = torch.cat([reached, totals[-shift:]])
        decays = torch.cat([left * decays[shift:], torch.zeros_like(decays[-shift:])])
        shift *= 2
    return totals


def _result_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.no_grad()
def whiten(
    advantages: Tensor, loss_mask: Tensor, moments: Tensor, *, epsilon: float = 1e-8
) -> Tensor:
    """(A - mean) / sqrt(var + epsilon) at the sampled tokens, 0 elsewhere; float64 inside.

    Args:
        advantages: [T]. loss_mask: [T] bool. moments: [3] count, sum and sum of squares over all
        ranks: the sum of `AdvantageEstimate.moments`. With fewer
            than two tokens the (unbiased) variance counts as 1.

    Returns:
        [T] float32; float64 for float64 advantages.
    """
    count, total, squares = moments.double().unbind()
    mean = total / count.clamp(min=1)
    variance = (squares - count * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
    variance = torch.where(count > 1, variance, 1.0)
    whitened = (advantages.double() - mean) * torch.rsqrt(variance + epsilon)
    return torch.where(loss_mask, whitened, 0.0).to(_result_dtype(advantages))


@torch.no_grad()
def group_normalize(scores: Tensor, group_ids: Tensor, *, scale_by_std: bool = True) -> Tensor:
    """Group-relative advantage of whole trajectories: (score - group mean) / group std; float64
    inside.

    GRPO, arXiv:2402.03300 section 4.1.2; without the division Dr.GRPO, arXiv:2503.20783. The
    standard deviation is the unbiased one. A group whose standard deviation is at most CONSTANT_STD
    is constant, also the only trajectory of a group, and gets 0: the threshold takes the place of
    an epsilon in the divisor, which would scale every other group.

    Args:
        scores: [S] float, one per trajectory.
        group_ids: [S], any labels.
        scale_by_std: divide by the group's standard deviation.

    Returns:
        [S] float32; float64 for float64 scores.
    """
    check_groups(scores, group_ids)
    _, groups, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(counts), dtype=torch.float64, device=scores.device)
    mean = zeros.index_add(0, groups, scores.double()) / counts
    centred = scores.double() - mean[groups]
    if scale_by_std:
        variance = zeros.index_add(0, groups, centred.square()) / (counts - 1).clamp(min=1)
        std = variance.sqrt()[groups]
        centred = torch.where(std > CONSTANT_STD, centred / std.clamp(min=CONSTANT_STD), 0.0)
    return centred.to(_result_dtype(scores))


def check_groups(scores: Tensor, group_ids: Tensor) -> None:
    """Raise ValueError unless every trajectory has one score and one group."""
    if scores.shape != group_ids.shape or scores.dim() != 1:
        raise ValueError(
            f"need scores [S] and group_ids [S], got {tuple(scores.shape)} and"
            f" {tuple(group_ids.shape)}"
        )


def check_value_clip(clip: float | None) -> None:
    """Raise ValueError for a bound that lets no value move."""
    if clip is not None and not clip > 0.0:
        raise ValueError(f"clip must be > 0, got {clip}; use 0.5, or None to switch it off")


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half squared error of the critic with the clipped branch of PPO, differentiable in `values`.

    loss = sum(weights * 0.5 * max((v - R)^2, (v_clipped - R)^2)) with v_clipped = old + clip(v -
    old, -clip, clip). At a tie the unclipped branch is taken.

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
