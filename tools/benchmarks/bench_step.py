"""Time whole StarPO-S steps of a model of a real size: rollout, weight sync, advantages and
updates, phase by phase.

    python tools/benchmarks/bench_step.py --json step.json   # Qwen2.5-0.5B on a GPU, with SGLang
    python tools/benchmarks/bench_step.py --keep 1 -- --sglang-python PYTHON --offload turns

The paper's protocol on Sokoban: 8 initial states x 16 trajectories, five turns, PPO with a critic,
32 trajectories per optimizer step; bfloat16 on CUDA, float32 on a CPU. The run goes through
ragen-mega launch on one rank: StarPO-S keeps the quarter of the groups with the widest spread of
returns (--keep 0.25), 1 trains on all. Flags after -- go to the training program.

Weights are random, so nothing has to be downloaded, and the workload is fixed: the model cannot
sample a stop token, so every turn has exactly --response-length tokens, and it never solves a room,
so every trajectory has all its turns. The default of 68 is the longest that arXiv:2504.20073 shows
in training: 338 tokens a trajectory at the beginning, 104 at the end (Fig. 11, Sokoban with
thoughts), so the original's mean seconds per step were spent on fewer tokens than ours. All returns
are equal: the groups that are kept are the first, which costs what keeping others would.

`seconds` is the wall clock from one row of metrics.jsonl to the next, median over the steps after
the first two: the first starts the server and compiles kernels, and cuDNN builds a graph of
attention, which takes seconds, whenever the number of tokens or trajectories of a pass reaches a
new power of two, as may still happen in the second step. The phases are the program's own timers,
`other` is the rest: summaries, logging, waiting. Rates: sampled tokens over the seconds of
rollout and sync; positions of the update, prompts included, over the seconds of advantages and
update. On a GPU `memory` sets what the device held at the end of each phase beside the plan. The
original takes 23.5 s with 0.25 and 68.7 s with 1: arXiv:2504.20073 Fig. 7,
total time over 200 steps, one GPU of the H100 class.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from harness import JSON, model_flag, provenance, publish, spread, table
from random_models import write_checkpoint
from transformers import PretrainedConfig

from ragen_mega.commands.command_line import command, flag
from ragen_mega.config import StarPOConfig, parse
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.hardware import HARDWARE
from ragen_mega.planning.memory import GIB, Setting, plan
from ragen_mega.planning.published import model_config
from ragen_mega.ranks.launcher import PROGRAM, ranks_command
from ragen_mega.report.metrics import METRICS_FILE, read_metrics, write_json
from ragen_mega.storage.checkpoints import CHECKPOINTS
from ragen_mega.storage.run_directory import FINAL_EXPORT

NUM_TURNS, RUN = 5, "run"
WARMUP = 2
"""First steps, which do not count."""
_POLL_SECONDS = 0.02
_LOG_LINES = 15
FLAGS = (
    JSON,
    model_flag("Qwen2.5-0.5B"),
    flag("--steps", "per run; the first two do not count", 6),
    flag("--num-groups", "initial states a step", 8),
    flag("--group-size", "trajectories of each", 16),
    flag("--response-length", "sampled tokens a turn", 68),
    flag("--keep", "share of the groups that is trained on", 0.25),
    flag(
        "--rollout-engine",
        "what samples; without CUDA embedded",
        "sglang" if torch.cuda.is_available() else "embedded",
        choices=("sglang", "embedded"),
    ),
    flag("--output", "checkpoint, runs and logs", Path("bench_step")),
    ("training", {"nargs": "*", "metavar": "-- FLAGS", "help": "of the training program"}),
)


def training_flags(arguments: argparse.Namespace, checkpoint: Path) -> list[str]:
    """Return the flags of the run: no warm start, no checkpoint, one evaluated episode before it,
    and a last step that is not measured, because the final evaluation is part of this step.
    """
    kept = "--filter-strategy none"
    if arguments.keep < 1:
        kept = f"--filter-strategy top_fraction --filter-value {arguments.keep} --filter-keep-zero"
    flags = (
        f"--recipe none --environments sokoban --max-turns {NUM_TURNS} {kept}"
        f" --num-groups {arguments.num_groups} --group-size {arguments.group_size}"
        f" --max-response-length {arguments.response_length} --num-steps {arguments.steps + 1}"
        f" --rollout-engine {arguments.rollout_engine} --save-interval 0 --eval-interval 0"
        f" --eval-prompts 1 --eval-samples 1 --name {RUN} --overwrite"
    ).split()
    flags += ["--bf16"] if torch.cuda.is_available() else []
    places = ("--load", str(checkpoint), "--output", str(arguments.output))
    return [*flags, *places, *arguments.training]


def train(
    arguments: argparse.Namespace,
    checkpoint: Path,
    report: Callable[[list[dict[str, Any]], list[float]], None],
) -> None:
    """Train; `report` gets, after every step that counts, the rows of metrics of all steps and the
    wall-clock seconds between them. If the run fails, leave with the end of its log.
    """
    run, log = arguments.output / RUN, arguments.output / f"{RUN}.log"
    metrics = run / METRICS_FILE
    metrics.unlink(missing_ok=True)
    stamps: list[float] = []
    with log.open("wb") as file:
        process = subprocess.Popen(
            ranks_command(1, PROGRAM, "train", *training_flags(arguments, checkpoint)),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        with ended(process):
            while process.poll() is None and len(stamps) < arguments.steps:
                if metrics.exists() and metrics.read_bytes().count(b"\n") > len(stamps):
                    stamps.append(time.monotonic())
                    if len(stamps) > WARMUP:
                        gaps = [later - earlier for earlier, later in zip(stamps, stamps[1:])]
                        report(read_metrics(metrics)[: len(stamps)], gaps)
                time.sleep(_POLL_SECONDS)
    for directory in (CHECKPOINTS, FINAL_EXPORT):  # they may have been begun before the kill
        shutil.rmtree(run / directory, ignore_errors=True)
    if len(stamps) < arguments.steps:
        print(
            *log.read_text(errors="replace").splitlines()[-_LOG_LINES:], sep="\n", file=sys.stderr
        )
        raise SystemExit(
            f"error: training ended with status {process.returncode}; the end of {log} is above"
        )


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a run at the end of the block, before it writes its last checkpoint and its export: many
    GB that nobody wants.
    """
    try:
        yield
    finally:
        everything: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # a process may have ended by itself
            launcher = psutil.Process(process.pid)
            everything = launcher.children(recursive=True)
            for rank in launcher.children():
                rank.kill()
        process.kill()
        process.wait()
        # servers end with their ranks, and the next run needs their memory
        psutil.wait_procs(everything, timeout=60)


