"""Advantage estimators over packed trajectories: GAE, bi-level GAE, group-relative, REINFORCE++,
reward shaping.

GAE: arXiv:1506.02438 Eq. 16. Bi-level GAE: RAGEN, arXiv:2504.20073. GRPO: arXiv:2402.03300 sec.
4.1.2. Dr.GRPO: arXiv:2503.20783 sec. 3. RLOO: arXiv:2402.14740 sec. 3. REINFORCE++:
arXiv:2501.03262. All recursions run over sampled tokens only: the successor of a sampled token is
the next sampled token of its trajectory, whatever the environment wrote in between. The arithmetic
of GAE is in `ragen_kernels` (Triton for CUDA tensors); this module adds StarPO's terms and checks.
"""

from typing import Literal, get_args

import ragen_kernels
import torch
from ragen_kernels.objective import KL_KINDS, KLKind
from ragen_kernels.reference import compute_dtype, kl_estimate
from torch import Tensor

NormalizationMethod = Literal["identity", "mean", "mean_std", "asym_clip"]

CONSTANT_STD = 1e-6
"""Scores of a group whose standard deviation is not above this count as equal."""
WHITEN_EPSILON = 1e-8
"""Added to the variance before the square root."""
ASYM_CLIP = (-1.0, 3.0)
"""RAGEN's `asym_clip`: bounds of the normalised score; a rare success keeps more of its magnitude
than a rare failure.
"""


