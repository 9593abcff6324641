"""Selection of the initial states that a StarPO step trains on: groups ranked by the spread of
their returns.

StarPO-S, arXiv:2504.20073 Eq. 7 (uncertainty, top fraction); SNR-adaptive selection (top-p, min-p)
and its controls (percentile range, within group): RAGEN-2, arXiv:2604.06268. Returns are those
after --reward and before normalisation, which gives every group the same standard deviation.
`ragen_mega.algorithm.tables` lists the filters; each is a function

    filter(returns, *, value, keep_zero) -> indices of the groups to keep

of P sequences of returns R(tau), the value of the filter, and whether constant groups (all
trajectories earned the same) may be kept. `within_group` selects trajectories instead.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean, pvariance
from typing import Any

import torch
from torch import Tensor

from ragen_mega.algorithm.rewards import VERDICTS
from ragen_mega.algorithm.tables import FILTERS, PlugInError, call, find_filter
from ragen_mega.data.types import Trajectory, TrajectoryGroup
from ragen_mega.environments.episode import ERROR

Returns = Sequence[Sequence[float]]

CONSTANT_SCORE = 1e-10
"""A group whose score is not above this counts as constant: its trajectories all earned the same.
"""
ROUNDING = 1e-9
"""Slack for rounding errors when a sum of shares or a product with a fraction is compared with a
bound.
"""


def has_return(trajectory: Trajectory, judges: Iterable[str] = ()) -> bool:
    """Return whether no failure of its environment ended the trajectory, and each of the judges
    gave a verdict on it. Otherwise what it had earned so far says nothing about what it is worth.
    """
    info = trajectory.turns[-1].info if trajectory.turns else {}
    verdicts = info.get(VERDICTS, {})
    return ERROR not in info and all(verdicts.get(url) is not None for url in judges)


def with_returns(
    groups: Sequence[TrajectoryGroup],
    has: Callable[[Trajectory], bool] = has_return,
    *,
    least: int = 2,
) -> list[TrajectoryGroup]:
    """Return the groups with the members that have a return. A group that is left with fewer than
    `least` is left out: in a group of one, nothing can be compared.
    """
    found = []
    for group in groups:
        members = [member for member in group.trajectories if has(member)]
        if len(members) == len(group.trajectories):
            found.append(group)
        elif len(members) >= least:
            found.append(replace(group, trajectories=members))
    return found


def group_uncertainty(returns: Returns) -> Tensor:
    """U = Std_tau[R(tau)] of each group, the unbiased standard deviation (StarPO-S Eq. 7).

    Args:
        returns: returns R(tau), P groups of at least 2 trajectories each; groups may differ in
        size.

    Returns:
        [P] float64.
    """
    sizes = [len(group) for group in returns]
    if min(sizes, default=2) < 2:
        raise ValueError(
            "the spread of returns needs at least 2 trajectories per group, got group sizes"
            f" {sizes}; raise group_size or set the filter strategy to none"
        )
    deviations = [torch.tensor(group, dtype=torch.float64).std(correction=1) for group in returns]
    return torch.stack(deviations) if deviations else torch.zeros(0, dtype=torch.float64)


def in_group_std(groups: Sequence[TrajectoryGroup]) -> float:
    """Return the mean of the groups' uncertainties (StarPO-S Eq. 7), 0 for a group of one."""
    return fmean(
        float(group_uncertainty([group.total_rewards])) if len(group.trajectories) > 1 else 0.0
        for group in groups
    )


def keep_all(returns: Returns, *, value: float | None, keep_zero: bool) -> list[int]:
    """Return every group, even constant ones; `value` and `keep_zero` are ignored."""
    return list(range(len(returns)))


def top_fraction(returns: Returns, *, value: float, keep_zero: bool) -> list[int]:
    """Return the floor(value P) groups of largest uncertainty, at least 1 (StarPO-S; value in (0,
    1]).
    """
    ranked, _ = _rank(returns, keep_zero)
    return ranked[: max(1, math.floor(value * len(returns) + ROUNDING))]


def top_k(returns: Returns, *, value: float, keep_zero: bool) -> list[int]:
    """Return the `value` groups of largest uncertainty (an integer in 1..P)."""
    ranked, _ = _rank(returns, keep_zero)
    return ranked[: int(value)]


