"""Rewards of a trajectory: a weighted sum of named rewards, the environment's own by default.

A reward is a pure function of a trajectory as it was played,

    reward(trajectory) -> rewards of its turns, or one number, which its last turn earns,

or, if its parameter is called `group`, of a `TrajectoryGroup`: one such result for each member.
In a run rank 0 computes all rewards, since it alone has all tokens. The rollout on disk stays as it
was played. Success is never shaped; `success_ranking` compares the shaped
rewards with it.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Any

from ragen_mega.algorithm.tables import REWARDS, PlugInError, call, is_judge, judges_tasks
from ragen_mega.data.types import Trajectory, TrajectoryGroup
from ragen_mega.environments.calls import MAX_REWARD
from ragen_mega.environments.protocol import OUTCOME
from ragen_mega.extensions.scalars import as_number

IDENTITY = {"environment": 1.0}
"""Terms that leave the rewards unchanged."""
TURN_DISCOUNT = 0.95
OVERLONG = 0.2
"""Share of a turn's token budget in which `overlong` grows, as in DAPO: 4096 of 20480."""
LIMIT = "max_tokens"
"""Key of a turn's info: how many tokens it might have sampled."""
REPEATED = 4
"""Length of the n-grams of tokens that `repetition` compares within a turn."""
VERDICTS = "verdicts"
"""Key of the last turn's info: URL of a judge -> its score, None where it gave none."""

_ROUNDING = 1e-9
"""A difference of mean returns above which it is none of rounding."""


def environment(trajectory: Trajectory) -> list[float]:
    """Return the environment's reward of each turn, its format penalty included."""
    return [turn.reward for turn in trajectory.turns]


def success(trajectory: Trajectory) -> float:
    """1 for a solved task, in its last turn."""
    return float(trajectory.success)


def well_formed(trajectory: Trajectory) -> list[float]:
    """1 / (number of turns) for every turn that can be parsed: their sum is in [0, 1]."""
    share = 1 / max(1, len(trajectory.turns))
    return [share * bool(turn.info.get("is_format_valid")) for turn in trajectory.turns]


def response_length(trajectory: Trajectory) -> list[float]:
    """Return the number of tokens sampled in each turn; a penalty if its weight is negative."""
    return [float(turn.end - turn.start) for turn in trajectory.turns]


def overlong(trajectory: Trajectory) -> list[float]:
    """DAPO's soft overlong punishment (arXiv:2503.14476 Eq. 13) of each turn, / (number of turns):
    0 up to 80% of the tokens that the turn might sample, then falling linearly to -1 at all those
    tokens.
    """
    shares = [
        (turn.end - turn.start) / turn.info[LIMIT] if LIMIT in turn.info else 0.0
        for turn in trajectory.turns
    ]
    return [min(0.0, (1 - OVERLONG - share) / OVERLONG) / len(shares) for share in shares]


def repetition(trajectory: Trajectory) -> list[float]:
    """1 / (number of turns) x the share of each turn's token 4-grams that repeat an earlier one of
    that turn; a penalty if its weight is negative.
    """
    shares = []
    for turn in trajectory.turns:
        said = trajectory.tokens[turn.start : turn.end]
        grams = list(zip(*(said[offset:] for offset in range(REPEATED))))
        shares.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return [share / len(trajectory.turns) for share in shares]


def action_effectiveness(trajectory: Trajectory) -> list[float]:
    """1 / (number of turns) for every turn that changed the state: the share of such turns."""
    share = 1 / max(1, len(trajectory.turns))
    return [share * bool(turn.info.get("is_action_effective")) for turn in trajectory.turns]


def grounded_thought(trajectory: Trajectory) -> list[float]:
    """1 / (number of turns) x the share of the claims in each turn's thought that are true of the
    state that it describes (RAGEN's reasoning-aware reward); a thought without claims earns 0.
    """
    claims = [turn.info.get("claims", (0, 0)) for turn in trajectory.turns]
    return [true / max(1, total) / len(claims) for true, total in claims]


def turn_discounted(trajectory: Trajectory) -> list[float]:
    """Return the environment's reward of turn k times 0.95^k: an earlier success earns more."""
    return [TURN_DISCOUNT**k * turn.reward for k, turn in enumerate(trajectory.turns)]


def group_relative(group: TrajectoryGroup) -> list[float]:
    """Return the environment's return minus the mean of the other members; 0 for a group of one."""
    returns, size = group.total_rewards, len(group.trajectories)
    return [(value - fmean(returns)) * size / max(1, size - 1) for value in returns]


def shape_trajectory(trajectory: Trajectory, terms: Mapping[str, float]) -> Trajectory:
    """`shape_group` of a group of one."""
    return shape_group(TrajectoryGroup(trajectory.group_id, [trajectory]), terms).trajectories[0]


def shape_group(group: TrajectoryGroup, terms: Mapping[str, float]) -> TrajectoryGroup:
    """Return a copy whose turns earn the weighted sum of `terms` (name -> weight);
    `info["rewards"]` of a turn has the contribution of each term.

    Raises PlugInError, in one line, for a reward that fails or returns something else.
    """
    by_term = {name: _turn_rewards(name, group) for name in terms}
    shaped = []
    for member, trajectory in enumerate(group.trajectories):
        turns = []
        for index, turn in enumerate(trajectory.turns):
            parts = {name: weight * by_term[name][member][index] for name, weight in terms.items()}
            info = turn.info | {"rewards": parts}
            turns.append(replace(turn, reward=math.fsum(parts.values()), info=info))
        shaped.append(replace(trajectory, turns=turns))
    return replace(group, trajectories=shaped)


