"""Three steps of training on environments of other libraries, offline, with the real packages."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gymnasium
import pytest

from ragen_mega.storage.rollouts import ROLLOUTS, RolloutStore
from tests.support import plain_mcp_server
from tests.support.forked_ranks import join_ranks
from tests.support.hub import MODULES
from tests.support.processes import wait_until
from tests.support.runs import start_ranks
from tests.support.training import FLAGS, launch, read_metrics

pytestmark = pytest.mark.forks
SERVER = Path(__file__).parents[1] / "support" / "openenv_server.py"
TAXI = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))
TINY = """--environment-options {} --max-context-length 1500 --max-turns 3 --eval-prompts 4
    --warm-start-first-turn-steps 40 --warm-start-steps 20 --warm-start-trajectories 60
    --num-groups 4 --group-size 2 --environment-timeout 300""".split()


def train(directory: Path, environments: str, *flags: str) -> list[dict]:
    """Metrics of three steps, in which answers were played."""
    run = launch(directory, 1, "--environments", environments, *TINY, *flags)
    steps = [line for line in read_metrics(run) if "rollout/reward" in line]
    assert len(steps) >= 3
    assert all(math.isfinite(line["rollout/reward"]) for line in steps)
    assert any(line["rollout/valid_format_rate"] > 0 for line in steps)
    return steps


@pytest.mark.slow
def test_gymnasium_trains(tmp_path: Path) -> None:
    steps = train(tmp_path, f"gymnasium:Blackjack-v1:3,gymnasium:{TAXI}:1")
    assert all(line["rollout/environment_errors"] == 0 for line in steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
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
    steps = train(tmp_path, environments, "--warm-start-first-turn-steps", "120")
    assert all(line["rollout/environment_errors"] == 0 for line in steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_file_of_tasks_trains_and_is_evaluated_on_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_judge.py").write_text(
        "def score(answer, reference, row):\n    return row['worth'] * (answer == reference)\n"
    )
    rows = [
        {"prompt": f"Is {n} even?", "answer": "no" if n % 2 else "yes", "worth": 0.5}
        for n in range(40)
    ]
    Path("my_data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    name = "tasks:my_data.jsonl"
    options = {name: {"score": "my_judge:score", "validation_share": 0.25}}
    steps = train(tmp_path, name, "--environment-options", json.dumps(options))
    assert any(0 < line["rollout/reward"] <= 0.5 for line in steps)
    assert all(line["rollout/success"] == 0 for line in steps), "no score is 1"
    evaluated = json.loads((tmp_path / "run" / "summary.json").read_text())["sets"][name]
    assert evaluated["num_prompts"] == 4 and evaluated["environment_errors"] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tasks_train_with_the_tools_of_an_mcp_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"Add {n} and {m}.", "answer": n + m} for n in range(5) for m in range(4)]
    Path("sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    server = f"{sys.executable} -S {plain_mcp_server.__file__}"
    options = json.dumps({"tasks:sums.jsonl": {"mcp": server}})
    flags = """--no-think --max-response-length 80 --hidden-size 64 --ffn-hidden-size 128
        --warm-start-first-turn-steps 150 --warm-start-steps 150""".split()
    steps = train(tmp_path, "tasks:sums.jsonl", "--environment-options", options, *flags)
    assert all(line["rollout/environment_errors"] == 0 for line in steps)
    rollouts = RolloutStore(tmp_path / "run" / ROLLOUTS)
    done = [
        action
        for step in rollouts.steps()
        for group in rollouts.read(step).groups
        for trajectory in group.trajectories
        for turn in trajectory.turns
        for action in turn.info["actions"]
    ]
    assert any(isinstance(action, dict) and action["name"] == "add" for action in done)
    assert any(isinstance(action, str) for action in done)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_environments_of_the_verifiers_hub_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers", reason="needs the extra verifiers")
    monkeypatch.chdir(tmp_path)
    for module, text in MODULES.items():
        (tmp_path / f"{module}.py").write_text(text)
    names = [f"verifiers:{module}" for module in MODULES]
    options = {name: {"max_turns": 3} for name in names}
    flags = ["--environment-options", json.dumps(options), "--num-groups", "8"]
    steps = train(tmp_path, ",".join(names), *flags)
    assert all(line["rollout/environment_errors"] == 0 for line in steps)
    evaluated = json.loads((tmp_path / "run" / "summary.json").read_text())["sets"]
    assert [evaluated[name]["environment_errors"] for name in names] == [0] * 4


UNRELIABLE = '''
import time


class Unreliable:
    """Raises or hangs at some steps, counted over all sessions."""

    actions = ("left", "right")
    num_steps = 0

    def reset(self, seed):
        return "Left or right?"

    def step(self, action):
        Unreliable.num_steps += 1
        if Unreliable.num_steps % 7 == 0:
            raise KeyError("lost")
        if Unreliable.num_steps % 60 == 0:
            time.sleep(4)
        return "Again?", float(action == "left"), False, False, {}
'''


LONG = '''
import pathlib
import time


class Long:
    """A tenth of a second a step, each of which leaves a mark."""

    actions = ("left", "right")

    def reset(self, seed):
        return "Left or right?"

    def step(self, action):
        with pathlib.Path("steps").open("a") as marks:
            marks.write(".")
        time.sleep(0.1)
        return "Again?", float(action == "left"), False, False, {}
'''


@contextmanager
def served(environment: str, folder: Path, port: int = 0) -> Iterator[str]:
    """Its name while a server of OpenEnv serves it from a folder."""
    command = [sys.executable, SERVER, environment, str(port)]
    log = folder / "server.log"  # a pipe that nobody empties would stop the server
    with (
        log.open("w") as output,
        subprocess.Popen(command, stderr=output, cwd=folder) as server,
    ):
        try:
            while "running on" not in log.read_text() and server.poll() is None:
                time.sleep(0.1)
            yield f"openenv:ws://127.0.0.1:{log.read_text().split('127.0.0.1:')[1].split()[0]}"
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_openenv_server_trains(tmp_path: Path) -> None:
    pytest.importorskip("openenv.core", reason="needs the extra openenv")
    (tmp_path / "endless.py").write_text(LONG)
    with served("endless:Long", tmp_path) as name:
        steps = train(tmp_path, f"{name}:4")
    assert all(line["rollout/environment_errors"] == 0 for line in steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_fails_and_hangs_costs_trajectories_only(tmp_path: Path) -> None:
    pytest.importorskip("openenv.core", reason="needs the extra openenv")
    (tmp_path / "unreliable.py").write_text(UNRELIABLE)
    with served("unreliable:Unreliable", tmp_path) as name:
        options = json.dumps({name: {"timeout": 2.0}})
        steps = train(tmp_path, name, "--environment-options", options)
    assert sum(line["rollout/environment_errors"] for line in steps) > 0
    for line in steps:
        assert line["rollout/num_trajectories"] == 8
        assert line["rollout/truncated_rate"] == 1.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_outlives_its_server(tmp_path: Path) -> None:
    """Killed in the middle of a rollout and started again on its port: what was being played is
    counted and closed, the run goes on, and can be resumed.
    """
    pytest.importorskip("openenv.core", reason="needs the extra openenv")
    (tmp_path / "long.py").write_text(LONG)
    flags = [*TINY, "--save-interval", "1", "--keep-rollouts", "0"]
    with served("long:Long", tmp_path) as name:
        flags += ["--environments", f"{name}:4"]
        # A server takes some seconds to start, on a busy machine minutes.
        flags += ["--environment-options", json.dumps({name: {"attempts": 60}})]
        ranks = start_ranks(tmp_path, "run", 1, *FLAGS, *flags)
        metrics, steps = tmp_path / "run" / "metrics.jsonl", tmp_path / "steps"
        wait_until(lambda: metrics.exists() and "\n" in metrics.read_text())
        before = steps.stat().st_size
        wait_until(lambda: steps.stat().st_size >= before + 3)  # in the next rollout
    with served("long:Long", tmp_path, int(name.rpartition(":")[2])):
        join_ranks(ranks)
        lines = read_metrics(tmp_path / "run")
        launch(tmp_path, 1, *flags, "--resume", "--num-steps", "4")
    assert [line["step"] for line in lines] == [0, 1, 2]
    errors = [line["rollout/environment_errors"] for line in lines]
    assert sum(errors) > 0 and errors[-1] == 0, errors
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2, 3]
    rollouts = RolloutStore(tmp_path / "run" / ROLLOUTS)
    played = [
        (one.group_id, one.outcome_seed)
        for step in rollouts.steps()
        for group in rollouts.read(step).groups
        for one in group.trajectories
    ]
    assert len(played) == len(set(played)) == 4 * 8, "none is trained on twice"
