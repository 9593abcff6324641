"""Ranks that only sample beside ranks that train: the same numbers as together, any step and any
resumed run to the bit, and one line for whatever ends it.
"""

import json
import multiprocessing
import os
import re
import signal
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ragen_mega.commands.replayed_step import LAYOUT, replay
from ragen_mega.config import parse
from ragen_mega.ranks import collectives
from ragen_mega.report.metrics import METRICS_FILE, read_metrics
from ragen_mega.run.build import build
from ragen_mega.run.run import Run
from ragen_mega.run.separate import Sampler, Samplers
from ragen_mega.storage.rollouts import RolloutStore
from ragen_mega.train import play_part
from tests.support.faulty_runs import FLAGS, WARM_START, start_of
from tests.support.forked_ranks import kill_ranks, on_ranks, wait_for
from tests.support.runs import launch, metrics, start_ranks, state
from tests.support.sockets import all_listening, is_loopback

pytestmark = pytest.mark.forks
NUM_STEPS = 4
SEPARATE = "--placement separate --rollout-ranks 1".split()
STALE = [*SEPARATE, *"--max-staleness 2 --importance-cap 2 --old-logprobs recompute".split()]


def flags(output: Path, *others: str) -> list[str]:
    """Of a short run from the small model."""
    start = ("--load", str(start_of(output)), "--num-steps", str(NUM_STEPS))
    return [*FLAGS, *start, "--minibatch-size", "8", "--eval-samples", "1", *others]


def sampled(run: Path) -> list[list]:
    """What the trajectories of every step are, besides the number of their weights."""
    store = RolloutStore(run / "rollouts")
    return [
        [
            (one.group_id, one.tokens, one.rollout_logprobs, one.total_reward)
            for group in store.read(step).groups
            for one in group.trajectories
        ]
        for step in store.steps()
    ]


def versions(run: Path) -> list[set[int]]:
    """The weights that the trajectories of every step were sampled under."""
    store = RolloutStore(run / "rollouts")
    return [
        {one.weight_version for group in store.read(step).groups for one in group.trajectories}
        for step in store.steps()
    ]


