"""The warm start on several ranks, which play a part each and may see other files."""

import io
from pathlib import Path

import pytest

from ragen_mega.config import parse
from ragen_mega.environments.registry import register
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.ranks import collectives
from ragen_mega.report.console import Console
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.storage.run_directory import WARM_START
from ragen_mega.warm_start.small_model import find_warm_start, scripted_play, write_small_model
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


class Flickering:
    """Does not begin from even seeds, or where it is dark from any."""

    actions = ("left", "right")
    instruction = "Walk to the well."
    max_turns = max_actions_per_turn = 1

    def __init__(self, *, is_dark: bool) -> None:
        self.is_dark = is_dark

    def reset(self, seed: int) -> str:
        if self.is_dark or seed % 2 == 0:
            raise OSError("no light")
        return "a crossing"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return "a well", 0.0, True, False, {}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("is_dark", [False, True])
def test_an_environment_is_given_up_where_it_fails_on_all_ranks(
    num_ranks: int, is_dark: bool
) -> None:
    """Rank 0 of two plays the even seeds, none of which begins."""
    register("flickering", Flickering)
    options = f'{{"flickering": {{"is_dark": {str(is_dark).lower()}}}}}'
    config = parse(["--environments", "flickering", "--environment-options", options])
    renderer = ChatRenderer(train_tokenizer(["system\nuser\nassistant\n"] * 9), think=True)
    console = Console(is_writer=False, num_steps=1, file=io.StringIO())

    def rank() -> None:
        collectives.start()
        if is_dark:
            with pytest.raises(ValueError, match="fails whatever is done, .*no light"):
                scripted_play(config, renderer, console, 6)
        else:
            seeds = [one.seed % 10 for one in scripted_play(config, renderer, console, 6)]
            assert seeds == [1, 3, 5]

    on_ranks(rank, num_ranks)
