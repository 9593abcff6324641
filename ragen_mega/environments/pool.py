"""Calls into environments, which are anyone's code: they may raise or never return, and the rollout
goes on.

A call runs in a worker thread. What is bounded is how long a trajectory waits for it: Python cannot
end a thread, so a call that never returns keeps its own until the process ends, which it does not
hold up.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

SECONDS_TOGETHER = 1.0
"""For so long all trajectories wait for a call, as if it were an ordinary one: batches of the
engine, and with them the last bits of log-probabilities, must not depend on the speed of threads.
After that only the trajectory of the call waits."""

T = TypeVar("T")


class EnvironmentFailed(Exception):
    """A call into an environment raised or exceeded its time limit; the text says which."""


class TimeLimit:
    """Makes calls that may take `seconds` (0: any time, and then in the calling thread)."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._worker: _Worker | None = None

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns. Raises EnvironmentFailed if it raises or takes too long."""
        if not self.seconds:
            return _guarded(function)
        self._worker = self._worker or _Worker()
        future = self._worker.submit(function)
        together = min(SECONDS_TOGETHER, self.seconds)
        with contextlib.suppress(
            TimeoutError
        ):  # none of the function's own: those are EnvironmentFailed
            return future.result(together)
        self.close()  # the worker is busy; the next call gets another
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self.seconds - together)
        except TimeoutError:
            raise EnvironmentFailed(f"took longer than {self.seconds:g} s") from None

    def close(self) -> None:
        """Let the worker end when it can."""
        if self._worker:
            self._worker.end()
            self._worker = None


class _Worker:
    """A daemon thread, so that the process can end while an environment does not return."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._serve, name="environment", daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, function))
        return future

    def end(self) -> None:
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(_guarded(function))
            except EnvironmentFailed as error:
                future.set_exception(error)


def _guarded(function: Callable[[], T]) -> T:
    try:
        return function()
    except (
        Exception,
        SystemExit,
    ) as error:  # an environment is anyone's code, and must not end the rollout
        raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error
