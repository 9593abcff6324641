"""Gymnasium in both directions: its environments as ours, e.g. `gymnasium:Blackjack-v1`, and ours
as Gymnasium's. Importing this module registers `ragen_mega/Sokoban-v0` and the others.

Interface: Gymnasium 1.x `Env` (Towers et al., arXiv:2407.17032). Through it, our environments take
the index of an action, or text if the environment takes text, and return text.
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

from ragen_mega.environments import calls
from ragen_mega.environments.protocol import Budget, StepResult, actions_of, text_of
from ragen_mega.environments.registry import ENVIRONMENTS, make

# An older version of an environment is a choice of the user.
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"gymnasium\.")

_MAX_EPISODE_STEPS = 100  # as in gym-sokoban and FrozenLake-v1
_MAX_TURNS = 20
"""Most turns of an environment whose own time limit is long."""
_MAX_DRAWN = 64
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
        """`options` are the options of `gymnasium.make`. Raises ValueError for actions of another
        kind, and whatever `gymnasium.make` raises.
        """
        self._environment = gymnasium.make(environment_id, **options)
        if "ansi" in self._environment.metadata.get("render_modes", ()):
            self._environment.close()
            self._environment = gymnasium.make(
                environment_id, **({"render_mode": "ansi"} | options)
            )
        self._draws = self._environment.render_mode == "ansi"
        self._known = _KNOWN.get(re.split(r"[/:]", environment_id)[-1].partition("-v")[0])
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


class AnyText(spaces.Text):
    """Every text, in any script and of any length; samples are short and ASCII."""

    def __init__(self) -> None:
        super().__init__(_MAX_DRAWN)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class TextWorld(gymnasium.Env[str, int | str]):
    """One of our environments, one primitive action per step.

    The seed of `reset` is the prompt seed, so episodes equal the environment's own episodes.
    `reset` takes the options `outcome_seed` and `board`.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}

    def __init__(
        self, environment_name: str, render_mode: str | None = None, **options: Any
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode must be ansi or None, not {render_mode!r}")
        self.world = make(environment_name, **options)
        self.render_mode = render_mode
        self.takes_text = not hasattr(self.world, "actions")
        # Gymnasium has one type for what `step` takes and what a space draws, NumPy's integers.
        self.action_space = (
            AnyText()  # type: ignore[assignment]
            if self.takes_text
            else spaces.Discrete(len(actions_of(self.world)))
        )
        self.observation_space = AnyText()
        self._observation = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        choices = dict(options or {})
        outcome_seed, board = choices.pop("outcome_seed", None), choices.pop("board", None)
        if choices:
            raise ValueError(
                f"unknown reset options {', '.join(map(str, choices))}; known are outcome_seed and"
                " board"
            )
        prompt_seed = int(self.np_random.integers(2**31)) if seed is None else seed
        self._observation = text_of(
            calls.reset(self.world, prompt_seed, outcome_seed=outcome_seed, board=board)
        )
        return self._observation, {"success": False}

    def step(self, action: int | str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        names = actions_of(self.world)
        if not self.action_space.contains(action):
            known = "text" if self.takes_text else f"an index into {', '.join(names)}"
            raise ValueError(f"action must be {known}, not {action!r:.60}")
        result = calls.step(self.world, action if self.takes_text else names[int(action)])
        self._observation = text_of(result.observation)
        return self._observation, result.reward, result.terminated, result.truncated, result.info

    def close(self) -> None:
        calls.close(self.world)

    def render(self) -> str | None:  # type: ignore[override]
        return self._observation if self.render_mode == "ansi" else None


def environment_id(name: str) -> str:
    """Return Gymnasium's id of the environment `name`: sokoban_large is ragen_mega/SokobanLarge-v0.
    An environment that was added after the import of this module is registered here.
    """
    words = re.split(r"\W+|_", name)
    identifier = f"ragen_mega/{''.join(word[:1].upper() + word[1:] for word in words)}-v0"
    if identifier not in gymnasium.registry:
        gymnasium.register(
            identifier,
            entry_point="ragen_mega.environments.adapters.gymnasium:TextWorld",
            max_episode_steps=_MAX_EPISODE_STEPS,
            kwargs={"environment_name": name},
        )
    return identifier


for _name in ENVIRONMENTS.names():
    environment_id(_name)
