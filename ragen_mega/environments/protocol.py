"""The protocol of an environment, what it may offer beside it, and the seeds that it starts from.

The step contract is RAGEN's (arXiv:2504.20073, section 2 and appendix B); seeds are split into the
prompt seed, which every trajectory of a group shares, and the outcome seed, which belongs to one
trajectory alone.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    content: str


Observation = str | Sequence[Message]
"""Text, which our prompt wraps, or the messages themselves, which the policy sees as they are. In
place of a `Message`, a (role, content) pair or a mapping with these keys will do.
"""
Action = str | dict[str, Any]
"""What one `step` takes: the name of an action, a text, or what a parser made of one."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step led to."""

    observation: Observation
    reward: float
    terminated: bool
    """The task ended: solved or lost."""
    truncated: bool = False
    """The environment gave up before the task ended. Budgets live in the episode layer, so ours
    never do.
    """
    info: dict[str, Any] = field(default_factory=dict)
    """`success` (bool; default: the last reward of a terminated episode is positive),
    `is_action_effective` (bool: the state changed) and `is_action_valid` (False: the step was not
    understood, which costs the format penalty).
    """


@runtime_checkable
class Environment(Protocol):
    """A text world that takes one step at a time and owns its random generator.

    These two methods are required; either may be `async`. With `actions`, the legal names (they may
    change from state to state), an answer is a list of them. Without, it is free text: what stands
    in the answer tags is one step; with `tools` (JSON schemas, which go through the chat template)
    each `<tool_call>` is one; or a method `parse(text)` makes one step or several of what the
    policy wrote after its thought, and raises ValueError where it cannot.

    What else a class may have is looked up where it is used: `instruction` (the task in words),
    `answer_format` (how an answer looks, in the prompt), the limits of `Budget` and
    `format_penalty` by their names, `facts()` (the true state), `claims(thought)`
    (whether each claim about it holds), `close()`, `solver` (a `Solver`),
    `narrator` (a `Narrator`), `random_answer(generator)`, `splits`, `num_tasks`,
    `accepts_board(rows)` and `board_set` (see boards.py), and `is_instant = True` in the class
    itself: its calls take no time worth a thread.
    """

    def reset(self, seed: int) -> Observation:
        """Start an episode and return the first observation.

        `seed` draws the initial state. Where the method takes the keyword `outcome_seed` (int or
        None: derived from `seed`), that draws the randomness of outcomes; where it takes `board`
        (rows of text or None), that replaces the drawn initial state.
        """

    def step(self, action: Any) -> StepResult:
        """Do one action; a tuple (observation, reward, terminated, truncated, info) will do."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a trajectory may do."""

    max_turns: int = 5
    max_actions_per_turn: int = 5
    max_actions: int = 10
    """Actions of the whole trajectory."""
    max_response_length: int = 400
    """Tokens of one turn."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if (value := getattr(self, item.name)) < 1:
                raise ValueError(f"{item.name} must be at least 1, not {value}")

    @property
    def action_budget(self) -> int:
        """Actions that a trajectory can really hold."""
        return min(self.max_actions, self.max_turns * self.max_actions_per_turn)


@dataclass(frozen=True, slots=True)
class References:
    """Success of the reference players from one initial state, None where it is not known."""

    random: float | None
    optimum: float | None
    """Best play under the protocol."""
    optimum_closed_loop: float | None
    """Best play when the outcome of every action is seen before the next one."""
    is_exact: bool = True
    """Whether the random player's is computed from all outcomes, not sampled."""


@dataclass(frozen=True, slots=True)
class Solver:
    """An environment that can be solved exactly has one as its attribute `solver`."""

    references: Callable[[Any, Budget], References]
    """(environment, budget) -> what reference players reach from its present state."""
    optimal_actions: Callable[[Any, int], list[Action]]
    """(environment, actions left) -> what an optimal player does next; nothing if it is over. Where
    the environment has a parser of its own: what the player answers.
    """


@dataclass(frozen=True, slots=True)
class Narrator:
    """An environment whose state can be told in words has one as its attribute `narrator`; the
    warm start clones what it says.
    """

    describe: Callable[[Any, Sequence[Action]], str]
    """(environment, the actions about to be taken) -> thought: true, without a hint what is best.
    """
    actions_per_turn: int = 1
    statement: str | None = None
    """Regular expression of one statement of `describe`: those in a policy's thoughts are checked
    against what it says.
    """


def text_of(observation: Observation) -> str:
    """The words of an observation."""
    if isinstance(observation, str):
        return observation
    return "\n".join(message.content for message in observation)


def text_seed(text: str) -> int:
    """A 63-bit seed, the same in every process and run (Python salts `hash` of strings)."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stable_seed(seed: int, purpose: str) -> int:
    """The `text_seed` of `seed` for one purpose."""
    return text_seed(f"{purpose}:{seed}")


def check_seed(seed: int) -> int:
    """`seed` itself. Raises ValueError if it is negative."""
    if seed < 0:
        raise ValueError(f"a seed must be a non-negative integer, not {seed}")
    return seed


def canonical_action(action: str, legal_actions: Sequence[str]) -> str:
    """The legal name that `action` spells in any letter case. ValueError if there is none."""
    for name in legal_actions:
        if name.lower() == action.strip().lower():
            return name
    raise ValueError(f"unknown action {action!r}; the legal actions are {', '.join(legal_actions)}")
