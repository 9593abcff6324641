"""Stopping a run: ranks agree on the arrival of a signal where they synchronize anyway, and the
loss of another rank becomes a one-line error.
"""

import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import torch
from torch.distributed import DistError

from ragen_mega.ranks import collectives
from ragen_mega.ranks.launcher import is_rank
from ragen_mega.report.console import fail
from ragen_mega.rollout.engine import Interrupted
from ragen_mega.storage.integrity import describe_error

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run: a scheduler, Ctrl-C, the end of the terminal, a warning before the time
limit.
"""
RANK_LOST = (
    "another rank of this job has ended or does not answer; --resume goes on from the last"
    " checkpoint"
)
_POLL_SECONDS = 1.0


class StopSignal:
    """Whether a signal to stop has come in, here or on another rank."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def listen(self) -> None:
        """Remember the first of SIGNALS; a second one ends the process without a checkpoint, unless
        it is SIGUSR1: schedulers may send that to launcher and ranks alike.
        """
        _handle(self._receive)

    def agreed(self) -> bool:
        """Return whether any rank has received one of them. Collective."""
        return bool(collectives.sum_over_ranks(torch.tensor([int(bool(self.received))])))

    def interrupt(self) -> None:
        """Raise Interrupted if this rank has received one of them."""
        if self.received:
            raise Interrupted

    @property
    def exit_code(self) -> int:
        """128 plus the signal that this rank has received, or plus SIGTERM if another rank has."""
        return 128 + (self.received or signal.SIGTERM)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.received:
            return None if signum == signal.SIGUSR1 else _leave(signum, None)
        self.received = signal.Signals(signum)
        _say(f"{self.received.name}: writing a checkpoint; the same again leaves without one")


def exit_on_signal() -> None:
    """Let any of SIGNALS end this process until a run listens: there is nothing to keep yet."""
    _handle(_leave)


def end_process(exit_code: int) -> NoReturn:
    """End this process without the end of its interpreter, during which gloo's threads may abort it
    by SIGABRT. A rank that left the job first could wait for a rank that is lost.
    """
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in SIGNALS:
        # Who starts a program by nohup wants it to outlive the terminal.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(signum: int, frame: FrameType | None) -> None:
    _say(f"stopped by {signal.Signals(signum).name} at once")
    os._exit(128 + signum)  # an exception could be caught, and threads may still be writing


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        # Not by print: the signal may have come in the middle of one.
        with suppress(OSError):  # the same Ctrl-C has ended the `tee` behind this process
            os.write(2, f"{line}\n".encode())


def end_with_launcher() -> None:
    """Send SIGTERM to this rank once the launcher that started it has ended, even by SIGKILL:
    nobody else would end its ranks. A process that torchrun has not started does nothing.
    """
    if is_rank():
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True, name="launcher").start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def fail_if_rank_lost(error: RuntimeError) -> None:
    """Leave with one line if `error` is that of a collective whose other ranks are gone, or that
    this rank has no descriptors left for.
    """
    if os.strerror(errno.EMFILE) in str(error):
        fail(describe_error(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), ""))
    if isinstance(error, DistError) or "gloo" in str(
        error
    ):  # gloo's errors have no type of their own
        fail(RANK_LOST)
