"""What a trajectory earns: a weighted sum of named rewards, the environment's own by default.

A reward is a pure function of a trajectory as it was played,

    reward(trajectory) -> rewards of its turns, or one number, which its last turn earns.

Every rank computes all of them, so equal trajectories must earn the same everywhere. The rollout on
the disk stays as it was played. Success is never shaped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from ragen_mega.algorithm.tables import REWARDS, PlugInError, call
from ragen_mega.data.types import Trajectory, TrajectoryGroup

IDENTITY = {"environment": 1.0}
"""Terms under which nothing changes."""


def environment(trajectory: Trajectory) -> list[float]:
    """What each turn earned in the environment, its format penalty included."""
    return [turn.reward for turn in trajectory.turns]


def success(trajectory: Trajectory) -> float:
    """1 for a solved task, in its last turn."""
    return float(trajectory.success)


def well_formed(trajectory: Trajectory) -> list[float]:
    """1 / (number of turns) for every turn that can be parsed: the share of them, in [0, 1]."""
    share = 1 / max(1, len(trajectory.turns))
    return [share * bool(turn.info.get("is_format_valid")) for turn in trajectory.turns]


def response_length(trajectory: Trajectory) -> list[float]:
    """The tokens that were sampled in each turn; a penalty under a negative weight."""
    return [float(turn.end - turn.start) for turn in trajectory.turns]


def shape_trajectory(trajectory: Trajectory, terms: Mapping[str, float]) -> Trajectory:
    """A copy whose turns earn the sum of `terms` (name -> weight); what each term gave to a turn is
    its `info["rewards"]`.

    Raises PlugInError, in one line, for a reward that fails or answers with something else.
    """
    by_term = {name: _turn_rewards(name, trajectory) for name in terms}
    turns = []
    for index, turn in enumerate(trajectory.turns):
        parts = {name: weight * by_term[name][index] for name, weight in terms.items()}
        info = turn.info | {"rewards": parts}
        turns.append(replace(turn, reward=math.fsum(parts.values()), info=info))
    return replace(trajectory, turns=turns)


def shape_rewards(
    groups: Sequence[TrajectoryGroup], terms: Mapping[str, float]
) -> tuple[list[TrajectoryGroup], dict[str, float]]:
    """The groups as the terms reward them, and what there is to log.

    Metrics, means over trajectories: what each term contributed (weight included) under its name,
    and `total`, their sum. With the environment's reward alone: the same groups, no metrics.
    """
    if dict(terms) == IDENTITY:
        return list(groups), {}
    shaped = [
        replace(group, trajectories=[shape_trajectory(one, terms) for one in group.trajectories])
        for group in groups
    ]
    trajectories = [one for group in shaped for one in group.trajectories]
    metrics = {
        name: fmean(sum(turn.info["rewards"][name] for turn in one.turns) for one in trajectories)
        for name in terms
    }
    return shaped, {"total": fmean(one.total_reward for one in trajectories)} | metrics


def _turn_rewards(name: str, trajectory: Trajectory) -> list[float]:
    answer = call(REWARDS, name, REWARDS.get(name), trajectory)
    num_turns = len(trajectory.turns)
    try:
        rewards = torch.as_tensor(answer, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        rewards = torch.tensor(math.nan)
    if rewards.dim() == 0 and num_turns:
        rewards = torch.nn.functional.pad(rewards.reshape(1), (num_turns - 1, 0))
    if rewards.shape != (num_turns,) or not torch.isfinite(rewards).all():
        raise PlugInError(
            f"reward {name} must return a finite number, or one for each of {num_turns} turns, not"
            f" {answer!r:.200}; mend it"
        )
    return rewards.tolist()
