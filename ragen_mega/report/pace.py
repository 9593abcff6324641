"""Remaining time of a run, from its latest steps and the time of an evaluation per episode."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping

_RECENT = 10
"""Latest steps whose mean predicts those to come: answers grow or shrink while a policy learns."""


class Pace:
    """Estimate of the remaining time of a run, from its plan and its finished steps.

    Nothing is said before the second step of a process: the first one compiles programs, and may
    take many times as long as those behind it.
    """

    def __init__(
        self,
        num_steps: int,
        evaluations: Mapping[int, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`evaluations`: after so many steps -> episodes that are then played here."""
        self.num_steps = num_steps
        self.num_done = 0
        """Steps that are done, by earlier processes too."""
        self._evaluations = dict(evaluations)
        self._clock = clock
        self._started = clock()
        self._has_compiled = False
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._seconds_per_episode: float | None = None
        self._num_evaluated = 0  # episodes, since the latest step
        self._anchor = self._started

    def step_done(self, num_done: int, seconds: float) -> None:
        """Record that a step took `seconds`, evaluation aside; `num_done` steps are done."""
        if self._has_compiled:
            self._recent.append(seconds)
        self._has_compiled = True
        self.num_done, self._num_evaluated, self._anchor = num_done, 0, self._clock()

    def played(self, num_episodes: int, seconds: float, *, in_evaluation: bool) -> None:
        """Record played episodes. Episodes of a rollout count until the first evaluation."""
        if in_evaluation:
            self._num_evaluated, self._anchor = self._num_evaluated + num_episodes, self._clock()
        if num_episodes and (in_evaluation or self._seconds_per_episode is None):
            self._seconds_per_episode = seconds / num_episodes

    def left(self) -> float | None:
        """Return the seconds until the last evaluation is over, None before the second step."""
        if not self._recent:
            return None
        step = statistics.mean(self._recent)
        episode, num_left = self._seconds_per_episode or 0.0, self.num_steps - self.num_done
        due = max(0, self._evaluations.get(self.num_done, 0) - self._num_evaluated) * episode
        later = sum(count for at, count in self._evaluations.items() if at > self.num_done)
        ahead = due + num_left * step + later * episode
        # The part under way may overrun; what comes after it always remains.
        under_way = due or (step if num_left else 0.0)
        return max(ahead - (self._clock() - self._anchor), ahead - under_way)

    def __str__(self) -> str:
        if not self.num_done:
            where = f"before the first of {self.num_steps} steps"
        else:
            where = f"{self.num_done} of {self.num_steps} steps"
        left = self.left()
        ahead = "" if left is None else f", about {duration(left)} left"
        return f"{where}, {duration(self._clock() - self._started)} so far{ahead}"


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`."""
    minutes = round(seconds / 60)
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
