"""The chaos test itself: it sees what is lost, and a real run under it loses nothing."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from ragen_mega.data.types import Trajectory, TrajectoryGroup, Turn
from ragen_mega.rollout.summary import summarize
from ragen_mega.storage.rollouts import ROLLOUTS, RolloutStore
from tests.support.pretend_nodes import reason_against
from tools import chaos
from tools.chaos import (
    LAYOUTS,
    NUM_STEPS,
    Victim,
    compare,
    damage,
    identity,
    main,
    sglang_layouts,
)


def finished(
    output: Path, name: str, *, steps=range(NUM_STEPS), weight: float = 1.0, loss: float = 0.5
) -> Victim:
    """A run directory as a finished run leaves it."""
    run = Victim(output, name, LAYOUTS[0])
    last = run.directory / "checkpoints" / f"step_{NUM_STEPS:08d}"
    last.mkdir(parents=True)
    save_file({"actor.weight": torch.tensor([weight])}, last / "rank_00000.safetensors")
    clocked = ("time/step", "share/rollout")
    rows = [
        {"step": step, "actor/loss": loss} | {key: random.random() for key in clocked}
        for step in steps
    ]
    (run.directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_a_run_that_does_not_end_is_killed_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(Victim):
        def start(self) -> subprocess.Popen[bytes]:
            self.log.touch()
            self._log_start = 0
            return subprocess.Popen(["sleep", "60"], env={chaos.MARKER: self.mark})

    monkeypatch.setattr(chaos, "SECONDS_TO_END", 0.1)
    monkeypatch.setattr(chaos, "SECONDS_TO_VANISH", 0.1)
    run = Hanging(tmp_path, "hangs", LAYOUTS[0])
    played = chaos.play_round(run, None, random.Random(0), tainted=set(), damages=False)
    assert not run.processes() and played.hit == "end"
    assert [problem.partition(" after")[0] for problem in played.problems] == [
        "1 processes were left",
        "the run ended with exit code -9: ",
    ]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"steps": [*range(NUM_STEPS - 1)]}, "logged steps"),
        ({"steps": [*range(3), *range(2, NUM_STEPS)]}, "logged steps"),
        ({"loss": 0.5000001}, "step 0 differs .* in actor/loss"),
        ({"weight": 1.0000001}, "the last checkpoint differs"),
    ],
)
def test_what_is_lost_is_seen(changes: dict, problem: str | None, tmp_path: Path) -> None:
    undisturbed = finished(tmp_path, "undisturbed")
    problems = compare(finished(tmp_path, "tormented", **changes), undisturbed)
    assert len(problems) == (problem is not None)
    assert all(re.search(problem, line) for line in problems)


def test_no_checkpoint_is_no_agreement(tmp_path: Path) -> None:
    runs = [finished(tmp_path, name) for name in ("tormented", "undisturbed")]
    for run in runs:
        shutil.rmtree(run.directory / "checkpoints")
    (problem,) = compare(*runs)
    assert "undisturbed run has no last checkpoint" in problem


def sampled(
    output: Path,
    name: str,
    *,
    played: tuple[int, ...] = (7, 8),
    reward: float = 1.0,
    logged: float = 1.0,
) -> Victim:
    """A run directory as a finished run with an SGLang server leaves it; `played` are the outcome
    seeds of each group.
    """
    run = Victim(output, name, sglang_layouts(Path(sys.executable))[0])
    store, rows = RolloutStore(run.directory / ROLLOUTS), []
    for step in range(NUM_STEPS):
        facts = []
        for rewarded in (reward, logged):
            members = [
                Trajectory(
                    0,
                    "bandit",
                    seed=step,
                    outcome_seed=seed,
                    tokens=[1, 2],
                    loss_mask=[False, True],
                    rollout_logprobs=[0.0, -0.5],
                    turns=[Turn(1, 2, rewarded, {})],
                    terminated=True,
                )
                for seed in played
            ]
            facts.append([TrajectoryGroup(0, members)])
        store.write(step, facts[0], {})
        rows.append(
            {"step": step} | {f"rollout/{key}": value for key, value in summarize(facts[1]).items()}
        )
    (run.directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"reward": 0.5, "logged": 0.5}, None),  # other luck on the same tasks
        ({"played": (7, 7)}, "other tasks"),
        ({"played": (7, 8, 8)}, "other tasks"),
        ({"reward": 0.5}, "not those of its rollout"),
    ],
)
def test_what_is_trained_twice_is_seen(changes: dict, problem: str | None, tmp_path: Path) -> None:
    problems = compare(sampled(tmp_path, "tormented", **changes), sampled(tmp_path, "undisturbed"))
    assert (
        (problems == [])
        if problem is None
        else (len(problems) == NUM_STEPS and problem in problems[0])
    )


@pytest.mark.parametrize("seed", range(8))
def test_damage_changes_one_file(seed: int, tmp_path: Path) -> None:
    files = {"a": b"x" * 40, "b": b"y" * 90}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    said = damage(tmp_path, random.Random(seed))
    changed = [name for name, content in files.items() if (tmp_path / name).read_bytes() != content]
    assert len(changed) == 1 and f"/{changed[0]} " in said


def test_a_checkpoint_written_anew_is_another(tmp_path: Path) -> None:
    for _ in range(2):
        (tmp_path / ".tmp").mkdir()
        (tmp_path / ".tmp").rename(tmp_path / "step_00000002")
        first = identity(tmp_path / "step_00000002")
        assert first == identity(tmp_path / "step_00000002")
        (tmp_path / "step_00000002").rmdir()
    (tmp_path / "step_00000002").mkdir()
    assert identity(tmp_path / "step_00000002") != first


def test_a_rank_that_ends_before_it_is_killed_has_reached_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a run's processes and the kill a run may finish."""
    rank = subprocess.Popen(["sleep", "60"])
    run, seen = Victim(tmp_path, "run", LAYOUTS[0]), psutil.Process(rank.pid)
    launcher = SimpleNamespace(pid=0, poll=lambda: None)

    def phase(self: Victim) -> str:
        assert chaos.kill(seen)
        rank.wait()
        return "finish"

    monkeypatch.setattr(Victim, "ranks", lambda self: [seen])
    monkeypatch.setattr(Victim, "phase", phase)
    monkeypatch.setattr(chaos, "wait_for", lambda *_: True)
    assert chaos.kill_rank(run, launcher, "finish", 0, random.Random(0)) == "end"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_loses_nothing(tmp_path: Path) -> None:
    main(["--rounds", "5", "--json", str(tmp_path / "out.json"), "--work", str(tmp_path)])
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["failures"] == 0 and report["runs_finished_and_compared"] >= 1
    assert set(report["kills"]) >= {"setup", "rollout", "update"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ranks_that_share_experts_lose_nothing(tmp_path: Path) -> None:
    layouts = [layout for layout in LAYOUTS if layout.has_experts]
    report = chaos.run_rounds(tmp_path, layouts, 4, seed=0)
    assert report["failures"] == 0 and report["runs_finished_and_compared"] >= 1
    assert set(report["kills"]) & {"rollout", "update"}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(bool(reason := reason_against()), reason=reason or "")
def test_two_nodes_lose_nothing(tmp_path: Path) -> None:
    """A sampler's node dies, a trainer dies while weights are on their way, a sampler is slow."""
    report = chaos.run_rounds(tmp_path, [chaos.NODES], 3, seed=0)
    assert report["failures"] == 0 and report["runs_finished_and_compared"] >= 1
    assert {played["target"] for played in report["played"]} >= {*chaos.NODE_TARGETS}
    assert sum(report["kills"].values()) == 2


def test_growth_goes_on() -> None:
    steps = range(0, 90)
    assert chaos.growth([(step, 7.0) for step in steps]) == 0
    assert chaos.growth([(step, 0.5 * step) for step in steps]) == pytest.approx(50)
    # what is allocated at the beginning or at once does not count, nor do steps too close to tell
    assert chaos.growth([(step, min(step, 22)) for step in steps]) == 0
    assert chaos.growth([(step, 27.0 * (step > 50)) for step in steps]) == 0
    assert chaos.growth([(step, step) for step in range(12)]) == chaos.growth([]) == 0


def rows_of(num_steps: int, **changes: Any) -> list[dict[str, Any]]:
    """Metrics of a run whose server was replaced once, and of which nothing grows."""
    usual = {"engine/restarts": 0.0, "memory/train_free_gib": 40.0, chaos.MISMATCH: 0.03}
    rows = [{"step": step} | usual for step in range(num_steps)]
    rows[4]["engine/restarts"] = 1.0
    for name, slope in changes.items():
        for row in rows:
            row[name.replace("__", "/")] += slope * row["step"]
    return rows


@pytest.mark.parametrize(
    ("rows", "sizes", "problem"),
    [
        (rows_of(90), 0.0, None),
        (rows_of(89), 0.0, "89 steps, 1.0 new servers"),
        ([row | {"engine/restarts": 0} for row in rows_of(90)], 0.0, "90 steps, 0 new servers"),
        (rows_of(90), 0.5, "server_mib changed by 50 in 100 steps"),
        (rows_of(90, memory__train_free_gib=-0.01), 0.0, "memory/train_free_gib changed by 1 "),
        (rows_of(90, mismatch__logprob_mean_abs_diff=0.001), 0.0, "mismatch/.* changed by 0.1 "),
    ],
)
def test_what_grows_is_seen(rows: list[dict], sizes: float, problem: str | None) -> None:
    readings = {
        ("server_mib", 7): [(step, 900 + sizes * step) for step in range(90)],
        ("server_mib", 3): [(step, 30.0 * step) for step in range(40)],  # killed early
        ("trainer_files", 2): [(step, 40.0) for step in range(90)],
    }
    report = chaos.endured(rows, readings, 90, [])
    assert len(report["problems"]) == (problem is not None), report
    assert all(re.match(problem, line) for line in report["problems"])
    assert report["largest_mismatch"] == pytest.approx(max(row[chaos.MISMATCH] for row in rows))
