"""--guard react undoes a collapse: the weights, moments and schedule that follow, on several ranks,
and through an end of the process before, at and after it.

Success is luck here, and the thresholds take any fall for a collapse, so that a run of a few steps
has one.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragen_mega.algorithm.diagnostics import CollapseThresholds
from ragen_mega.commands.replayed_step import check_rollouts
from ragen_mega.config import parse
from ragen_mega.rollout.tasks import TaskSampler
from ragen_mega.run.build import build
from ragen_mega.run.guards import CollapseGuard
from ragen_mega.run.log import StepLog
from ragen_mega.run.run import Run
from ragen_mega.storage.rollouts import RolloutStore
from ragen_mega.train import play_part
from ragen_mega.warm_start.small_model import write_small_model
from tests.support.forked_ranks import fork_ranks, join_ranks
from tests.support.runs import finish, metrics, send_sigterm_after, state, stop

pytestmark = pytest.mark.forks
FLAGS = """
    --environments tests.integration.test_guard:Parity --prompt-style compact --max-turns 1
    --max-response-length 6 --max-context-length 120 --hidden-size 16 --ffn-hidden-size 32
    --num-groups 4 --group-size 4 --minibatch-size 8 --filter-strategy none --num-steps 8
    --eval-prompts 2 --eval-samples 1 --eval-interval 0 --save-interval 2 --lr 1e-3 --critic-lr
    1e-3 --lr-decay linear --no-think --diagnose-interval 0 --guard react --guard-rollbacks 2
""".split()

ANY_FALL = CollapseThresholds(window=2, fall=0.0, fall_at_end=0.0, least_fall=0.0)


class Parity:
    """Solved by an answer with an even number of characters."""

    def reset(self, seed):
        return f"Say {seed % 7}."

    def parse(self, text):
        return [text or "-"]

    def step(self, text):
        is_even = len(text) % 2 == 0
        return "", float(is_even) + len(text) / 100, True, False, {"success": is_even}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights."""
    directory = tmp_path_factory.mktemp("start")
    write_small_model(parse(FLAGS), directory)
    return directory


def open_run(output: Path, start: Path, *flags: str) -> Run:
    argv = [*FLAGS, "--load", str(start), "--output", str(output), "--name", "run", *flags]
    run = build(parse(argv))
    run.collapse_guard.detector.thresholds = ANY_FALL
    return run


@pytest.fixture(scope="module")
def straight(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps in one go; every checkpoint stays."""
    return finish(open_run(tmp_path_factory.mktemp("straight"), start, "--keep-last", "0"))


def rollbacks(run: Path) -> dict[int, int]:
    """Steps that a run went back after -> number of steps after which it had those weights."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {
        event["step"]: int(event["text"].split("after ")[1].split()[0])
        for event in events
        if "back to the weights" in event["text"]
    }


def state_of(run: Path, step: int) -> dict[str, Any]:
    """What a checkpoint holds beside tensors."""
    return json.loads((run / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())


def assert_equal_runs(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other) and rollbacks(one) == rollbacks(other)
    torch.testing.assert_close(state(one, 8), state(other, 8), rtol=0, atol=0)


def test_a_rollback_brings_weights_and_moments_back(straight: Path) -> None:
    rows, went = metrics(straight), rollbacks(straight)
    assert 1 <= len(went) <= 2 and [row["guard/rollbacks"] for row in rows][-1] == len(went)
    for step, good in went.items():
        before, after = state(straight, good), state(straight, step + 1)
        torch.testing.assert_close(before, after, rtol=0, atol=0)
    first = min(went)
    assert (
        not all(
            torch.equal(value, state(straight, went[first])[key])
            for key, value in state(straight, first - first % 2).items()
        )
        or went[first] == first - first % 2
    )
    for row in rows:  # linear decay goes on by the steps that were taken
        count = sum(step < row["step"] for step in went)
        for model, lr in (("actor", 1e-3), ("critic", 1e-3)):
            if f"{model}/lr" in row:
                expected = lr * (1 - row["step"] / 8) * 0.5**count
                assert row[f"{model}/lr"] == pytest.approx(expected), row["step"]
        assert row["filter/kept_groups"] <= max(1, 4 * 0.5**count)


def test_a_replay_does_not_cross_a_return(straight: Path) -> None:
    files = RolloutStore(straight / "rollouts")
    first, begin = min(rollbacks(straight)), min(files.steps())
    run: Any = SimpleNamespace(step=begin, rollouts=SimpleNamespace(files=files))
    run.checkpoints = SimpleNamespace(steps=list)
    check_rollouts(run, first)
    with pytest.raises(ValueError, match=f"behind step {first} the run went back"):
        check_rollouts(run, first + 1)


def test_held_out_starts_that_training_has_met_are_counted(straight: Path) -> None:
    """Seeds 123 and 124 say 4 and 5; training draws from seven, at most four a step."""
    tasks = TaskSampler(parse(FLAGS))
    played = [{group[0].seed % 7 for group in tasks.sample(step)} for step in range(8)]
    met = [len({4, 5} & set().union(*played[: step + 1])) for step in range(8)]
    first = next(step for step, count in enumerate(met) if count)
    events = [json.loads(line) for line in (straight / "events.jsonl").read_text().splitlines()]
    (said,) = (event for event in events if "training has met" in event["text"])
    assert said["step"] == first
    assert f"training has met {met[first]} of the 2 starts that tests.integration" in said["text"]
    (result,) = json.loads((straight / "summary.json").read_text())["sets"].values()
    assert (result["starts_met"], result["starts"]) == (met[-1], 2)
    assert metrics(straight)[-1]["eval/starts_met"] == met[-1] > 0


def stopped(run: Run, step: int) -> None:
    """Train until SIGTERM comes while `step` is logged."""
    send_sigterm_after(run.logger, "log", lambda at, values: at == step)
    stop(run)


@pytest.mark.parametrize("distance", [-1, 0, 1])
def test_stopped_around_a_rollback_equals_straight(
    start: Path, straight: Path, tmp_path: Path, distance: int
) -> None:
    """Few checkpoints stay, so the one to go back to must be kept for it."""
    at = min(rollbacks(straight)) + distance
    stopped(open_run(tmp_path, start, "--keep-last", "1"), at)
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(at + 1))
    assert_equal_runs(straight, finish(open_run(tmp_path, start, "--keep-last", "1", "--resume")))


