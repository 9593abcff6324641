"""Advantage estimators over packed trajectories: GAE, bi-level GAE, group-relative, REINFORCE++, reward shaping.

GAE: arXiv:1506.02438 Eq. 16. Bi-level GAE: RAGEN, arXiv:2504.20073. GRPO: arXiv:2402.03300 sec. 4.1.2. Dr.GRPO:
arXiv:2503.20783 sec. 3. RLOO: arXiv:2402.14740 sec. 3. REINFORCE++: arXiv:2501.03262. All recursions run over sampled
tokens only: the successor of a sampled token is the next sampled token of its trajectory, whatever the environment
wrote in between.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from ragen_kernels.objective import KL_KINDS, KLKind
from ragen_kernels.reference import kl_estimate
from torch import Tensor

NormalizationMethod = Literal["identity", "mean", "mean_std", "asym_clip"]

CONSTANT_STD = 1e-6
"""Scores whose standard deviation is not above this count as equal and are normalised to 0, as in RAGEN."""
WHITEN_EPSILON = 1e-8
"""Added to the variance before the square root."""
ASYM_CLIP = (-1.0, 3.0)
"""RAGEN's `asym_clip`: bounds of the normalised score; a rare success keeps more of its lead than a rare failure."""


class _Sampled(NamedTuple):
    """The M sampled tokens of a batch, gathered in order."""

    positions: Tensor  # [M] int64 into [T]
    owners: Tensor  # [M] int64, trajectory of the token
    continues: Tensor  # [M] bool, the next sampled token belongs to the same trajectory


