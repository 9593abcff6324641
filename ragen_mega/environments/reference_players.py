"""Reference players: what uniformly random and optimal play reach under the same budget.

A success rate means little without them: random actions solve a fifth of RAGEN's 6x6 rooms, and no
player can solve more than half of its slippery lakes. The rates are exact if the environment has a
solver; else the random player is measured by play, if that is cheap. Interval: Wilson (1927).
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ragen_mega.environments import calls
from ragen_mega.environments.episode import Episode, EpisodeConfig, is_success
from ragen_mega.environments.pool import (
    EnvironmentFailed,
    Worker,
    briefly,
    describe_failures,
    guarded,
)
from ragen_mega.environments.protocol import (
    Environment,
    References,
    Solver,
    actions_of,
    stable_seed,
)
from ragen_mega.environments.random_player import is_drawn, random_steps, write_answer
from ragen_mega.environments.registry import make

EPISODES_PER_PROMPT = 32
"""Number of episodes that the random player plays per prompt in environments without a solver."""
_RESETS = 5  # attempts for an environment that fails now and then
_ROUNDING = 1e-9  # of sums of probabilities
MOST_TURNS = 64
"""Turns up to which a solver is asked how many an episode needs."""
MAX_SECONDS = 10.0
"""Time limit of measuring the random player; beyond it the rate is unknown."""

Z_95 = 1.959963984540054
"""Quantile of the normal distribution that bounds 95% of it on both sides."""
Prompt = tuple[int, tuple[str, ...] | None]
"""A seed, and the rows of a board that replaces the drawn initial state, or None."""


@dataclass(frozen=True, slots=True)
class Baselines:
    """Success rates of the reference players on one set of prompts, as fractions; None: unknown.

    `random_ci_low` and `random_ci_high` bound the 95% interval for a player at the random level,
    measured with one trajectory per prompt; compare a measured success rate with it. The rate
    itself is exact if `is_exact`.
    """

    environment: str
    num_prompts: int
    random: float | None
    random_ci_low: float | None
    random_ci_high: float | None
    optimum: float | None
    """Best play under the protocol."""
    optimum_closed_loop: float | None
    """Best play when the outcome of every action is seen before the next one."""
    is_exact: bool
    """The random player is computed from all outcomes, not sampled."""
    errors_say: str | None = None
    """One line about episodes of the players that an error ended, which count as lost; None if
    there are none.
    """
    turns_say: str | None = None
    """One line about a budget of turns in which no player succeeds; None if one does, or more turns
    would not help.
    """

    @property
    def notes(self) -> list[str]:
        """The lines that there are."""
        return [*filter(None, (self.errors_say, self.turns_say))]


def baselines(
    name: str,
    prompts: Sequence[Prompt],
    protocol: EpisodeConfig,
    options: Mapping[str, Any] | None = None,
    *,
    timeout: float = 60.0,
    build: Callable[[], Environment] | None = None,
) -> Baselines:
    """Return the baselines of environment `name` on the given prompts.

    `protocol` gives the budget (`max_turns`, `max_actions_per_turn`, `max_actions`); the random
    player uses the whole budget. `timeout`: seconds that the environment may take to be built or to
    start (0: no limit). `build`: function that builds it, in this process with these options by
    default. Raises ValueError for an unknown environment, option or board, if there is no prompt,
    or if every call of the environment fails.
    """
    if not prompts:
        raise ValueError(f"baselines of {name} need at least one board or seed")
    errors_say = turns_say = None
    build = build or partial(make, name, **(options or {}))
    with briefly(name, lambda: Episode(build(), protocol), timeout) as (worker, episode):
        solver: Solver | None = getattr(episode.environment, "solver", None)
        if solver is None:
            rate, errors_say = _measure_random(name, worker, episode, prompts)
            solved = [References(rate, None, None)]
        else:
            solved = [_solve(name, worker, episode, solver, prompt) for prompt in prompts]
            if not any(references.optimum != 0 for references in solved):
                turns_say = _turns_needed(name, worker, episode, solver, prompts[0])
    random = _mean_if_known([references.random for references in solved])
    interval: tuple[float | None, float | None] = (
        (None, None) if random is None else wilson_interval(random * len(prompts), len(prompts))
    )
    return Baselines(
        name,
        len(prompts),
        random,
        *interval,
        optimum=_mean_if_known([references.optimum for references in solved]),
        optimum_closed_loop=_mean_if_known(
            [references.optimum_closed_loop for references in solved]
        ),
        is_exact=solver is not None and all(references.is_exact for references in solved),
        errors_say=errors_say,
        turns_say=turns_say,
    )


def find_solver(environment: Environment) -> Solver:
    """Return the environment's solver. Raises ValueError if it has none."""
    solver: Solver | None = getattr(environment, "solver", None)
    if solver is None:
        raise ValueError(
            f"no solver for {type(environment).__name__}; give the class an attribute `solver`, or"
            " set --warm-start-skill 0"
        )
    return solver


