"""Position of this rank - step, stage, and what it waits for - and the seconds of its waits, by
stage and cause: for the meter of idleness (`run/idleness.py`) and the watch over ranks that stand
still (`ranks/watch.py`).
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Cause = Literal["ranks", "samples", "weights"]
"""Kind of a wait: for other ranks in a collective, for a rollout of ranks that sample, for the
weights of ranks that train.
"""
_SHOWN_SECONDS = 1e-3
"""Shorter waits are no spans of the timeline."""


class Position:
    """Position of the main thread of a rank. Other threads may read it, and their own waits do not
    count.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        """The step under way; None before the first."""
        self.stage = "start"
        self.awaited: str | None = None
        """Object of the wait under way."""
        self.is_polling = False
        """Whether it asks for that again and again, so that its line changes though nothing comes.
        """
        self.num_moves = 0
        """Count of stages and turns that have begun or ended, of whatever shows progress."""
        self.seconds: defaultdict[tuple[str, Cause], float] = defaultdict(float)
        """(Stage, cause) -> seconds since they were last cleared."""
        self.requests: dict[object, tuple[str, float]] = {}
        """Requests without an answer, of which a rank may have many: what, since when."""
        self.spans: list[tuple[str, float, float]] = []
        """Waits since they were last taken: cause, start in seconds since 1970, seconds."""

    @contextmanager
    def in_stage(self, name: str) -> Iterator[None]:
        """Name the stage of the block."""
        outside, self.stage = self.stage, name
        self.num_moves += 1
        try:
            yield
        finally:
            self.stage = outside
            self.num_moves += 1

    @contextmanager
    def waiting(self, cause: Cause, what: str, *, polls: bool = False) -> Iterator[None]:
        """Count the seconds of the block as a wait for `what`; of nested waits the outer one
        counts. `polls`: the block asks again and again.
        """
        if self.awaited is not None or threading.current_thread() is not threading.main_thread():
            yield
            return
        begin, start = time.time(), time.monotonic()
        self.awaited, self.is_polling = what, polls
        try:
            yield
        finally:
            self.awaited, self.is_polling = None, False
            seconds = time.monotonic() - start
            self.seconds[self.stage, cause] += seconds
            if seconds >= _SHOWN_SECONDS:
                self.spans.append((f"waiting for {cause}", begin, seconds))

    @contextmanager
    def requesting(self, what: str) -> Iterator[None]:
        """Keep a request in `requests` for the block."""
        key = object()
        self.requests[key] = what, time.monotonic()
        try:
            yield
        finally:
            del self.requests[key]

    def moved(self) -> None:
        """Note progress that no stage shows, such as the end of a turn."""
        self.num_moves += 1


here = Position()
"""Position of this process."""
