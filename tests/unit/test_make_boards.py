"""Drawn boards are read back as what they were drawn from, and none is a packaged one."""

import subprocess
import sys
from pathlib import Path

import pytest

from ragen_mega.environments.boards import load_boards
from ragen_mega.environments.registry import make
from ragen_mega.environments.worlds.frozen_lake.lakes import parse_lake
from ragen_mega.environments.worlds.frozen_lake.world import FrozenLake
from ragen_mega.ranks.launcher import PROGRAM


def draw(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", PROGRAM, "make-boards", *flags]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban", "sokoban_new_vocabulary"])
def test_boards_are_the_states_of_their_seeds(name: str, tmp_path: Path) -> None:
    path = tmp_path / "boards.jsonl"
    assert draw("--environment", name, "--num-boards", "12", "--output", str(path)).returncode == 0
    boards = load_boards(path, name)
    assert len(boards) == 12 and not {board.rows for board in boards} & {
        board.rows for board in load_boards(None, name)
    }
    environment = make(name)
    for board in boards:
        assert environment.reset(board.seed) == environment.reset(board.seed, board=board.rows)


def test_a_lake_reads_its_own_rows() -> None:
    environment = FrozenLake(size=5)
    for seed in range(50):
        environment.reset(seed)
        assert parse_lake(environment.lake.rows()) == environment.lake


def test_bad_requests_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "boards.jsonl"
    small = ("--environment", "frozen_lake", "--environment-options", '{"size": 2}')
    for flags, said in (
        (("--environment", "bandit"), "start from boards"),
        (("--environment", "sokoban", "--first-seed", "99999"), "[0, 100000)"),
        (("--environment", "sokoban", "--environment-options", "[1]"), "must be a JSON object"),
        (("--environment", "frozen_lake", "--environment-options", "{"), "must be a JSON object"),
        # All there are: 8 x 4 with the goal beside the start, 4 x 3 with it across.
        ((*small, "--first-seed", "99900", "--num-boards", "44"), "seeds 99900 to 99999"),
    ):
        result = draw(*flags, "--output", str(path))
        assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1
        assert said in result.stderr
        assert not path.exists()
