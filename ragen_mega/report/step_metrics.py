"""Health metrics of a step: what the filter kept, engine against trainer, signs of the Echo
Trap.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ragen_mega.algorithm.diagnostics import (
    COLLAPSE_SIGNALS,
    SIGNALS,
    EchoTrapMonitor,
    EchoTrapWarning,
)
from ragen_mega.algorithm.filters import (
    CONSTANT_SCORE,
    by_environment,
    group_uncertainty,
    soft_reweighting,
    with_returns,
)
from ragen_mega.algorithm.tables import METRICS, PlugInError, call
from ragen_mega.config import FilterConfig
from ragen_mega.data.types import TokenBatch, TrajectoryGroup
from ragen_mega.extensions.scalars import as_number
from ragen_mega.ranks.collectives import max_over_ranks
from ragen_mega.report.metrics import Mean, Metrics

EVALUATED = ("success", "reward", "random", "optimum", "starts_met")
"""The values of an evaluated set that are logged as eval/...; the last one from 1 on."""
OF_UPDATE = ("loss", "grad_norm", "skipped", "lr", "explained_variance", "context_gbytes")
"""Metrics of an update as a whole."""
OF_COMPUTED = (
    "computed_share",
    "routing_unshared",
    "routing_load",
    "routing_entropy",
    "routing_overlap",
    "routing_drift",
)
"""Metrics of the tokens that an update computes: each microbatch computes a shared beginning once,
so another division of the trajectories among ranks computes other tokens.
"""


def filter_metrics(
    groups: Sequence[TrajectoryGroup],
    kept: Sequence[TrajectoryGroup],
    num_played: int | None = None,
) -> dict[str, float]:
    """Count the groups that the filter kept, of several environments also by their names, and the
    groups that could not have taught anything. `num_played` is the number of groups before
    `groups`, which have two samples, were selected (None: the same).
    """
    metrics = {
        "kept_groups": float(len(kept)),
        "kept_fraction": len(kept) / (num_played or len(groups)),
    }
    if num_played is not None:
        metrics["short_groups"] = float(num_played - len(groups))
    environments, kept_of = by_environment(groups), by_environment(kept)
    if len(environments) > 1:
        for name in environments:
            metrics[f"kept_groups/{name}"] = float(len(kept_of.get(name, ())))
    if groups and min(len(group.trajectories) for group in groups) > 1:
        spread = group_uncertainty([group.total_rewards for group in groups])
        metrics["constant_groups"] = float((spread <= CONSTANT_SCORE).double().mean())
        if kept and min(len(group.trajectories) for group in kept) > 1:
            metrics["kept_std"] = float(
                group_uncertainty([group.total_rewards for group in kept]).mean()
            )
    return metrics


def evaluation_metrics(
    results: Mapping[str, Mapping[str, Any]], trained: Sequence[str], prefix: str = ""
) -> dict[str, float]:
    """Return evaluated sets, as they are logged: with the set's name unless it alone is trained; of
    several that are, also their mean success if all have a result: one that a resumed run has
    added was not evaluated before its first step. Unknown values are left out.
    """
    found = {
        f"{prefix}{what}" + ("" if [name] == [*trained] else f"_{name}"): value
        for name, result in results.items()
        for what in EVALUATED
        if (value := result.get(what)) is not None and (value or what != "starts_met")
    }
    if len(trained) > 1 and results.keys() >= {*trained}:
        found[f"{prefix}success"] = fmean(results[name]["success"] for name in trained)
    return found


def custom_metrics(groups: Sequence[TrajectoryGroup], names: Iterable[str]) -> dict[str, float]:
    """Return the values of the named metrics over the trajectories as they were played, without
    what an error ended; nothing if it ended all.

    A metric that returns one number is logged under its name. Raises PlugInError, in one line, if a
    metric fails, returns something else, or uses a key that is taken.
    """
    result: dict[str, float] = {}
    groups = with_returns(groups, least=1)
    for name in names if groups else ():
        answer = call(METRICS, name, METRICS.get(name), groups)
        for key, value in (answer if isinstance(answer, Mapping) else {name: answer}).items():
            number = as_number(value)
            is_new = isinstance(key, str) and key not in result
            if not is_new or number is None or not math.isfinite(number):
                raise PlugInError(
                    f"metric {name} must return a finite number, or name -> number with names of"
                    f" its own, not {key!r}: {value!r:.200}; mend it"
                )
            result[key] = number
    return result


def group_weights(kept: Sequence[TrajectoryGroup], config: FilterConfig) -> Tensor | None:
    """[S] factor of each trajectory's advantages under soft reweighting, which compares a group
    with the groups of its environment; None without.
    """
    if not config.soft_reweighting:
        return None
    spread = group_uncertainty([group.total_rewards for group in kept])
    weights = torch.zeros_like(spread)
    for places in by_environment(kept).values():
        weights[places] = soft_reweighting(spread[places])
    sizes = torch.tensor([len(group.trajectories) for group in kept])
    return torch.repeat_interleave(weights, sizes).float()


def update_metrics(result: Mapping[str, float], minibatch: TokenBatch) -> dict[str, Mean]:
    """Return the metrics of an update with their weights in the means of the step. A metric that is
    in neither table is a mean over the sampled tokens; every rank knows the mask of them all.
    """
    num_sampled = int(minibatch.loss_mask.sum())
    weights = dict.fromkeys(OF_UPDATE, 1) | dict.fromkeys(OF_COMPUTED, minibatch.num_positions)
    return {name: Mean(value, weights.get(name, num_sampled)) for name, value in result.items()}


def engine_vs_policy(batch: TokenBatch, logprobs: Tensor) -> dict[str, float]:
    """Return the difference of the engine's and the trainer's log-probabilities [T] on the sampled
    tokens, under the same weights. Collective where ranks hold parts of the batch.

    Sums are taken by trajectory, so that they do not depend on who holds which.
    """
    mask = batch.loss_mask
    difference = torch.where(mask, logprobs - batch.rollout_logprobs, 0.0).double()
    k3 = difference.exp() - 1 - difference  # under the rollout policy
    owners = torch.arange(batch.num_trajectories).repeat_interleave(batch.lengths.long())
    found = torch.zeros(3, batch.num_trajectories, dtype=torch.float64)
    found[0].index_add_(0, owners, difference.abs())
    found[1].scatter_reduce_(0, owners, difference.abs(), "amax")
    found[2].index_add_(0, owners, k3)
    if batch.here is not None:
        found[:, ~batch.here] = -math.inf
        found = max_over_ranks(found)
    count = int(mask.sum()) or math.nan
    return {
        "logprob_mean_abs_diff": float(found[0].sum()) / count,
        "logprob_max_abs_diff": float(found[1].max()),
        "kl_rollout_old": float(found[2].sum()) / count,
    }


def staleness(step: int, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the steps by which the weights have moved on since they sampled, mean over sampled
    tokens, and the share of trajectories that went on under other weights than they began with.
    """
    trajectories = [member for group in groups for member in group.trajectories]
    behind = [
        (step - version, turn.end - turn.start)
        for trajectory in trajectories
        for turn, version in zip(trajectory.turns, trajectory.versions, strict=True)
    ]
    total = sum(size for _, size in behind)
    return {
        "staleness": sum(steps * size for steps, size in behind) / max(1, total),
        "continued": sum(len({*trajectory.versions}) > 1 for trajectory in trajectories)
        / len(trajectories),
    }


def observe(monitor: EchoTrapMonitor, metrics: Metrics) -> list[EchoTrapWarning]:
    """Feed a step's numbers to the monitor; returns the new warnings."""
    return monitor.observe(_signals(metrics, SIGNALS, entropy="actor/entropy"))


def collapse_signals(metrics: Metrics) -> dict[str, float]:
    """Return the numbers of a step that `CollapseDetector` reads."""
    return _signals(metrics, COLLAPSE_SIGNALS, entropy="rollout/entropy")


def _signals(metrics: Metrics, names: Iterable[str], *, entropy: str) -> dict[str, float]:
    result = metrics.result()
    sources = {
        "success_rate": "rollout/success",
        "reward_std": f"{'reward' if 'reward/in_group_std' in result else 'rollout'}/in_group_std",
        "entropy": entropy,
        "grad_norm": "actor/grad_norm",
        "distinct_openings": "rollout/distinct_openings",
    }
    return {name: result[sources[name]] for name in names if sources[name] in result}
