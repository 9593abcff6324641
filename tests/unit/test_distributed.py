"""Ranks and their devices."""

import pytest

from ragen_mega.data.distributed import _take_device


def test_a_rank_without_a_gpu_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"local rank 1 finds 1; start torchrun with --nproc-per-node 1"
    ):
        _take_device(1, 1)
