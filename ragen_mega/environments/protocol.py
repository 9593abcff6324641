"""The protocol of an environment, its optional extensions, and the seeds of an episode.

The step contract is RAGEN's (arXiv:2504.20073, section 2 and appendix B); seeds are split into the
prompt seed, which every trajectory of a group shares, and the outcome seed, which belongs to one
trajectory alone.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

CUT = "\U000f0000"
"""A mark of private use in the content of a message: the texts before and after it are encoded
apart, and the mark itself is no text.
"""
TAG = re.compile(r"</?(?:think|answer|tool_call|tool_response)>")
"""Tags of an answer and of a tool's result."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    content: str
    name: str = ""
    """Name of the speaker, for chat templates that write it."""
    calls: str = ""
    """Calls of tools behind the content, in the form that environments read."""

    @property
    def text(self) -> str:
        """The content and the calls."""
        return "\n".join(filter(None, (self.content, self.calls)))


Observation = str | Sequence[Message]
"""Text, which our prompt wraps, or messages, which the policy sees as they are. Instead of a
`Message`, a (role, content) pair or a mapping with these two keys is accepted.
"""
Action = str | dict[str, Any]
"""Argument of one `step`: the name of an action, a text, or an object that a parser returned."""
A = TypeVar("A", bound=Action)


MAX_SEED = 2**63 - 1
"""Largest seed, which fits into a tensor."""
STEP_INFO = ("success", "is_action_valid", "is_action_effective")
"""Entries of a step's info that are read."""
OUTCOME = "outcome"
"""Entry of a step's info, and of a turn's, that is kept for metrics and people, if it is JSON."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step."""

    observation: Observation
    reward: float
    terminated: bool
    """The task ended: solved or lost."""
    truncated: bool = False
    """The environment stopped before the task ended. Our environments never do: the episode layer
    enforces the budgets.
    """
    info: dict[str, Any] = field(default_factory=dict)
    """`success` (bool; the last step's counts, however the episode ends; default: the last reward
    of a terminated episode is positive), `is_action_effective` (bool: the state changed) and
    `is_action_valid` (False: the step was not understood, which costs the format penalty).
    `outcome` of a turn's last step is kept with the turn, if it is an object of JSON.
    """


@runtime_checkable
class Environment(Protocol):
    """A text world that takes one step at a time and owns its random generator.

    These two methods are required; either may be `async`. With `actions`, the legal names (they may
    change from state to state), an answer is a list of actions. Without, it is free text: the
    content of the answer tags is one step. With `tools` (JSON schemas for the chat template), each
    `<tool_call>` is one step. A method `parse(text)` turns what the policy wrote after its thought
    into one or more steps, and raises ValueError if it cannot.

    Optional members are looked up where they are used: `instruction` (the task in words),
    `answer_format` (the format of an answer, for the prompt), the limits of `Budget` and
    `format_penalty` by their names, `facts()` (the true state), `claims(thought)` (whether each
    claim about it holds), `close()`, `solver` (a `Solver`), `narrator` (a `Narrator`),
    `example_options` (options under which the examples in prompts are played),
    `random_answer(generator)`, `difficulty` (a whole number, of the present state), `splits`,
    `num_tasks`, `is_hidden` (True: equal first observations may be of different states),
    `accepts_board(rows)` and `board_set` (see boards.py), and `is_instant = True`, set in the class
    itself: its calls are too short to need a thread.
    """

    def reset(self, seed: int) -> Observation:
        """Start an episode and return the first observation.

        `seed` draws the initial state. If the method takes the keyword `outcome_seed` (int or
        None: derived from `seed`), this draws the randomness of outcomes; if it takes `board`
        (rows of text or None), this replaces the drawn initial state.
        """

    def step(self, action: Any) -> StepResult:
        """Do one action. May also return (observation, reward, terminated, truncated, info)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a trajectory."""

    max_turns: int = 5
    max_actions_per_turn: int = 5
    max_actions: int = 10
    """Actions of the whole trajectory."""
    max_response_length: int = 400
    """Tokens of one turn."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(
                    f"{item.name} must be a whole number of at least 1, not {value!r:.60}; correct"
                    " the world's attribute, or override it by the flag of this name"
                )
            object.__setattr__(self, item.name, int(value))  # NumPy's are no JSON

    @property
    def action_budget(self) -> int:
        """The most actions that a trajectory can hold."""
        return min(self.max_actions, self.max_turns * self.max_actions_per_turn)


@dataclass(frozen=True, slots=True)
class References:
    """Success rates of the reference players from one initial state, None where unknown."""

    random: float | None
    optimum: float | None
    """Best play under the protocol."""
    optimum_closed_loop: float | None
    """Best play when the outcome of every action is seen before the next one."""
    is_exact: bool = True
    """Whether `random` is computed from all outcomes, not sampled."""


@dataclass(frozen=True, slots=True)
class Solver:
    """An environment that can be solved exactly has one as its attribute `solver`."""

    references: Callable[[Any, Budget], References]
    """(environment, budget) -> what reference players reach from its current state."""
    optimal_actions: Callable[[Any, int], Sequence[Action]]
    """(environment, actions left) -> what an optimal player does next; empty if the episode is
    over. If the environment has its own parser: the player's answer.
    """


@dataclass(frozen=True, slots=True)
class Narrator(Generic[A]):
    """An environment whose state can be described in words has one as its attribute `narrator`;
    the warm start clones what it says. `A` is the type of its actions, such as `str` for names.
    """

    describe: Callable[[Any, Sequence[A]], str]
    """(environment, the actions about to be taken) -> a true thought that gives no hint which
    action is best.
    """
    actions_per_turn: int = 1
    statement: str | None = None
    """Regular expression of one statement of `describe`. Statements in a policy's thoughts are
    checked against the statements of `describe`.
    """
    announcement: str | None = None
    """Regular expression of an action that `describe` announces, its group the action; statements
    behind it are about the state that the action leads to (None: all are about the present one).
    """
    explain: Callable[[Any, Sequence[A]], str] | None = None
    """Function like `describe` that writes sentences, for models that can talk: the thoughts of the
    examples in a prompt and of the play that a loaded model imitates. None: `describe`.
    """
    sentence: str | None = None
    """Regular expression of one sentence of `explain`, its first group the action that it is about.
    Such sentences in a policy's thoughts are checked against the sentences of `explain`.
    """


def actions_of(environment: object) -> Sequence[str]:
    """Return the legal names of the present state; none where the environment names no actions."""
    return getattr(environment, "actions", ())


def text_of(observation: Observation) -> str:
    """Return the words of an observation."""
    if isinstance(observation, str):
        return observation
    return "\n".join(message.content for message in observation)


def text_seed(text: str) -> int:
    """Return a 63-bit seed, the same in every process and run (Python salts `hash` of strings)."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stable_seed(seed: int, purpose: str) -> int:
    """Return the `text_seed` of `seed` for one purpose."""
    return text_seed(f"{purpose}:{seed}")


def check_seed(seed: int) -> int:
    """Return the seed itself. Raises ValueError unless it is from 0 to MAX_SEED."""
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"a seed must be a whole number from 0 to 2**63 - 1, not {seed}")
    return seed


def canonical_action(action: str, legal_actions: Sequence[str]) -> str:
    """Find the legal name that `action` spells in any letter case. Raises ValueError if none."""
    for name in legal_actions:
        if name.lower() == action.strip().lower():
            return name
    raise ValueError(f"unknown action {action!r}; the legal actions are {', '.join(legal_actions)}")
