"""Environments that the package has never seen, in a folder of their own: trained by the launcher,
resumed, evaluated; and what their mistakes look like.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORLD = """
import random


class Digit:
    actions = tuple("0123456789")
    largest = 9

    def reset(self, seed):
        self.digit = random.Random(seed).randint(0, self.largest)
        return f"Say {self.digit}."

    def step(self, action):
        return "Done.", float(int(action) == self.digit), True, False, {}


class Raises(Digit):
    def __init__(self):
        raise RuntimeError("no licence")
"""
FLAGS = """
    --output out --name mine --hidden-size 16 --ffn-hidden-size 32 --num-layers 1 --num-groups 2
    --group-size 4 --minibatch-size 4 --max-turns 2 --eval-prompts 4 --eval-samples 1
    --eval-interval 1 --save-interval 1 --warm-start-first-turn-steps 4 --warm-start-steps 4
    --warm-start-trajectories 8 --warm-start-critic-steps 2
""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_world.py").write_text(WORLD)
    return folder


def execute(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "NPROC_PER_NODE": "1",
        "COLUMNS": "200",
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def train(folder: Path, environments: str, *flags: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "examples/pretrain_starpo.sh")
    return execute(folder, "bash", script, "--environments", environments, *FLAGS, *flags)


def test_twelve_lines_in_a_file_train_resume_and_evaluate(folder: Path) -> None:
    mine = "my_world:Digit"
    options = ["--environment-options", json.dumps({mine: {"largest": 4}})]
    options += ["--eval-environments", "bandit"]
    first = train(folder, f"{mine}:2", *options, "--num-steps", "2")
    assert first.returncode == 0, first.stderr
    assert f"warm start: {mine} has no narrator" in first.stdout
    assert "optimum -" in first.stdout and "nan" not in first.stdout.lower()
    resumed = train(folder, f"{mine}:2", *options, "--num-steps", "3", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "2 steps are done" in resumed.stdout
    rows = [json.loads(line) for line in (folder / "out/mine/metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["rollout/environment_errors"] == 0 for row in rows)
    assert not any("rollout/optimum" in row for row in rows)
    assert {"eval/success", "eval/random", "eval/success_bandit"} <= rows[0].keys()
    assert rows[0]["eval/optimum_bandit"] == 1.0 and "eval/optimum" not in rows[0]
    summary = json.loads((folder / "out/mine/summary.json").read_text())["sets"]
    assert summary["bandit"]["random"] == 0.5
    summary = summary[mine]
    assert summary["optimum"] is None and 0 < summary["random"] < 0.5
    evaluated = execute(
        folder, sys.executable, str(ROOT / "tools/evaluate.py"), "--load", "out/mine",
        "--environment", f"{mine},bandit", "--num-prompts", "4", "--samples-per-prompt", "2",
        "--json", "evaluated.json",
    )  # fmt: skip
    assert evaluated.returncode == 0, evaluated.stderr
    sets = json.loads((folder / "evaluated.json").read_text())["sets"]
    assert sets[mine]["optimum"] is None and sets["bandit"]["optimum"] == 1.0


def test_a_mistake_is_one_line_at_the_start(folder: Path) -> None:
    done = train(folder, "my_world:Raises")
    assert done.returncode == 2
    assert "environment my_world:Raises cannot be built: RuntimeError: no licence" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
