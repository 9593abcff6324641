"""Tasks of reasoning-gym, e.g. `reasoning_gym:leg_counting`: one question, one or several attempts.

Interface: reasoning-gym 0.1 (Stojanovski et al., arXiv:2505.24760); its own `score_answer`, from 0
to 1, is the reward.
"""

from typing import Any

from ragen_mega.environments.adapters.packages import MAX_SEED, required
from ragen_mega.environments.protocol import StepResult

_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError)
"""Errors that scorers raise for answers that they cannot read."""


class ReasoningTask:
    """A question drawn by the seed, answered in free text.

    With several attempts, each pays how much it improves on the best score so far, so that a
    trajectory's reward is its best score; a wrong answer is told its score.
    """

    max_turns: int

    def __init__(self, task: str, /, attempts: int = 1, **options: Any) -> None:
        """`options` are the fields of the task's configuration. Raises ValueError for an unknown
        task or option, and if reasoning-gym is not installed.
        """
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {attempts}")
        self._create = required("reasoning_gym:create_dataset", "reasoning-gym").create_dataset
        self._task, self._options = task, options
        self.max_turns = attempts
        try:
            self._draw(0)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"reasoning_gym:{task} cannot be drawn: {error}") from error

    def reset(self, seed: int) -> str:
        self._draw(seed)
        self._best, self._attempts_left = 0.0, self.max_turns
        return self._entry["question"].strip()

    def step(self, text: str) -> StepResult:
        try:
            score, is_readable = float(self._tasks.score_answer(text, self._entry)), True
        except _UNREADABLE:
            score, is_readable = 0.0, False
        self._attempts_left -= 1
        is_solved = score >= 1.0
        gain = max(0.0, score - self._best)
        self._best += gain
        return StepResult(
            "Correct." if is_solved else f"Wrong: this scores {score:.3g} of 1. Try again.",
            gain,
            terminated=is_solved or self._attempts_left == 0,
            info={"success": is_solved, "is_action_valid": is_readable},
        )

    def _draw(self, seed: int) -> None:
        self._tasks = self._create(self._task, seed=seed % MAX_SEED, size=1, **self._options)
        self._entry = self._tasks[0]