def test_killed_after_a_rollback_goes_back_again(
    start: Path, straight: Path, tmp_path: Path
) -> None:
    """What remains is the checkpoint before it, and rollouts that are not sampled again. Bad and
    empty steps in a row are of the weights that are left.
    """
    first = min(rollbacks(straight))
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > first:
            shutil.rmtree(path)
    run = open_run(tmp_path, start, "--keep-last", "0", "--resume")
    roll_back = run.roll_back_if_collapsed

    def after_bad_updates(log: StepLog) -> None:
        run.guard.consecutive["actor"], log.empty = 2, "no group was kept"
        roll_back(log)

    run.roll_back_if_collapsed = after_bad_updates
    assert_equal_runs(straight, finish(run))
    saved = state_of(tmp_path / "run", first + 1)
    assert saved["nonfinite"] == {} and saved["empty_steps"] == 0


def test_a_damaged_checkpoint_is_not_gone_back_to(
    start: Path, straight: Path, tmp_path: Path
) -> None:
    went = rollbacks(straight)
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "events.jsonl").unlink()
    first = min(went)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > first:
            shutil.rmtree(path)
    run = open_run(tmp_path, start, "--keep-last", "0", "--resume", "--num-steps", str(first + 1))
    good = tmp_path / "run" / "checkpoints" / f"step_{went[first]:08d}"
    (good / "state.json").write_text("{}")
    directory = finish(run)
    assert "cannot be read: state.json" in (directory / "events.jsonl").read_text()
    assert metrics(directory)[-1]["guard/rollbacks"] == 0


@pytest.mark.parametrize(
    ("flags", "is_comparable"),
    [
        ("--environment-timeout 50 --eval-interval 3 --lr 1e-4 --guard-lr 0.1", True),
        ("--max-turns 2", False),
        ("--temperature 0.9", False),
    ],
)
def test_a_resume_with_other_tasks_begins_the_comparison_anew(
    start: Path,
    straight: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    flags: str,
    is_comparable: bool,
) -> None:
    """What the run has gone back for holds on, under other flags of the guard too."""
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    run = open_run(tmp_path, start, "--resume", "--num-steps", "9", *flags.split())
    run.shutdown()
    guard = run.collapse_guard.state_dict()
    assert bool(guard["detector"]["best"]) == is_comparable == (guard["good_level"] is not None)
    assert guard["rollbacks"] == (count := metrics(straight)[-1]["guard/rollbacks"])
    rate = run.trainers["actor"].optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(run.config.train.lr / 9 * 0.5**count)
    said = f"the learning rate of step 8 would have been 0 and is {rate:.3g}"
    assert said in capsys.readouterr().out
    assert str(run.console._pace).startswith("8 of 9 steps")


def observed(guard: CollapseGuard, *levels: float, first: int = 1) -> list[str | None]:
    """Ten steps at each level, then a checkpoint."""
    said = []
    for number, level in enumerate(levels, start=first):
        said += [guard.observe({"success_rate": level}, is_last=False) for _ in range(10)]
        guard.checkpoint_at(10 * number)
    return said


