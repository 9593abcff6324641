"""The trajectories of a rollout that a step trains on: rewards are shaped first, then the filter
chooses groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ragen_mega.algorithm.filters import filter_groups, has_return, in_group_std, with_returns
from ragen_mega.algorithm.rewards import IDENTITY, shape_rewards
from ragen_mega.algorithm.tables import is_judge
from ragen_mega.config import StarPOConfig
from ragen_mega.data.types import Trajectory, TrajectoryGroup
from ragen_mega.ranks.collectives import on_each, on_main


def shape_on_main(
    groups: Sequence[TrajectoryGroup], terms: Mapping[str, float]
) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup], dict[str, float]]:
    """Return the groups with the rewards of the terms, the groups that can be trained on, with
    their samples alone, and metrics to log, as `shape_rewards` has them, with `in_group_std` of
    what the terms pay.

    Samples are the members that have a return. Rank 0, which has all tokens and infos, finds them
    and shapes them alone, so that none is compared with anything else; the others get what it
    found. Collective. Raises PlugInError on all ranks.
    """
    judges = [name for name, weight in terms.items() if is_judge(name) and weight]
    members = members_of(groups)
    found = on_main(lambda: [(has_return(each, judges), has_return(each)) for each in members])
    worth = {id(member) for member, (is_judged, _) in zip(members, found) if is_judged}
    samples = with_returns(groups, lambda trajectory: id(trajectory) in worth)
    metrics: dict[str, float] = {}
    if judges:
        metrics["missing_verdicts"] = float(sum(played for _, played in found) - len(worth))
    if dict(terms) == IDENTITY or not samples:
        return list(groups), samples, metrics
    shaped: list[Trajectory] = []

    def shape() -> tuple[list[float], dict[str, float]]:
        found, means = shape_rewards(samples, terms)
        shaped.extend(members_of(found))
        return [turn.reward for member in shaped for turn in member.turns], means

    rewards, means = on_main(shape)
    earned, before = iter(rewards), members_of(samples)
    for member in before[len(shaped) :]:  # on the other ranks
        turns = [replace(turn, reward=next(earned)) for turn in member.turns]
        shaped.append(replace(member, turns=turns))
    changed = {id(old): new for old, new in zip(before, shaped, strict=True)}
    whole, samples = (
        [
            replace(group, trajectories=[changed.get(id(old), old) for old in group.trajectories])
            for group in each
        ]
        for each in (groups, samples)
    )
    return whole, samples, metrics | means | {"in_group_std": in_group_std(samples)}


def choose_groups(
    samples: Sequence[TrajectoryGroup], config: StarPOConfig, num_played: int, share: float
) -> list[TrajectoryGroup]:
    """Return the groups that the configured filter keeps by their returns, of `num_played` in all,
    and of these only a `share`, those whose returns vary most. It keeps as many groups of several
    rounds as of one. Collective. Raises PlugInError on all ranks if a user's filter fails on any.
    """
    rules, strategy, value = config.filter, config.filter.filter_strategy, config.filter.value
    if config.rollout.max_sampling_rounds > 1:
        strategy, value = "top_k", rules.num_kept(config.rollout.num_groups)
    kept = on_each(
        partial(
            filter_groups,
            samples,
            strategy=strategy,
            value=value,
            keep_zero=rules.filter_keep_zero,
            num_groups=num_played,
        )
    )
    if share < 1.0 and kept:
        kept = filter_groups(kept, strategy="top_fraction", value=share, keep_zero=False)
    return kept


def members_of(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    """Return the trajectories of all groups, in order."""
    return [trajectory for group in groups for trajectory in group.trajectories]
