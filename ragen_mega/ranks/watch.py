"""Who waits for whom: once a rank stands still, all ranks of the job print where they are, and the
first line names the rank that the others wait for.

A thread of every rank looks whether its main thread moves; another one answers through the job's
store, which serves one rank after the other: what a rank asks of it for a report must not grow with
the number of ranks. A rank that gives no answer is stopped, killed, or on a node that is lost.
"""

import atexit
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ragen_mega.ranks.waits import here

_SECONDS_TO_END = 5.0
_POLL_SECONDS = 1.0
_SECONDS_TO_ANSWER = 5.0
_SECONDS_TO_TELL = 20.0
"""Time in which the job's store must have let a report come about."""
_PACKAGE = str(Path(__file__).parents[1])
_COLLECTIVES = str(Path(dist.__file__).parent)
_MOST_FRAMES = 4
_ENVIRONMENT = "environment"
"""Name of the threads that call environments."""
Report = dict[str, Any]
_watch: "Watch | None" = None


class Watch:
    """The watch of one rank over itself, and its part in the reports of all ranks."""

    def __init__(self, board: dist.Store, rank: int, num_ranks: int, patience: float) -> None:
        """`board` is used by no other thread. A rank that has not moved for `patience` seconds
        makes all ranks report, again after twice the time, and so on; 0: only `ask` does.
        """
        self._board, self._rank, self._num_ranks = board, rank, num_ranks
        self._patience = self._limit = patience
        self._node = os.environ.get("GROUP_RANK", "0")
        self._since = time.monotonic()  # when the main thread moved last
        self._wanted, self._told, self._ended = (threading.Event() for _ in range(3))
        self._threads = [
            threading.Thread(target=work, daemon=True, name="watch")
            for work in (self._look, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, seconds: float = 0.0, *, only_if_still: bool = False) -> bool:
        """Have all ranks report; return whether they have within this time. `only_if_still`: they
        stay silent if a rank moves that waits for no other.
        """
        self._told.clear()
        self._limit = self._patience if only_if_still else 0.0
        self._wanted.set()
        return self._told.wait(seconds)

    def end(self) -> None:
        """Stop watching. A thread that uses the store when the process ends would abort it."""
        self._ended.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_SECONDS_TO_END)

    def _look(self) -> None:
        last, due = None, self._patience
        while not self._ended.wait(_POLL_SECONDS):
            stack = [] if here.is_polling else _stack()  # the lines of a poll say nothing
            mark = here.num_moves, [(frame.f_code, frame.f_lasti) for frame, _ in stack]
            if mark != last:
                last, due, self._since = mark, self._patience, time.monotonic()
            elif self._patience and time.monotonic() - self._since >= due:
                due *= 2
                if not self.ask(_SECONDS_TO_TELL, only_if_still=True) and not self._ended.is_set():
                    keeper = os.environ.get("MASTER_ADDR", "this one")
                    _say(
                        f"the job's store, which node 0 keeps ({keeper}), has not answered for"
                        f" {_SECONDS_TO_TELL:g} s; that node is stopped or lost",
                        _line(self._rank, self.report()),
                    )

    def _listen(self) -> None:
        number = 1
        with suppress(RuntimeError):  # DistError among them: the store is gone, as `_look` says
            self._append("names", f"process {os.getpid()} on {platform.node()}")
            while not self._ended.wait(_POLL_SECONDS / 4):
                if self._wanted.is_set():
                    self._wanted.clear()
                    self._board.set(f"asked_{number}", str(self._limit))
                if self._board.check([f"asked_{number}"]):
                    self._answer(number)
                    number += 1

    def _answer(self, number: int) -> None:
        """Append where this rank is. The first rank of each node that has done so prints a report
        if one is due, since any other rank may be stopped.
        """
        board, report, done = self._board, self.report(), f"told_{number}_{self._node}"
        answers, answered, moves = (f"{each}_{number}" for each in ("answers", "answered", "moves"))
        if _works(report) and report["seconds"] < float(board.get(f"asked_{number}")):
            board.set(moves, "yes")
        self._append(answers, report)
        board.add(answered, 1)
        if board.add(f"tellers_{number}_{self._node}", 1) > 1:
            _wait_until(lambda: board.check([done]), SECONDS_TO_REPORT)
        else:
            num_ranks = self._num_ranks
            all_have = _wait_until(lambda: board.add(answered, 0) >= num_ranks, _SECONDS_TO_ANSWER)
            if not (all_have and board.check([moves])):
                said, names = self._read(answers), self._read("names")
                _say(verdict(said, names, num_ranks), *(_line(*each) for each in said.items()))
            board.set(done, "yes")
        self._told.set()

    def _append(self, key: str, value: Any) -> None:
        """Append the value of this rank to a key that has the values of all ranks."""
        line = json.dumps([self._rank, value]) + "\n"
        self._board.append(key, line)  # type: ignore[attr-defined] # torch's stubs lack it

    def _read(self, key: str) -> dict[int, Any]:
        """Return rank -> value, in order of the ranks that have appended one."""
        values = dict(map(json.loads, self._board.get(key).decode().splitlines()))
        return {rank: values[rank] for rank in sorted(values)}

    def report(self) -> Report:
        """Describe where the main thread of this rank is."""
        frames = [(frame.f_code, line) for frame, line in _stack()]
        own = [each for each in frames if each[0].co_filename.startswith(_PACKAGE)]
        shown = dict.fromkeys([*frames[:1], *own[:_MOST_FRAMES]])
        return {
            "step": here.step,
            "stage": here.stage,
            "awaited": here.awaited,
            "is_in_collective": any(
                code.co_filename.startswith(_COLLECTIVES) for code, _ in frames
            ),
            "is_polling": here.is_polling,
            "seconds": time.monotonic() - self._since,
            "where": " < ".join(_place(*each) for each in shown),
            "open": _unanswered(),
        }


