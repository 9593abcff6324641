"""Time training steps with ranks that sample beside ranks that train, against ranks that do both in
turns.

    python tools/benchmarks/bench_placement.py --json placement.json

Two ranks, a small model with random weights and an environment of which every step takes --latency
seconds. Runs of the two placements alternate; `separate` has one rank that samples, one step ahead
(--max-staleness 1). A step's seconds are the wall clock from one row of metrics.jsonl to the next,
without the first two of a run. The model cannot sample a stop token, so that both placements
sample and train on the same number of tokens. `sampling` and `training` are what the one rank of
each took for a step in the separate runs, without waiting for the other.

Only where the two are alike does either rank have nothing to wait for. So a first run with one
pass over the rollout measures them, and the measured ones make as many passes (--updates, the
flag --updates-per-rollout) as bring training closest to sampling. A workload whose training is
the longer with one pass stays unequal, and the result says so. `expected` is the ratio if nothing
passed between the two ranks and colocated ones shared all but the environment's seconds evenly.
Flags after -- go to the training program.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_step import ended
from harness import OUTPUTS, interleave, provenance, publish, spread, table
from random_models import write_checkpoint

from ragen_mega.commands.command_line import command, flag
from ragen_mega.config import ModelConfig
from ragen_mega.data.launcher import PROGRAM, ranks_command
from ragen_mega.report.metrics import METRICS_FILE, read_metrics
from ragen_mega.warm_start.small_model import small_model

ENVIRONMENT = "slow_world:SlowWorld"
PLACEMENTS = {
    "colocated": (),
    "separate": tuple(
        "--placement separate --rollout-ranks 1 --max-staleness 1 --importance-cap 2".split()
    ),
}
WARMUP = 2
"""First steps of a run, which do not count."""
ALIKE = 0.1
"""Share by which sampling and training may differ to count as equally long."""
_POLL_SECONDS = 0.01
FLAGS = (
    *OUTPUTS,
    flag("--latency", "seconds of an environment's step", 0.1),
    flag("--turns", "of a trajectory", 5),
    flag("--num-groups", "initial states a step", 4),
    flag("--group-size", "trajectories of each", 8),
    flag("--response-length", "sampled tokens a turn", 4),
    flag("--updates", "passes over a rollout (0: for training as long as sampling)", 0),
    flag("--steps", "of a run; the first two do not count", 12),
    flag("--repeats", "runs of each placement", 5),
    flag("--output", "checkpoint, runs and logs", Path("bench_placement")),
    ("training", {"nargs": "*", "metavar": "-- FLAGS", "help": "of the training program"}),
)


def train(arguments: argparse.Namespace, placement: str, updates: int) -> dict[str, Any]:
    """Return the wall-clock seconds of the steps of one run with so many passes over a rollout, and
    its rows of metrics. If it fails, leave with the end of its log.
    """
    directory = arguments.output / placement
    metrics, log = directory / METRICS_FILE, arguments.output / f"{placement}.log"
    metrics.unlink(missing_ok=True)
    flags = (
        f"--recipe none --environments {ENVIRONMENT} --max-turns {arguments.turns} --no-think"
        f" --max-actions {arguments.turns} --prompt-style compact --max-context-length 512"
        f" --max-response-length {arguments.response_length} --num-groups {arguments.num_groups}"
        f" --group-size {arguments.group_size} --minibatch-size"
        f" {arguments.num_groups * arguments.group_size} --filter-strategy none"
        f" --advantage-estimator grpo --old-logprobs recompute --save-interval 0"
        f" --updates-per-rollout {updates}"
        f" --num-steps {arguments.steps + 1} --eval-interval 0 --eval-prompts 1"
        f" --eval-samples 1 --name {placement} --overwrite"
    ).split()
    options = json.dumps({ENVIRONMENT: {"latency": arguments.latency}})
    places = ("--environment-options", options, "--load", str(arguments.output / "checkpoint"))
    words = (*flags, *places, "--output", str(arguments.output), *PLACEMENTS[placement])
    here = Path(__file__).resolve().parent
    root = here.parents[1]
    paths = [str(here), str(root), str(root / "kernels")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    stamps: list[float] = []
    with log.open("wb") as file:
        process = subprocess.Popen(
            ranks_command(2, PROGRAM, "train", *words, *arguments.training),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        with ended(process):
            while process.poll() is None and len(stamps) < arguments.steps:
                if metrics.exists() and metrics.read_bytes().count(b"\n") > len(stamps):
                    stamps.append(time.monotonic())
                time.sleep(_POLL_SECONDS)
    if len(stamps) < arguments.steps:
        print(*log.read_text(errors="replace").splitlines()[-15:], sep="\n", file=sys.stderr)
        raise SystemExit(1)
    gaps = [later - earlier for earlier, later in zip(stamps, stamps[1:])]
    return {"seconds": gaps[WARMUP - 1 :], "rows": read_metrics(metrics)[WARMUP:]}


def parts(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of a step of separate runs: what the sampling rank and the training
    rank did and waited, and of the latter the passes over the rollout.
    """
    steps = [step for run in runs for step in zip(run["seconds"], run["rows"])]
    readings = {
        "sampling": [row["engine/sampling_seconds"] for _, row in steps],
        "training": [seconds - row["time/rollout"] for seconds, row in steps],
        "sampler_waits": [row["engine/waiting_seconds"] for _, row in steps],
        "trainer_waits": [row["time/rollout"] for _, row in steps],
        "updates": [row["time/update"] for _, row in steps],
    }
    return {name: statistics.median(values) for name, values in readings.items()}


