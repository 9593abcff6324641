"""Reverse: write words in the opposite order, the usual first task of reinforcement learning."""

import math
import random
from typing import Any, Literal

from ragen_mega.environments.actions import same_word
from ragen_mega.environments.protocol import (
    Budget,
    References,
    Solver,
    StepResult,
    check_seed,
    stable_seed,
)

WORDS = tuple(
    "cat dog sun map tree fish ball milk bird star moon rain snow wind fire leaf rock sand gold"
    " ship boat road door desk lamp book cup fork rice corn bean meat soup cake salt ring coin shoe"
    " coat hand foot head nose knee".split()
)
_EXAMPLE_WORDS = ("apple", "pen", "horse", "wall", "tea", "chair", "bread", "hat")
Score = Literal["exact", "in_place"]


def references(environment: "Reverse", budget: Budget) -> References:
    """Return the rate of a player who writes the words in any order, drawn uniformly."""
    return References(1.0 / math.factorial(len(environment.words)), 1.0, 1.0)


class Reverse:
    """One answer, one reward. `exact` pays 1 for the right answer; `in_place` pays the share of the
    words that stand in their place. Success means the right answer.
    """

    is_instant = True
    max_turns = max_actions = max_actions_per_turn = 1
    example_options = ({"vocabulary": _EXAMPLE_WORDS},)  # no word of an episode
    solver = Solver(references, lambda world, left: [] if world.is_over else [world.answer])

    def __init__(
        self,
        *,
        min_words: int = 2,
        max_words: int = 2,
        score: Score = "exact",
        vocabulary: tuple[str, ...] = WORDS,
    ) -> None:
        """`min_words`, `max_words`: number of words of an episode, drawn uniformly. Raises
        ValueError unless the vocabulary holds as many.
        """
        if not 2 <= min_words <= max_words <= len(set(vocabulary)):
            raise ValueError(
                "min_words and max_words must be in order, from 2 to the"
                f" {len(set(vocabulary))} words of the vocabulary, not {min_words} and {max_words}"
            )
        self._sizes, self._score, self._vocabulary = (min_words, max_words), score, vocabulary
        self.instruction = "Write the words that you are given in the opposite order."
        self.words: list[str] = []
        """Words of the episode, as they are shown."""
        self.is_over = True
        """Whether no episode is running."""

    @property
    def answer(self) -> str:
        """The right answer."""
        return " ".join(self.words[::-1])

    @property
    def difficulty(self) -> int:
        """Number of words."""
        return len(self.words)

    def reset(self, seed: int) -> str:
        draw = random.Random(stable_seed(check_seed(seed), "reverse"))
        self.words = draw.sample(self._vocabulary, draw.randint(*self._sizes))
        self.is_over = False
        return f"Write these words in the opposite order: {' '.join(self.words)}"

    def step(self, action: str) -> StepResult:
        if self.is_over:
            raise RuntimeError("the answer has been given; call reset before the next step")
        self.is_over = True
        given, right = same_word(action).split(), same_word(self.answer).split()
        reward = float(given == right)
        if self._score == "in_place":
            hits = sum(a == b for a, b in zip(given, right, strict=False))
            reward = hits / max(len(given), len(right))
        text = "Right." if given == right else f"The answer is: {self.answer}"
        return StepResult(text, reward, terminated=True, info={"success": given == right})

    def random_answer(self, draw: random.Random) -> str:
        """Return the words of the episode in any order, drawn uniformly."""
        return " ".join(draw.sample(self.words, len(self.words)))

    def facts(self) -> dict[str, Any]:
        """`words` in the order shown."""
        return {"words": list(self.words)}
