"""The warm start on several ranks, which see parts of it, or other files."""

from pathlib import Path

import pytest

from ragen_mega.config import parse
from ragen_mega.ranks import collectives
from ragen_mega.storage.run_directory import WARM_START
from ragen_mega.warm_start.small_model import find_warm_start, write_small_model
from tests.support.forked_ranks import on_ranks

pytestmark = pytest.mark.forks
FLAGS = "--environments bandit --hidden-size 16 --ffn-hidden-size 32 --name run".split()


@pytest.mark.parametrize("owner", [0, 1])
def test_ranks_agree_on_a_warm_start_that_one_does_not_see(owner: int, tmp_path: Path) -> None:
    """As on shared storage whose nodes have not heard of a file yet: what rank 0 sees holds."""
    configs = [parse([*FLAGS, "--output", str(tmp_path / str(rank))]) for rank in range(2)]
    write_small_model(configs[owner], configs[owner].run_directory / WARM_START)

    def rank() -> None:
        collectives.start()
        assert (find_warm_start(configs[collectives.rank()]) is not None) == (owner == 0)

    on_ranks(rank, 2)
