r"""Environments of GEM (gem-llm), e.g. `gem:game:GuessTheNumber-v0-easy`.

Interface: gem-llm 0.1 (Liu et al., arXiv:2510.01051). GEM reads an answer inside `\boxed{}`; an
answer without a box is put into one.
"""

import random
from typing import Any

from ragen_mega.environments.adapters.packages import MAX_SEED, ProcessRandomness, required
from ragen_mega.environments.protocol import StepResult

_WON = 1.0
_MARKS = ("\\boxed", "```")
"""Answers with one of these go to GEM unchanged: boxes and code."""


class GemEnvironment:
    """One of GEM's single-agent text environments, with its own prompt and reward."""

    max_turns: int

    def __init__(self, environment: str, /, **options: Any) -> None:
        """`options` are keywords of the environment. Raises ValueError for an environment that is
        unknown or cannot be made, and if gem-llm is not installed.
        """
        gem = required("gem:make", "gem")
        self._random = ProcessRandomness()
        try:
            with self._random.installed():
                self._environment = gem.make(environment, **options)
        except TypeError as error:
            raise ValueError(f"gem:{environment} cannot be made: {error}") from error
        if isinstance(limit := getattr(self._environment, "max_turns", None), int):
            self.max_turns = limit
        if type(self._environment).sample_random_action is not gem.Env.sample_random_action:
            self.random_answer = self._random_answer

    def reset(self, seed: int, outcome_seed: int | None = None) -> str:
        self._random.seed(seed)
        with self._random.installed():
            observation, info = self._environment.reset(seed=seed % MAX_SEED)
        if outcome_seed is not None:
            self._random.seed(outcome_seed)
        return _text(observation, info)

    def step(self, text: str) -> StepResult:
        answer = text if any(mark in text for mark in _MARKS) else f"\\boxed{{{text}}}"
        with self._random.installed():
            observation, reward, terminated, truncated, info = self._environment.step(answer)
        return StepResult(
            _text(observation, info),
            float(reward),
            bool(terminated),
            bool(truncated),
            {"success": bool(terminated) and float(reward) >= _WON},
        )

    def _random_answer(self, draw: random.Random) -> str:
        randomness = ProcessRandomness()
        randomness.seed(draw.getrandbits(32))
        with randomness.installed():
            return str(self._environment.sample_random_action())


def _text(observation: Any, info: dict[str, Any]) -> str:
    return f"{observation}\n{info.get('suffix', '')}".strip()
