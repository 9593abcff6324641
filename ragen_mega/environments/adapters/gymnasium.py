"""Environments of Gymnasium with actions that can be said, e.g. `gymnasium:Blackjack-v1`.

Interface: Gymnasium 1.x `Env` (Towers et al., arXiv:2407.17032).
"""

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces

from ragen_mega.environments.protocol import Budget, StepResult

# An older version of an environment is a choice of the user.
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"gymnasium\.")

_MAX_TURNS = 20
"""Most turns of an environment whose own time limit is long."""
_COLORED = re.compile(r"(?:\x1b\[(?!0m)[\d;]+m)+(.*?)(?:\x1b\[0m)+")


@dataclass(frozen=True, slots=True)
class _Known:
    """Facts about an environment of Gymnasium that Gymnasium does not expose."""

    instruction: str
    actions: tuple[str, ...]
    max_turns: int
    words: Callable[[gymnasium.Env, Any], str] | None = None
    """(environment, observation) -> what the drawing leaves out."""
    success_above: float = 0.0
    """A last reward above this means success."""
    obeys_mask: bool = True
    """Whether its mask forbids actions; Taxi's names those without an effect, which cost as much as
    any other.
    """


def _taxi_words(environment: gymnasium.Env, observation: int) -> str:
    row, column, passenger, destination = environment.get_wrapper_attr("decode")(observation)
    cells = environment.get_wrapper_attr("locs")
    places = [f"{name} (row {r}, column {c})" for name, (r, c) in zip("RGYB", cells)]
    waiting = "in the taxi" if passenger == len(places) else f"at {places[passenger]}"
    return (
        f"The taxi is at row {row}, column {column}. The passenger is {waiting} and wants to go to"
        f" {places[destination]}."
    )


def _blackjack_words(environment: gymnasium.Env, observation: Sequence[int]) -> str:
    total, dealer, usable_ace = observation
    ace = "with" if usable_ace else "without"
    return f"Your sum is {total}, {ace} a usable ace. The dealer shows {dealer}."


_GRID = "The bracketed cell is where you are."
_KNOWN = {
    "Taxi": _Known(
        "Drive the taxi to the passenger, pick them up and drop them off at their destination."
        " Walls are drawn as |; every action costs 1, a wrong pickup or dropoff 10.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        max_turns=10,
        words=_taxi_words,
        obeys_mask=False,
    ),
    "Blackjack": _Known(
        "Beat the dealer's sum without exceeding 21. Your actions are stick and hit.",
        ("stick", "hit"),
        max_turns=5,
        words=_blackjack_words,
    ),
    "FrozenLake": _Known(
        "Walk over the frozen lake (F) from S to G and avoid the holes (H). " + _GRID,
        ("left", "down", "right", "up"),
        max_turns=5,
    ),
    "CliffWalking": _Known(
        "Walk from the lower left to T; x is where you are, C the cliff, which sends you back.",
        ("up", "right", "down", "left"),
        max_turns=5,
        success_above=-2.0,
    ),
}