def summarize(
    model: str, rows: Sequence[Mapping[str, Any]], gaps: Sequence[float]
) -> dict[str, Any]:
    """Summarize the time of a run per step; the first steps do not count. `gaps` are the wall-clock
    seconds of all steps but the first.
    """
    counted, gaps, median = rows[WARMUP:], gaps[WARMUP - 1 :], statistics.median
    seconds, num_trajectories = median(gaps), counted[0]["rollout/num_trajectories"]
    names = sorted({key for row in counted for key in row if is_phase(key)})
    phases = {
        key.removeprefix("time/"): median([row.get(key, 0.0) for row in counted]) for key in names
    }
    peak = bfloat16_peak()
    known = [sum(row[key] for key in names if key in row) for row in counted]
    phases["other"] = median([gap - part for gap, part in zip(gaps, known, strict=True)])
    sampled = median([row["rollout/sampled_tokens"] for row in counted])
    return {
        "seconds": seconds,
        "spread": spread(gaps),
        "all_seconds": list(gaps),
        "phases": {
            name: {"seconds": value, "share": value / seconds} for name, value in phases.items()
        },
        "num_trajectories": num_trajectories,
        "trained_trajectories": num_trajectories * counted[0]["filter/kept_fraction"],
        "sampled_tokens": sampled,
        "sampled_tokens_per_trajectory": sampled / num_trajectories,
        "rollout_tokens_per_second": median([row["rollout/tokens_per_second"] for row in counted]),
        "train_tokens_per_second": median([row["update/tokens_per_second"] for row in counted]),
        "sync_gbytes_per_second": rate_of(counted, "time/sync_gbytes_shard", "time/sync"),
        "update_teraflops": (teraflops := update_teraflops(model, counted)),
        "mfu": teraflops and peak and 1e12 * teraflops / peak,
        "awake_free_gib": min(row.get("memory/rollout_free_gib", 0.0) for row in counted),
        "asleep_free_gib": min(row.get("memory/train_free_gib", 0.0) for row in counted),
        "mismatch": max(row["mismatch/logprob_max_abs_diff"] for row in counted),
        "rows": [
            {key: value for key, value in row.items() if key.startswith(("time/", "memory/"))}
            for row in counted
        ],
    }


