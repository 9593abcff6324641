"""Stopping a run: ranks agree on the arrival of a signal where they synchronize anyway, and the
loss of another rank becomes a one-line error.
"""

import errno
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import torch
from torch.distributed import DistError

from ragen_mega.ranks import collectives, watch
from ragen_mega.ranks.launcher import JOB, SECONDS_TO_WAIT, handle_signals, is_rank, seconds_to_stop
from ragen_mega.report.console import fail
from ragen_mega.rollout.engine import Interrupted
from ragen_mega.storage.integrity import describe_error

RANK_LOST = (
    "another rank of this job has ended or does not answer; --resume goes on from the last"
    " checkpoint"
)
ASK = {signal.SIGUSR1, signal.SIGUSR2}
"""Signals after which all ranks print where they are; SIGUSR2 does nothing else."""
_POLL_SECONDS = 1.0
_SECONDS_OF_ECHO = 0.5


class StopSignal:
    """Whether a signal to stop has come in, here or on another rank."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._since = 0.0

    def listen(self) -> None:
        """Remember the first of SIGNALS; a second one ends the process without a checkpoint, unless
        it is SIGUSR1, or the same within a moment: schedulers send it to launcher and ranks alike.
        """
        handle_signals(self._receive)

    def agreed(self) -> bool:
        """Return whether any rank has received such a signal. Collective."""
        return bool(collectives.sum_over_ranks(torch.tensor([int(bool(self.received))])))

    def interrupt(self) -> None:
        """Raise Interrupted if this rank has received such a signal."""
        if self.received:
            raise Interrupted

    @property
    def exit_code(self) -> int:
        """128 plus the signal that this rank has received, or plus SIGTERM if another rank has."""
        return 128 + (self.received or signal.SIGTERM)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_echo = signum == self.received and now - self._since < _SECONDS_OF_ECHO
        if self.received:
            return None if is_echo or signum == signal.SIGUSR1 else _leave(signum, None)
        self.received, self._since = signal.Signals(signum), now
        _say(f"{self.received.name}: writing a checkpoint; the same again leaves without one")


def exit_on_signal() -> None:
    """Let any of SIGNALS end this process until a run listens: there is nothing to keep yet. Their
    default action ends it in C++ code too, where Python runs no handler.
    """
    handle_signals(signal.SIG_DFL)


def end_process(exit_code: int) -> NoReturn:
    """End this process without the end of its interpreter, during which gloo's threads may abort it
    by SIGABRT. A rank that left the job first could wait for a rank that is lost.
    """
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _leave(signum: int, frame: FrameType | None) -> None:
    _say(f"stopped by {signal.Signals(signum).name} at once")
    os._exit(128 + signum)  # an exception could be caught, and threads may still be writing


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        # Not by print: the signal may have come in the middle of one.
        with suppress(OSError):  # the same Ctrl-C has ended the `tee` behind this process
            os.write(2, f"{line}\n".encode())


def end_with_launcher() -> None:
    """Send SIGTERM to this rank once the torchrun that started it has ended, even by SIGKILL, and
    end it if it takes too long after a signal, in C++ code too. The guardian of our own launcher
    does so for all its ranks. A process that torchrun has not started does nothing.
    """
    if is_rank():
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR2, lambda signum, frame: None)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        arguments = reader, os.getppid(), seconds_to_stop()
        threading.Thread(target=_watch, args=arguments, daemon=True, name="launcher").start()


def _watch(reader: int, launcher: int, limit: float) -> None:
    first, passed, is_orphan = 0, 0.0, False
    while True:
        if select.select([reader], [], [], _POLL_SECONDS)[0]:
            numbers = os.read(reader, 1 << 10)
            if ASK & {*numbers}:
                watch.ask()
            numbers = bytes(each for each in numbers if each not in ASK)
            first = first or next(iter(numbers), 0)
        if not is_orphan and os.getppid() != launcher and JOB not in os.environ:
            is_orphan = True
            os.kill(os.getpid(), signal.SIGTERM)
        passed += _POLL_SECONDS if first else 0.0
        if passed > (min(limit, SECONDS_TO_WAIT) if is_orphan else limit):
            watch.ask(watch.SECONDS_TO_REPORT)
            _leave(first, None)


def fail_if_rank_lost(error: RuntimeError) -> None:
    """Leave with one line if `error` comes from a collective whose other ranks are gone, or that
    this rank has no descriptors left for.
    """
    if os.strerror(errno.EMFILE) in str(error):
        fail(describe_error(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), ""))
    if isinstance(error, DistError) or "gloo" in str(error):  # gloo's errors have no special type
        fail(RANK_LOST)