def assert_equal(run: Path, straight: Path) -> None:
    assert [row["step"] for row in metrics(run)] == list(range(NUM_STEPS))
    assert metrics(run) == metrics(straight)
    assert sampled(run) == sampled(straight)
    last, others = state(run, NUM_STEPS), state(straight, NUM_STEPS)
    torch.testing.assert_close(last, others, rtol=0, atol=0)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `start`, a small model."""
    output = tmp_path_factory.mktemp("separate")
    launch(output, "start", 1, *FLAGS, *WARM_START, "--warm-start-first-turn-steps", "40")
    return output


@pytest.fixture(scope="module")
def stale(output: Path) -> Path:
    """A run on rollouts of weights two steps old."""
    return launch(output, "stale", 2, *flags(output, *STALE))


def test_without_staleness_it_equals_the_colocated_run_to_the_bit(output: Path) -> None:
    together = launch(output, "together", 1, *flags(output))
    with all_listening(psutil.Process()) as addresses:
        apart = launch(output, "apart", 2, *flags(output, *SEPARATE))
    assert addresses and all(map(is_loopback, addresses)), addresses
    assert versions(apart) == [{step} for step in range(NUM_STEPS)]
    assert sampled(apart) == sampled(together)
    of_age = {"rollout/staleness", "rollout/continued"}
    assert [
        {key: value for key, value in row.items() if key not in of_age} for row in metrics(apart)
    ] == metrics(together)
    last, others = state(apart, NUM_STEPS), state(together, NUM_STEPS)
    assert all(torch.equal(last[key], others[key]) for key in others)


@pytest.mark.slow
def test_context_ranks_train_what_another_rank_samples(output: Path) -> None:
    """They equal two context-parallel ranks that sample too, to the bit."""
    context = ("--context-parallel-size", "2")
    together = launch(output, "context_together", 2, *flags(output, *context))
    apart = launch(output, "context_apart", 3, *flags(output, *SEPARATE, *context))
    assert sampled(apart) == sampled(together)
    last, others = state(apart, NUM_STEPS), state(together, NUM_STEPS)
    assert all(torch.equal(last[key], others[key]) for key in others)


ADAPTERS = "--lora-rank 4 --lora-sync adapter".split()


def test_adapters_travel_beside_a_base_that_is_sent_once(output: Path) -> None:
    """With the samples of engines on the ranks that train, which take adapters too."""
    together = launch(output, "adapters", 1, *flags(output, *ADAPTERS))
    apart = launch(output, "adapters_apart", 2, *flags(output, *SEPARATE, *ADAPTERS))
    assert sampled(apart) == sampled(together)
    rows = read_metrics(apart / METRICS_FILE)
    first, *later = [row["engine/weights_gbytes"] for row in rows]
    assert len(later) == NUM_STEPS - 1 and 0 < max(later) < first / 5
    assert max(row["mismatch/logprob_max_abs_diff"] for row in rows) < 1e-5


@pytest.mark.slow
def test_a_resumed_run_has_the_adapters_that_rollouts_are_due_under(output: Path) -> None:
    """A checkpoint keeps adapters of earlier steps, and the base is sent anew."""
    straight = launch(output, "straight", 2, *flags(output, *STALE, *ADAPTERS))
    kill_after_two_steps(output, "resumed", *STALE, *ADAPTERS)
    run = launch(output, "resumed", 2, *flags(output, *STALE, *ADAPTERS, "--resume"))
    assert_equal(run, straight)


def test_rollouts_are_of_weights_so_many_steps_old_and_corrected(stale: Path) -> None:
    assert versions(stale) == [{0}, {0}, {0}, {1}]
    rows = metrics(stale)
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 2, 2]
    assert rows[0]["mismatch/logprob_max_abs_diff"] < 1e-5
    assert all(row["mismatch/logprob_max_abs_diff"] > 1e-3 for row in rows[1:])
    assert all(row["actor/importance"] != 1.0 for row in rows[1:])


def test_every_second_of_every_rank_has_a_part(stale: Path) -> None:
    rows, lines = read_metrics(stale / METRICS_FILE), read_metrics(stale / "idleness.jsonl")
    assert [line["step"] for line in lines] == list(range(NUM_STEPS))
    for row, line in zip(rows, lines, strict=True):
        shares = {key: value for key, value in row.items() if key.startswith("share/")}
        trains, samples = line["ranks"]
        both = sum(trains.values()) + sum(samples.values())
        assert sum(shares.values()) == pytest.approx(1.0)
        assert shares["share/update"] == pytest.approx(trains["update"] / both, abs=1e-3)
        assert trains["update"] > 0 and not trains["waiting_weights"]
        assert samples["rollout"] > 0 and not samples["waiting_samples"] + samples["update"]
        assert line["text"].startswith("ranks wait ")
    assert "ranks wait " in json.loads((stale / "summary.json").read_text())["idleness"]


def test_samplers_do_not_wait_until_a_step_is_evaluated(output: Path) -> None:
    """The next rollout comes before the evaluation ends, though it is due under these weights."""
    others = ("--num-steps", "2", "--eval-interval", "1", "--output", str(output))
    config = parse([*flags(output, *SEPARATE), *others, "--name", "evaluated"])

    def rank() -> None:
        run = build(config)
        if isinstance(run, Run):
            evaluate = run.evaluation.play

            def evaluate_late(step: int, *rest: object) -> object:
                deadline = time.monotonic() + 100.0
                while step == 1 and not run.rollouts.samplers._link.num_waiting:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                return evaluate(step, *rest)

            run.evaluation.play = evaluate_late
        with run:
            play_part(run)

    on_ranks(rank, 2)
    assert versions(output / "evaluated") == [{0}, {1}]


def test_any_step_is_repeated_to_the_bit(stale: Path) -> None:
    result = replay(
        Namespace(
            run=stale,
            step=3,
            tolerance=0.0,
            num_ranks=None,
            **dict.fromkeys(LAYOUT),
        )
    )
    assert result["keys"]["rollout/staleness"]["replayed"] == 2
    assert result["equal"] and len(result["keys"]) > 20, result["keys"]


def kill_after_two_steps(output: Path, name: str, *others: str) -> None:
    processes = start_ranks(output, name, 2, *flags(output, *others))
    wait_for(output / name / "checkpoints" / "step_00000002", processes)
    kill_ranks(processes)


def test_a_killed_run_goes_on_to_the_bit(output: Path, stale: Path) -> None:
    kill_after_two_steps(output, "killed", *STALE)
    assert_equal(launch(output, "killed", 2, *flags(output, *STALE, "--resume")), stale)


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_bit(
    output: Path, stale: Path, capfd: pytest.CaptureFixture
) -> None:
    """The signal reaches the rank that samples alone, which has the others stop."""
    processes = start_ranks(output, "stopped", 2, *flags(output, *STALE, "--save-interval", "0"))
    wait_for(output / "stopped" / "rollouts" / "step_00000000.safetensors", processes)
    os.kill(processes[1].pid, signal.SIGTERM)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [128 + signal.SIGTERM] * 2
    assert "--resume goes on" in capfd.readouterr().out
    (checkpoint,) = (output / "stopped" / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("step_")) < NUM_STEPS
    assert_equal(launch(output, "stopped", 2, *flags(output, *STALE, "--resume")), stale)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["trainer", "sampler"])
def test_a_killed_rank_ends_the_others_with_one_line(
    victim: int, output: Path, stale: Path, capfd: pytest.CaptureFixture
) -> None:
    name = f"without_{victim}"
    processes = start_ranks(output, name, 2, *flags(output, *STALE, "--save-interval", "1"))
    wait_for(output / name / "rollouts" / "step_00000000.safetensors", processes)
    capfd.readouterr()
    processes[victim].kill()
    processes[1 - victim].join()
    assert processes[1 - victim].exitcode == 2
    gone = ("train", "sample")[victim]
    said = capfd.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert f"ranks that {gone} have ended; --resume" in said
    assert_equal(launch(output, name, 2, *flags(output, *STALE, "--resume")), stale)


@pytest.mark.slow
def test_a_sampler_that_never_answers_ends_the_run(
    output: Path, capfd: pytest.CaptureFixture
) -> None:
    patience = ("--sampler-timeout", "3")
    processes = start_ranks(output, "silent", 2, *flags(output, *STALE, *patience))
    wait_for(output / "silent" / "rollouts", processes)
    os.kill(processes[1].pid, signal.SIGSTOP)
    processes[0].join()
    said = capfd.readouterr().err
    processes[1].kill()
    assert processes[0].exitcode == 2
    first, own, error = said.splitlines()
    assert f"the job waits for rank 1 (process {processes[1].pid} on " in first
    assert own.startswith("  rank 0: ") and ", waits for rollout " in own
    assert error.startswith("error: ") and re.search("no turn for [3-9] s", error)


@pytest.mark.slow  # and a machine that stands still for four seconds fails it
def test_turns_of_any_sampler_are_signs_of_life(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one has soon ended its part, of eight trajectories. Each turn of the other takes a
    second, and is waited for from its first one on: engines are compiled before.
    """
    has_begun = multiprocessing.get_context("fork").Event()
    send_heartbeat, take = Sampler._send_heartbeat, Samplers.take

    def end_turn(self: Sampler) -> None:
        if os.environ["RANK"] == "2":
            has_begun.set()
            time.sleep(1.0)
        send_heartbeat(self)

    def take_later(self: Samplers, *about: Any) -> Any:
        has_begun.wait()
        return take(self, *about)

    monkeypatch.setattr(Sampler, "_send_heartbeat", end_turn)
    monkeypatch.setattr(Samplers, "take", take_later)
    layout = "--rollout-ranks 2 --group-size 8 --num-steps 1 --sampler-timeout 5".split()
    run = launch(output, "slow_turns", 3, *flags(output), *SEPARATE, *layout)
    assert versions(run) == [{0}]