class GymnasiumWorld:
    """An environment of Gymnasium with discrete or text actions.

    The observation is the environment's drawing as text if it has one (`ansi`; colored characters
    are put in brackets), else Gymnasium's observation as a string. Actions are numbers if neither
    the environment nor the table above has names for them.
    """

    max_turns: int

    def __init__(self, environment_id: str, /, **options: Any) -> None:
        """`options` go to `gymnasium.make`. Raises ValueError for an unknown environment or actions
        of another kind, and whatever else `gymnasium.make` raises.
        """
        try:
            self._environment = gymnasium.make(environment_id, **options)
        except (gymnasium.error.UnregisteredEnv, ModuleNotFoundError) as error:
            if getattr(error, "name", None):  # a module that the environment imports is missing
                raise
            raise ValueError(
                f"gymnasium:{environment_id} is unknown to Gymnasium: {str(error).rstrip('.')};"
                " correct the name, or install the package that registers it and name its module"
                " as in gymnasium:MODULE:NAME"
            ) from None
        if "ansi" in self._environment.metadata.get("render_modes", ()):
            self._environment.close()
            self._environment = gymnasium.make(
                environment_id, **({"render_mode": "ansi"} | options)
            )
        self._draws = self._environment.render_mode == "ansi"
        self._known = _KNOWN.get(environment_id.rpartition(":")[2].partition("-v")[0])
        space = self._environment.action_space
        if isinstance(space, spaces.Discrete):
            self.actions = _action_names(self._environment, self._known, space)
            self._values = dict(zip(self.actions, range(space.start, space.start + space.n)))
        elif not isinstance(space, spaces.Text):
            raise ValueError(
                f"gymnasium:{environment_id} takes {space}; environments with Discrete or Text"
                " actions can be played"
            )
        if self._known:
            self.instruction, self.max_turns = self._known.instruction, self._known.max_turns
        elif (spec := self._environment.spec) and (limit := spec.max_episode_steps):
            self.max_turns = min(_MAX_TURNS, -(-limit // Budget().max_actions_per_turn))

    def reset(self, seed: int, outcome_seed: int | None = None) -> str:
        observation, info = self._environment.reset(seed=seed)
        self._mask, self._earned = info.get("action_mask"), 0.0
        if outcome_seed is not None:
            self._environment.unwrapped.np_random = np.random.default_rng(outcome_seed)
        self._seen = self._text(observation)
        return self._seen

    def step(self, action: str) -> StepResult:
        move = self._values[action] if hasattr(self, "actions") else action
        if not self._is_legal(move):
            return StepResult(self._seen, 0.0, False, False, {"is_action_valid": False})
        observation, reward, terminated, truncated, info = self._environment.step(move)
        self._mask = info.get("action_mask")
        before, self._seen = self._seen, self._text(observation)
        self._earned += float(reward)
        spec = self._environment.spec  # None where it cannot be copied
        threshold = spec.reward_threshold if spec else None
        if self._known is None and threshold is not None:
            is_solved = (terminated or truncated) and self._earned >= threshold
        else:
            least = self._known.success_above if self._known else 0.0
            is_solved = terminated and float(reward) > least
        return StepResult(
            self._seen,
            float(reward),
            bool(terminated),
            bool(truncated),
            {
                "success": bool(info.get("success", info.get("is_success", is_solved))),
                "is_action_effective": self._seen != before,
            },
        )

    def close(self) -> None:
        self._environment.close()

    def _is_legal(self, move: Any) -> bool:
        """Return whether the environment takes a move in its present state: by its space, and by
        the mask that many environments give in their info.
        """
        space = self._environment.action_space
        if not isinstance(space, spaces.Discrete):
            return space.contains(move)
        obeys = self._known is None or self._known.obeys_mask
        return not obeys or self._mask is None or bool(self._mask[move - space.start])

    def _text(self, observation: Any) -> str:
        parts = []
        if self._draws:
            drawing = cast(str, self._environment.render())  # as the mode `ansi` promises
            parts.append(_COLORED.sub(r"[\1]", drawing).strip("\n"))
        if self._known and self._known.words:
            parts.append(self._known.words(self._environment, observation))
        if isinstance(observation, str) or not parts:
            with np.printoptions(threshold=sys.maxsize):  # else large arrays lose their middle
                parts.append(str(_plain(observation)))
        return "\n".join(parts)


def _plain(value: Any) -> Any:
    """Return an observation with Python's numbers in place of NumPy's, whose names are in their
    text.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain_part(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain_part, value))
    return value


def _plain_part(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else _plain(value)


def _action_names(
    environment: gymnasium.Env, known: _Known | None, space: spaces.Discrete
) -> tuple[str, ...]:
    """Return one name for each action: the environment's own meanings, the table's, or numbers."""
    meanings = getattr(environment.unwrapped, "get_action_meanings", None)
    names = meanings() if meanings else known.actions if known else ()
    names = tuple(map(str, names))
    for distinct in (tuple(name.lower() for name in names), names):
        if len(names) == len(set(distinct)) == space.n:
            return distinct
    return tuple(map(str, range(space.start, space.start + space.n)))
