"""The critic's regression towards returns, with the clipped branch of PPO (arXiv:1707.06347), and
what its values explain of the returns.
"""

import torch
from ragen_kernels.reference import compute_dtype
from torch import Tensor

_ROUNDING = 1e-6
"""Distance of float32 returns that are equal but for rounding, in parts of the largest number that
they are computed from.
"""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return half squared error of the critic with the clipped branch of PPO, differentiable in
    `values`.

    loss = sum(weights * 0.5 * max((v - R)^2, (v_clipped - R)^2)) with v_clipped = old + clip(v -
    old, -clip, clip). At a tie the unclipped branch is taken.

    Args:
        values, old_values, returns: [T].
        weights: [T]; 0 takes the token out entirely.
        clip: largest change of a value that still is rewarded; None: plain squared error.

    Returns:
        The scalar loss and is_clipped [T] float32, 1 where the clipped branch was taken.
    """
    dtype = compute_dtype(values)
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


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(return - value) / Var(return) of float32 numbers [T]; 0 where the returns are
    equal but for their rounding, or there are none.
    """
    if not len(returns):
        return 0.0
    values, returns = values.double(), returns.double()
    largest = torch.maximum(values.abs(), returns.abs()).max()
    if returns.max() - returns.min() <= _ROUNDING * largest:
        return 0.0
    left = (returns - values).var(correction=0) / returns.var(correction=0)
    return 1.0 - float(left)