def shape_rewards(
    groups: Sequence[TrajectoryGroup], terms: Mapping[str, float]
) -> tuple[list[TrajectoryGroup], dict[str, float]]:
    """Return the groups with the rewards of the terms, and metrics to log.

    Metrics, means over trajectories: what each term contributed (weight included) under its name,
    and `total`, their sum. Unless all succeed or all fail, also `success_ranking` (see there), and
    `inverted`, the number of environments whose failures earn more in the mean under the terms,
    but not by the environment's own payouts. If there are any, `inverted_by/<term>` is what the
    term pays their failures more than their successes. With only the environment's reward: the same
    groups, no metrics.
    """
    if dict(terms) == IDENTITY:
        return list(groups), {}
    shaped = [shape_group(group, terms) for group in groups]
    trajectories = [member for group in shaped for member in group.trajectories]
    metrics = {
        name: fmean(_contribution(name, trajectory) for trajectory in trajectories)
        for name in terms
    }
    ranking = success_ranking(trajectories)
    if ranking is not None:
        own = success_margins([member for group in groups for member in group.trajectories])
        now = success_margins(trajectories)
        inverted = [name for name, margin in now.items() if margin < -_ROUNDING <= own[name]]
        metrics |= {"success_ranking": ranking, "inverted": float(len(inverted))}
        for term in terms if inverted else ():
            margins = success_margins(trajectories, partial(_contribution, term))
            metrics[f"inverted_by/{term}"] = -fmean(margins[name] for name in inverted)
    return shaped, {
        "total": fmean(trajectory.total_reward for trajectory in trajectories)
    } | metrics


def success_ranking(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of pairs in which a solved trajectory earned more than an unsolved one of
    its environment, ties counting half (the area under the ROC curve); None without such a pair. 1:
    every success earned more than every failure; 0.5: the reward does not distinguish them; below:
    failures earn more.
    """
    pairs = [
        (good > bad) + (good == bad) / 2
        for unsolved, solved in _earned(trajectories).values()
        for good in solved
        for bad in unsolved
    ]
    return fmean(pairs) if pairs else None


def success_margins(
    trajectories: Sequence[Trajectory],
    pay: Callable[[Trajectory], float] = attrgetter("total_reward"),
) -> dict[str, float]:
    """Return a map: environment -> mean pay of solved trajectories minus mean pay of unsolved ones,
    where there are both.
    """
    return {
        name: fmean(solved) - fmean(unsolved)
        for name, (unsolved, solved) in _earned(trajectories, pay).items()
        if solved and unsolved
    }


def _earned(
    trajectories: Sequence[Trajectory],
    pay: Callable[[Trajectory], float] = attrgetter("total_reward"),
) -> dict[str, tuple[list[float], list[float]]]:
    """Return a map: environment -> pay of unsolved trajectories and of solved ones."""
    earned: dict[str, tuple[list[float], list[float]]] = {}
    for trajectory in trajectories:
        of_world = earned.setdefault(trajectory.environment, ([], []))
        of_world[trajectory.success].append(pay(trajectory))
    return earned


def _contribution(term: str, trajectory: Trajectory) -> float:
    """Return what a term pays a shaped trajectory, its weight included."""
    return sum(turn.info["rewards"][term] for turn in trajectory.turns)


def judge(url: str, group: TrajectoryGroup) -> list[float]:
    """Return the verdicts stored with the rollout. A missing one is replaced by the mean of the
    group; a run has no such member in a group, unless the weight of the judge is 0.
    """
    verdicts = [
        member.turns[-1].info.get(VERDICTS, {}).get(url) if member.turns else None
        for member in group.trajectories
    ]
    known = [verdict for verdict in verdicts if verdict is not None]
    neutral = fmean(known) if known else 0.0
    return [neutral if verdict is None else verdict for verdict in verdicts]


def _turn_rewards(name: str, group: TrajectoryGroup) -> list[list[float]]:
    """Return the rewards of the turns of each member."""
    answers: Any
    if is_judge(name):
        answers = judge(name, group)
    elif judges_tasks(name):  # the task has called it; it gives a malformed answer nothing
        answers = [
            [turn.info.get(OUTCOME, {}).get(name, 0.0) for turn in each.turns]
            for each in group.trajectories
        ]
    elif "group" in call(REWARDS, name, partial(inspect.signature, REWARDS.get(name))).parameters:
        answers = call(REWARDS, name, REWARDS.get(name), group)
    else:
        answers = [call(REWARDS, name, REWARDS.get(name), each) for each in group.trajectories]
    if not _is_row(answers) or len(answers) != len(group.trajectories):
        raise PlugInError(
            f"reward {name} must return an answer for each of the {len(group.trajectories)}"
            f" trajectories of a group, not {answers!r:.200}; mend it"
        )
    return [
        _per_turn(name, answer, len(member.turns))
        for answer, member in zip(answers, group.trajectories, strict=True)
    ]


def _is_row(answer: Any) -> bool:
    """Return whether an answer has several places: it is no scalar of NumPy or torch, no mapping
    and no set.
    """
    is_scalar = getattr(answer, "ndim", 1) == 0 or not hasattr(answer, "__len__")
    return not is_scalar and not isinstance(answer, (Mapping, Set))


def _per_turn(name: str, answer: Any, num_turns: int) -> list[float]:
    parts = answer if _is_row(answer) else [0.0] * (num_turns - 1) + [answer]
    rewards = [math.nan if (part := as_number(each)) is None else part for each in parts]
    if len(rewards) != num_turns or not all(abs(each) <= MAX_REWARD for each in rewards):
        raise PlugInError(
            f"reward {name} must return a number of at most {MAX_REWARD:g} in size, or one for each"
            f" of {num_turns} turns, not {answer!r:.200}; mend it"
        )
    return rewards