def equal_updates(arguments: argparse.Namespace) -> int:
    """Return the passes over a rollout with which training takes about as long as sampling, by a
    run with one.
    """
    times = parts([train(arguments, "separate", 1)])
    return max(1, 1 + round((times["sampling"] - times["training"]) / times["updates"]))


def described(report: dict[str, Any]) -> str:
    """Return the result as a table and in words."""
    rows = [
        (
            name,
            f"{at['median']:.3f}",
            f"{at['min']:.3f} - {at['max']:.3f}",
            f"{3600 / at['median']:.0f}",
        )
        for name, at in report["seconds"].items()
    ]
    times = report["of_one_rank"]
    alike = "about as long" if report["is_alike"] else "not as long, so that one waits"
    return (
        table(("placement", "s/step", "spread", "steps an hour"), rows)
        + f"\n\nseparate is {report['speedup']:.2f} times as fast, expected"
        f" {report['expected']:.2f};"
        f" with --updates-per-rollout {report['updates']} one rank samples a step in"
        f" {times['sampling']:.3f} s (and waits {times['sampler_waits']:.3f} s), the other trains"
        f" on it in {times['training']:.3f} s (and waits {times['trainer_waits']:.3f} s): {alike}"
    )


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    if arguments.steps <= WARMUP:
        raise ValueError(f"--steps must be at least {WARMUP + 1}, not {arguments.steps}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    checkpoint = arguments.output / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    hf = small_model(ModelConfig(), vocab_size=2048)
    write_checkpoint(hf, "bandit", checkpoint, dtype=torch.float32)
    updates = arguments.updates or equal_updates(arguments)
    jobs = {name: lambda name=name: train(arguments, name, updates) for name in PLACEMENTS}
    runs = interleave(jobs, arguments.repeats)
    seconds = {
        name: [value for run in group for value in run["seconds"]] for name, group in runs.items()
    }
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    times, elapsing = parts(runs["separate"]), arguments.turns * arguments.latency
    longer = max(times["sampling"], times["training"])
    report = provenance() | {
        "latency": arguments.latency,
        "trajectories": arguments.num_groups * arguments.group_size,
        "turns": arguments.turns,
        "response_length": arguments.response_length,
        "updates": updates,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "of_one_rank": times,
        "is_alike": abs(times["sampling"] - times["training"]) <= ALIKE * longer,
        "speedup": medians["colocated"] / medians["separate"],
        "expected": (elapsing + (times["sampling"] - elapsing + times["training"]) / 2) / longer,
        "all_seconds": seconds,
    }
    publish(arguments, report, described(report), {"seconds per step": seconds})


if __name__ == "__main__":
    main()
