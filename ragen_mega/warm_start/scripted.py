"""Scripted players: true thoughts about the state, and actions that are uniformly random unless `skill` says otherwise.

A thought states facts and relations that the state implies; it never says which action is best. What to make of the facts
is left to reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ragen_mega.environments.bandit import Bandit
from ragen_mega.environments.base import Environment
from ragen_mega.environments.episode import Episode
from ragen_mega.environments.frozen_lake import DIRECTIONS, FrozenLake
from ragen_mega.environments.solvers import optimal_actions

ACTIONS_PER_TURN = 2

Cell = tuple[int, int]


def scripted_response(episode: Episode, generator: np.random.Generator, *, skill: float = 0.0) -> str:
    """What the scripted player says in this turn, after a forced `<think>` where the episode asks for thoughts.

    Each action is the optimal one with probability `skill`, else uniformly random. Raises ValueError for an environment
    without a scripted player.
    """
    environment, config = episode.environment, episode.config
    count = min(ACTIONS_PER_TURN, config.max_actions_per_turn, episode.actions_left)
    plan = optimal_actions(environment)[:count] if skill > 0 else []
    actions = [
        plan[index] if index < len(plan) and generator.random() < skill else str(generator.choice(environment.actions))
        for index in range(count)
    ]
    answer = "<answer> " + " || ".join(actions) + "</answer>"
    return f"{_thought(environment)}</think>{answer}" if config.think else answer


def _thought(environment: Environment) -> str:
    for kind, describe in _DESCRIPTIONS.items():
        if isinstance(environment, kind):
            return describe(environment)
    raise ValueError(
        f"there is no scripted player for {type(environment).__name__}; add one to warm_start/scripted.py or start from a "
        "pretrained checkpoint with --load"
    )


def describe_bandit(environment: Bandit) -> str:
    """Which arms there are, in the order shown."""
    first, second = environment.facts()["arms"]
    return f" arms {first} {second}"


def describe_frozen_lake(environment: FrozenLake) -> str:
    """Where each move would lead: the edge, or a cell that is a hole, the goal, or ice closer to or farther from it."""
    facts = environment.facts()
    player, goal = facts["player"], facts["goal"]
    parts = [f" goal {goal}"]
    for action, (d_row, d_column) in DIRECTIONS.items():
        cell = (player[0] + d_row, player[1] + d_column)
        if not (0 <= cell[0] < facts["size"] and 0 <= cell[1] < facts["size"]):
            parts.append(f" {action} edge")
            continue
        if cell in facts["holes"]:
            what = "hole"
        elif cell == goal:
            what = "goal"
        else:
            what = "closer" if _distance(cell, goal) < _distance(player, goal) else "farther"
        parts.append(f" {action} {cell} {what}")
    return "".join(parts)


def _distance(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


_DESCRIPTIONS: dict[type, Callable[..., str]] = {
    Bandit: describe_bandit,
    FrozenLake: describe_frozen_lake,
}
