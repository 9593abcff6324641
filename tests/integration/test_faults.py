"""Crashes and faults of a run in one process: steps repeated from the disk, updates skipped, errors
in one line.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ragen_mega.commands import replayed_step
from ragen_mega.commands.replay import main as replay_command
from ragen_mega.config.recorded import STARTS
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.environments.protocol import StepResult
from ragen_mega.environments.worlds.bandit.world import Bandit
from ragen_mega.ranks.launcher import PROGRAM, ranks_command
from ragen_mega.run.log import StepLog
from ragen_mega.run.rollouts import Rollouts
from ragen_mega.run.run import Run
from ragen_mega.storage.checkpoints import find_latest, read_checkpoint
from ragen_mega.storage.integrity import describe_error
from ragen_mega.storage.rollouts import RolloutStore
from ragen_mega.storage.run_directory import Finished
from ragen_mega.storage.sealed_files import read_sealed
from ragen_mega.train import starpo
from tests.support.faulty_runs import (
    FLAGS,
    WARM_START,
    open_run,
    poison,
    record_moves,
    replay_arguments,
    start_of,
)
from tests.support.forked_ranks import on_ranks
from tests.support.runs import finish, launch, metrics, state

ROOT = Path(__file__).parents[2]


class Crash(Exception):
    """Ends training as a bug or a lost machine would."""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `start`, a small model, and `straight`, four steps from there in one go."""
    output = tmp_path_factory.mktemp("faults")
    finish(open_run(output, "start", *WARM_START))
    finish(open_run(output, "straight"))
    return output


def sampled_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that are sampled from now on, as they are."""
    steps: list[int] = []
    sample = Rollouts.sample

    def counting(rollouts: Rollouts, step: int, log: StepLog) -> list[TrajectoryGroup]:
        steps.append(step)
        return sample(rollouts, step, log)

    monkeypatch.setattr(Rollouts, "sample", counting)
    return steps


def crash_at(run: Run, step: int) -> None:
    """Train until the second update of `step`."""
    update, updates = run.policy.update, []

    def crashing(minibatch):
        updates.append(minibatch)
        if len(updates) == step * 4 + 2:
            raise Crash
        return update(minibatch)

    run.policy.update = crashing
    with pytest.raises(Crash):
        starpo(run)
    run.shutdown()


@pytest.fixture(scope="module")
def crashed(output: Path) -> Path:
    """A run that ended in the updates of step 3; to be copied, not resumed."""
    crash_at(open_run(output, "crashed"), 3)
    return output / "crashed"


def test_a_crash_in_training_repeats_its_steps_from_the_disk(
    output: Path, crashed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Step 2 has a damaged file and is sampled again, step 3 is not; nothing differs from a run
    without a crash.
    """
    shutil.copytree(crashed, output / "resumed")
    store = RolloutStore(output / "resumed" / "rollouts")
    assert store.steps() == [0, 1, 2, 3]
    path = store.directory / "step_00000002.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    steps = sampled_steps(monkeypatch)
    capfd.readouterr()
    run = finish(open_run(output, "resumed", "--resume"))
    assert steps == [2]
    said = capfd.readouterr().out
    assert re.search("step 2: .* sampled again: step_00000002.safetensors", said)
    assert "step 3: repeated" in said
    assert metrics(run) == metrics(output / "straight")
    for step in (2, 4):
        one, other = state(run, step), state(output / "straight", step)
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    straight = RolloutStore(output / "straight" / "rollouts")
    assert all(store.read(step) == straight.read(step) for step in range(4))