def memory(
    config: StarPOConfig, hf: PretrainedConfig, rows: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Return phase -> most GiB of the device that all processes held at its end, when torch has
    given nothing back yet, and the plan's GiB.
    """
    all_gib, found = torch.cuda.mem_get_info()[1] / GIB, dict[str, dict[str, float]]()
    for name, terms in plan(ModelShape.of(hf), Setting.from_config(config, 1)).items():
        phase, planned = name.split()[0], sum(terms.values()) / GIB  # `train` of actor and critic
        measured = all_gib - min(row[f"memory/{phase}_end_free_gib"] for row in rows)
        planned = max(planned, found.get(phase, {}).get("planned", 0.0))
        found[phase] = {"measured": measured, "planned": planned}
    return found


def rate_of(rows: Sequence[Mapping[str, Any]], amount: str, seconds: str) -> float | None:
    """Return the median of an amount over its seconds; None where a step does not say both."""
    if not all(amount in row and row.get(seconds) for row in rows):
        return None
    return statistics.median([row[amount] / row[seconds] for row in rows])


def update_teraflops(model: str, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """TFLOP/s of actor and critic, forward and backward, over the positions of an update; with
    shared prefixes less is computed. None where a step does not say its seconds.
    """
    cost, found = ModelShape.of(model_config(model)).cost, []
    for row in rows:
        if not row.get("time/advantages") or not row.get("time/update"):
            return None
        seconds = row["time/advantages"] + row["time/update"]
        positions = row["update/tokens_per_second"] * seconds
        kept = row["filter/kept_fraction"]
        length = positions / (row["rollout/num_trajectories"] * kept)
        labels = row["rollout/sampled_tokens"] * kept / positions
        flops = positions * (cost.flops(length, labels) + cost.flops(length, 0.0))
        found.append(flops / row["time/update"] / 1e12)
    return statistics.median(found)


def bfloat16_peak() -> float | None:
    """Return the operations a second of this GPU's data sheet; None without one that is known."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((hardware.bf16 for name, hardware in HARDWARE.items() if name in device), None)


def is_phase(key: str) -> bool:
    """Return whether a metric is the seconds of a phase, none of which is inside another."""
    return key.startswith("time/") and key != "time/step" and not key.startswith("time/sync_")


def tables(report: Mapping[str, Any]) -> str:
    """Return the report as text."""
    totals = (
        f"{report['seconds']:.2f}",
        f"{report['spread']['min']:.2f} - {report['spread']['max']:.2f}",
        *(f"{report[f'{stage}_tokens_per_second']:.0f}" for stage in ("rollout", "train")),
    )
    phases = [
        (name, f"{phase['seconds']:.2f}", f"{phase['share']:.0%}")
        for name, phase in sorted(report["phases"].items(), key=lambda item: -item[1]["seconds"])
    ]
    return "\n\n".join(
        (
            f"{report['model']} ({report['num_parameters'] / 1e6:.1f} M parameters, random) on"
            f" {report['hardware']}, {report['rollout_engine']} rollouts, {report['keep']:.0%} of"
            f" {report['num_trajectories']:.0f} trajectories a step trained on,"
            f" {report['sampled_tokens_per_trajectory']:.1f} sampled tokens a trajectory",
            table(("s/step", "spread", "rollout tok/s", "train tok/s"), [totals]),
            table(("phase", "s", "share"), phases),
        )
    )


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    if arguments.steps <= WARMUP:
        raise ValueError(
            f"--steps must be at least {WARMUP + 1}, because the first {WARMUP} do not count, not"
            f" {arguments.steps}"
        )
    if not 0 < arguments.keep <= 1:
        raise ValueError(f"--keep must be a share above 0 and up to 1, not {arguments.keep:g}")
    checkpoint = arguments.output / "checkpoint"
    arguments.output.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = provenance() | {
        "model": arguments.model,
        "rollout_engine": arguments.rollout_engine,
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "response_length": arguments.response_length,
        "num_turns": NUM_TURNS,
        "keep": arguments.keep,
        "training_flags": arguments.training,
    }

    def publish_so_far(rows: list[dict[str, Any]], gaps: list[float]) -> None:
        """Write after every step, so that a later failure loses nothing."""
        report.update(summarize(arguments.model, rows, gaps))
        if torch.cuda.is_available():
            config = parse(training_flags(arguments, checkpoint))
            report["memory"] = memory(config, hf, rows)
        if arguments.json:
            write_json(arguments.json, report)

    try:
        hf = model_config(arguments.model)
        print(f"writing a random {arguments.model} to {checkpoint}", flush=True)
        report["num_parameters"] = write_checkpoint(hf, "sokoban", checkpoint, dtype=torch.bfloat16)
        train(arguments, checkpoint, publish_so_far)
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
        if "seconds" in report:
            publish(arguments, report, tables(report))


if __name__ == "__main__":
    main()
