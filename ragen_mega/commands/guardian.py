"""The guardian of a job: a process that kills a launcher and its ranks once they take too long to
end after a signal, or after the launcher has been killed, whatever they wait in.

It is a process of its own session, because a signal to the group of the launcher must not reach it,
and since a rank may wait in C++ code, hold the interpreter or be stopped.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ragen_mega.ranks.launcher import JOB, SECONDS_TO_WAIT, seconds_to_stop

_SECONDS_TO_END = 10.0
"""Time that ranks have to end after a second signal."""
_SECONDS_OF_SILENCE = 1.0
"""Time after a second signal before the user is told of the wait."""
_SECONDS_TO_CLEAN = 5.0
"""Time that processes of killed ranks have to notice their end, and to remove their files."""
_SECONDS_TO_REPORT = 7.0
"""Time that a launcher has to end once its ranks are being killed."""
_PERIOD = 0.5
_COMPUTES = 0.25
"""Share of a core from which on a rank computes and does not wait."""
_DONE = b"\0"


@contextmanager
def guarded(folder: str, signals: tuple[int, ...]) -> Iterator[None]:
    """Have a guardian for the block, which learns of `signals` as soon as they arrive in this
    process. It removes `folder` if this process is killed. Raises ValueError as `seconds_to_stop`.
    """
    limit = seconds_to_stop()
    os.environ[JOB] = job = secrets.token_hex(8)
    launcher, (reader, writer) = os.getpid(), os.pipe()
    if child := os.fork():
        os.close(reader)
        os.waitpid(child, 0)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            with suppress(BrokenPipeError):  # the guardian may have been killed
                os.write(writer, _DONE)
            os.close(writer)
        return
    try:
        os.setsid()
        if os.fork() == 0:  # this one is no child of the launcher, which takes those for ranks
            os.close(writer)
            for number in signals:
                signal.signal(number, signal.SIG_IGN)
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, 0)
            os.dup2(nowhere, 1)
            _Guardian(reader, launcher, job, folder, limit).run()
    finally:
        os._exit(0)


class _Guardian:
    def __init__(self, reader: int, launcher: int, job: str, folder: str, limit: float) -> None:
        self._reader, self._job, self._folder, self._limit = reader, job, folder, limit
        self._launcher = psutil.Process(launcher)
        self._is_orphaned = self._has_told = self._is_limited = False
        self._first = self._second = self._active = 0.0
        """When the first signal and a second one came, and when a rank has last computed."""
        self._last = (0, 0.0)
        """The last signal and its time."""
        self._cpu_seconds = 0.0

    def run(self) -> None:
        """Wait until the launcher says that it is done, or all processes of the job have ended, or
        their time is over. After a signal nothing that ranks have started stays either.
        """
        while True:
            is_waiting = not (self._first or self._is_orphaned)
            if select.select([self._reader], [], [], None if is_waiting else _PERIOD)[0]:
                received = b"" if self._is_orphaned else os.read(self._reader, 1 << 10)
                if _DONE in received:
                    return self._kill(self._family()) if self._first else None
                if not received and not self._is_orphaned:
                    self._take_over()
                for number in received:
                    self._receive(number)
            if self._is_orphaned and not self._family():
                return shutil.rmtree(self._folder, ignore_errors=True)
            if self._first and self._left() <= 0.0:
                end = time.monotonic() + _SECONDS_TO_REPORT
                self._kill(self._family())
                return self._end_launcher(max(0.0, end - time.monotonic()))

    def _receive(self, number: int) -> None:
        now = time.monotonic()
        is_new, self._last = not is_echo(number, now, *self._last), (number, now)
        if is_new and self._first and number != signal.SIGUSR1:
            self._second = self._second or now
        # A scheduler that warns has its own time limit.
        self._is_limited = self._is_limited or number != signal.SIGUSR1
        self._first = self._first or now
        self._active = now

    def _take_over(self) -> None:
        """Send SIGTERM to the ranks of a launcher that was killed, unless it has told them."""
        self._is_orphaned = True
        family = self._family()
        for rank in family if not self._first else ():
            with suppress(psutil.Error):
                if rank.ppid() not in {process.pid for process in family}:
                    rank.terminate()
        self._first = self._active = time.monotonic()
        self._is_limited = True

    def _left(self) -> float:
        """Return the seconds until the ranks are killed, and tell the user when they are few."""
        now, ranks = time.monotonic(), self._ranks()
        cpu_seconds = sum(map(_cpu_seconds, ranks))
        if cpu_seconds - self._cpu_seconds > _COMPUTES * _PERIOD or any(map(_uses_disk, ranks)):
            self._active = now
        self._cpu_seconds = cpu_seconds
        end = min(self._active + SECONDS_TO_WAIT, self._first + self._limit)
        if self._is_orphaned:  # whoever killed the launcher did not mean to wait
            end = min(end, self._first + SECONDS_TO_WAIT)
        if self._second:
            end = min(end, self._second + _SECONDS_TO_END)
        elif not self._is_limited:
            return SECONDS_TO_WAIT
        left = end - now
        if ranks and not self._has_told and left < _SECONDS_TO_END - _SECONDS_OF_SILENCE:
            self._has_told = True
            text = f"{len(ranks)} rank(s) have not ended; they are killed in {left:.0f} s\n"
            with suppress(OSError):
                os.write(2, text.encode())
        return left

    def _ranks(self) -> list[psutil.Process]:
        if self._is_orphaned:
            return self._family()
        with suppress(psutil.Error):
            return [each for each in self._launcher.children() if _lives(each)]
        return []

    def _family(self) -> list[psutil.Process]:
        """Return the processes of the job, however far they have gone from the launcher."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(JOB) == self._job and _lives(process):
                    found.append(process)
        return found

    def _kill(self, family: list[psutil.Process]) -> None:
        """Kill the ranks that are left, and `family` once it had time to notice that."""
        for rank in self._ranks():
            with suppress(psutil.Error):
                family += rank.children(recursive=True)
                rank.kill()
        # A server's supervisor removes weights from shared memory when its rank is gone.
        end = time.monotonic() + _SECONDS_TO_CLEAN
        while any(map(_lives, family)) and time.monotonic() < end:
            time.sleep(0.1)
        for process in family:
            with suppress(psutil.Error):
                process.kill()
        if self._is_orphaned:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end_launcher(self, seconds: float) -> None:
        """Give the launcher these seconds to report its ranks, then kill it."""
        with suppress(psutil.Error):
            try:
                self._launcher.wait(seconds)
            except psutil.TimeoutExpired:
                self._launcher.kill()


def is_echo(number: int, now: float, last: int, then: float) -> bool:
    """Return whether a signal is a repetition by its sender: `timeout` sends each to a process and
    to the group that this process is in.
    """
    return number == last and now - then < 0.1


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _cpu_seconds(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return sum(process.cpu_times()[:2])
    return 0.0


def _uses_disk(process: psutil.Process) -> bool:
    """Return whether a thread of the process waits for the disk, as it does in a long fsync."""
    for stat in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        with suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False