def test_a_rollout_of_other_weights_or_settings_is_not_used(
    output: Path, crashed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    shutil.copytree(crashed, output / "other_settings")
    steps = sampled_steps(monkeypatch)
    finish(open_run(output, "other_settings", "--resume", "--lr", "5e-4"))
    assert steps == [
        3
    ]  # step 2 starts from the same weights, its updates do not end at the same ones
    assert "step 3: the stored rollout has another weights" in capfd.readouterr().out
    shutil.rmtree(output / "other_settings" / "checkpoints" / "step_00000004")
    (output / "other_settings" / "summary.json").unlink()
    finish(open_run(output, "other_settings", "--resume", "--lr", "5e-4", "--temperature", "0.9"))
    assert steps == [3, 2, 3]


def digest(directory: Path) -> str:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return hashlib.sha256(
        b"".join(str(path).encode() + path.read_bytes() for path in files)
    ).hexdigest()


def test_replay_gives_what_was_logged(output: Path, tmp_path: Path) -> None:
    run = output / "straight"
    before = digest(run)
    for step, origin in ((1, "the weights that"), (3, "step_00000002")):
        result = replayed_step.replay(replay_arguments(run, step))
        assert result["equal"] and result["largest_difference"] == 0.0 and origin in result["from"]
        assert {"actor/loss", "actor/grad_norm", "critic/grad_norm", "rollout/reward"} <= result[
            "keys"
        ].keys()
    assert digest(run) == before
    moved = shutil.copytree(run, tmp_path / "moved")
    rows = [json.loads(line) for line in (moved / "metrics.jsonl").read_text().splitlines()]
    rows[3]["actor/grad_norm"] += 0.01
    (moved / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = replayed_step.replay(replay_arguments(moved, 3))
    assert not result["equal"] and [
        key for key, row in result["keys"].items() if row["difference"]
    ] == ["actor/grad_norm"]
    (moved / "rollouts" / "step_00000002.safetensors").unlink()
    with pytest.raises(
        ValueError,
        match="step 2, whose rollout .* repeat steps 0 to 1",
    ):
        replayed_step.replay(replay_arguments(moved, 3))
    with pytest.raises(ValueError, match="step 9 .*metrics.jsonl, .* 0 to 3"):
        replayed_step.replay(replay_arguments(moved, 9))
    with pytest.raises(ValueError, match="holds no run"):
        replayed_step.replay(replay_arguments(tmp_path, 0))


def test_a_replay_does_not_cross_a_start_with_other_settings(output: Path, crashed: Path) -> None:
    for flags in (("--eval-samples", "2"), ("--lr", "5e-4", "--gamma", "0.9")):
        run = output / f"resumed_with_{len(flags)}"
        shutil.copytree(crashed, run)
        finish(open_run(output, run.name, "--resume", "--trace-groups", "2", *flags))
        assert replayed_step.replay(replay_arguments(run, 3))["largest_difference"] == 0.0
        shutil.rmtree(run / "checkpoints" / "step_00000002")
        assert replayed_step.replay(replay_arguments(run, 1))["largest_difference"] == 0.0
        if "--lr" not in flags:  # only its logs and its evaluations changed
            assert replayed_step.replay(replay_arguments(run, 3))["largest_difference"] == 0.0
            check_longer(run)
            continue
        said = (
            "step 3 would be repeated from step 0, and from step 2 on .* other settings"
            r" \(advantage.gamma was 1.0 and is 0.9, train.lr was 0.001 and is 0.0005\)"
            ".* replay a step up to 1, or"
        )
        with pytest.raises(ValueError, match=said):
            replayed_step.replay(replay_arguments(run, 3))


def check_longer(run: Path) -> None:
    """More steps change the rates of those before, unless the rates are constant."""
    recorded = json.loads((run / "config.json").read_text())
    recorded[STARTS][-1]["changed"]["train.num_steps"] = [3, 4]
    replayed: Any = SimpleNamespace(
        step=0, rollouts=SimpleNamespace(files=RolloutStore(run / "rollouts"))
    )
    for decay, error in (("constant", None), ("linear", "num_steps was 3 and is 4")):
        recorded["train"]["lr_decay"] = decay
        (run / "config.json").write_text(json.dumps(recorded))
        with pytest.raises(ValueError, match=error) if error else nullcontext():
            replayed_step.check_settings(replayed, 3)


def test_a_run_that_had_room_for_one_model_at_a_time_is_replayed_so(
    output: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(output / "straight", tmp_path / "turns")
    config = json.loads((moved / "config.json").read_text())
    for settings in (config, *config["provenance"]):
        settings["parallel"]["offload"] = "turns"
    (moved / "config.json").write_text(json.dumps(config))
    arguments = replay_arguments(moved, 3)
    run, _ = replayed_step.open_replay(replayed_step.read_config(arguments)[0], 3)
    replayed: dict[str, float] = {}
    for work in (dict, lambda: replayed_step.repeat(run, 3)):
        replayed = work()
        models = (model.trainer.memory.on_device() for model in (run.policy, run.critic))
        assert 0 in [sum(held.values()) for held in models]
    logged = replayed_step.read_row(moved / "metrics.jsonl", 3)
    assert not any(row["difference"] for row in replayed_step.compare(logged, replayed).values())


@pytest.mark.forks
@pytest.mark.parametrize("context", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_on_two_ranks_is_replayed_on_two_by_its_own_record(
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    context: int,
) -> None:
    """A process that knows nothing of ranks becomes the launcher of as many as the run had. What
    two ranks computed, one rank repeats to rounding, but for the tokens that ranks compute each.
    """
    flags = [*FLAGS, "--load", str(start_of(output)), "--num-steps", "2", "--overwrite"]
    flags += ["--context-parallel-size", str(context)]
    run = launch(tmp_path, "two", 2, *flags)
    before, out = digest(run), tmp_path / "out.json"
    words = ["--run", str(run), "--step", "1", "--json", str(out)]
    for name in ("RANK", "WORLD_SIZE"):  # this process has trained
        monkeypatch.delenv(name, raising=False)

    def become(program: str, command: list[str]) -> None:
        assert command == ranks_command(2, PROGRAM, "replay", *words)
        sys.exit(77)

    with monkeypatch.context() as patched, pytest.raises(SystemExit, match="77"):
        patched.setattr(os, "execv", become)
        replay_command(words)
    on_ranks(lambda: replay_command(words), 2)
    result = json.loads(out.read_text())
    assert result["world_size"] == 2 and result["largest_difference"] == 0.0
    assert "on 2 ranks" in capfd.readouterr().out and digest(run) == before
    assert {"actor/computed_share", "critic/computed_share"} <= result["keys"].keys()
    one = ["--num-ranks", "1", "--context-parallel-size", "1"]
    on_ranks(lambda: replay_command([*words, *one]), 1)
    result = json.loads(out.read_text())
    assert result["world_size"] == 1 and 0 < result["largest_difference"] < 1e-4
    assert not any(key.endswith("computed_share") for key in result["keys"])

    config = json.loads((run / "config.json").read_text())
    (start,) = config["provenance"]
    assert (start["world_size"], start["recipe"], start["first_step"]) == (2, "none", 0)
    for changes, reason in (
        ({"ranks_per_node": 1}, "2 ranks, 1 on each node"),
        ({"device": "cuda", "ranks_per_node": 2}, "2 GPUs on .*, and here"),
    ):
        config["provenance"] = [start | changes]
        (run / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=reason):
            replayed_step.read_config(replay_arguments(run, 1))


def test_bad_updates_change_nothing_and_are_kept(
    output: Path, capfd: pytest.CaptureFixture
) -> None:
    """A weight that is no number, a loss that is infinite, gradients whose norm has an infinite
    square.
    """
    run = open_run(output, "poisoned", "--num-steps", "2", "--max-nonfinite-updates", "4")
    changes = {
        1: ("actor", math.nan),
        2: ("advantages", 1e25),
        3: ("advantages", 3e38),
        5: ("returns", 1e25),
        6: ("critic", math.inf),
    }
    poison(run, changes)
    moves = record_moves(run)
    directory = finish(run)
    assert moves == {
        "actor": [True, False, False, False] + [True] * 4,
        "critic": [True] * 5 + [False, False, True],
    }
    rows = metrics(directory)
    assert [row["update/nonfinite"] for row in rows] == [3, 2]
    assert (
        rows[0]["actor/skipped"] == 0.75
        and rows[1]["critic/skipped"] == 0.5
        and rows[1]["actor/skipped"] == 0
    )
    assert all(
        value is not None
        for row in rows
        for key, value in row.items()
        if key.startswith(("actor", "critic"))
    )
    files = sorted((directory / "faults").iterdir())
    assert [path.name for path in files] == [
        "step_00000000_actor_1.safetensors",
        "step_00000000_actor_2.safetensors",
        "step_00000000_actor_3.safetensors",
        "step_00000001_critic_1.safetensors",
        "step_00000001_critic_2.safetensors",
    ]
    tensors, facts = read_sealed(files[1])
    assert float(tensors["advantages"].max()) == pytest.approx(1e25) and (
        facts["step"],
        facts["model"],
    ) == (0, "actor")
    assert capfd.readouterr().out.count("skipped, its loss") == 5


def test_the_only_update_of_a_step_may_be_bad(output: Path, capfd: pytest.CaptureFixture) -> None:
    """Its pass, which is no number, would have given the old log-probabilities."""
    run = open_run(output, "only", "--num-steps", "2", "--minibatch-size", "8")
    poison(run, {0: ("actor", math.nan)})
    moves = record_moves(run)
    rows = metrics(finish(run))
    assert moves == {"actor": [False, True], "critic": [True, True]}
    assert [row["update/nonfinite"] for row in rows] == [1, 0]
    assert capfd.readouterr().out.count("skipped, its loss") == 1


def test_bad_updates_in_a_row_stop_the_run(output: Path) -> None:
    run = open_run(output, "stopped", "--max-nonfinite-updates", "3")
    poison(run, {number: ("advantages", 1e25) for number in (4, 5, 7, 10, 11, 12)})
    with pytest.raises(FloatingPointError) as stopped:
        finish(run)
    said = str(stopped.value)
    assert re.search(r"3 updates of the actor .* non-finite .*\(step 3\)", said)
    assert f"{output}/stopped/checkpoints/step_00000002: --resume" in said


def test_the_first_and_the_last_evaluation_are_in_the_log(output: Path) -> None:
    rows = [
        json.loads(line)
        for line in (output / "straight" / "metrics.jsonl").read_text().splitlines()
    ]
    summary = json.loads((output / "straight" / "summary.json").read_text())
    for row, key, result in (
        (rows[0], "eval/initial_", summary["warm_start"]["bandit"]),
        (rows[-1], "eval/", summary["sets"]["bandit"]),
    ):
        for what in ("success", "reward", "random", "optimum"):
            assert row[f"{key}{what}"] == result[what]
    assert rows[-1]["eval/starts_met"] == summary["sets"]["bandit"]["starts_met"] > 0  # of two
    assert [len([key for key in row if key.startswith("eval/")]) for row in rows] == [4, 0, 0, 5]
    events = EventAccumulator(str(output / "straight" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("eval/initial_success")] == [0]
    assert [event.step for event in events.Scalars("eval/success")] == [3]


def test_a_finished_run_is_neither_changed_nor_said_to_train(output: Path) -> None:
    before = digest(output / "straight")
    with pytest.raises(Finished, match="raise --num-steps"):
        open_run(output, "straight", "--resume")
    assert digest(output / "straight") == before


def test_a_start_that_is_refused_late_leaves_nothing_to_overwrite(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the model does not fit: found once its directory is there."""
    with monkeypatch.context() as patched:
        patched.setattr("ragen_mega.run.build.build_models", _refuse)
        with pytest.raises(ValueError, match="refused"):
            open_run(output, "late")
    run = open_run(output, "late", "--num-steps", "1")
    run.shutdown()


@pytest.mark.parametrize("flags", [("--resume", "--num-steps", "5"), ("--overwrite",)])
def test_a_start_that_is_refused_late_takes_nothing_away(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    shutil.copytree(output / "straight", tmp_path / "mine")
    model = ("--load", str(start_of(output)))

    def content() -> dict[Path, bytes]:
        files = (path for path in (tmp_path / "mine").rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files if path.name != "config.json"}

    before = content()
    with monkeypatch.context() as patched:
        patched.setattr("ragen_mega.run.build.build_models", _refuse)
        with pytest.raises(ValueError, match="refused"):
            open_run(tmp_path, "mine", *model, *flags)
    assert content() == before
    if "--overwrite" in flags:
        open_run(tmp_path, "mine", *model, *flags).shutdown()
        assert not (tmp_path / "mine" / "summary.json").exists()
        assert {path.name for path in tmp_path.iterdir()} == {"mine", ".mine.lock"}


def test_a_run_is_put_back_under_its_lock(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(output / "straight", tmp_path / "mine")
    is_free = []

    def put_back(directory: Path) -> None:
        with open(tmp_path / ".mine.lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_free.append(False)
            else:
                is_free.append(True)

    monkeypatch.setattr("ragen_mega.report.metrics.put_back", put_back)
    monkeypatch.setattr("ragen_mega.run.build.begin_run", _refuse)
    with pytest.raises(ValueError, match="refused"):
        open_run(tmp_path, "mine", "--load", str(start_of(output)), "--overwrite")
    assert is_free == [False]


def _refuse(*args: object) -> None:
    raise ValueError("refused")


def test_a_first_prompt_that_fills_the_context_is_found_before_the_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragen_mega.run.build.warm_start", _refuse)
    with pytest.raises(ValueError, match="first prompt of bandit .*max_context_length is 13"):
        open_run(tmp_path, "start", "--max-context-length", "13")


@pytest.mark.parametrize(
    ("flags", "why", "interval"),
    [
        (("--max-response-length", "2"), "8 of 8 answers were cut, at 2 tokens", 0),
        (("--temperature", "50"), ". of 8 answers were cut, .* lack the form", 2),
    ],
)
def test_steps_that_train_nothing_say_why_and_end_the_run(
    output: Path, capfd: pytest.CaptureFixture, flags: tuple[str, ...], why: str, interval: int
) -> None:
    """The last of them counts as any step does: its evaluation, and its checkpoint if it is due."""
    name = f"empty{flags[0]}"
    common = ("--max-turns", "1", "--filter-strategy", "top_fraction", "--max-empty-steps", "2")
    due = ("--eval-interval", "2", "--save-interval", f"{interval}")
    run = open_run(output, name, *common, *flags, *due)
    said = f"2 steps .*--max-empty-steps.*{why}.*; (?:raise|start|show)"
    with pytest.raises(ValueError, match=said):
        finish(run)
    said = capfd.readouterr().out
    assert said.count("trained on nothing: ") == 2
    assert re.search(f"step 1: trained on nothing: {why}", said)
    assert [row["step"] for row in metrics(output / name)] == [0, 1]
    saved = read_checkpoint(output / name / "checkpoints" / "step_00000002")
    assert saved.score == metrics(output / name)[1]["eval/success"]
    assert saved.state["collapse_guard"]["good_step"] == (interval or None)


def test_a_resumed_run_heeds_a_bound_that_it_has_passed(output: Path) -> None:
    common = "--max-turns 1 --filter-strategy top_fraction --max-response-length 2".split()
    finish(open_run(output, "bound", *common, "--num-steps", "3", "--max-empty-steps", "0"))
    run = open_run(
        output, "bound", *common, "--num-steps", "6", "--max-empty-steps", "2", "--resume"
    )
    with pytest.raises(ValueError, match="bound of --max-empty-steps"):
        finish(run)
    assert [row["step"] for row in metrics(output / "bound")] == [0, 1, 2, 3]
    goal = "--max-empty-steps 1 --eval-interval 1 --stop-at-success 0 --resume".split()
    finish(open_run(output, "bound", *common, "--num-steps", "6", *goal))
    assert json.loads((output / "bound" / "summary.json").read_text())["steps"] == 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", ".model.safetensors.tmp"])
def test_an_export_without_room_loses_nothing_else(output: Path, file: str) -> None:
    run = open_run(output, f"full-{file}", "--num-steps", "1")
    export = run.logger.directory / "huggingface"
    export.mkdir()
    (export / file).symlink_to("/dev/full")
    with pytest.raises(OSError) as failed:
        finish(run)
    said = describe_error(failed.value, output)
    assert said.startswith("cannot write ") and str(output) in said
    assert said.endswith("another --output") and "No space left" in said
    assert len(metrics(run.logger.directory)) == 1
    assert find_latest(run.logger.directory / "checkpoints", print).step == 1


class Flaky(Bandit):
    """A bandit that fails for some outcome seeds, by raising or by not answering."""

    def reset(self, seed, *, outcome_seed=None, board=None) -> str:
        self.fault = (outcome_seed or 0) % 3
        return super().reset(seed, outcome_seed=outcome_seed)

    def step(self, action: str) -> StepResult:
        if self.fault == 1:
            raise ConnectionError("lost connection")
        if self.fault == 2:
            time.sleep(600)
        return super().step(action)


def test_a_run_goes_on_with_a_broken_environment(
    output: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Every trajectory of the start model that pulls an arm meets the environment; those that fail
    are truncated.
    """
    run = open_run(
        output,
        "flaky",
        "--environments",
        f"{__name__}:Flaky",
        "--num-steps",
        "1",
        "--environment-timeout",
        "0.2",
        "--max-response-length",
        "40",
    )
    monkeypatch.setattr(run, "finish", lambda: None)
    directory = finish(run)
    (row,) = metrics(directory)
    groups = RolloutStore(directory / "rollouts").read(0).groups
    assert [len(group.trajectories) for group in groups] == [4, 4] and row[
        "rollout/num_trajectories"
    ] == 8
    played = [trajectory for group in groups for trajectory in group.trajectories]
    failed = [t for t in played if "error" in t.turns[-1].info]
    attempts = [each for t in played for each in t.turns[-1].info.get("failed_attempts", ())]
    assert failed and row["rollout/lost_trajectories"] == len(failed)
    assert row["rollout/resampled"] == len(attempts) >= len(failed)
    assert row["rollout/environment_errors"] == len(failed) + len(attempts)
    by_time = sum(t.outcome_seed % 3 == 2 for t in failed) / 8
    assert row["rollout/truncated_by_time"] == by_time
    assert row["rollout/truncated_by_error"] == len(failed) / 8 - by_time
    for trajectory in failed:
        reason = {1: "ConnectionError: lost connection (in step, ", 2: "took longer than 0.2 s"}[
            trajectory.outcome_seed % 3
        ]
        assert trajectory.truncated and trajectory.turns[-1].info["error"].startswith(reason)
    said = capfd.readouterr().out
    assert f"errors closed {len(failed) + len(attempts)} of {8 + len(attempts)}" in said


class Away(Bandit):
    """A bandit whose server is away for a time."""

    is_away = False

    def reset(self, seed, *, outcome_seed=None, board=None) -> str:
        if self.is_away:
            raise ConnectionError("no server")
        return super().reset(seed, outcome_seed=outcome_seed)


def test_a_step_in_which_no_environment_starts_trains_nothing(
    output: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    run = open_run(output, "away", "--environments", f"{__name__}:Away", "--num-steps", "2")
    sample = run.rollouts.sample

    def sample_without(step: int, log: StepLog) -> list[TrajectoryGroup]:
        with monkeypatch.context() as patched:
            patched.setattr(Away, "is_away", step == 0)
            return sample(step, log)

    run.rollouts.sample = sample_without
    rows = metrics(finish(run))
    assert [row["rollout/environment_errors"] for row in rows] == [16, 0]
    assert [row["rollout/lost_trajectories"] for row in rows] == [8, 0]
    assert ["actor/loss" in row for row in rows] == [False, True]
    said = capfd.readouterr().out
    assert "step 0: trained on nothing: the environment" in said
