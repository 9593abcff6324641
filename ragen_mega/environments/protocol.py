"""The environment protocol, the registry of environments and the seeds that they start from.

The step contract is RAGEN's (arXiv:2504.20073, section 2 and appendix B); seeds are split into the
prompt seed, which every trajectory of a group shares, and the outcome seed, which belongs to one
trajectory alone.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import (
    Any,
    Literal,
    Protocol,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one primitive action led to."""

    observation: str
    reward: float
    terminated: bool
    """The task ended: solved or lost."""
    truncated: bool
    """The environment gave up before the task ended. Budgets live in the episode layer, so ours
    never do.
    """
    info: dict[str, Any]
    """Always `success` (bool) and `is_action_effective` (bool: the state changed)."""


@runtime_checkable
class Environment(Protocol):
    """A text world that takes one primitive action at a time and owns its random generator."""

    actions: tuple[str, ...]
    """Legal action names."""
    instruction: str
    """Task text: rules, meaning of the symbols, available actions."""

    def reset(
        self, seed: int, *, outcome_seed: int | None = None, board: Sequence[str] | None = None
    ) -> str:
        """Start an episode and return the first observation.

        `seed` draws the initial state, `outcome_seed` the randomness of outcomes (default: derived
        from `seed`), `board` replaces the drawn initial state. Raises ValueError for a negative
        seed or a malformed board.
        """
        ...

    def step(self, action: str) -> StepResult:
        """Do one action, named in any letter case. ValueError if unknown, RuntimeError outside an
        episode.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """The true state, for scripted players and solvers."""
        ...


@dataclass(frozen=True, slots=True)
class Registration:
    """Where an environment lives (`module:Class`, imported on first use) and the options that its
    name implies.
    """

    entry_point: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> type[Any]:
        """Import the class."""
        module, _, class_name = self.entry_point.partition(":")
        loaded = getattr(importlib.import_module(module), class_name)
        if not isinstance(loaded, type):
            raise TypeError(f"entry point {self.entry_point} must name a class, not {loaded!r}")
        return loaded


_BANDIT = "ragen_mega.environments.worlds.bandit.world:Bandit"
_SOKOBAN = "ragen_mega.environments.worlds.sokoban.world:Sokoban"
_FROZEN_LAKE = "ragen_mega.environments.worlds.frozen_lake.world:FrozenLake"

# RAGEN's script names and paper names of the two transfer bandits are swapped; the scripts' reading
# is kept here.
_REGISTRY: dict[str, Registration] = {
    "bandit": Registration(_BANDIT, {"low_arm": "Phoenix", "high_arm": "Dragon"}),
    "bandit_test": Registration(_BANDIT, {"low_arm": "Trader", "high_arm": "Librarian"}),
    "bandit_reversed": Registration(_BANDIT, {"low_arm": "Librarian", "high_arm": "Trader"}),
    "sokoban": Registration(_SOKOBAN),
    # 8 backward moves, counted exactly, give the difficulty of the original depth-first search of
    # depth 10.
    "sokoban_large": Registration(_SOKOBAN, {"dim": 8, "num_boxes": 2, "search_depth": 8}),
    "sokoban_new_vocabulary": Registration(_SOKOBAN, {"vocabulary": "new", "search_depth": 30}),
    "frozen_lake": Registration(_FROZEN_LAKE),
}


def names() -> list[str]:
    """Names that `make` knows."""
    return sorted(_REGISTRY)


def make(name: str, **options: Any) -> Environment:
    """Build the environment `name`; `options` override what the name implies.

    Raises ValueError for an unknown name, an unknown option or an option value that the environment
    rejects.
    """
    registration = _REGISTRY.get(name)
    if registration is None:
        raise ValueError(f"unknown environment {name!r}; choose one of {', '.join(names())}")
    constructor = registration.load()
    valid = list(inspect.signature(constructor).parameters)
    unknown = sorted(set(options) - set(valid))
    if unknown:
        raise ValueError(
            f"environment {name} has no option {', '.join(unknown)}; its options are"
            f" {', '.join(valid)}"
        )
    hints = get_type_hints(constructor.__init__)
    for option, value in options.items():
        if not _has_type(value, hints.get(option, Any)):
            kind = inspect.formatannotation(hints[option])
            raise ValueError(f"option {option} of environment {name} must be {kind}, not {value!r}")
    environment: Environment = constructor(**{**registration.options, **options})
    return environment


def _has_type(value: Any, hint: Any) -> bool:
    """Whether an option value has its annotated type; an int is a fine float, a bool is neither."""
    if get_origin(hint) in (Union, UnionType):
        return any(_has_type(value, member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return hint is Any or isinstance(
        value, (int, float) if hint is float else get_origin(hint) or hint
    )


def stable_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed derived from `seed`, the same in every process (Python salts `hash` of strings
    per process).
    """
    digest = hashlib.blake2b(f"{purpose}:{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def check_seed(seed: int) -> int:
    """`seed` itself. Raises ValueError if it is negative."""
    if seed < 0:
        raise ValueError(f"a seed must be a non-negative integer, not {seed}")
    return seed


def canonical_action(action: str, legal_actions: Sequence[str]) -> str:
    """The legal name that `action` spells in any letter case. Raises ValueError if there is none."""
    for name in legal_actions:
        if name.lower() == action.strip().lower():
            return name
    raise ValueError(f"unknown action {action!r}; the legal actions are {', '.join(legal_actions)}")
