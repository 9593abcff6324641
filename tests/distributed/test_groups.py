"""Process groups of a job on CPUs: as few as there are sets of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ragen_mega.config import ParallelConfig
from ragen_mega.megatron.initialize import initialize
from tests.support.forked_ranks import on_ranks


@pytest.mark.forks
@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo alone polls")
def test_groups_of_the_same_ranks_are_one() -> None:
    def rank() -> None:
        groups = initialize(ParallelConfig(tensor_model_parallel_size=2))
        assert dist.get_process_group_ranks(groups.tp) == [0, 1]
        assert groups.mp is groups.tp and groups.pp is groups.cp is groups.dp
        assert dist.get_process_group_ranks(groups.dp) == [dist.get_rank()]
        names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
        # of the job, of both ranks, and of this one
        assert sum(name.startswith("gloo_tcp_loop") for name in names) == 3

    on_ranks(rank, 2)