def test_the_checkpoint_to_go_back_to_is_the_latest_of_the_best() -> None:
    config = parse(["--guard", "react", "--guard-rollbacks", "1"]).guard
    guard = CollapseGuard(config)
    assert not guard.pinned and not guard.may_react
    said = observed(guard, 0.25, 0.5, 0.5, 0.475)
    assert guard.pinned == [30] and guard.may_react and not any(said)
    other = CollapseGuard(config)
    other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for one in (guard, other):
        assert any(observed(one, 0.0)) and one.pinned == [30]
    other.good_step = None  # it could not be read
    other.checkpoint_at(60)
    assert other.good_step is None and not other.may_react
    guard.go_back(60)
    assert guard.pinned == [60] and not guard.may_react
    assert (guard.lr_factor, guard.filter_share) == (config.guard_lr, config.guard_filter)
    state = json.loads(json.dumps(guard.state_dict()))
    flags = "--guard react --guard-lr 0.1 --guard-filter 0.2".split()
    other = CollapseGuard(parse(flags).guard)
    other.load_state_dict(state)  # other flags hold from the next rollback on
    assert (other.lr_factor, other.filter_share) == (config.guard_lr, config.guard_filter)
    other.go_back(70)
    factors = 0.1 * config.guard_lr, 0.2 * config.guard_filter
    assert (other.lr_factor, other.filter_share) == pytest.approx(factors)
    del state["lr_factor"], state["filter_share"]  # of an older run
    other.load_state_dict(state)
    assert (other.lr_factor, other.filter_share) == (0.1, 0.2)


def test_success_at_another_task_is_no_collapse() -> None:
    guard = CollapseGuard(parse(["--guard", "react"]).guard)
    observed(guard, 0.75)
    guard.task_changed()
    assert not any(observed(guard, 0.25, first=2)) and guard.good_step == 20
    assert any(observed(guard, 0.0, first=3))


def test_what_collapsed_weights_sample_is_not_played_after_a_rollback(
    start: Path, tmp_path: Path
) -> None:
    """Ranks that sample are three steps ahead when the run goes back: they begin anew, which a run
    that goes on from the checkpoint after the rollback repeats.
    """
    flags = "--placement separate --rollout-ranks 1 --max-staleness 3 --importance-cap 2".split()
    flags += "--num-steps 12 --keep-last 0 --keep-rollouts 0".split()

    def work(*more: str) -> None:
        run = build(parse([*FLAGS, "--load", str(start), "--output", str(tmp_path), *more]))
        if isinstance(run, Run):
            run.collapse_guard.detector.thresholds = ANY_FALL
        with run:
            play_part(run)

    join_ranks(fork_ranks(lambda: work("--name", "run", *flags), 2))
    run, store = tmp_path / "run", RolloutStore(tmp_path / "run" / "rollouts")
    went = sorted(rollbacks(run))
    assert went and went[0] < 10
    for step in range(12):
        (version,) = {
            member.weight_version
            for group in store.read(step).groups
            for member in group.trajectories
        }
        since = max((back + 1 for back in went if back < step), default=0)
        assert version == max(since, step - 3)
    again = shutil.copytree(run, tmp_path / "again")
    (again / "summary.json").unlink()
    for path in [*(again / "checkpoints").iterdir(), *(again / "rollouts").iterdir()]:
        if int(path.stem.removeprefix("step_")) > went[0] + ("checkpoints" in path.parts):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    join_ranks(fork_ranks(lambda: work("--name", "again", *flags, "--resume"), 2))
    assert metrics(again) == metrics(run)


LAYOUTS = {
    "dp2": ("--use-distributed-optimizer",),
    "tp2": ("--tensor-model-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name != "dp2")) for name in LAYOUTS]
)
def test_all_ranks_go_back_together(
    start: Path, straight: Path, tmp_path: Path, layout: str
) -> None:
    """On two ranks: what each holds of weights and moments comes back, and the run ends."""

    def work() -> None:
        finish(open_run(tmp_path, start, "--keep-last", "0", *LAYOUTS[layout]))

    join_ranks(fork_ranks(work, 2))
    went = rollbacks(tmp_path / "run")
    assert min(went) == min(rollbacks(straight)), "until then the samples agree"
    for step, good in went.items():
        before, after = state(tmp_path / "run", good), state(tmp_path / "run", step + 1)
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_warning_changes_nothing(start: Path, straight: Path, tmp_path: Path) -> None:
    flags = [*FLAGS[:-4], *"--guard warn --keep-last 0 --name run".split()]
    run = build(parse([*flags, "--load", str(start), "--output", str(tmp_path)]))
    run.collapse_guard.detector.thresholds = ANY_FALL
    directory = finish(run)
    first = min(rollbacks(straight))
    assert "collapse: success fell" in (directory / "events.jsonl").read_text()
    (directory / "summary.json").unlink()
    good = state_of(directory, 8)["collapse_guard"]["good_step"]
    for is_there in (True, False):  # where only a warning was asked for it may have been pruned
        run = open_run(tmp_path, start, "--resume", "--num-steps", "9")
        run.shutdown()
        assert run.collapse_guard.pinned == [good] * is_there
        assert bool(run.collapse_guard.state_dict()["detector"]["best"]) == is_there
        shutil.rmtree(directory / "checkpoints" / f"step_{good:08d}", ignore_errors=True)
    assert rollbacks(directory) == {} and metrics(directory)[-1]["guard/rollbacks"] == 0
    keys = ("rollout/reward", "actor/entropy")
    assert [[row[k] for k in keys] for row in metrics(directory)][: first + 1] == [
        [row[k] for k in keys] for row in metrics(straight)
    ][: first + 1]