def gae(
    rewards: Tensor, values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over sampled tokens (arXiv:1506.02438 Eq. 16).

    A_i = delta_i + gamma lam A_{i+1},  delta_i = r_i + gamma V_{i+1} - V_i,  V = A = 0 behind the last sampled token.

    Args:
        rewards, values: [T]; rewards must be 0 outside the mask.
        loss_mask: [T] bool, True where the policy sampled the token.
        cu_seqlens: [S + 1] offsets of the trajectories.
        gamma, lam: discount and trace decay per sampled token, in [0, 1].

    Returns:
        advantages and returns (advantages + values), both [T] and 0 outside the mask.
    """
    _check_discounts(gamma=gamma, lam=lam)
    sampled = _sampled_tokens(loss_mask, cu_seqlens)
    r, v = _gather_rewards(rewards, loss_mask, sampled), values[sampled.positions]  # [M]
    deltas = r + gamma * _next(v, sampled.continues) - v
    advantages = _accumulate_from_right(deltas, gamma * lam, sampled.continues)
    return _scatter(advantages, loss_mask, sampled), _scatter(advantages + v, loss_mask, sampled)


def bilevel_gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float,
    turn_gamma: float,
    turn_lam: float,
) -> tuple[Tensor, Tensor]:
    """RAGEN's bi-level GAE: a turn-level pass over turn ends, then a token-level pass within each turn.

    With e_k the last sampled token of turn k and V the critic's value of the state before a token:

        turn level    A_{e_k} = r_{e_k} + turn_gamma V_{e_{k+1}} - V_{e_k} + turn_gamma turn_lam A_{e_{k+1}}
        token level   A_i = r_i + gamma V_{i+1} - V_i + gamma lam A_{i+1}   for the other tokens i of turn k,

    V = A = 0 behind the last turn. So the token level of turn k ends in the turn's return A_{e_k} + V_{e_k} and never
    looks across turns. A reward inside a turn (a per-token KL penalty) is credited to that turn's tokens only. Turn
    ends come from `turn_ids`; RAGEN takes them from reward != 0, which merges turns that earned exactly 0.

    Args:
        rewards, values, loss_mask, cu_seqlens, gamma, lam: as in `gae`.
        turn_ids: [T] int, turn of each sampled token; entries outside the mask are ignored.
        turn_gamma, turn_lam: discount and trace decay per turn, in [0, 1].

    Returns:
        advantages and returns (advantages + values), both [T] and 0 outside the mask.
    """
    _check_discounts(gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam)
    sampled = _sampled_tokens(loss_mask, cu_seqlens)
    turns = turn_ids[sampled.positions]  # [M]
    if (turns < 0).any():
        raise ValueError(f"a sampled token needs its turn, got {int((turns < 0).sum())} without; check turn_ids")
    r, v = _gather_rewards(rewards, loss_mask, sampled), values[sampled.positions]  # [M]

    in_turn = sampled.continues & (turns == turns.roll(-1))  # [M] the next sampled token belongs to the same turn
    ends = (~in_turn).nonzero().squeeze(1)  # [K]
    r_end, v_end, end_continues = r[ends], v[ends], sampled.continues[ends]
    turn_deltas = r_end + turn_gamma * _next(v_end, end_continues) - v_end
    turn_advantages = _accumulate_from_right(turn_deltas, turn_gamma * turn_lam, end_continues)

    deltas = (r + gamma * _next(v, in_turn) - v).index_copy(0, ends, turn_advantages)
    advantages = _accumulate_from_right(deltas, gamma * lam, in_turn)
    return _scatter(advantages, loss_mask, sampled), _scatter(advantages + v, loss_mask, sampled)


def group_relative(
    scores: Tensor, group_ids: Tensor, *, normalize_std: bool, leave_one_out: bool = False
) -> Tensor:
    """Advantage of each trajectory relative to its group.

    GRPO (`normalize_std`): (R - mean) / std, unbiased std, 0 in a constant group. Dr.GRPO: R - mean. RLOO
    (`leave_one_out`): R - mean of the others = N / (N - 1) (R - mean).

    Args:
        scores, group_ids: [S]; every group needs at least 2 trajectories.

    Returns:
        [S], dtype of `scores`.
    """
    if normalize_std and leave_one_out:
        raise ValueError("RLOO (leave_one_out) does not divide by the group's std (normalize_std); set one of the two")
    centred, std, sizes = _segment_statistics(scores, group_ids)
    if normalize_std:
        centred = _divide_by_std(centred, std)
    elif leave_one_out:
        centred = centred * sizes / (sizes - 1)
    return centred.to(scores.dtype)


def normalize_rewards(scores: Tensor, keys: Tensor, *, method: NormalizationMethod) -> Tensor:
    """RAGEN's reward normalisation among the trajectories that share a key (group, environment or one batch).

    mean: R - mean. mean_std: (R - mean) / std, unbiased std, 0 where all are equal. asym_clip: mean_std clamped to
    [-1, 3]. Never feed the result to the filter, which ranks raw returns.

    Args:
        scores, keys: [S]; except for `identity` every key needs at least 2 trajectories.

    Returns:
        [S], dtype of `scores`.
    """
    if method == "identity":
        return scores
    centred, std, _ = _segment_statistics(scores, keys)
    if method == "mean":
        return centred.to(scores.dtype)
    if method == "mean_std":
        return _divide_by_std(centred, std).to(scores.dtype)
    if method == "asym_clip":
        return _divide_by_std(centred, std).clamp(*ASYM_CLIP).to(scores.dtype)
    raise ValueError(f"unknown reward normalisation {method!r}; choose identity, mean, mean_std or asym_clip")


def returns_to_go(rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *, gamma: float) -> Tensor:
    """G_i = r_i + gamma G_{i+1} over sampled tokens: [T], 0 outside the mask."""
    _check_discounts(gamma=gamma)
    sampled = _sampled_tokens(loss_mask, cu_seqlens)
    r = _gather_rewards(rewards, loss_mask, sampled)
    return _scatter(_accumulate_from_right(r, gamma, sampled.continues), loss_mask, sampled)


def reinforce_plus_plus(rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *, gamma: float) -> Tensor:
    """REINFORCE++ (arXiv:2501.03262): returns-to-go, whitened over all sampled tokens of the batch. [T].

    A caller that holds only a part of the batch composes `returns_to_go`, `masked_moments` and `whiten` instead.
    """
    return whiten(returns_to_go(rewards, loss_mask, cu_seqlens, gamma=gamma), loss_mask)


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """[3] float64: count, sum and sum of squares of `x` [T] under `mask`. Sum it over ranks before use."""
    selected = x[mask].double()
    count = selected.new_tensor(selected.numel())
    return torch.stack([count, selected.sum(), selected.square().sum()])


def mean_and_variance(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (ddof 1) from the summed `masked_moments`; needs at least 2 elements."""
    count, total, squares = moments.unbind()
    if count < 2:
        raise ValueError(f"the unbiased variance needs at least 2 sampled tokens, got {int(count)}; enlarge the batch")
    mean = total / count
    return mean, ((squares - count * mean.square()) / (count - 1)).clamp(min=0.0)


def whiten(x: Tensor, mask: Tensor, *, mean: Tensor | None = None, var: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) under the mask, 0 outside.

    Without `mean` and `var` they are those of `x` under the mask (variance unbiased, ddof 1). With data-parallel parts
    of a batch pass both, from `mean_and_variance` of the summed `masked_moments`.
    """
    if (mean is None) != (var is None):
        raise ValueError(f"whiten needs mean and var together, got mean={mean} and var={var}; pass both or none")
    if mean is None:
        mean, var = mean_and_variance(masked_moments(x, mask))
    whitened = (x.double() - mean) * torch.rsqrt(var + WHITEN_EPSILON)
    return torch.where(mask, whitened, 0.0).to(x.dtype)


def place_at_end(scores: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] scores -> [T] rewards, each on the last sampled token of its trajectory.

    A trajectory without sampled tokens made no decision, so its score has no place and is dropped.
    """
    sampled = _sampled_tokens(loss_mask, cu_seqlens)
    last = ~sampled.continues
    rewards = scores.new_zeros(loss_mask.shape)
    rewards[sampled.positions[last]] = scores[sampled.owners[last]]
    return rewards


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Per-token estimate of KL(policy || reference) at tokens of the policy, to subtract from the reward. [T].

    With d = log ref - log policy, clamped to +-20: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (k1, k3 unbiased; k2, k3
    never negative). http://joschu.net/blog/kl-approx.html
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimator {kind!r}; choose one of {', '.join(KL_KINDS)}")
    return kl_estimate(logprobs, ref_logprobs, kind)


def _sampled_tokens(loss_mask: Tensor, cu_seqlens: Tensor) -> _Sampled:
    positions = loss_mask.nonzero().squeeze(1)
    ends = cu_seqlens[1:].to(positions.dtype)
    owners = torch.searchsorted(ends, positions, right=True)
    if (owners >= len(ends)).any():
        raise ValueError(
            f"loss_mask selects a token at or behind cu_seqlens[S] = {int(cu_seqlens[-1])}, where only padding lies; "
            "check the packing"
        )
    continues = torch.zeros_like(positions, dtype=torch.bool)
    continues[:-1] = owners[1:] == owners[:-1]
    return _Sampled(positions, owners, continues)


def _gather_rewards(rewards: Tensor, loss_mask: Tensor, sampled: _Sampled) -> Tensor:
    lost = (rewards != 0) & ~loss_mask
    if lost.any():
        raise ValueError(
            f"rewards must lie on sampled tokens, got {int(lost.sum())} nonzero rewards outside loss_mask; place them "
            "on the last sampled token of the turn"
        )
    return rewards[sampled.positions]


def _next(x: Tensor, continues: Tensor) -> Tensor:
    """x_{i+1}, 0 where the chain ends."""
    return torch.where(continues, x.roll(-1), 0.0)


def _accumulate_from_right(deltas: Tensor, decay: float, continues: Tensor) -> Tensor:
    """Solve x_i = deltas_i + decay x_{i+1} for all i at once, x_{i+1} = 0 where the chain ends.

    Doubling: after n rounds `totals` sums up to 2^n terms of a chain and `decays` holds decay^(2^n), 0 behind a chain's
    end, so log2(M) rounds reach every end.
    """
    totals, decays = deltas, decay * continues.to(deltas.dtype)
    shift = 1
    while shift < len(totals):
        totals = torch.cat([totals[:-shift] + decays[:-shift] * totals[shift:], totals[-shift:]])
        decays = torch.cat([decays[:-shift] * decays[shift:], torch.zeros_like(decays[-shift:])])
        shift *= 2
    return totals


def _scatter(sampled_values: Tensor, loss_mask: Tensor, sampled: _Sampled) -> Tensor:
    """[M] -> [T], 0 outside the mask."""
    return sampled_values.new_zeros(loss_mask.shape).index_copy(0, sampled.positions, sampled_values)


def _segment_statistics(scores: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float64 [S] each: scores minus their segment's mean, and the segment's unbiased std and size."""
    _, segments = torch.unique(keys, return_inverse=True)
    sizes = torch.bincount(segments).double()  # [number of segments]
    if (sizes < 2).any():
        raise ValueError(
            f"relative scores need at least 2 trajectories per key, got {int((sizes < 2).sum())} keys with one; raise "
            "group_size or normalise over a wider scope"
        )
    sums = torch.zeros_like(sizes).index_add(0, segments, scores.double())
    centred = scores.double() - (sums / sizes)[segments]
    squares = torch.zeros_like(sizes).index_add(0, segments, centred.square())
    return centred, (squares / (sizes - 1)).sqrt()[segments], sizes[segments]


def _divide_by_std(centred: Tensor, std: Tensor) -> Tensor:
    return torch.where(std > CONSTANT_STD, centred / std.clamp(min=CONSTANT_STD), 0.0)


def _check_discounts(**discounts: float) -> None:
    for name, value in discounts.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {value}; 1.0 means no discount")
