"""How a run is made to stop: SIGTERM becomes a question that all ranks answer alike at points where
they meet anyway, and the death of another rank an error in one line.
"""

import signal
from types import FrameType

import torch
from torch.distributed import DistError

from ragen_mega.data import distributed
from ragen_mega.report.console import fail
from ragen_mega.rollout.engine import Interrupted

RANK_LOST = (
    "another rank of this job has ended or does not answer; --resume goes on from the last"
    " checkpoint"
)


class StopSignal:
    """Whether SIGTERM has come in, here or on another rank."""

    def __init__(self) -> None:
        self._received = False

    def listen(self) -> None:
        """From now on a first SIGTERM is remembered, and a second one ends the process without a
        checkpoint.
        """
        signal.signal(signal.SIGTERM, self._receive)

    def agreed(self) -> bool:
        """Whether any rank has received SIGTERM. Collective."""
        return bool(distributed.sum_over_ranks(torch.tensor([int(self._received)])))

    def interrupt(self) -> None:
        """Raise Interrupted if this rank has received SIGTERM."""
        if self._received:
            raise Interrupted

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._received:
            raise SystemExit(128 + signum)
        self._received = True


def fail_if_rank_lost(error: RuntimeError) -> None:
    """Leave with one line if `error` is that of a collective whose other ranks are gone."""
    if isinstance(error, DistError) or "gloo" in str(
        error
    ):  # gloo's errors have no type of their own
        fail(RANK_LOST)
