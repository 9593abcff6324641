"""Calls into environments, which are user code: they may raise, be slow or never return, and the
rollout goes on.

An environment that declares itself instant is called in the thread of the rollout. Any other has
its own thread while it is open, so that many work at a time and none is called from two threads.
Only the wait of a trajectory for a call is bounded: Python cannot end a thread, so a call that
never returns keeps its thread until the process exits, which it does not delay.
"""

import asyncio
import contextlib
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, TypeGuard, TypeVar

from ragen_mega.environments import calls
from ragen_mega.environments.event_loop import LIBRARIES

MAX_THREADS = 256
"""Most environments of one kind that are open at a time, if each has its own thread."""

_MAIN_THREAD = (
    "give --environment-processes 1 or more: environments and their scores are then called in the"
    " main thread of processes of their own"
)
_LATE = "took longer than"
PLACE = "_place"
"""Attribute of an error of a host process: the place that `where` names."""
_PACKAGE = os.path.join(Path(__file__).parents[1], "")
_WORLDS = tuple(os.path.join(Path(__file__).parent, name, "") for name in ("worlds", "adapters"))

T = TypeVar("T")


class EnvironmentFailed(Exception):
    """A call into an environment raised or exceeded its time limit; the text says which, and
    where.
    """

    def __init__(self, text: str, *, is_late: bool = False) -> None:
        """`is_late`: a time limit was exceeded, ours or one of the environment itself."""
        super().__init__(text)
        self.is_late = is_late


def guarded(function: Callable[[], T]) -> T:
    """Return the result of `function`. Raises EnvironmentFailed for any exception but Ctrl-C."""
    try:
        return function()
    except (KeyboardInterrupt, GeneratorExit):  # these end the process, not the environment
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        text = f"{type(error).__name__}: {error}{where(error)}{advice(error)}"
        raise EnvironmentFailed(text, is_late=isinstance(error, TimeoutError)) from error


def describe_failures(
    name: str, player: str, num_episodes: int, failures: Sequence[tuple[int, str]]
) -> str | None:
    """Return one line about the (seed, reason) of each episode of a scripted or random player that
    environment `name` ended by an error; None if there are none.
    """
    if not failures:
        return None
    seed, reason = failures[0]
    return (
        f"{name}: {len(failures)} of {num_episodes} {player} episodes ended by an error, the first"
        f" with seed {seed}: {' '.join(reason.split())}{late_advice(name, reason)}"
    )


def late_advice(name: str, reason: str) -> str:
    """Return the remedy for an episode that an environment or agent `name` lost to its time limit;
    nothing for another reason.
    """
    if _LATE not in reason:
        return ""
    if name.startswith("agent:"):
        return "; let the agent end sooner, or raise --agent-timeout"
    return "; let reset, the steps of a turn or a score end sooner, or raise --environment-timeout"


def where(error: BaseException) -> str:
    """` (in step, my_world.py:12)`: the function of the user that was called, such as a method of
    the environment, and the innermost line that is no library's. Nothing where our own checks
    raised: their text names the method.
    """
    if place := getattr(error, PLACE, ""):
        return place
    lines = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    entered = 1 + max((at for at, (code, _) in enumerate(lines) if _is_ours(code)), default=-1)
    if not (inside := lines[entered:]):
        return ""
    own = [line for line in inside if not line[0].co_filename.startswith(LIBRARIES)] or inside
    code, number = own[-1]
    return f" (in {own[0][0].co_name}, {code.co_filename}:{number})"


def advice(error: BaseException) -> str:
    """Return the remedy for code that works in the main thread of a process alone; nothing for any
    other error.
    """
    is_signal = isinstance(error, ValueError) and "signal only works in main thread" in str(error)
    return f"; {_MAIN_THREAD}" if is_signal else ""


def is_refusal(error: BaseException | None) -> TypeGuard[ValueError]:
    """Return whether an error is a ValueError of this package, whose text says all; one of the
    user's needs its place.
    """
    if not isinstance(error, ValueError):
        return False
    if place := getattr(error, PLACE, ""):
        return _PACKAGE in place
    frames = [*traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1][0].f_code.co_filename.startswith(_PACKAGE)


