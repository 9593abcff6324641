"""Arithmetic of rewards and advantages that compares trajectories: group-relative advantages,
reward normalisation, whitening, and the place of a return among tokens.

GRPO: arXiv:2402.03300 sec. 4.1.2. Dr.GRPO: arXiv:2503.20783 sec. 3. RLOO: arXiv:2402.14740 sec. 3.
"""

from typing import Literal

import torch
from ragen_kernels.reference import compute_dtype
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
    members, sizes = _members(group_ids)
    if (sizes < 2).any():
        raise ValueError(
            f"relative scores need at least 2 trajectories per group, got {int((sizes < 2).sum())}"
            " groups with one; raise --group-size"
        )
    relative = _centred(scores, members, sizes, scale_by_std=normalize_std)
    sizes = sizes[members].double()
    return relative * (sizes / (sizes - 1)).to(relative.dtype) if leave_one_out else relative


def normalize_rewards(scores: Tensor, keys: Tensor, *, method: NormalizationMethod) -> Tensor:
    """RAGEN's reward normalisation among the trajectories that share a key (group, environment or
    one batch).

    mean: R - mean. mean_std: (R - mean) / std, unbiased std, 0 where all are equal. asym_clip:
    mean_std clamped to [-1, 3]. All but `identity` give 0 to a trajectory without others, as where
    episodes failed. Never feed the result to the filter, which ranks raw returns.

    Args:
        scores, keys: [S].

    Returns:
        [S], dtype of `scores`.
    """
    if method == "identity":
        return scores
    normalized = _centred(scores, *_members(keys), scale_by_std=method != "mean")
    return normalized.clamp(*ASYM_CLIP) if method == "asym_clip" else normalized


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) under the mask, 0 outside; the variance is unbiased (ddof 1).

    Args:
        x: [T].
        mask: [T] bool.

    Returns:
        [T] float32; float64 for float64 `x`. Arithmetic is float64.
    """
    count, selected = mask.double().sum(), torch.where(mask, x, 0.0).double()
    if not x.is_cuda and count < 2:  # on CUDA the host would wait for the number
        raise ValueError(
            f"the unbiased variance needs at least 2 sampled tokens, got {int(count)}; enlarge"
            " the batch"
        )
    mean = selected.sum() / count.clamp(min=1)
    squares = selected.square().sum()
    variance = (squares - count * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
    whitened = (x.double() - mean) * torch.rsqrt(variance + WHITEN_EPSILON)
    return torch.where(mask, whitened, 0.0).to(compute_dtype(x))


def place_at_end(scores: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] scores -> [T] rewards, each on the last sampled token of its trajectory.

    A trajectory without sampled tokens made no decision, so its score is dropped.
    """
    places = torch.arange(len(loss_mask), device=loss_mask.device)
    owners = torch.searchsorted(cu_seqlens[1:].long(), places, right=True)
    owners = owners.clamp(max=len(scores) - 1)  # padding, where nothing is sampled
    last = torch.full_like(scores, -1, dtype=torch.int64)  # [S], -1 where nothing was sampled
    last.scatter_reduce_(0, owners, torch.where(loss_mask, places, -1), "amax")
    has_place = last >= 0
    rewards = scores.new_zeros(loss_mask.shape)
    return rewards.index_add_(0, last.clamp(min=0), torch.where(has_place, scores, 0.0))


def _members(keys: Tensor) -> tuple[Tensor, Tensor]:
    """[S] the segment of each trajectory, one segment a key, and [G] the trajectories of each."""
    _, segments, sizes = torch.unique(keys, return_inverse=True, return_counts=True)
    return segments, sizes


def _centred(scores: Tensor, members: Tensor, sizes: Tensor, *, scale_by_std: bool) -> Tensor:
    """[S] score - mean of the segment, divided by its unbiased standard deviation with
    `scale_by_std`; float64 inside. A segment of one trajectory, or whose standard deviation is at
    most CONSTANT_STD, is constant and gets 0: the threshold takes the place of an epsilon in the
    divisor, which would scale every other segment.
    """
    zeros = torch.zeros(len(sizes), dtype=torch.float64, device=scores.device)
    mean = zeros.index_add(0, members, scores.double()) / sizes
    centred = scores.double() - mean[members]
    if scale_by_std:
        variance = zeros.index_add(0, members, centred.square()) / (sizes - 1).clamp(min=1)
        std = variance.sqrt()[members]
        centred = torch.where(std > CONSTANT_STD, centred / std.clamp(min=CONSTANT_STD), 0.0)
    return centred.to(compute_dtype(scores))
