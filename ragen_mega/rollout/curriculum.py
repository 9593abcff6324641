"""A curriculum by measured success: tasks of a level of difficulty are drawn once the policy solves
the tasks of the level below (curriculum learning, Bengio et al., ICML 2009).

An environment says how hard its present state is by an attribute `difficulty`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

LEAST_SHARE = 1 / 64
"""Least share of a level in the states that were looked at, 4 of 256, for at most 4000 seeds are
drawn for a task. A difficulty that 4000 seeds miss once in 20 000 tasks or more often has at most
0.25% of all states, and so few come 4 times among 256 with a probability of at most 0.4%.
"""
_MEMORY = 0.7
"""Weight of the earlier episodes of a level after each step that has further ones."""
_FOCUS = 0.5
"""Share of the tasks that are drawn from the hardest open level; the others from all open ones."""


class Levels:
    """The levels of one environment, easiest first, and their success. A level is a difficulty, or
    several where some are rare, and has the number of its hardest one.
    """

    def __init__(self, difficulties: Sequence[int], threshold: float) -> None:
        """`difficulties`: one of each state that was looked at; `threshold`: success of a level at
        which the next one opens.
        """
        self.levels, self._threshold = _levels(difficulties), threshold
        self.level_of = {
            difficulty: next(level for level in self.levels if level >= difficulty)
            for difficulty in set(difficulties)
        }
        """Level of each difficulty that was seen."""
        self._seen: dict[int, tuple[float, float]] = {}  # successes and episodes, decayed

    @property
    def hardest_open(self) -> int:
        """The first level that is not solved yet, the last one if all are."""
        return next((level for level in self.levels if not self._is_solved(level)), self.levels[-1])

    def _is_solved(self, level: int) -> bool:
        solved, played = self._seen.get(level, (0.0, 0.0))
        return played > 0 and solved / played >= self._threshold

    def wanted(self, draw: float) -> frozenset[int]:
        """Return the levels of which one task is drawn; `draw` is uniform in [0, 1)."""
        hardest = self.hardest_open
        lowest = hardest if draw < _FOCUS else self.levels[0]
        return frozenset(level for level in self.levels if lowest <= level <= hardest)

    def observe(self, results: Mapping[int, Sequence[bool]]) -> None:
        """Record the successes of a step's episodes of each level."""
        for level, successes in results.items():
            solved, played = self._seen.get(level, (0.0, 0.0))
            self._seen[level] = (
                _MEMORY * solved + sum(successes),
                _MEMORY * played + len(successes),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, as JSON values."""
        return {str(level): seen for level, seen in self._seen.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the successes of a checkpoint."""
        self._seen = {int(level): (seen[0], seen[1]) for level, seen in state.items()}


def _levels(difficulties: Sequence[int]) -> tuple[int, ...]:
    """Return the hardest difficulty of each level, easiest level first. A rare difficulty belongs
    to the level above it, and one above all other levels to the last level.
    """
    levels: list[int] = []
    count = 0
    for difficulty, number in sorted(Counter(difficulties).items()):
        count += number
        if count >= LEAST_SHARE * len(difficulties):
            levels.append(difficulty)
            count = 0
    if count:
        levels[-1:] = [max(difficulties)]
    return tuple(levels)