def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimation over sampled tokens (arXiv:1506.02438 Eq. 16).

    A_i = delta_i + gamma lam A_{i+1},  delta_i = r_i + gamma V_{i+1} - V_i,  V = A = 0 after the
    last sampled token.

    Args:
        rewards, values: [T]; rewards must be 0 outside the mask.
        loss_mask: [T] bool, True where the policy sampled the token.
        cu_seqlens: [S + 1] offsets of the trajectories.
        gamma, lam: discount and trace decay per sampled token, in [0, 1].

    Returns:
        advantages and returns (advantages + values), both [T] and 0 outside the mask, as
        `ragen_kernels.gae` types them.
    """
    _check_rewards(rewards, loss_mask, cu_seqlens)
    return ragen_kernels.gae(rewards, values, loss_mask, cu_seqlens, gamma=gamma, lam=lam)


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
    """RAGEN's bi-level GAE: a turn-level pass over turn ends, then a token-level pass within each
    turn.

    With e_k the last sampled token of turn k and V the critic's value of the state before a token:

        turn level    A_{e_k} = r_{e_k} + turn_gamma V_{e_{k+1}} - V_{e_k}
                                + turn_gamma turn_lam A_{e_{k+1}}
        token level   A_i = r_i + gamma V_{i+1} - V_i + gamma lam A_{i+1}
                      for the other tokens i of turn k,

    V = A = 0 after the last turn. So the token level of turn k ends with the turn's return A_{e_k}
    + V_{e_k} and never crosses turns. A reward inside a turn (a per-token KL penalty) is
    credited to that turn's tokens only. Turn ends come from `turn_ids`; RAGEN takes them from
    reward != 0, which merges turns that earned exactly 0.

    Args:
        rewards, values, loss_mask, cu_seqlens, gamma, lam: as in `gae`.
        turn_ids: [T] int, turn of each sampled token; entries outside the mask are ignored.
        turn_gamma, turn_lam: discount and trace decay per turn, in [0, 1].

    Returns:
        advantages and returns (advantages + values), both [T] and 0 outside the mask, as
        `ragen_kernels.gae` types them.
    """
    _check_rewards(rewards, loss_mask, cu_seqlens)
    return ragen_kernels.gae(
        rewards,
        values,
        loss_mask,
        cu_seqlens,
        gamma=gamma,
        lam=lam,
        turn_ends=_turn_ends(turn_ids, loss_mask, cu_seqlens),
        turn_gamma=turn_gamma,
        turn_lam=turn_lam,
    )


def group_relative(
    scores: Tensor, group_ids: Tensor, *, normalize_std: bool, leave_one_out: bool = False
) -> Tensor:
    """Return the advantage of each trajectory relative to its group.

    GRPO (`normalize_std`): (R - mean) / std, unbiased std, 0 in a constant group. Dr.GRPO: R -
    mean. RLOO (`leave_one_out`): R - mean of the others = N / (N - 1) (R - mean).

    Args:
        scores, group_ids: [S]; every group needs at least 2 trajectories.

    Returns:
        [S] float32; float64 for float64 scores.
    """
    if normalize_std and leave_one_out:
        raise ValueError(
            "RLOO (leave_one_out) does not divide by the group's std (normalize_std); set one of"
            " the two"
        )
    members, sizes = _members(group_ids)
    relative = _centred(scores, members, sizes, scale_by_std=normalize_std)
    sizes = sizes[members].double()
    return relative * (sizes / (sizes - 1)).to(relative.dtype) if leave_one_out else relative


def normalize_rewards(scores: Tensor, keys: Tensor, *, method: NormalizationMethod) -> Tensor:
    """RAGEN's reward normalisation among the trajectories that share a key (group, environment or
    one batch).

    mean: R - mean. mean_std: (R - mean) / std, unbiased std, 0 where all are equal. asym_clip:
    mean_std clamped to [-1, 3]. Never feed the result to the filter, which ranks raw returns.

    Args:
        scores, keys: [S]; except for `identity` every key needs at least 2 trajectories.

    Returns:
        [S], dtype of `scores`.
    """
    if method == "identity":
        return scores
    if method not in get_args(NormalizationMethod):
        raise ValueError(
            f"unknown reward normalisation {method!r}; choose one of"
            f" {', '.join(get_args(NormalizationMethod))}"
        )
    normalized = _centred(scores, *_members(keys), scale_by_std=method != "mean")
    return normalized.clamp(*ASYM_CLIP) if method == "asym_clip" else normalized


def returns_to_go(
    rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *, gamma: float
) -> Tensor:
    """G_i = r_i + gamma G_{i+1} over sampled tokens: [T], 0 outside the mask."""
    # GAE with a critic that is 0 everywhere and without trace decay.
    return gae(rewards, torch.zeros_like(rewards), loss_mask, cu_seqlens, gamma=gamma, lam=1.0)[0]


def reinforce_plus_plus(
    rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *, gamma: float
) -> Tensor:
    """REINFORCE++ (arXiv:2501.03262): returns-to-go, whitened over all sampled tokens of the batch.
    [T].

    A caller with only a part of the batch composes `returns_to_go`, `masked_moments` and
    `whiten` instead.
    """
    return whiten(returns_to_go(rewards, loss_mask, cu_seqlens, gamma=gamma), loss_mask)


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """[3] float64: count, sum and sum of squares of `x` [T] under `mask`. Sum it over ranks before
    use.
    """
    selected = torch.where(mask, x, 0.0).double()
    return torch.stack([mask.double().sum(), selected.sum(), selected.square().sum()])


def whiten(x: Tensor, mask: Tensor, *, moments: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) under the mask, 0 outside; the variance is unbiased (ddof 1).

    Without `moments` mean and variance are those of `x` under the mask. Arithmetic is float64.

    Args:
        x: [T].
        mask: [T] bool.
        moments: [3], the `masked_moments` of the whole batch, summed over its data-parallel parts.
            They must count at least 2 elements.

    Returns:
        [T] float32; float64 for float64 `x`.
    """
    if moments is None:
        moments = masked_moments(x, mask)
    if not moments.is_cuda and moments[0] < 2:
        raise ValueError(
            f"the unbiased variance needs at least 2 sampled tokens, got {int(moments[0])}; enlarge"
            " the batch"
        )
    count, total, squares = moments.double().unbind()
    mean = total / count.clamp(min=1)
    variance = (squares - count * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
    whitened = (x.double() - mean) * torch.rsqrt(variance + WHITEN_EPSILON)
    return torch.where(mask, whitened, 0.0).to(compute_dtype(x))


def place_at_end(scores: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] scores -> [T] rewards, each on the last sampled token of its trajectory.

    A trajectory without sampled tokens made no decision, so its score is dropped.
    """
    _check_padding(loss_mask, cu_seqlens)
    places = torch.arange(len(loss_mask), device=loss_mask.device)
    owners = torch.searchsorted(cu_seqlens[1:].long(), places, right=True)
    owners = owners.clamp(max=len(scores) - 1)  # padding, where nothing is sampled
    last = torch.full_like(scores, -1, dtype=torch.int64)  # [S], -1 where nothing was sampled
    last.scatter_reduce_(0, owners, torch.where(loss_mask, places, -1), "amax")
    has_place = last >= 0
    rewards = scores.new_zeros(loss_mask.shape)
    return rewards.index_add_(0, last.clamp(min=0), torch.where(has_place, scores, 0.0))


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Return the per-token estimate of KL(policy || reference) at tokens of the policy, to subtract
    from the reward. [T].

    With d = log ref - log policy, clamped to +-20: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (k1,
    k3 unbiased; k2, k3 never negative). http://joschu.net/blog/kl-approx.html
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimator {kind!r}; choose one of {', '.join(KL_KINDS)}")
    return kl_estimate(logprobs, ref_logprobs, kind)


def _sampled_tokens(loss_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """List the M sampled tokens in order: [M] positions, trajectories, and whether each token is
    the last of its trajectory.
    """
    _check_padding(loss_mask, cu_seqlens)
    positions = loss_mask.nonzero().squeeze(1)
    owners = torch.searchsorted(cu_seqlens[1:].to(positions.dtype), positions, right=True)
    is_last = torch.ones_like(positions, dtype=torch.bool)
    is_last[:-1] = owners[1:] != owners[:-1]
    return positions, owners, is_last


def _turn_ends(turn_ids: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] bool, True at the last sampled token of each turn."""
    positions, _, is_last = _sampled_tokens(loss_mask, cu_seqlens)
    turns = turn_ids[positions]
    if (turns < 0).any():
        raise ValueError(
            f"a sampled token needs its turn, got {int((turns < 0).sum())} without; check turn_ids"
        )
    is_end = is_last | (turns != turns.roll(-1))
    return torch.zeros_like(loss_mask).index_copy(0, positions, is_end)


# The checks below read values only in host memory; on CUDA each would synchronise with the device.


def _check_rewards(rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> None:
    if rewards.is_cuda:
        return
    _check_padding(loss_mask, cu_seqlens)
    lost = (rewards != 0) & ~loss_mask
    if lost.any():
        raise ValueError(
            f"rewards must lie on sampled tokens, got {int(lost.sum())} nonzero rewards outside"
            " loss_mask; place them on the last sampled token of the turn"
        )


def _check_padding(loss_mask: Tensor, cu_seqlens: Tensor) -> None:
    if not loss_mask.is_cuda and loss_mask[int(cu_seqlens[-1]) :].any():
        raise ValueError(
            f"loss_mask selects a token at or behind cu_seqlens[S] = {int(cu_seqlens[-1])}, where"
            " only padding lies; check the packing"
        )


def _members(keys: Tensor) -> tuple[Tensor, Tensor]:
    """[S] the segment of each trajectory, one segment a key, and [G] the trajectories of each."""
    _, segments, sizes = torch.unique(keys, return_inverse=True, return_counts=True)
    if (sizes < 2).any():
        raise ValueError(
            f"relative scores need at least 2 trajectories per key, got {int((sizes < 2).sum())}"
            " keys with one; raise group_size or normalise over a wider scope"
        )
    return segments, sizes


def _centred(scores: Tensor, members: Tensor, sizes: Tensor, *, scale_by_std: bool) -> Tensor:
    """[S] score - mean of the segment, divided by its unbiased standard deviation with
    `scale_by_std`; float64 inside. A segment whose standard deviation is at most CONSTANT_STD is
    constant and gets 0: the threshold takes the place of an epsilon in the divisor, which would
    scale every other segment.
    """
    zeros = torch.zeros(len(sizes), dtype=torch.float64, device=scores.device)
    mean = zeros.index_add(0, members, scores.double()) / sizes
    centred = scores.double() - mean[members]
    if scale_by_std:
        variance = zeros.index_add(0, members, centred.square()) / (sizes - 1)
        std = variance.sqrt()[members]
        centred = torch.where(std > CONSTANT_STD, centred / std.clamp(min=CONSTANT_STD), 0.0)
    return centred.to(compute_dtype(scores))