def _is_ours(code: CodeType) -> bool:
    """Return whether the code calls environments; worlds of the package are environments."""
    name = code.co_filename
    return name.startswith(_PACKAGE) and not name.startswith(_WORLDS)


def is_instant(environment: object) -> bool:
    """Return whether the class itself, not a base class, declares that its calls take no time."""
    return bool(vars(type(environment)).get("is_instant", False))


class Worker:
    """The thread that calls one environment. It is a daemon, so that the process can exit even if
    a call does not return.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long a call may take; 0: no limit."""
        self.seconds = seconds
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="environment", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Call `function` in the thread and return a future of the caller's event loop. The future
        fails with EnvironmentFailed if `function` raises or takes too long. After a timeout the
        thread is still busy, and only `end` may be called.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def act() -> None:
            if not answer.done():  # else nobody waits any more
                outcome = _outcome(function)
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(_settle, answer, outcome)

        self._calls.put(act)
        if self.seconds:
            timer = loop.call_later(self.seconds, _settle, answer, self._too_late())
            answer.add_done_callback(lambda _: timer.cancel())
        return answer

    def give_up(self, answer: asyncio.Future[Any], why: str) -> None:
        """Let an answer fail because it takes too long; `why` is a clause about the cause."""
        _settle(answer, self._too_late(why))

    def wait(self, function: Callable[[], T]) -> T:
        """Call `function` in the thread and wait for its result, for callers that have no event
        loop.
        """
        answer: Future[T] = Future()
        self._calls.put(lambda: _settle(answer, _outcome(function)))
        try:
            return answer.result(self.seconds or None)
        except TimeoutError:
            raise self._too_late() from None

    def build(self, name: str, function: Callable[[], T]) -> T:
        """Wait for a `function` that builds environment `name`. Nothing that it starts in this
        thread can delay the exit of the process. If it fails, ends the thread and raises
        ValueError, in one line.
        """
        try:
            return self.wait(function)
        except EnvironmentFailed as error:
            self.end(lambda: None)
            if is_refusal(error.__cause__):
                raise error.__cause__ from None
            remedy = "; raise --environment-timeout" if error.is_late else ""
            raise ValueError(f"environment {name} cannot be built: {error}{remedy}") from error

    def end(self, last: Callable[[], Any]) -> None:
        """Call `last` after all earlier calls have returned, then let the thread end."""
        self._calls.put(partial(_outcome, last))
        self._calls.put(None)

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for the thread to end."""
        self._thread.join(seconds)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _too_late(self, why: str = "") -> EnvironmentFailed:
        return EnvironmentFailed(f"{_LATE} {self.seconds:g} s{why}", is_late=True)


def _outcome(function: Callable[[], T]) -> T | EnvironmentFailed:
    """Call `function` and return its result or its failure."""
    try:
        return guarded(function)
    except EnvironmentFailed as error:
        return error
    except (KeyboardInterrupt, GeneratorExit) as error:  # its own: Ctrl-C comes to the main thread
        return EnvironmentFailed(f"{type(error).__name__}: {error}")


def _settle(answer: Future[T] | asyncio.Future[T], outcome: T | EnvironmentFailed) -> None:
    """Give the answer, unless it was given up or came too late."""
    if answer.done():
        return
    if isinstance(outcome, EnvironmentFailed):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


@contextlib.contextmanager
def briefly(name: str, build: Callable[[], T], seconds: float) -> Iterator[tuple[Worker, T]]:
    """Give the context a thread and what `build` makes in it, the environment `name` or one of its
    episodes; close it on leaving. A call takes at most `seconds`. Raises ValueError as
    `Worker.build` does.
    """
    worker = Worker(seconds)
    built = worker.build(name, build)
    try:
        yield worker, built
    finally:
        worker.end(partial(calls.close, built))
