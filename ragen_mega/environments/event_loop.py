"""The event loop of all asynchronous code of the user: `async` environments and agents.

One loop serves all threads, so that connections, locks and queues of a module persist across calls
and episodes. Each call has a context of its own (contextvars). A coroutine that blocks the loop
stops all others; a thread watches for that and says where.
"""

import asyncio
import contextlib
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

LIBRARIES = (
    os.path.join(Path(__file__).parents[1], ""),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib")),
)
"""Folders of code that is not the user's."""
STANDSTILL = 5.0
"""Seconds of silence after which the loop is said to stand still."""
_MAX_THREADS = 256
"""Most threads of `asyncio.to_thread`; asyncio's own default is 4 more than processors."""
_THREAD = "asynchronous code"
_starting = threading.Lock()
_blocked_in: str | None = None
"""Place in which the loop stands still at present."""


def begin(value: Awaitable[Any]) -> Future[Any]:
    """Begin to await a value on the loop; cancelling the future cancels the coroutine. Raises
    RuntimeError in the thread of the loop, which would wait for itself.
    """

    async def settle() -> Any:
        try:
            return await value
        except (SystemExit, KeyboardInterrupt) as error:  # would end the loop of all
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    if threading.current_thread().name == _THREAD:
        if asyncio.iscoroutine(value):
            value.close()
        raise RuntimeError("a method that waits must not be called in one that is async")
    with _starting:  # `cache` alone would let two threads start a loop each
        loop = _loop()
    return asyncio.run_coroutine_threadsafe(settle(), loop)


def standstill() -> str:
    """Return a clause that says where the loop stands still; empty if it does not."""
    if _blocked_in is None:
        return ""
    return (
        f": {_blocked_in} blocks the event loop that all coroutines share; await it, give it to"
        " asyncio.to_thread, or make the agent a plain function, which has a thread of its own"
    )


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="to_thread"))
    thread = threading.Thread(target=_run, args=(loop,), name=_THREAD, daemon=True)
    thread.start()
    threading.Thread(target=_watch, args=(loop, thread), daemon=True).start()
    return loop


# A forked process has no thread of the loop.
os.register_at_fork(after_in_child=_loop.cache_clear)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop. A task of the user's that calls `sys.exit` or `loop.stop` ends no other."""
    while True:
        with contextlib.suppress(BaseException):
            loop.run_forever()


def _watch(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Note while the loop stands still, and say so once for each place."""
    global _blocked_in
    places: set[str] = set()
    while True:
        has_turned = threading.Event()
        loop.call_soon_threadsafe(has_turned.set)
        while not has_turned.wait(STANDSTILL):
            _blocked_in = _place(thread)
            if _blocked_in not in places:
                places.add(_blocked_in)
                text = f"no coroutine goes on for {STANDSTILL:g} s{standstill()}"
                print(text, file=sys.stderr, flush=True)
        _blocked_in = None
        time.sleep(STANDSTILL / 5)


def _place(thread: threading.Thread) -> str:
    """Return the innermost function of the user's that a thread is in, with file and line."""
    assert thread.ident is not None  # it was started
    stack = [*traceback.walk_stack(sys._current_frames().get(thread.ident))]
    frames = [(frame.f_code, number) for frame, number in stack]
    own = [each for each in frames if not each[0].co_filename.startswith(LIBRARIES)] or frames
    code, number = own[0]
    return f"{code.co_name} ({code.co_filename}:{number})"