def top_p_linear(returns: Returns, *, value: float, keep_zero: bool) -> list[int]:
    """Return the smallest set of largest uncertainties that holds `value` of their sum (RAGEN-2; in
    (0, 1]).

    RAGEN-2 stops 0.01 short of its target; that slack depends on the scale of the rewards and is
    omitted here. If no group has any spread, all groups count equally.
    """
    ranked, scores = _rank(returns, keep_zero)
    total = scores.sum()
    shares = scores / total if total > CONSTANT_SCORE else scores.softmax(0)
    return ranked[: _nucleus_size(shares, value)]


def top_p_softmax(returns: Returns, *, value: float, keep_zero: bool) -> list[int]:
    """Return the smallest set of largest uncertainties that holds `value` of their softmax
    (RAGEN-2).
    """
    ranked, scores = _rank(returns, keep_zero)
    return ranked[: _nucleus_size(scores.softmax(0), value)]


def min_p(returns: Returns, *, value: float, keep_zero: bool) -> list[int]:
    """Return groups whose uncertainty is at least `value` times the largest (RAGEN-2; value in (0,
    1]).
    """
    ranked, scores = _rank(returns, keep_zero)
    bound = value * scores.max() * (1 - ROUNDING) if ranked else 0.0
    return ranked[: int((scores >= bound).sum())]


def percentile_range(returns: Returns, *, value: tuple[float, float], keep_zero: bool) -> list[int]:
    """Return the groups from one share of the ranking to another, the largest uncertainty first:
    (0, 0.25) is the top quarter, (0.75, 1) the bottom one (the quartiles of RAGEN-2).

    Constant groups count in the ranking, so that the ranges of one step do not overlap.
    """
    ranked, _ = _rank(returns, keep_zero=True)
    first, last = (math.floor(share * len(returns) + ROUNDING) for share in value)
    return ranked[first:last]


def within_group(returns: Returns, *, value: float, keep_zero: bool) -> list[list[int]]:
    """Keep the max(2, floor(value N)) trajectories of every group whose returns spread most: its
    lowest and its highest (the control of RAGEN-2, which trains on as many trajectories as a filter
    of groups, from all groups).

    Means and deviations of the group are then taken over the kept ones, on purpose: where returns
    have two values, the expected update equals the update of the whole group times a positive
    number. With the mean of the whole group the kept advantages would not sum to 0, so that the
    update would also make all kept answers likelier, or all less likely.
    """
    return [_widest(group, max(2, math.floor(value * len(group) + ROUNDING))) for group in returns]


def _widest(returns: Sequence[float], size: int) -> list[int]:
    """Return the indices of the `size` values of largest variance. Some of the lowest with some of
    the highest are always among the best choices, for the variance is convex in every value.
    """
    order = sorted(range(len(returns)), key=lambda index: (returns[index], index))
    choices = [order[:low] + order[len(order) - (size - low) :] for low in range(size, -1, -1)]
    return sorted(max(choices, key=lambda chosen: pvariance([returns[i] for i in chosen])))


def soft_reweighting(group_scores: Sequence[float] | Tensor) -> Tensor:
    """[P] float64 weight of each group's advantages: its score over the highest one, in [0, 1]
    (RAGEN-2).

    All-constant groups weigh 0.
    """
    scores = torch.as_tensor(group_scores, dtype=torch.float64)
    if len(scores) == 0 or scores.max() <= CONSTANT_SCORE:
        return torch.zeros_like(scores)
    return scores / scores.max()


