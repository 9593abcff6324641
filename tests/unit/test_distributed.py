"""Ranks and their devices."""

import pytest

from ragen_mega.data.distributed import _take_device, start
from ragen_mega.megatron.initialize import shutdown


def test_a_rank_without_a_gpu_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"local rank 1 finds 1; start torchrun with --nproc-per-node 1"
    ):
        _take_device(1, 1)


def test_a_process_waits_for_no_ranks_that_nobody_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutdown()  # what a test before has started in this process
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2 must come from torchrun"):
        start()
