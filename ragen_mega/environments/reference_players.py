"""Reference players: what uniformly random and optimal play reach under the same budget.

A success rate means little without them: on RAGEN's 6x6 rooms random actions solve a fifth, and on
its slippery lakes nobody can exceed a half. Interval: Wilson (1927).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ragen_mega.environments.boards import Board
from ragen_mega.environments.episode import EpisodeConfig
from ragen_mega.environments.protocol import Environment, make, stable_seed
from ragen_mega.environments.worlds.bandit.world import Bandit
from ragen_mega.environments.worlds.frozen_lake.solver import LakeSolver
from ragen_mega.environments.worlds.frozen_lake.world import FrozenLake
from ragen_mega.environments.worlds.sokoban.solver import random_success, shortest_plan
from ragen_mega.environments.worlds.sokoban.world import Sokoban

_EPISODES_PER_PROMPT = 32  # of the random player in environments without an exact solution


@dataclass(frozen=True, slots=True)
class Baselines:
    """Success rates of the reference players on one set of prompts, as fractions.

    `random_ci_low` and `random_ci_high` are the 95% interval within which a player of the random
    level, measured with one trajectory per prompt, is expected: compare a measured success with it.
    The rate itself is exact if `is_exact`.
    """

    environment: str
    num_prompts: int
    random: float
    random_ci_low: float
    random_ci_high: float
    optimum: float | None
    """Best play under the protocol; None if it is not known."""
    optimum_closed_loop: float | None
    """Best play when the outcome of every action is seen before the next one; None if it is not
    known.
    """
    is_exact: bool
    """The random player is computed from all outcomes, not sampled."""


@dataclass(frozen=True, slots=True)
class _PromptBaseline:
    random: float
    optimum: float | None
    optimum_closed_loop: float | None


def baselines(
    name: str,
    boards_or_seeds: Iterable[int | Board | Sequence[str]],
    protocol: EpisodeConfig,
    options: Mapping[str, Any] | None = None,
) -> Baselines:
    """Baselines of environment `name` on the given prompts: seeds, boards or rows of boards.

    `protocol` gives the budget (`max_turns`, `max_actions_per_turn`, `max_actions`); the random
    player uses all of it. Raises ValueError for an unknown environment, option or board, or if
    there is no prompt.
    """
    environment = make(name, **(options or {}))
    prompts: list[_PromptBaseline] = []
    for prompt in boards_or_seeds:
        if isinstance(prompt, int):
            seed, rows = prompt, None
        elif isinstance(prompt, Board):
            seed, rows = prompt.seed, prompt.rows
        else:
            seed, rows = 0, tuple(prompt)
        environment.reset(seed, board=rows)
        prompts.append(_solve(environment, protocol, seed, rows))
    if not prompts:
        raise ValueError(f"baselines of {name} need at least one board or seed")
    random = math.fsum(prompt.random for prompt in prompts) / len(prompts)
    low, high = wilson_interval(random * len(prompts), len(prompts))
    return Baselines(
        environment=name,
        num_prompts=len(prompts),
        random=random,
        random_ci_low=low,
        random_ci_high=high,
        optimum=_mean_if_known([prompt.optimum for prompt in prompts]),
        optimum_closed_loop=_mean_if_known([prompt.optimum_closed_loop for prompt in prompts]),
        is_exact=isinstance(environment, (Bandit, FrozenLake, Sokoban)),
    )


def optimal_actions(environment: Environment, *, actions_left: int = 10) -> list[str]:
    """What an optimal player does next, given the true state and a budget of `actions_left`
    actions.

    Sokoban: a shortest solution from here, cut off at the budget; empty if there is none.
    FrozenLake: the best next action alone, because the one after it depends on where this one
    slips. Bandit: the better arm. Empty if the episode is over. Raises ValueError for an
    environment without a solver.
    """
    if actions_left < 1:
        raise ValueError(f"actions_left must be at least 1, not {actions_left}")
    match environment:
        case Sokoban():
            return (shortest_plan(environment.room) or [])[:actions_left]
        case FrozenLake():
            player = environment.facts()["player"]
            if player == environment.lake.goal or player in environment.lake.holes:
                return []
            return [
                LakeSolver(environment.lake, environment.success_rate).best_action(
                    player, actions_left
                )
            ]
        case Bandit():
            return [environment.facts()["high_arm"]] if not environment.is_over else []
        case _:
            raise ValueError(
                f"no solver for {type(environment).__name__}; solvers know Bandit, FrozenLake and"
                " Sokoban"
            )


def wilson_interval(successes: float, n: float) -> tuple[float, float]:
    """95% interval of a success probability after `successes` of `n` trials, expected or effective
    numbers of them too.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(
            f"wilson_interval needs 0 <= successes <= n and n >= 1, not {successes} of {n}"
        )
    z = 1.959963984540054
    rate = successes / n
    scale = 1.0 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    half_width = z * math.sqrt(rate * (1.0 - rate) / n + z * z / (4 * n * n)) / scale
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def _solve(
    environment: Environment, protocol: EpisodeConfig, seed: int, rows: Sequence[str] | None
) -> _PromptBaseline:
    match environment:
        case Sokoban():
            return _solve_sokoban(environment, protocol)
        case FrozenLake():
            return _solve_frozen_lake(environment, protocol)
        case Bandit():
            return _PromptBaseline(random=0.5, optimum=1.0, optimum_closed_loop=1.0)
        case _:
            return _PromptBaseline(_sample_random(environment, protocol, seed, rows), None, None)


def _solve_sokoban(environment: Sokoban, protocol: EpisodeConfig) -> _PromptBaseline:
    room = environment.room
    plan = shortest_plan(room, protocol.max_actions)
    return _PromptBaseline(
        random=random_success(room, protocol.action_budget),
        optimum=float(plan is not None and len(plan) <= protocol.action_budget),
        optimum_closed_loop=float(plan is not None),
    )


def _solve_frozen_lake(environment: FrozenLake, protocol: EpisodeConfig) -> _PromptBaseline:
    start = environment.lake.start
    solver = LakeSolver(environment.lake, environment.success_rate)
    return _PromptBaseline(
        random=solver.random(start, protocol.action_budget),
        optimum=solver.open_loop(
            start,
            max_turns=protocol.max_turns,
            max_actions_per_turn=protocol.max_actions_per_turn,
            max_actions=protocol.max_actions,
        ),
        optimum_closed_loop=solver.closed_loop(start, protocol.max_actions),
    )


def _sample_random(
    environment: Environment, protocol: EpisodeConfig, seed: int, rows: Sequence[str] | None
) -> float:
    """Success rate of uniformly random actions over sampled episodes."""
    rng = np.random.default_rng(stable_seed(seed, "random player"))
    successes = 0
    for _ in range(_EPISODES_PER_PROMPT):
        environment.reset(seed, outcome_seed=int(rng.integers(2**62)), board=rows)
        for _ in range(protocol.action_budget):
            result = environment.step(
                environment.actions[int(rng.integers(len(environment.actions)))]
            )
            if result.terminated or result.truncated:
                successes += bool(result.terminated and result.info["success"])
                break
    return successes / _EPISODES_PER_PROMPT


def _mean_if_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None
