"""Three steps of training on environments of other libraries, offline, with the real packages."""

import math
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

from tests.support.training import ROOT, launch, read_metrics

TAXI = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))
TINY = """--environment-options {} --max-context-length 1500 --max-turns 3 --eval-prompts 4
    --warm-start-first-turn-steps 40 --warm-start-steps 20 --warm-start-trajectories 60
    --num-groups 4 --group-size 2""".split()


def train(directory: Path, environments: str, *flags: str) -> None:
    """Three steps; raises AssertionError unless they went well and answers were played."""
    run = launch(directory, 1, "--environments", environments, *TINY, *flags)
    steps = [line for line in read_metrics(run) if "rollout/reward" in line]
    assert len(steps) >= 3
    assert all(math.isfinite(line["rollout/reward"]) for line in steps)
    assert all(line["rollout/environment_errors"] == 0 for line in steps)
    assert any(line["rollout/valid_format_rate"] > 0 for line in steps)


def test_gymnasium_trains(tmp_path: Path) -> None:
    train(tmp_path, f"gymnasium:Blackjack-v1:3,gymnasium:{TAXI}:1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "environments"),
    [
        (
            "textarena",
            "textarena:GuessTheNumber-v0,textarena:Mastermind-v0,textarena:TowerOfHanoi-v0,"
            "textarena:Sokoban-v0",
        ),
        ("reasoning_gym", "reasoning_gym:leg_counting:2,reasoning_gym:chain_sum:2"),
        ("gem", "gem:game:GuessTheNumber-v0-easy:2,gem:game:TowerofHanoi-v0-easy:2"),
    ],
)
def test_other_libraries_train(tmp_path: Path, package: str, environments: str) -> None:
    pytest.importorskip(package, reason=f"needs the extra {package.replace('_', '-')}")
    train(tmp_path, environments, "--warm-start-first-turn-steps", "120")


@pytest.mark.slow
def test_an_openenv_server_trains(tmp_path: Path) -> None:
    pytest.importorskip("openenv.core", reason="needs the extra openenv")
    command = [sys.executable, str(ROOT / "tools" / "serve_environment.py")]
    flags = ["--environment", "bandit", "--port", "0"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stderr if "running on" in line)
            port = line.split("127.0.0.1:")[1].split()[0]
            train(tmp_path, f"openenv:ws://127.0.0.1:{port}:4")
        finally:
            server.terminate()
