"""A run that is stopped or killed goes on as if nothing had happened, on the same layout to the
bit, on others to rounding.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from ragen_mega.config import parse
from ragen_mega.models.huggingface import load_tokenizer
from ragen_mega.rollout.tasks import TaskSampler
from ragen_mega.run.build import build
from ragen_mega.run.rollouts import Rollouts
from ragen_mega.run.run import Run
from ragen_mega.storage.checkpoints import read_checkpoint
from ragen_mega.storage.rollouts import RolloutStore
from ragen_mega.storage.run_directory import Finished
from tests.support.forked_ranks import kill_ranks, wait_for
from tests.support.runs import (
    finish,
    launch,
    metrics,
    send_sigterm_after,
    start_ranks,
    state,
    stop,
)
from tools.chaos import write_mixture

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.forks
FLAGS = (
    """
    --environments bandit:1,frozen_lake:1
    --environment-options {"frozen_lake":{"observation":"cells"}}
    --prompt-style compact --max-response-length 48 --max-context-length 400
    --eval-prompts 8 --eval-interval 2 --hidden-size 32 --ffn-hidden-size 64 --num-layers 2
    --num-groups 4 --group-size 4 --minibatch-size 4 --filter-strategy none
    --lr 1e-3 --critic-lr 1e-3 --lr-decay linear --num-steps 6 --save-interval 3 --keep-last 0
    --kl-kind k3 --kl-coef 0.01 --decoupled-lr 3e-3 --teacher-prompt-examples 2
""".split()
    + ["--reward", "environment + 0.1*teacher"]
)
WARM_START = """
    --warm-start-first-turn-steps 60 --warm-start-steps 30 --warm-start-trajectories 100
    --num-steps 1 --save-interval 0
""".split()
LAYOUTS = {
    "one": (1, ()),
    "tp2": (2, ("--tensor-model-parallel-size", "2", "--teacher-top-k", "4")),
    "pp2": (2, ("--pipeline-model-parallel-size", "2", "--teacher-top-k", "4")),
    "cp2": (2, ("--context-parallel-size", "2")),
    "dp2_distributed_optimizer": (2, ("--use-distributed-optimizer",)),
    "ep2": (
        2,
        ("--expert-model-parallel-size", "2", "--sft-steps", "5", "--teacher-top-k", "4"),
    ),
    "tp2_pp2": (4, ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")),
    "pp4": (4, ("--pipeline-model-parallel-size", "4")),
    "pp2_vp2": (
        2,
        ("--pipeline-model-parallel-size", "2", "--virtual-pipeline-model-parallel-size", "2"),
    ),
}


def open_run(output: Path, name: str, *flags: str) -> Run:
    return build(parse([*FLAGS, "--output", str(output), "--name", name, *flags]))


def launch_and_kill(output: Path, name: str, num_ranks: int, *flags: str) -> None:
    """Start a run and end all its processes by SIGKILL as soon as its first checkpoint is there."""
    processes = start_ranks(output, name, num_ranks, *flags)
    wait_for(output / name / "checkpoints" / "step_00000003", processes)
    kill_ranks(processes)
    assert not (output / name / "summary.json").exists()


def assert_equal_runs(one: Path, other: Path) -> None:
    assert [row["step"] for row in metrics(one)] == list(range(6))
    assert metrics(one) == metrics(other)
    last = state(one, 6)
    torch.testing.assert_close(last, state(other, 6), rtol=0, atol=0)
    assert not all(torch.equal(value, last[key]) for key, value in state(one, 3).items()), (
        "training did nothing"
    )
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, other)]
    assert (
        summaries[0]["sets"] == summaries[1]["sets"]
        and summaries[0]["warm_start"] == summaries[1]["warm_start"]
    )


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small warm-started model."""
    return launch(tmp_path_factory.mktemp("start"), "run", 1, *FLAGS, *WARM_START) / "warm_start"