def verdict(said: Mapping[int, Report], names: Mapping[int, str], num_ranks: int) -> str:
    """Name the rank that the others wait for, from the reports of the ranks that have answered."""

    def named(rank: int) -> str:
        return f"rank {rank} ({names.get(rank, 'which has not begun')})"

    if missing := [rank for rank in range(num_ranks) if rank not in said]:
        return (
            f"the job waits for {', '.join(map(named, missing))}: no answer within"
            f" {_SECONDS_TO_ANSWER:g} s, so it is stopped, killed, or its node is lost"
        )
    if works := [rank for rank, report in said.items() if _works(report)]:
        rank = max(works, key=lambda rank: said[rank]["seconds"])
        return (
            f"the job waits for {named(rank)}, which is in no collective and has not moved for"
            f" {said[rank]['seconds']:.0f} s"
        )
    if polls := [rank for rank, report in said.items() if report["is_polling"]]:
        whom = "; ".join(f"{named(rank)} for {said[rank]['awaited']}" for rank in polls)
        return f"all ranks wait, {whom}"
    places = [(report["step"], report["stage"], report["where"]) for report in said.values()]
    odd = min(places, key=places.count)
    if places.count(odd) == len(places):
        return "all ranks wait in the same collective: does the network between them work?"
    ranks = [named(rank) for rank, place in zip(said, places, strict=True) if place == odd]
    return f"the job waits for {', '.join(ranks)}, in another collective than the other ranks"


def _works(report: Report) -> bool:
    """Return whether a rank waits for no other one."""
    return not (report["is_in_collective"] or report["is_polling"])


def _wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Return whether something has become so within this time."""
    end = time.monotonic() + seconds
    while not (found := is_so()) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS / 4)
    return found


def _line(rank: int, report: Report) -> str:
    step = "before the first step" if report["step"] is None else f"step {report['step']}"
    awaited = f", waits for {report['awaited']}" if report["awaited"] else ""
    further = "".join(f"; {each}" for each in report["open"])
    return (
        f"  rank {rank}: {step}, {report['stage']}{awaited}, not moved for"
        f" {report['seconds']:.0f} s: {report['where']}{further}"
    )


def _stack(thread: threading.Thread | None = None) -> list[tuple[Any, int]]:
    """Return frames and lines of a thread, by default the main one, the innermost first."""
    ident = (thread or threading.main_thread()).ident
    frame = sys._current_frames().get(ident or 0)
    return [*traceback.walk_stack(frame)] if frame else []


def _unanswered() -> list[str]:
    """Describe what this rank waits for beside its main thread's line."""
    said, requests = [], list(here.requests.values())
    if requests:
        what, since = min(requests, key=lambda each: each[1])
        seconds = time.monotonic() - since
        said.append(f"the oldest of {len(requests)} open requests is {what}, {seconds:.0f} s old")
    threads = [each for each in threading.enumerate() if each.name == _ENVIRONMENT]
    innermost = [stack[0] for stack in map(_stack, threads) if stack]
    busy = [(frame.f_code, at) for frame, at in innermost if frame.f_code.co_name != "_serve"]
    if busy:
        said.append(f"{len(busy)} environments work, the first in {_place(*busy[0])}")
    return said


def _place(code: Any, line: int) -> str:
    return f"{code.co_name} ({Path(code.co_filename).name}:{line})"


def _say(*lines: str) -> None:
    with suppress(OSError):  # nobody reads it any more
        os.write(2, "".join(f"{line}\n" for line in lines).encode())


def begin(board: dist.Store, rank: int, num_ranks: int, patience: float) -> None:
    """Watch over the main thread of this process, in place of what `begin` began before."""
    global _watch
    end()
    _watch = Watch(board, rank, num_ranks, patience)


@atexit.register
def end() -> None:
    """Stop watching."""
    if _watch:
        _watch.end()


SECONDS_TO_REPORT = 10.0
"""Time that all ranks have to print where they are, before a timeout ends the job."""


def ask(seconds: float = 0.0) -> None:
    """Have all ranks of the job print where they are, and wait for that so many seconds."""
    if _watch:
        _watch.ask(seconds)
