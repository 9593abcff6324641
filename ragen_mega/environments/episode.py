"""The multi-turn text protocol around one environment: it writes prompts, reads responses, and
keeps track of rewards and budgets.

Source: RAGEN (arXiv:2504.20073, appendix B): at most 5 turns, 5 actions a turn and 10 actions a
trajectory, -0.1 for a turn without a well-formed answer. Unlike in the original,
the prompt announces the budget that is enforced.
"""

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from ragen_mega.environments.actions import ACTION_SEPARATOR, ParsedResponse, read_response
from ragen_mega.environments.calls import close, reset, step
from ragen_mega.environments.claims import check_claims
from ragen_mega.environments.protocol import (
    CUT,
    OUTCOME,
    TAG,
    Action,
    Budget,
    Environment,
    Message,
    Observation,
    StepResult,
    actions_of,
    text_of,
)
from ragen_mega.environments.tool_calls import CALL_FORMAT
from ragen_mega.extensions.scalars import as_number

PromptStyle = Literal["full", "system", "brief", "compact"]

_MALFORMED = "Your answer could not be read. Keep to the format."
_MARKER = re.compile(rf"<\|[^|<>\s]{{1,40}}\|>|{TAG.pattern}")
_TOKENS_PER_WORD = 2
"""Upper bound of the tokens of a word, with a share of the tags, so that no answer within the
announced length is cut off.
"""
ERROR = "error"
"""Key of a turn's info: why a failure of the environment ended the trajectory."""
FAILED_ACTION = "failed_action"
"""Key of a turn's info: the action whose step failed."""
TRUNCATED_BY = "truncated_by"
"""Key of the last turn's info: what cut the trajectory, one of `CAUSES`."""
CAUSES = ("budget", "environment", "context", "time", "error")
"""The budget of turns or actions, the environment itself, the context, the time limit of a call, an
error of the environment.
"""


PROBLEM = "problem"
"""Key of a turn's info: what a parser said of an answer that it could not read."""
QUOTED = "quoted_markers"
"""Key of a turn's info: markers of chat templates in what the environment said."""
BY_REWARD = "success_by_reward"
"""Key of a turn's info: the reward, other than 1, for which alone the episode counts as solved."""
FORMAT_PENALTY = -0.1
SYSTEM_PROMPT = "You're a helpful assistant."