@pytest.fixture(scope="module")
def straight(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one go, in this process."""
    return finish(open_run(tmp_path_factory.mktemp("straight"), "run", "--load", str(start)))


def test_sigterm_between_steps(start: Path, straight: Path, tmp_path: Path) -> None:
    run = open_run(tmp_path, "run", "--load", str(start), "--save-interval", "0")
    send_sigterm_after(run.logger, "log", lambda step, values: step == 2)
    stop(run)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
    torch.manual_seed(999)  # nothing of a run may come from the global generator
    assert_equal_runs(straight, finish(open_run(tmp_path, "run", "--load", str(start), "--resume")))


def test_sigterm_during_a_rollout(start: Path, straight: Path, tmp_path: Path) -> None:
    run = open_run(tmp_path, "run", "--load", str(start), "--save-interval", "0")
    send_sigterm_after(run.tasks, "sample", lambda step: step == 3)
    stop(run)
    assert_equal_runs(straight, finish(open_run(tmp_path, "run", "--load", str(start), "--resume")))


def test_the_notes_of_the_start_outlive_a_stop_in_step_0(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragen_mega.run.build.check_play", lambda config, renderer: ["a note"])
    run = open_run(tmp_path, "run", "--load", str(start))
    send_sigterm_after(run.tasks, "sample", lambda step: step == 0)
    stop(run)
    open_run(tmp_path, "run", "--load", str(start), "--resume").shutdown()
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    noted = [(event["step"], event["text"]) for event in map(json.loads, events)]
    assert noted.count((0, "a note")) == 1


@pytest.mark.slow
def test_sigterm_between_rollout_and_updates(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout on the disk is used, under the version that sampled it, and the diagnosis and
    the curriculum count once.
    """
    observed, observe = [], TaskSampler.observe
    monkeypatch.setattr(
        TaskSampler, "observe", lambda self, groups: observed.append(1) or observe(self, groups)
    )
    diagnoses = ("--diagnose-interval", "1", "--keep-rollouts", "0", "--num-steps", "3")
    flags = ("--load", str(start), "--save-interval", "0", *diagnoses)
    straight = finish(open_run(tmp_path, "straight", *flags))
    run = open_run(tmp_path, "run", *flags)
    send_sigterm_after(run, "diagnose_if_due", lambda groups, log: log.step == 1)
    stop(run)
    assert len(observed) == 3 + 1, "step 1 is repeated"
    sampled, sample = [], Rollouts.sample
    monkeypatch.setattr(
        Rollouts, "sample", lambda self, step, log: sampled.append(step) or sample(self, step, log)
    )
    resumed = finish(open_run(tmp_path, "run", *flags, "--resume"))
    assert sampled == [2] and len(observed) == 3 + 3
    assert metrics(resumed) == metrics(straight)
    assert metrics(straight)[2]["collapse/score_average"] is not None
    one, other = (RolloutStore(path / "rollouts") for path in (resumed, straight))
    assert all(one.read(step) == other.read(step) for step in range(3))


def test_sigterm_during_the_updates_finishes_the_step(
    start: Path, straight: Path, tmp_path: Path
) -> None:
    run = open_run(tmp_path, "run", "--load", str(start), "--save-interval", "0")
    updates = []
    send_sigterm_after(
        run.policy,
        "update",
        lambda minibatch: updates.append(minibatch) or len(updates) == 4 * 3 + 2,
    )
    stop(run)
    assert len(updates) == 4 * 4
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3]
    assert_equal_runs(straight, finish(open_run(tmp_path, "run", "--load", str(start), "--resume")))


