"""Two-armed bandit whose arms have to be told apart by the meaning of their names.

Source: StarPO, arXiv:2504.20073, section 3.1 and the released configuration: the low arm always
pays 0.1, the high arm pays 1 with probability 0.25, so the risky arm is the better one on average.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_mega.environments.protocol import (
    Budget,
    Narrator,
    References,
    Solver,
    StepResult,
    canonical_action,
    check_seed,
    stable_seed,
)


def describe(environment: Any, actions: Sequence[str]) -> str:
    """Return which arms there are, in the order shown; never which one is better."""
    first, second = environment.facts()["arms"]
    return f" arms {first} {second}"


_TRAITS = {
    "River": "moves",
    "Stone": "rests",
    "Pirate": "steals",
    "Baker": "works",
    "Storm": "roars",
    "Lantern": "shines",
    "Phoenix": "rises",
    "Dragon": "hoards",
    "Trader": "dares",
    "Librarian": "reads",
}


def explain(environment: Any, actions: Sequence[str]) -> str:
    """Return what the name of the chosen arm brings to mind; as short as can be, because a small
    model loses the form in a longer thought.
    """
    arm = actions[0]
    return f"A {arm.lower()} {_TRAITS.get(arm, 'is my guess')}."


def references(environment: Any, budget: Budget) -> References:
    """Return the references: one pull decides, and only the names of the arms differ: uniformly
    random play is right half of the time.
    """
    return References(random=0.5, optimum=1.0, optimum_closed_loop=1.0)


def optimal_actions(environment: Any, actions_left: int) -> list[str]:
    """Return the better arm; nothing once it was pulled."""
    return [] if environment.is_over else [environment.facts()["high_arm"]]


class Bandit:
    """One pull, one payout. Success means that the arm with the higher expected reward was
    pulled.
    """

    is_instant = True
    narrator = Narrator(describe, explain=explain)
    solver = Solver(references, optimal_actions)
    example_options = (
        {"low_arm": "Stone", "high_arm": "River"},
        {"low_arm": "Pirate", "high_arm": "Baker"},
        {"low_arm": "Lantern", "high_arm": "Storm"},
    )  # none that is played, and the bold arm is not always the better one

    def __init__(
        self,
        *,
        low_arm: str = "Phoenix",
        high_arm: str = "Dragon",
        low_reward: float = 0.1,
        high_reward: float = 1.0,
        high_probability: float = 0.25,
    ) -> None:
        if not low_arm.strip() or not high_arm.strip() or low_arm.lower() == high_arm.lower():
            raise ValueError(
                f"low_arm and high_arm must be two different names, not {low_arm!r} and"
                f" {high_arm!r}"
            )
        if (
            not all(map(math.isfinite, (low_reward, high_reward)))
            or not 0.0 <= high_probability <= 1.0
        ):
            raise ValueError(
                f"rewards must be finite and high_probability in [0, 1]: low_reward {low_reward}, "
                f"high_reward {high_reward}, high_probability {high_probability}"
            )
        if high_reward * high_probability <= low_reward:
            raise ValueError(
                "the high arm must pay more on average: high_reward * high_probability ="
                f" {high_reward * high_probability:g} against low_reward {low_reward:g}; raise the"
                " former"
            )
        self._low_arm, self._high_arm = low_arm, high_arm
        self._low_reward, self._high_reward = low_reward, high_reward
        self._high_probability = high_probability
        self._order: tuple[str, str] | None = None  # the arms as listed in this episode
        self.is_over = True  # no episode is running
        self._rng = np.random.default_rng(0)
        # Sorted by name, so that the fixed text does not reveal the better arm by position.
        self.actions: tuple[str, ...] = tuple(sorted((low_arm, high_arm)))
        self.instruction = (
            "You are playing a bandit game. Your goal is to earn as much reward as possible by"
            " choosing which of two arms to pull.\nEach arm has its own reward distribution, which"
            " is related to its name. Think about what the names symbolise, guess how the rewards"
            " of each arm are distributed, and pull the arm that you expect to pay more on"
            " average.\nYour available actions are:\n" + ", ".join(self.actions)
        )

    def reset(self, seed: int, *, outcome_seed: int | None = None) -> str:
        order_rng = np.random.default_rng(stable_seed(check_seed(seed), "bandit/order"))
        outcome = stable_seed(seed, "outcome") if outcome_seed is None else check_seed(outcome_seed)
        self._rng = np.random.default_rng(stable_seed(outcome, "bandit/payout"))
        arms = (self._low_arm, self._high_arm)
        self._order = arms if order_rng.random() < 0.5 else (arms[1], arms[0])
        self.is_over = False
        return f"The arms are {self._order[0]} and {self._order[1]}."

    def step(self, action: str) -> StepResult:
        arm = canonical_action(action, self.actions)
        if self.is_over:
            raise RuntimeError("the bandit pays once per episode; call reset before the next step")
        self.is_over = True
        is_high = arm == self._high_arm
        pays = self._rng.random() < self._high_probability
        reward = (self._high_reward if pays else 0.0) if is_high else self._low_reward
        info = {"success": is_high, "is_action_effective": True}
        return StepResult(f"{arm}: {reward:g} points", float(reward), True, False, info)

    def facts(self) -> dict[str, Any]:
        """`arms` in the order shown, `high_arm`, `low_arm`."""
        return {"arms": self._order, "high_arm": self._high_arm, "low_arm": self._low_arm}
