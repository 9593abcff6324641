"""Exact bandit players: the arms differ in what they are called and in nothing that is seen."""

from typing import Any

from ragen_mega.environments.protocol import Budget, References, Solver


def references(environment: Any, budget: Budget) -> References:
    """One pull decides: uniformly random play is right half of the time."""
    return References(random=0.5, optimum=1.0, optimum_closed_loop=1.0)


def optimal_actions(environment: Any, actions_left: int) -> list[str]:
    """The better arm; nothing once it was pulled."""
    return [] if environment.is_over else [environment.facts()["high_arm"]]


SOLVER = Solver(references, optimal_actions)