def wilson_interval(successes: float, n: float) -> tuple[float, float]:
    """95% interval of a success probability after `successes` of `n` trials; both may be expected
    or effective numbers.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(
            f"wilson_interval needs 0 <= successes <= n and n >= 1, not {successes} of {n}"
        )
    z, rate = Z_95, successes / n
    scale = 1.0 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    half_width = z * math.sqrt(rate * (1.0 - rate) / n + z * z / (4 * n * n)) / scale
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def _solve(
    name: str, worker: Worker, episode: Episode, solver: Solver, prompt: Prompt
) -> References:
    """Solve the episode from one initial state. Raises ValueError if the solver fails, or if
    `reset` fails several times.
    """
    environment, (seed, rows) = episode.environment, prompt
    for attempt in range(1, _RESETS + 1):
        try:
            worker.wait(partial(calls.reset, environment, seed, board=rows))
            break
        except EnvironmentFailed as error:
            if attempt == _RESETS:
                raise ValueError(
                    f"environment {name} cannot start from seed {seed}: {error}"
                ) from error
    try:
        return guarded(partial(solver.references, environment, episode.budget))
    except EnvironmentFailed as error:
        raise ValueError(f"the solver of environment {name} fails: {error}") from error


def _turns_needed(
    name: str, worker: Worker, episode: Episode, solver: Solver, prompt: Prompt
) -> str | None:
    """Return the line about too few turns where more of them solve the episode from one initial
    state, and are no more than MOST_TURNS; a limit of actions may leave them nothing to do.
    """
    limit = episode.budget.max_turns
    for turns in range(limit + 1, MOST_TURNS + 1):
        before, rules = episode.budget, replace(episode.config, max_turns=turns)
        episode.budget = rules.budget(episode.environment)
        if episode.budget.action_budget == before.action_budget:
            break
        if _solve(name, worker, episode, solver, prompt).optimum:
            return too_few_turns(name, limit, turns)
    return None


def too_few_turns(name: str, limit: int, needed: int) -> str:
    """Say that nobody succeeds within the limit of turns, and how many the first state needs."""
    return (
        f"{name}: --max-turns {limit} is too few for any success: the first state that is evaluated"
        f" needs {needed}"
    )


def _measure_random(
    name: str, worker: Worker, episode: Episode, prompts: Sequence[Prompt]
) -> tuple[float | None, str | None]:
    """Return the success rate of uniformly random actions over sampled episodes, None if that takes
    too long or the possible answers are unknown; and a line about errors.

    An episode in which the environment fails counts as lost. Raises ValueError if all fail.
    """
    deadline = time.monotonic() + MAX_SECONDS
    worker.seconds = MAX_SECONDS + 1.0
    if not is_drawn(episode):  # its actions may come with the first state
        with contextlib.suppress(EnvironmentFailed):
            worker.wait(partial(episode.start, prompts[0][0], board=prompts[0][1]))
        if not is_drawn(episode):
            return None, None
    failures: list[tuple[int, str]] = []
    num_episodes = 0

    def measure() -> float | None:
        nonlocal num_episodes
        successes = 0
        for seed, rows in prompts:
            rng = np.random.default_rng(stable_seed(seed, "random player"))
            for _ in range(EPISODES_PER_PROMPT):
                if time.monotonic() > deadline:
                    return None
                try:
                    successes += guarded(partial(_play_randomly, episode, seed, rows, rng))
                except EnvironmentFailed as error:
                    failures.append((seed, str(error)))
                num_episodes += 1
        return successes / num_episodes

    try:
        rate = worker.wait(measure)
    except EnvironmentFailed:  # a call does not return
        rate = None
    if len(failures) == EPISODES_PER_PROMPT * len(prompts):
        raise ValueError(f"environment {name} fails whatever is done: {failures[0][1]}")
    return rate, describe_failures(name, "random", num_episodes, failures)


def _play_randomly(
    episode: Episode, seed: int, rows: Sequence[str] | None, rng: np.random.Generator
) -> bool:
    """Play one episode and return whether it succeeded."""
    outcome_seed = int(rng.integers(2**62))
    if not episode.takes_names:
        episode.start(seed, outcome_seed=outcome_seed, board=rows)
        opening = "</think>" if episode.config.think else ""
        while True:
            answer = write_answer(episode, random_steps(episode, rng))
            turn = episode.respond(opening + answer)
            if episode.done:
                return turn.info["success"]
    environment = episode.environment
    calls.reset(environment, seed, outcome_seed=outcome_seed, board=rows)
    is_solved = False
    for _ in range(episode.budget.action_budget):
        if not len(actions := actions_of(environment)):  # turns pass
            break
        result = calls.step(environment, actions[int(rng.integers(len(actions)))])
        is_solved = is_success(result)
        if result.terminated or result.truncated:
            break
    return is_solved


def _mean_if_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    mean = math.fsum(known) / len(known)
    return 1.0 if 1.0 < mean < 1.0 + _ROUNDING else mean
