"""Calls into environments, which are anyone's code: they may raise, take their time or never
return, and the rollout goes on.

An environment that declares itself instant is called where the rollout runs. Any other has a thread
of its own while it is open, so that many work at a time and none is called by two threads. What is
bounded is how long a trajectory waits for a call: Python cannot end a thread, so a call that never
returns keeps its own until the process ends, which it does not hold up.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

MAX_THREADS = 256
"""Environments of one kind that are open at a time, where each has a thread."""

T = TypeVar("T")


class EnvironmentFailed(Exception):
    """A call into an environment raised or exceeded its time limit; the text says which."""


def guarded(function: Callable[[], T]) -> T:
    """What `function` returns. Raises EnvironmentFailed, whatever it raises."""
    try:
        return function()
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error


def is_instant(environment: object) -> bool:
    """Whether the class itself, not one that it extends, says that its calls take no time."""
    return bool(vars(type(environment)).get("is_instant", False))


class Worker:
    """Where one environment is called: a daemon thread, so that the process can end while a call
    does not return.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long a call may take; 0: no limit."""
        self._seconds = seconds
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._serve, name="environment", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns. Raises EnvironmentFailed if it raises or takes too long; the
        thread is then still busy with it, and nothing but `end` is to be asked of it.
        """
        answer = asyncio.wrap_future(self._submit(function))
        await asyncio.wait([answer], timeout=self._seconds or None)
        if not answer.done():
            answer.cancel()
            raise EnvironmentFailed(f"took longer than {self._seconds:g} s")
        return answer.result()

    def wait(self, function: Callable[[], T]) -> T:
        """As `call`, for callers that have no event loop."""
        try:
            return self._submit(function).result(self._seconds or None)
        except TimeoutError:
            raise EnvironmentFailed(f"took longer than {self._seconds:g} s") from None

    def build(self, name: str, function: Callable[[], T]) -> T:
        """As `wait`, of what builds environment `name`. What it starts in this thread cannot hold
        up the end of the process either. Raises ValueError, in one line, and ends if it fails.
        """
        try:
            return self.wait(function)
        except EnvironmentFailed as error:
            self.end(lambda: None)
            if isinstance(error.__cause__, ValueError):
                raise error.__cause__ from None
            raise ValueError(f"environment {name} cannot be built: {error}") from error

    def end(self, last: Callable[[], Any]) -> None:
        """Call `last` when everything before has returned, and let the thread end."""
        self._submit(last)
        self._calls.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, at most so long."""
        self._thread.join(seconds)

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, function))
        return future

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(guarded(function))
            except EnvironmentFailed as error:
                future.set_exception(error)
