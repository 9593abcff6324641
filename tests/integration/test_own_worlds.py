"""Environments that the package has never seen, in a separate folder: trained by the launcher,
resumed, evaluated; and what their mistakes look like.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ragen_mega.commands import evaluate
from ragen_mega.config.cli import DEFAULT_RECIPE
from ragen_mega.train import main

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


class NeverBuilt(Digit):
    def __init__(self):
        import time

        time.sleep(600)


class Tools:
    tools = [
        {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
        {"name": "stop"},
    ]
    max_turns = 60
    format_penalty = -0.01
    is_instant = True

    def reset(self, seed):
        self.sum = 0
        return [("system", "Reach ten."), ("user", "It is 0.")]

    def step(self, call):
        self.sum += call["arguments"].get("a", 0) if call["name"] == "add" else 0
        done = call["name"] == "stop"
        return [("tool", str(self.sum))], float(done and self.sum > 9), done, False, {}

    def facts(self):
        return {"sum": self.sum}


class Guess:
    max_turns = 3

    def reset(self, seed):
        self.number = random.Random(seed).randint(0, 9)
        return "Your guess?"

    def step(self, text):
        return f"not {text}", 0.0, text == str(self.number), False, {"success": True}

    def random_answer(self, draw):
        return str(draw.randint(0, 9))


class Slow(Guess):
    def reset(self, seed):
        import time

        time.sleep(0.2)
        return super().reset(seed)


class Crashing(Guess):
    luck = random.Random(3)

    def reset(self, seed):
        self.crash()
        return super().reset(seed)

    def step(self, text):
        self.crash()
        return super().step(text)

    def crash(self):
        if self.luck.random() < 0.05:
            raise OSError("lost the\\nserver")


class Leaky(Guess):
    def reset(self, seed):
        import threading

        threading.Thread(target=threading.Event().wait).start()
        return super().reset(seed)


class Huge(Guess):
    def reset(self, seed):
        return "x" * 10_000_000


class HugeLater(Guess):
    def step(self, text):
        return "x" * 10_000_000, 0.0, False, False, {}


class Bytes(Guess):
    def reset(self, seed):
        return b"x"


class Nothing(Guess):
    def step(self, text):
        return None


class NotANumber(Guess):
    def step(self, text):
        return "x", float("nan"), False, False, {}


class NeverAnswers(Guess):
    def step(self, text):
        import time

        time.sleep(600)
"""
WANDERER = """
import os

os.chdir("/")


class Wanderer:
    actions = ("stay", "go")

    def __init__(self):
        os.chdir("/usr")

    def reset(self, seed):
        os.chdir("/tmp")
        return "Stay or go?"

    def step(self, action):
        os.chdir("/dev")
        return "There.", float(action == "go"), True, False, {}
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


def test_twelve_lines_in_a_file_train_resume_and_evaluate(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Trained by the script, then resumed and evaluated in this process."""
    mine = "my_world:Digit"
    options = ["--environment-options", json.dumps({mine: {"largest": 4}})]
    options += ["--eval-environments", "bandit"]
    first = train(folder, f"{mine}:2", *options, "--num-steps", "2")
    assert first.returncode == 0, first.stderr
    assert f"warm start: {mine} has no narrator" in first.stdout
    assert "optimum -" in first.stdout and "nan" not in first.stdout.lower()
    monkeypatch.chdir(folder)
    further = ["--environments", f"{mine}:2", *FLAGS, *options, "--num-steps", "3", "--resume"]
    main(further, recipe=DEFAULT_RECIPE)
    assert "2 steps are done" in capfd.readouterr().out
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
    asked = ["--num-prompts", "4", "--samples-per-prompt", "2", "--json", "evaluated.json"]
    evaluate.main(["--load", "out/mine", "--environment", f"{mine},bandit", *asked])
    sets = json.loads((folder / "evaluated.json").read_text())["sets"]
    assert sets[mine]["optimum"] is None and sets["bandit"]["optimum"] == 1.0


@pytest.mark.slow
def test_a_world_may_leave_the_directory(folder: Path) -> None:
    """Whenever it does, relative paths begin at the directory in which the run was started."""
    (folder / "my_wanderer.py").write_text(WANDERER)
    rows = [{"question": f"Is {n} odd?", "answer": n % 2} for n in range(20)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    names = "my_wanderer:Wanderer,tasks:rows.jsonl"
    done = train(folder, names, "--num-steps", "1", "--name", "wandered")
    assert done.returncode == 0, done.stderr
    recorded = json.loads((folder / "out/wandered/config.json").read_text())
    options = json.loads(recorded["environment"]["environment_options"])
    assert options == {"tasks:rows.jsonl": {"directory": str(folder)}}
    assert recorded["logging"]["output"] == str(folder / "out")
    assert recorded["provenance"][0]["directory"] == str(folder)
    program = str(Path(sys.executable).with_name("ragen-mega"))
    asked = "--num-prompts 2 --samples-per-prompt 1 --json there.json --environment".split()
    done = execute(folder, program, "evaluate", "--load", "out/wandered", *asked, names)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((folder / "there.json").read_text())["sets"]) == 2


@pytest.mark.slow
def test_tools_over_sixty_turns_in_a_window_of_two(folder: Path) -> None:
    flags = "--context-window 2 --filter-keep-zero --max-turns 60 --max-response-length 24".split()
    flags += ["--name", "tools"]
    flags += ["--reward", "environment + 0.1*grounded_thought - 0.01*repetition"]
    flags += "--num-steps 1 --group-size 2 --eval-interval 0 --eval-prompts 1".split()
    done = train(folder, "my_world:Tools", *flags)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "out/tools/metrics.jsonl").open()]
    assert {"reward/grounded_thought", "reward/repetition", "reward/total"} <= rows[0].keys()
    assert rows[0]["rollout/num_turns"] > 2 and rows[0]["rollout/environment_errors"] == 0
    assert rows[0]["mismatch/logprob_max_abs_diff"] < 1e-4, "trained on what was seen"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "errors"),
    [
        ("Guess", 0), ("Slow", 0), ("Leaky", 0), ("Crashing", 1), ("HugeLater", 8), ("Nothing", 8),
        ("NotANumber", 8),
    ],
)  # fmt: skip
def test_worlds_that_cost_a_trajectory_at_most(folder: Path, kind: str, errors: int) -> None:
    """A run ends well, whatever they do; the warm start refuses those that never answer."""
    done = train(folder, f"my_world:{kind}", "--num-steps", "2", "--name", kind)
    assert "Traceback" not in done.stderr
    if errors == 8:
        assert done.returncode == 2 and "fails whatever is done" in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        return
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / f"out/{kind}/metrics.jsonl").open()]
    assert sum(row["rollout/lost_trajectories"] for row in rows) <= 16 * errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("NeverBuilt", "built: took longer than 5 s"),
        (
            "NeverAnswers",
            "took longer than 5 s; let each call (reset, step, a score) end sooner, or",
        ),
        ("Huge", "has 10000000 characters"),
        ("Bytes", "must be text"),
    ],
)
def test_worlds_that_cannot_be_played_are_one_line(folder: Path, kind: str, reason: str) -> None:
    done = train(folder, f"my_world:{kind}", "--environment-timeout", "5", "--name", kind)
    assert done.returncode == 2, done.stdout
    assert reason in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_mistake_is_one_line_at_the_start(folder: Path) -> None:
    done = train(folder, "my_world:Raises")
    assert done.returncode == 2
    assert "my_world:Raises cannot be built: RuntimeError: no licence" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