def test_a_damaged_checkpoint_costs_its_steps_only(
    start: Path, straight: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()  # it had not finished
    path = next((tmp_path / "run" / "checkpoints" / "step_00000006").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    directory = finish(open_run(tmp_path, "run", "--load", str(start), "--resume"))
    said = " ".join(capfd.readouterr().out.split())
    assert (
        "step_00000006 is skipped: rank_00000.safetensors does not have the SHA-256 in the manifest"
        in said
    )
    assert_equal_runs(straight, directory)


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(
    start: Path, straight: Path, tmp_path: Path
) -> None:
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()  # it had not finished
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert_equal_runs(straight, finish(open_run(tmp_path, "run", "--load", str(start), "--resume")))


@pytest.mark.parametrize("lost", ["newer", "unmounted", "unmounted and finished"])
def test_a_run_whose_checkpoints_cannot_be_read_is_never_begun_anew(
    lost: str, start: Path, straight: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    if lost == "newer":
        for manifest in run.glob("checkpoints/*/manifest.json"):
            newer = json.loads(manifest.read_text()) | {"format": 99}
            del newer["sha256"]
            digest = hashlib.sha256(json.dumps(newer, sort_keys=True).encode()).hexdigest()
            manifest.write_text(json.dumps(newer | {"sha256": digest}))
    else:
        shutil.rmtree(run / "checkpoints")
    if lost != "unmounted and finished":
        (run / "summary.json").unlink()
    rows = run / "metrics.jsonl"
    rows.write_text(rows.read_text() + '{"step": 6}\n')
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    remedy = "the version that wrote them" if lost == "newer" else "anew with --overwrite"
    with pytest.raises(ValueError, match=remedy) as error:
        open_run(tmp_path, "run", "--load", str(start), "--num-steps", "9", "--resume")
    if lost == "newer":
        said = str(error.value)
        assert all(re.search(f"step_0000000{step} is skipped: .* 99", said) for step in (3, 6))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_that_ends_at_its_checkpoint_forgets_the_steps_after_it(
    start: Path, straight: Path, tmp_path: Path
) -> None:
    """It was killed later; --num-steps then says that there is nothing left to train."""
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()  # it had not finished
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    ends = ("--resume", "--num-steps", "3")
    run = finish(open_run(tmp_path, "run", "--load", str(start), *ends))
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    assert metrics(run) == metrics(straight)[:3]


def test_a_goal_that_was_reached_stays_reached(start: Path, tmp_path: Path) -> None:
    """Also where the process ended before the last evaluation, whose success is the score of the
    last checkpoint, or before the summary was written.
    """
    goal = ("--load", str(start), "--eval-interval", "1", "--stop-at-success", "0")
    stopped = open_run(tmp_path, "run", *goal)
    send_sigterm_after(stopped.logger, "log", lambda step, values: step == 0)
    stop(stopped)
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000001").score is None
    run = finish(open_run(tmp_path, "run", *goal, "--resume"))
    before = metrics(run)
    assert [row["step"] for row in before] == [0]
    result, other = json.loads((run / "summary.json").read_text())["sets"].values()
    score = read_checkpoint(run / "checkpoints" / "step_00000001").score
    assert score == (result["success"] + other["success"]) / 2
    with pytest.raises(Finished, match="reached --stop-at-success 0 after 1 steps"):
        open_run(tmp_path, "run", *goal, "--resume")
    (run / "summary.json").unlink()
    finish(open_run(tmp_path, "run", *goal, "--resume"))
    assert metrics(run) == before
    assert json.loads((run / "summary.json").read_text())["steps"] == 1


def test_a_refused_run_can_be_started_again(start: Path, straight: Path, tmp_path: Path) -> None:
    """In the same process: a notebook keeps the error, and with it what the frames of it hold."""
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    flags = ("--load", str(start), "--resume")
    for path in (tmp_path / "run" / "checkpoints").glob("*"):
        (path / "common.pt").write_bytes(b"damaged")
    errors = []
    for _ in range(2):
        with pytest.raises(ValueError, match="checkpoints") as refused:
            open_run(tmp_path, "run", *flags)
        errors.append(refused.value)
    assert "another process" not in str(errors[1])


def test_a_model_is_known_by_its_content_wherever_it_lies(
    start: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """And the learning rate, whose schedule had come to its end, jumps, which is said."""
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    model = shutil.copytree(start, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    run = open_run(tmp_path, "run", "--load", "./moved", "--num-steps", "9", "--resume")
    run.shutdown()
    assert run.config.model.load == str(model)
    rate = run.trainers["actor"].optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(1e-3 / 3)
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "would have been" in line)
    assert f"learning rate of step 6 would have been 0 and is {rate:.3g}, after 0.000167" in said
    assert "decoupled one of step 6 would have been 0 and is 0.001, after 0.0005 in step 5" in said
    remedy = said.split("must not jump, give ")[1].split()
    assert remedy == "--lr 0.0005 --decoupled-lr 0.0015 --critic-lr 0.0005".split()
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="model.load was"):
        open_run(tmp_path, "run", "--load", "./moved", "--num-steps", "9", "--resume")


def test_what_cannot_be_resumed_is_refused(start: Path, straight: Path, tmp_path: Path) -> None:
    output = straight.parent
    with pytest.raises(ValueError, match="advantage_estimator was gae .* is grpo"):
        other = ("--advantage-estimator", "grpo", "--num-steps", "9")
        open_run(output, "run", "--load", str(start), "--resume", *other)
    first = open_run(tmp_path, "run", "--load", str(start))
    try:
        with pytest.raises(ValueError, match="another process .* run directory"):
            open_run(tmp_path, "run", "--load", str(start), "--overwrite")
    finally:
        first.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "dp2_distributed_optimizer", "ep2", "cp2"])
def test_killed_and_resumed_equals_straight(start: Path, tmp_path: Path, layout: str) -> None:
    num_ranks, flags = LAYOUTS[layout]
    if layout == "ep2":
        tokenizer, start = load_tokenizer(str(start)), tmp_path / "mixture"
        write_mixture(start, tokenizer)
    flags = (*FLAGS, "--load", str(start), *flags)
    straight = launch(tmp_path, "straight", num_ranks, *flags)
    launch_and_kill(tmp_path, "killed", num_ranks, *flags)
    resumed = launch(tmp_path, "killed", num_ranks, *flags, "--resume")
    assert_equal_runs(straight, resumed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resumed_on_another_layout(tmp_path: Path) -> None:
    """Saved at TP2 x PP2 after three steps; the loss of the fourth equals the loss of the same
    layout.
    """
    start = launch(tmp_path, "start", 1, *FLAGS, *WARM_START, "--num-layers", "5") / "warm_start"

    def common(steps: int) -> tuple[str, ...]:
        return (
            *FLAGS,
            "--load",
            str(start),
            "--lr-decay",
            "constant",
            "--minibatch-size",
            "16",
            "--num-steps",
            str(steps),
        )

    num_ranks, flags = LAYOUTS["tp2_pp2"]
    saved = launch(tmp_path, "saved", num_ranks, *common(3), *flags)
    rows = {}
    for layout in ("tp2_pp2", "one", "dp2_distributed_optimizer", "pp4", "pp2_vp2", "cp2"):
        num_ranks, flags = LAYOUTS[layout]
        shutil.copytree(saved, tmp_path / layout)
        run = launch(tmp_path, layout, num_ranks, *common(4), "--resume", *flags)
        rows[layout] = metrics(run)[3]
    expected = rows.pop("tp2_pp2")
    for layout, row in rows.items():
        assert row["rollout/reward"] == expected["rollout/reward"], layout
        for key in (
            "actor/loss",
            "critic/loss",
            "actor/grad_norm",
            "critic/grad_norm",
            "actor/entropy",
        ):
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), (layout, key)
