"""The multi-turn text protocol around one environment: prompts out, responses in, rewards and
budgets kept.

Source: RAGEN (arXiv:2504.20073, appendix B): at most 5 turns, 5 actions a turn and 10 actions a
trajectory, -0.1 for a turn without a well-formed answer. Unlike the original the prompt announces
the budget that is enforced.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ragen_mega.environments.actions import ACTION_SEPARATOR, ParsedResponse, parse_response
from ragen_mega.environments.calls import reset, step
from ragen_mega.environments.protocol import Budget, Environment, StepResult

PromptStyle = Literal["full", "system", "compact"]

_TOKENS_PER_WORD = 2
"""With the tags of an answer, at most, so that what prompts allow is not cut."""
ERROR = "error"
"""Key of a turn's info under which a trajectory that its environment ended says why."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class EpisodeConfig(Budget):
    """Budgets, format rules and wording of an episode."""

    format_penalty: float = -0.1
    """Added to the reward of every turn without a well-formed answer or with an unknown action."""
    think: bool = True
    """The response follows a forced `<think>`; otherwise it is an answer alone."""
    prompt_style: PromptStyle = "full"
    """full: task in the first user message; system: task in the system message; compact: state and
    budget only.
    """

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_actions_per_turn", "max_actions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not math.isfinite(self.format_penalty) or self.format_penalty > 0:
            raise ValueError(
                "format_penalty is added to the reward and must be finite and <= 0, not"
                f" {self.format_penalty}; write -0.1 for a penalty of 0.1"
            )
        if self.prompt_style not in get_args(PromptStyle):
            raise ValueError(
                f"prompt_style must be one of {', '.join(get_args(PromptStyle))}, not"
                f" {self.prompt_style!r}"
            )


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What one response led to."""

    reward: float
    """Sum of the rewards of the executed actions, plus the format penalty if it is due."""
    message: Message | None
    """The next user message, None when the episode is over."""
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    """success, is_format_valid, is_action_valid, is_action_effective, num_actions, actions,
    thought.
    """


def failed_turn(error: Exception) -> TurnResult:
    """The end of a trajectory whose environment did not answer, with the reason as data."""
    info = {ERROR: str(error), "success": False}
    return TurnResult(reward=0.0, message=None, terminated=False, truncated=True, info=info)


class Episode:
    """Drives one environment through one trajectory at a time."""

    def __init__(self, environment: Environment, config: EpisodeConfig) -> None:
        self.environment = environment
        self.config = config
        self.max_response_length = 400
        """Tokens that an answer may have; whoever plays the episode knows, prompts announce it."""
        self.done = True
        self._num_turns = 0
        self._num_actions = 0
        self.observation = ""
        """The latest."""

    @property
    def actions_left(self) -> int:
        """Actions that can still be executed: the budget, or what the remaining turns can hold if
        that is less.
        """
        turns_left = self.config.max_turns - self._num_turns
        return min(
            self.config.max_actions - self._num_actions,
            turns_left * self.config.max_actions_per_turn,
        )

    def start(
        self, seed: int, *, outcome_seed: int | None = None, board: Sequence[str] | None = None
    ) -> list[Message]:
        """Reset the environment; an optional system message and the first user message."""
        self.observation = reset(self.environment, seed, outcome_seed=outcome_seed, board=board)
        self._num_turns = self._num_actions = 0
        self.done = False
        prompt = self._turn_prompt()
        if self.config.prompt_style == "compact":
            return [Message("user", prompt)]
        if self.config.prompt_style == "system":
            return [Message("system", self._task_prompt()), Message("user", prompt)]
        return [
            Message("system", "You're a helpful assistant."),
            Message("user", self._task_prompt() + prompt),
        ]

    def respond(self, text: str) -> TurnResult:
        """Execute the model's text of this turn. Any text is legal.

        Raises RuntimeError if the episode is over, and what `calls.step` does for an answer that
        breaks a rule.
        """
        if self.done:
            raise RuntimeError("the episode is over; call start before the next response")
        parsed = parse_response(
            text,
            legal_actions=self.environment.actions,
            think=self.config.think,
            max_actions=self.config.max_actions_per_turn,
        )
        results = self._execute(parsed.actions)
        self._num_turns += 1
        environment_reward = math.fsum(result.reward for result in results)
        terminated = bool(results) and results[-1].terminated
        truncated = not terminated and (
            (bool(results) and results[-1].truncated) or self.actions_left == 0
        )
        self.done = terminated or truncated
        message = None if self.done else Message("user", self._next_prompt(environment_reward))
        return TurnResult(
            reward=environment_reward
            + (self.config.format_penalty if parsed.is_penalised else 0.0),
            message=message,
            terminated=terminated,
            truncated=truncated,
            info=_turn_info(parsed, results),
        )

    def _execute(self, actions: Sequence[str]) -> list[StepResult]:
        """Run the actions in order until the environment ends or the budget does."""
        results: list[StepResult] = []
        for action in actions[: self.config.max_actions - self._num_actions]:
            result = step(self.environment, action)
            results.append(result)
            self._num_actions += 1
            self.observation = result.observation
            if result.terminated or result.truncated:
                break
        return results

    def _next_prompt(self, reward: float) -> str:
        if self.config.prompt_style == "compact":
            return self._turn_prompt()
        return f"Reward:\n{round(reward, 6):g}\n{self._turn_prompt()}"

    def _turn_prompt(self) -> str:
        actions_left = self.actions_left
        if self.config.prompt_style == "compact":
            return f"{self.observation}\n{actions_left} left"
        actions_now = min(actions_left, self.config.max_actions_per_turn)
        thoughts = "<think> [Your thoughts] </think> " if self.config.think else ""
        return (
            f"Turn {self._num_turns + 1}:\nState:\n{self.observation}\nYou have"
            f" {_count(actions_left, 'action')} left and may use at most {actions_now} in this"
            f" turn. Always output: {thoughts}<answer> [your answer] </answer> with no extra text."
            f" Strictly follow this format. Max response length:"
            f" {max(1, self.max_response_length // _TOKENS_PER_WORD)} words (tokens).\n"
        )

    def _task_prompt(self) -> str:
        config = self.config
        per_turn = min(config.max_actions_per_turn, config.action_budget)
        actions = "Your available actions are:\n" + ", ".join(self.environment.actions)
        return (
            f"{getattr(self.environment, 'instruction', actions)}\n"
            f"You have {_count(config.max_turns, 'turn')}. You can make up to"
            f" {_count(per_turn, 'action')} in one turn "
            f"and {_count(config.action_budget, 'action')} in total, separated by the action"
            " separator "
            f'" {ACTION_SEPARATOR} "\n'
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def is_success(result: StepResult) -> bool:
    """Whether the task ended well: as the environment says, else by a positive reward."""
    return result.terminated and bool(result.info.get("success", result.reward > 0))


def _turn_info(parsed: ParsedResponse, results: Sequence[StepResult]) -> dict[str, Any]:
    return {
        "success": bool(results) and is_success(results[-1]),
        "is_format_valid": parsed.is_format_valid,
        "is_action_valid": parsed.is_action_valid,
        "is_action_effective": any(
            bool(result.info.get("is_action_effective")) for result in results
        ),
        "num_actions": len(results),
        "actions": parsed.actions[: len(results)],
        "thought": parsed.thought,
    }