@pytest.mark.slow
def test_what_ends_a_sampler_is_what_the_run_says(
    output: Path, capfd: pytest.CaptureFixture
) -> None:
    """A judge that cannot be reached from there."""
    judge = ("--reward", "environment + http://127.0.0.1:9/judge", "--num-steps", "3")
    processes = start_ranks(output, "judged", 2, *flags(output, *SEPARATE, *judge))
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [2, 2]
    said = capfd.readouterr().err
    assert said.startswith("error: the judge http://127.0.0.1:9/judge ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("rank", [1, 2])
def test_what_ends_one_sampler_alone_is_what_the_run_says(
    output: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """While the other one waits for it."""

    def fail(*about: object) -> None:
        if os.environ["RANK"] == str(rank):
            raise ValueError("no engine here")
        collectives.barrier()

    monkeypatch.setattr("ragen_mega.run.build.build_sampling", fail)
    layout = ("--rollout-ranks", "2")
    processes = start_ranks(output, f"alone_{rank}", 3, *flags(output, *SEPARATE, *layout))
    processes[0].join()
    kill_ranks(processes[1:])  # as the launcher does
    assert processes[0].exitcode == 2
    reason, *others = capfd.readouterr().err.splitlines()
    assert reason == "error: no engine here"
    # of samplers that then find themselves alone
    assert all("another rank" in line for line in others)


@pytest.mark.slow
def test_trajectories_that_are_carried_over_are_repeated_too(output: Path) -> None:
    """Two ranks that sample, two that train. Answers without the form go on for twenty turns: some
    are left when half of the trajectories are over, which is asked every 32 tokens.
    """
    layout = "--rollout-ranks 2 --tensor-model-parallel-size 2 --carry-over 0.5".split()
    turns = "--max-turns 20 --max-context-length 700".split()
    runs = [
        launch(output, f"carried_{name}", 4, *flags(output, *STALE, *layout, *turns))
        for name in ("once", "again")
    ]
    assert_equal(*runs)
    rows = metrics(runs[0])
    assert any(row["rollout/continued"] for row in rows) and not rows[-1]["rollout/continued"]
