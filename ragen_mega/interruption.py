"""How a run is told to stop: SIGTERM becomes a question that all ranks answer alike at points where they meet anyway."""

from __future__ import annotations

import signal
from types import FrameType

import torch

from ragen_mega import distributed


class Interrupted(Exception):
    """The run was asked to stop and stands where its state can be saved."""


class StopSignal:
    """Whether SIGTERM has come in, here or on another rank."""

    def __init__(self) -> None:
        self._received = False

    def listen(self) -> None:
        """From now on a first SIGTERM is remembered, and a second one ends the process without a checkpoint."""
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