def filter_groups(
    groups: Sequence[TrajectoryGroup],
    *,
    strategy: str,
    value: float | tuple[float, float | None] | None,
    keep_zero: bool,
    num_groups: int | None = None,
) -> list[TrajectoryGroup]:
    """Return the groups that the filter `strategy` keeps by their returns, in the given order,
    without members that have none; with a filter within groups, their trajectories that it keeps.

    Rewards of different environments have different scales, so the filter ranks the groups of each
    environment by themselves; a number of groups is divided in proportion to theirs, and at least
    one is kept of each. Constant groups are dropped in any case, unless `keep_zero` is set or the
    filter has `drops_constant=False`. `num_groups` is how many were played, if these are not all.
    Raises PlugInError, in one line, if a user's filter fails or returns something else.
    """
    found = find_filter(strategy)
    found.check(strategy, value, num_groups or len(groups))
    groups = with_returns(groups)
    ours = list(by_environment(groups).values())
    values: Sequence[float | tuple[float, float | None] | None] = [value] * len(ours)
    if len(ours) > 1 and not (value is None or isinstance(value, tuple)):
        if strategy == "top_fraction":  # divided as a whole: shares are rounded down
            strategy, found = "top_k", find_filter("top_k")
            value = max(1, math.floor(value * len(groups) + ROUNDING))
        if found.value == "count":
            values = _apportioned(
                int(value), list(map(len, ours)), groups[0].group_id // len(groups)
            )
    chosen: dict[int, TrajectoryGroup] = {}
    for places, share in zip(ours, values):
        stay = _kept_of_one(
            [groups[place] for place in places], strategy=strategy, value=share, keep_zero=keep_zero
        )
        chosen |= {places[index]: group for index, group in stay}
    kept = [chosen[place] for place in sorted(chosen)]
    if kept and found.drops_constant and not keep_zero:
        scores = group_uncertainty([group.total_rewards for group in kept])
        kept = [group for group, score in zip(kept, scores) if score > CONSTANT_SCORE]
    return kept


def by_environment(groups: Sequence[TrajectoryGroup]) -> dict[str, list[int]]:
    """Name of each environment -> the indices of its groups, in order."""
    found: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        found.setdefault(group.trajectories[0].environment, []).append(index)
    return found


def _kept_of_one(
    groups: Sequence[TrajectoryGroup],
    *,
    strategy: str,
    value: float | tuple[float, float | None] | None,
    keep_zero: bool,
) -> list[tuple[int, TrajectoryGroup]]:
    """Return the groups of one environment that a filter keeps, with their indices; constant groups
    may be among them.
    """
    found = find_filter(strategy)
    returns = [group.total_rewards for group in groups]
    answer = call(FILTERS, strategy, found.function, returns, value=value, keep_zero=keep_zero)
    if not found.within_groups:
        return [(index, groups[index]) for index in _indices(strategy, answer, len(groups))]
    rows = answer if isinstance(answer, Sequence) and len(answer) == len(groups) else [None]
    return [
        (index, replace(group, trajectories=[group.trajectories[member] for member in chosen]))
        for index, (group, row) in enumerate(zip(groups, rows))
        if (chosen := _indices(strategy, row, len(group.trajectories)))
    ]


def _apportioned(total: int, sizes: Sequence[int], turn: int) -> list[int]:
    """`total` divided in proportion to the sizes by largest remainders, at least 1 each. Among
    equal remainders the first place moves on with every `turn`.
    """
    exact = [total * size / sum(sizes) for size in sizes]
    counts = [max(1, math.floor(share + ROUNDING)) for share in exact]

    def rank(place: int) -> tuple[float, int]:
        return round(counts[place] - exact[place], 9), (place - turn) % len(sizes)

    for place in sorted(range(len(sizes)), key=rank)[: max(0, total - sum(counts))]:
        counts[place] += 1
    return counts


def _indices(strategy: str, answer: Any, size: int) -> list[int]:
    """Return a filter's answer in order. Raises PlugInError unless it is distinct indices below
    `size`.
    """
    try:
        kept = sorted(operator.index(index) for index in answer)
    except TypeError:
        kept = [-1]
    if len(set(kept)) < len(kept) or not set(kept) <= set(range(size)):
        raise PlugInError(
            f"group filter {strategy} must return distinct indices in 0..{size - 1}, not"
            f" {answer!r:.200}; return those of the groups to keep"
        )
    return kept


def _rank(returns: Returns, keep_zero: bool) -> tuple[list[int], Tensor]:
    """Return the candidate groups, largest uncertainty first and ties by index, with their
    uncertainties.
    """
    scores = group_uncertainty(returns)
    ranked = scores.argsort(descending=True, stable=True)
    if not keep_zero:
        ranked = ranked[scores[ranked] > CONSTANT_SCORE]
    return ranked.tolist(), scores[ranked]


def _nucleus_size(shares: Tensor, p: float) -> int:
    """Return the length of the shortest prefix of descending shares that sums to `p`."""
    masses = enumerate(accumulate(shares.tolist()), start=1)
    return next((size for size, mass in masses if mass >= p - ROUNDING), len(shares))