@dataclass(frozen=True, slots=True)
class EpisodeConfig:
    """Budgets, format rules and wording of episodes. A field that is None takes the environment's
    attribute of the same name, else the default of `Budget` or `FORMAT_PENALTY`.
    """

    max_turns: int | None = None
    max_actions_per_turn: int | None = None
    max_actions: int | None = None
    max_response_length: int | None = None
    """Tokens of one answer. Prompts announce the limit; who samples enforces it."""
    format_penalty: float | None = None
    """Added to the reward of every turn without a well-formed answer or with an unknown action."""
    think: bool = True
    """The response follows a forced `<think>`; otherwise it is only an answer."""
    prompt_style: PromptStyle = "full"
    """full: task in the first user message; system: task in the system message; brief: task and
    format in the system message, turns as in compact; compact: state and budget only.
    """
    system_prompt: str | None = None
    """System message before the task; an empty text leaves it out. None: `SYSTEM_PROMPT` where the
    style is full, no system message elsewhere.
    """

    def __post_init__(self) -> None:
        self.budget(None)
        self.penalty(None)
        if self.prompt_style not in get_args(PromptStyle):
            raise ValueError(
                f"prompt_style must be one of {', '.join(get_args(PromptStyle))}, not"
                f" {self.prompt_style!r}"
            )

    def budget(self, environment: Any) -> Budget:
        """Return the limits of a trajectory of this environment. Free text is one step per turn. If
        neither the flags nor the environment limit the actions, an environment that sets its own
        turns or has no `actions` may use all of its turns.
        """
        limits = {item.name: self._setting(item.name, environment) for item in fields(Budget)}
        limits = {name: limit for name, limit in limits.items() if limit is not None}
        if environment is None:
            return Budget(**limits)
        if not any(hasattr(environment, name) for name in ("actions", "tools", "parse")):
            limits["max_actions_per_turn"] = 1
        if hasattr(environment, "max_turns") or not hasattr(environment, "actions"):
            known = Budget(**limits)
            limits.setdefault("max_actions", known.max_turns * known.max_actions_per_turn)
        return Budget(**limits)

    def penalty(self, environment: Any) -> float:
        """Return the penalty of a malformed answer. Raises ValueError unless finite and <= 0."""
        own = self._setting("format_penalty", environment)
        penalty = as_number(FORMAT_PENALTY if own is None else own)
        if penalty is None or not math.isfinite(penalty) or penalty > 0:
            raise ValueError(
                "format_penalty is added to the reward and must be finite and <= 0, not"
                f" {own!r:.60}; write -0.1 for a penalty of 0.1"
            )
        return penalty

    def _setting(self, name: str, environment: Any) -> Any:
        own = getattr(self, name, None)
        return getattr(environment, name, None) if own is None else own


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The outcome of one response."""

    reward: float
    """Sum of the rewards of the executed actions, plus the format penalty if it applies."""
    messages: tuple[Message, ...]
    """Messages that the policy sees next; empty when the episode is over."""
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    """success, is_format_valid, is_action_valid, is_action_effective, num_actions, actions,
    thought; outcome, if the last step has one; claims (if they can be checked): how many in the
    thought are true, and how many there are.
    """


def failed_turn(error: Exception, action: Action | None = None) -> TurnResult:
    """Return the end of a trajectory whose environment did not answer, with the reason as data;
    `action` is what the environment was asked to do.
    """
    cause = "time" if getattr(error, "is_late", False) else "error"
    info = {ERROR: str(error), "success": False, TRUNCATED_BY: cause}
    if action is not None:
        info[FAILED_ACTION] = action
    return TurnResult(reward=0.0, messages=(), terminated=False, truncated=True, info=info)


class Episode:
    """Drives one environment through one trajectory at a time."""

    def __init__(
        self, environment: Environment, config: EpisodeConfig, examples: Sequence[Message] = ()
    ) -> None:
        """`examples`: earlier turns, with their answers, that every prompt shows before the
        episode's own. Raises ValueError if a limit set by the environment is invalid.
        """
        self.environment = environment
        self.config = config
        self._examples = examples
        self.budget = config.budget(environment)
        self._penalty = config.penalty(environment)
        self.tools: list[dict[str, Any]] | None = getattr(environment, "tools", None)
        """JSON schemas for the chat template."""
        self.done = True
        self._num_turns = 0
        self._num_actions = 0
        self._is_success = False  # as of the last step
        self.observation: Observation = ""
        """The latest observation."""
        self.action: Action | None = None
        """The action that the environment is doing; after a failure, the one that failed."""
        self._opening: tuple[Message, ...] | None = None  # if the environment speaks in messages
        self._first: list[Message] = []  # the first prompt, if it is a text
        self._num_quoted = 0  # markers in the first observation, for the info of the first turn
        self.task = ""
        """The task in words, with which the first message of a prompt begins."""

    @property
    def takes_names(self) -> bool:
        """Whether an answer is a list of action names, not free text or the input of a parser."""
        environment = self.environment
        return hasattr(environment, "actions") and not (self.tools or hasattr(environment, "parse"))

    @property
    def actions_left(self) -> int:
        """Actions that can still be executed: the budget, or what the remaining turns can hold if
        that is less.
        """
        return min(
            self.budget.max_actions - self._num_actions,
            self.turns_left * self.budget.max_actions_per_turn,
        )

    @property
    def turns_left(self) -> int:
        """Turns that the budget of turns still allows."""
        return self.budget.max_turns - self._num_turns

    def start(
        self, seed: int, *, outcome_seed: int | None = None, board: Sequence[str] | None = None
    ) -> list[Message]:
        """Reset the environment and return what the policy sees first: the environment's messages,
        or an optional system message and a user message around its text.
        """
        self.observation = reset(self.environment, seed, outcome_seed=outcome_seed, board=board)
        self.budget = self.config.budget(self.environment)  # its actions may come with the state
        self._num_turns = self._num_actions = 0
        self.done = self._is_success = False
        self.task = "" if self.config.prompt_style == "compact" else self._task_prompt()
        if self.config.prompt_style == "brief":
            self.task += self._format_rule()
        self._num_quoted = _count_markers(self.observation)
        if isinstance(self.observation, str):
            self._opening = None
            self._first = self.beginning([Message("user", self._turn_prompt(self.observation))])
            return list(self._first)
        own = [*map(quoted, self.observation)]
        first = 1 if own[:1] and own[0].role == "system" else 0
        opening = [*own[:first], *self._examples, *own[first:]]
        self._opening = tuple(self._under_system_prompt(opening))
        return list(self._opening)

    def beginning(self, messages: Sequence[Message]) -> list[Message]:
        """Return the context of a policy that begins with the `messages` of a turn: the task comes
        before them, as in the first turn, and the examples. The task of an environment that speaks
        in messages is its first prompt.
        """
        if self._opening is not None:
            return [*self._opening, *messages]
        if not isinstance(self.observation, str):  # a text first, such as a question
            return [*self._first, *messages]
        messages = [*self._examples, *messages]
        if self.config.prompt_style == "compact":
            return self._under_system_prompt(messages)
        if self.config.prompt_style in ("system", "brief"):
            return self._under_system_prompt([Message("system", self.task), *messages])
        task = self.task
        if messages[0].role == "user":
            task, messages = task + messages[0].content, messages[1:]
        return self._under_system_prompt([Message("user", task), *messages], SYSTEM_PROMPT)

    def _under_system_prompt(self, messages: Sequence[Message], default: str = "") -> list[Message]:
        """Put the system prompt before the messages, or at the start of their system message."""
        prompt = default if self.config.system_prompt is None else self.config.system_prompt
        if not prompt:
            return list(messages)
        if messages and messages[0].role == "system":
            prompt, messages = f"{prompt}\n{messages[0].content}", messages[1:]
        return [Message("system", prompt), *messages]

    def respond(self, text: str) -> TurnResult:
        """Execute the model's text of this turn. Any text is legal.

        Raises RuntimeError if the episode is over, and whatever `calls.step` and the environment's
        parser raise.
        """
        if self.done:
            raise RuntimeError("the episode is over; call start before the next response")
        self.action = None
        parsed = read_response(
            self.environment,
            text,
            think=self.config.think,
            max_actions=self.budget.max_actions_per_turn,
        )
        claims = check_claims(self.environment, parsed.thought) if parsed.thought else None
        actions = parsed.actions
        # A copy of what was said, because the environment may write into it, or use it again.
        parsed = replace(parsed, actions=copy.deepcopy(actions))
        results = self._execute(actions)
        last = results[-1] if results else StepResult(self.observation, 0.0, False)
        if results:
            self._is_success = is_success(last)
        info = {"success": self._is_success} | _turn_info(parsed, results)
        if OUTCOME in last.info:
            info[OUTCOME] = last.info[OUTCOME]
        if last.terminated and "success" not in last.info and is_partial(last.reward):
            info[BY_REWARD] = last.reward
        if parsed.problem:
            info[PROBLEM] = parsed.problem
        if claims is not None:
            info["claims"] = (sum(claims), len(claims))
        self._num_turns += 1
        reward = math.fsum(result.reward for result in results)
        terminated = last.terminated
        truncated = not terminated and (last.truncated or self.actions_left == 0)
        if truncated:
            info[TRUNCATED_BY] = "environment" if last.truncated else "budget"
        self.done = terminated or truncated
        messages: tuple[Message, ...] = ()
        if not self.done:
            messages = self._next_messages(results, reward, parsed.problem)
            is_text = isinstance(self.observation, str)
            news = [self.observation] if is_text else [result.observation for result in results]
            self._num_quoted += sum(map(_count_markers, news))  # not of the program's own words
        if self._num_quoted:
            info[QUOTED], self._num_quoted = self._num_quoted, 0
        is_understood = info["is_format_valid"] and info["is_action_valid"]
        return TurnResult(
            reward=reward + (0.0 if is_understood else self._penalty),
            messages=messages,
            terminated=terminated,
            truncated=truncated,
            info=info,
        )

    def close(self) -> None:
        """Close the environment."""
        close(self.environment)

    def _execute(self, actions: Sequence[Action]) -> list[StepResult]:
        """Run the actions in order until the environment ends or the budget does."""
        results: list[StepResult] = []
        for action in actions[: self.budget.max_actions - self._num_actions]:
            self.action = copy.deepcopy(action)  # which the environment may write into
            result = step(self.environment, action)
            results.append(result)
            self._num_actions += 1
            self.observation = result.observation
            if result.terminated or result.truncated:
                break
        self.action = None
        return results

    def _next_messages(
        self, results: Sequence[StepResult], reward: float, problem: str
    ) -> tuple[Message, ...]:
        """Return the environment's answer: the messages of all steps of the turn, or the latest
        text; `problem` is the problem of a tool call.
        """
        observations = [
            result.observation for result in results if not isinstance(result.observation, str)
        ]
        if observations and not isinstance(self.observation, str):
            return tuple(quoted(message) for messages in observations for message in messages)
        if not isinstance(self.observation, str):  # nothing was done, so nothing is new
            return (Message("user", quote(problem) or _MALFORMED),)
        prompt = self._turn_prompt(self.observation)
        if problem:
            prompt = f"{quote(problem)}\n{prompt}"
        if self.config.prompt_style in ("full", "system"):
            prompt = f"Reward:\n{round(reward, 6):g}\n{prompt}"
        return (Message("user", prompt),)

    def _turn_prompt(self, observation: str) -> str:
        actions_left, config = self.actions_left, self.config
        turns_left = min(self.turns_left, actions_left)
        if config.prompt_style in ("brief", "compact"):
            return f"{quote(observation)}\n{actions_left if self.takes_names else turns_left} left"
        left = f"{_count(turns_left, 'turn')} left"
        if self.takes_names:
            actions_now = min(actions_left, self.budget.max_actions_per_turn)
            left = (
                f"{_count(actions_left, 'action')} left and may use at most {actions_now} in this"
                " turn"
            )
        return (
            f"Turn {self._num_turns + 1}:\nState:\n{quote(observation)}\nYou have {left}."
            f" {self._format_rule()}"
        )

    def _format_rule(self) -> str:
        thoughts = "<think> [Your thoughts] </think> " if self.config.think else ""
        max_words = max(1, self.budget.max_response_length // _TOKENS_PER_WORD)
        return (
            f"Always output: {thoughts}{self._answer_format()} with no extra text. Strictly follow"
            f" this format. Max response length: {max_words} words (tokens).\n"
        )

    def _answer_format(self) -> str:
        if self.tools:
            default = CALL_FORMAT
        elif hasattr(self.environment, "parse"):
            default = "[your answer]"
        else:
            default = "<answer> [your answer] </answer>"
        return getattr(self.environment, "answer_format", default)

    def _task_prompt(self) -> str:
        instruction, turns = getattr(self.environment, "instruction", None), self.budget.max_turns
        if not self.takes_names:
            return f"{instruction}\nYou have {_count(turns, 'turn')}.\n".removeprefix("None\n")
        if instruction is None:
            instruction = "Your available actions are:\n" + ", ".join(actions_of(self.environment))
        per_turn = min(self.budget.max_actions_per_turn, self.budget.action_budget)
        return (
            f"{instruction}\n"
            f"You have {_count(turns, 'turn')}. You can make up to"
            f" {_count(per_turn, 'action')} in one turn "
            f"and {_count(self.budget.action_budget, 'action')} in total, separated by the action"
            " separator "
            f'" {ACTION_SEPARATOR} "\n'
        )


def quote(text: str) -> str:
    """Return the text of a world with a CUT in every marker of chat templates, so that a renderer
    encodes its letters and not a control token.
    """
    return _MARKER.sub(lambda found: f"{found[0][0]}{CUT}{found[0][1:]}", text)


def quoted(message: Message) -> Message:
    """Return the message of a world, quoted."""
    content = quote(message.content)
    return message if content == message.content else replace(message, content=content)


def _count_markers(observation: Observation) -> int:
    return len(_MARKER.findall(text_of(observation)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def is_success(result: StepResult) -> bool:
    """Return whether the task is done if this is the last step: as the environment says, else
    whether it was terminated with a positive reward.
    """
    return bool(result.info.get("success", result.terminated and result.reward > 0))


def is_partial(reward: float) -> bool:
    """Return whether a reward counts as success by default and may be partial credit."""
    return reward > 0 and reward != 1


def _turn_info(parsed: ParsedResponse, results: Sequence[StepResult]) -> dict[str, Any]:
    return {
        "is_format_valid": parsed.is_format_valid,
        "is_action_valid": parsed.is_action_valid
        and all(bool(result.info.get("is_action_valid", True)) for result in results),
        "is_action_effective": any(
            bool(result.info.get("is_action_effective")) for result in results
        ),
        "num_actions": len(results),
        "actions": parsed.actions[: len(results)],
        "thought": parsed.thought,
    }
