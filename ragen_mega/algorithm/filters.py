"""Which initial states a StarPO step trains on: groups ranked by the spread of their raw returns.

StarPO-S, arXiv:2504.20073 Eq. 7 (uncertainty, top fraction); SNR-adaptive selection (top-p, min-p):
RAGEN-2, arXiv:2604.06268. Returns must be raw: after normalisation by group every group has the
same standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from ragen_mega.data.types import TrajectoryGroup

Strategy = Literal["none", "top_fraction", "top_p_linear", "top_p_softmax", "top_k", "min_p"]

CONSTANT_SCORE = 1e-10
"""A group whose score is not above this counts as constant: its trajectories all earned the same.
"""
ROUNDING = 1e-9
"""Slack for float arithmetic where a sum of shares or a product with a fraction meets its target.
"""


def group_uncertainty(rewards: Sequence[Sequence[float]]) -> Tensor:
    """U = Std_tau[R(tau)] of each group, the unbiased standard deviation (StarPO-S Eq. 7).

    Args:
        rewards: raw returns R(tau), P groups of at least 2 trajectories each; groups may differ in
        size.

    Returns:
        [P] float64.
    """
    sizes = [len(group) for group in rewards]
    if min(sizes, default=2) < 2:
        raise ValueError(
            "the spread of returns needs at least 2 trajectories per group, got group sizes"
            f" {sizes}; raise group_size or set the filter strategy to none"
        )
    deviations = [torch.tensor(group, dtype=torch.float64).std(correction=1) for group in rewards]
    return torch.stack(deviations) if deviations else torch.zeros(0, dtype=torch.float64)


def select_groups(
    group_scores: Sequence[float] | Tensor, *, strategy: Strategy, value: float, keep_zero: bool
) -> list[int]:
    """Indices of the groups to keep, ascending; ties go to the smaller index.

    Strategies, with `value`:
        none: every group, constant ones too; `value` and `keep_zero` have no part in it.
        top_fraction: the floor(value * P) groups of highest score, at least 1 (StarPO-S; value in
        (0, 1]). top_k: the `value` groups of highest score (an integer in 1..P). top_p_linear: the
        smallest set of highest scores that holds `value` of their sum (RAGEN-2; value in (0, 1]).
        top_p_softmax: the same over softmax(scores). min_p: groups that score at least `value`
        times the highest score (value in (0, 1]).

    RAGEN-2 stops top_p_linear 0.01 short of its target; that slack depends on the scale of the
    rewards and is left out.

    Args:
        group_scores: [P] finite and >= 0. keep_zero: let constant groups (score <= 1e-10) compete.
        Otherwise they are never kept, and the answer is []
            when all groups are constant.
    """
    scores = torch.as_tensor(group_scores, dtype=torch.float64).tolist()
    _check_scores(scores)
    _check_value(strategy, value, len(scores))
    if strategy == "none":
        return list(range(len(scores)))
    candidates = [i for i, score in enumerate(scores) if keep_zero or score > CONSTANT_SCORE]
    ranked = sorted(candidates, key=lambda i: (-scores[i], i))
    if not ranked:
        return []
    if strategy == "top_fraction":
        kept = ranked[: max(1, math.floor(value * len(scores) + ROUNDING))]
    elif strategy == "top_k":
        kept = ranked[: int(value)]
    elif strategy == "min_p":
        kept = [i for i in ranked if scores[i] >= value * scores[ranked[0]]]
    else:
        ranked_scores = torch.tensor([scores[i] for i in ranked], dtype=torch.float64)
        kept = ranked[: _nucleus_size(ranked_scores, value, softmax=strategy == "top_p_softmax")]
    return sorted(kept)


def soft_reweighting(group_scores: Sequence[float] | Tensor) -> Tensor:
    """[P] float64 weight of each group's advantages: its score over the highest one, in [0, 1]
    (RAGEN-2).

    All-constant groups weigh 0.
    """
    scores = torch.as_tensor(group_scores, dtype=torch.float64)
    _check_scores(scores.tolist())
    if len(scores) == 0 or scores.max() <= CONSTANT_SCORE:
        return torch.zeros_like(scores)
    return scores / scores.max()


def filter_groups(
    groups: Sequence[TrajectoryGroup], *, strategy: Strategy, value: float, keep_zero: bool
) -> list[TrajectoryGroup]:
    """The groups that `select_groups` keeps by the standard deviation of their raw returns, in the
    given order.
    """
    if strategy == "none":
        return list(groups)
    scores = group_uncertainty([group.total_rewards for group in groups])
    return [
        groups[i]
        for i in select_groups(scores, strategy=strategy, value=value, keep_zero=keep_zero)
    ]


def _nucleus_size(ranked_scores: Tensor, p: float, *, softmax: bool) -> int:
    """Length of the shortest prefix of descending scores whose shares sum to `p`."""
    if softmax or ranked_scores.sum() <= CONSTANT_SCORE:
        shares = ranked_scores.softmax(
            0
        )  # without any spread linear shares are 0 / 0; all groups count alike
    else:
        shares = ranked_scores / ranked_scores.sum()
    return next(
        (
            size
            for size, mass in enumerate(accumulate(shares.tolist()), start=1)
            if mass >= p - ROUNDING
        ),
        len(shares),
    )


def _check_scores(scores: list[float]) -> None:
    bad = {
        i: score for i, score in enumerate(scores) if not (math.isfinite(score) and score >= 0.0)
    }
    if bad:
        raise ValueError(
            f"group scores must be finite and >= 0, got {bad} (index: score); check the rewards"
        )


def _check_value(strategy: str, value: float, num_groups: int) -> None:
    if strategy not in get_args(Strategy):
        raise ValueError(
            f"unknown filter strategy {strategy!r}; choose one of {', '.join(get_args(Strategy))}"
        )
    if strategy == "none":
        return
    if strategy == "top_k":
        if value != int(value) or not 1 <= value <= max(1, num_groups):
            raise ValueError(
                f"top_k keeps a whole number of groups in 1..{num_groups}, got {value}; for a share"
                " use top_fraction"
            )
    elif not 0.0 < value <= 1.0:
        raise ValueError(
            f"the value of {strategy} must be in (0, 1], got {value}; StarPO-S keeps top_fraction"
            " 0.25"
        )
