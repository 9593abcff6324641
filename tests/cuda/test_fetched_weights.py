"""Weights that ranks that only sample fetch, from device to device on a fake one: over NCCL, or
over gloo where ranks share a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("fake_cuda_device", reason="needs the fake CUDA device")
from ragen_mega.run import fetching  # noqa: E402
from ragen_mega.run.separate import Sampler  # noqa: E402
from ragen_mega.run.shares import Shares  # noqa: E402
from tests.distributed.test_fetching import Recorder, job  # noqa: E402
from tests.support.forked_ranks import on_ranks  # noqa: E402

pytestmark = [
    pytest.mark.forks,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="each of four ranks needs a device"),
]


@pytest.mark.parametrize(("shares", "senders"), [(False, 1), (True, 1), (False, 2)])
def test_bytes_go_from_device_to_device(
    shares: bool, senders: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy waits on the device of each rank that sends, and in host memory once it was sent."""
    kinds: list[str] = []
    broadcast, copied = fetching._Group.broadcast, Shares.copied

    def noting(self: fetching._Group, memory: torch.Tensor) -> Callable[[], None]:
        kinds.append(memory.device.type)
        return broadcast(self, memory)

    def copied_there(self: Shares, *given: object, **options: object) -> dict[str, torch.Tensor]:
        held = copied(self, *given, **options)
        assert held and all(tensor.is_cuda for tensor in held.values())
        copies.append(held)
        return held

    copies: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(fetching._Group, "broadcast", noting)
    monkeypatch.setattr(Shares, "copied", copied_there)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "99" if shares else f"{senders + 2}")

    def check(sampler: Sampler, engine: Recorder) -> None:
        assert kinds and {*kinds} == {"cpu" if shares else "cuda"}

    work = job(tmp_path, sampler=check, senders=senders)

    def rank() -> None:
        work()
        if int(os.environ["RANK"]) < senders:
            assert len(copies) == 2 and {*kinds} == {"cpu" if shares else "cuda"}
            assert not any(tensor.is_cuda for held in copies for tensor in held.values())

    on_ranks(rank, senders + 2)
