"""Time whole StarPO-S steps of a model of a real size: rollout, weight sync, advantages and
updates, phase by phase.

    python tools/bench_step.py --json step.json                          # Qwen2.5-0.5B, on a GPU with SGLang's rollouts
    python tools/bench_step.py --keep 0.25 --json step.json -- --rollout-engine sglang --sglang-python PYTHON --offload turns

The paper's protocol on Sokoban: 8 initial states x 16 trajectories, five turns, PPO with a critic,
32 trajectories per optimizer step; bfloat16 on CUDA, float32 on a CPU. Each value of --keep is a
run of its own through tools/launch.py on one rank: StarPO-S keeps the quarter of the groups with
the widest spread of returns (0.25), 1 trains on all. What stands behind -- goes to the training
program.

Weights are random, so nothing has to be downloaded, and the workload is fixed: the model cannot
sample a stop token, so every turn has exactly --response-length tokens, and it never solves a room,
so every trajectory has all its turns. The default of 68 is the longest that arXiv:2504.20073 shows
in training: 338 tokens a trajectory at the beginning, 104 at the end (Fig. 11, Sokoban with
thoughts), so the original's mean seconds per step were spent on fewer tokens than ours. All returns
are equal: the groups that are kept are the first, which costs what keeping others would.

`seconds` is the wall clock from one row of metrics.jsonl to the next, median over the steps behind
the first (which starts the server and compiles kernels). The phases are the program's own timers,
`other` is what they leave: summaries, logging, waiting. Rates: sampled tokens over the seconds of
rollout and sync; positions of the update, prompts included, over the seconds of advantages and
update. The original's seconds are arXiv:2504.20073 Fig. 7, total time over 200 steps, one GPU of
the H100 class.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from random_checkpoint import model_config, write_checkpoint

from ragen_mega.report.console import fail
from ragen_mega.report.metrics import METRICS_FILE, read_metrics
from ragen_mega.run.run import FINAL_EXPORT
from ragen_mega.storage.checkpoints import CHECKPOINTS

ROOT = Path(__file__).parents[1]
NUM_TURNS = 5
TARGETS = {0.25: (6.0, 23.5), 1.0: (15.0, 68.7)}
"""Share of the groups that is kept -> seconds per step (what we aim at, what the original took)."""
TARGET_MODEL, TARGET_TRAJECTORIES = "Qwen2.5-0.5B", 128
"""What those are for."""
_POLL_SECONDS = 0.02
_LOG_LINES = 15


def training_flags(arguments: argparse.Namespace, checkpoint: Path, keep: float) -> list[str]:
    """Flags of one run: no warm start, no checkpoint, one evaluated episode before it."""
    kept = ["--filter-strategy", "none"]
    if keep < 1:
        kept = [
            "--filter-strategy",
            "top_fraction",
            "--filter-value",
            str(keep),
            "--filter-keep-zero",
        ]
    return [
        "--recipe", "none", "--load", str(checkpoint), "--environments", "sokoban", "--max-turns", str(NUM_TURNS),
        "--num-groups", str(arguments.num_groups), "--group-size", str(arguments.group_size),
        "--max-response-length", str(arguments.response_length), "--num-steps", str(arguments.steps), *kept,
        "--rollout-engine", arguments.rollout_engine, *(["--bf16"] if torch.cuda.is_available() else []),
        "--eval-interval", "0", "--eval-prompts", "1", "--eval-samples", "1", "--save-interval", "0",
        "--output", str(arguments.output), "--name", run_name(keep), "--overwrite", *arguments.training,
    ]  # fmt: skip


def run_name(keep: float) -> str:
    """Of the run directory."""
    return f"keep_{100 * keep:g}"


def train(
    arguments: argparse.Namespace, checkpoint: Path, keep: float
) -> tuple[list[dict[str, Any]], list[float]]:
    """One run; returns its rows of metrics and the wall-clock seconds between them. Raises
    RuntimeError if it fails.
    """
    run, log = arguments.output / run_name(keep), arguments.output / f"{run_name(keep)}.log"
    metrics = run / METRICS_FILE
    metrics.unlink(missing_ok=True)
    command = [
        sys.executable, str(ROOT / "tools" / "launch.py"), "--nproc-per-node", "1",
        str(ROOT / "examples" / "pretrain_starpo.sh"), *training_flags(arguments, checkpoint, keep),
    ]  # fmt: skip
    stamps: list[float] = []
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and len(stamps) < arguments.steps:
                if metrics.exists() and metrics.read_bytes().count(b"\n") > len(stamps):
                    stamps.append(time.monotonic())
                time.sleep(_POLL_SECONDS)
        finally:
            end(process)
            for directory in (CHECKPOINTS, FINAL_EXPORT):  # the kill may come when they have begun
                shutil.rmtree(run / directory, ignore_errors=True)
    if len(stamps) < arguments.steps:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        raise RuntimeError(
            f"training with --keep {keep:g} ended with status {process.returncode}; {log} ends"
            f" with:\n{last}"
        )
    rows = read_metrics(metrics)
    return rows, [later - earlier for earlier, later in zip(stamps, stamps[1:])]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a run before it writes its last checkpoint and its export, which nobody wants and are
    many GB.
    """
    everything: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):  # what has ended by itself
        launcher = psutil.Process(process.pid)
        everything = launcher.children(recursive=True)
        for rank in launcher.children():
            rank.kill()
    process.kill()
    process.wait()
    psutil.wait_procs(
        everything, timeout=60
    )  # servers end with their ranks, and the next run needs their memory


def summarize(
    model: str, keep: float, rows: Sequence[Mapping[str, Any]], gaps: Sequence[float]
) -> dict[str, Any]:
    """What a run took per step; the first step does not count. `gaps` are the wall-clock seconds of
    the others.
    """
    counted, median = rows[1:], statistics.median
    seconds = median(gaps)
    names = sorted({key for row in counted for key in row if is_phase(key)})
    phases = {
        key.removeprefix("time/"): median([row.get(key, 0.0) for row in counted]) for key in names
    }
    known = [sum(row[key] for key in names if key in row) for row in counted]
    phases["other"] = median([gap - part for gap, part in zip(gaps, known, strict=True)])
    sampled = [row["rollout/sampled_tokens"] for row in counted]
    is_comparable = (
        model == TARGET_MODEL and counted[0]["rollout/num_trajectories"] == TARGET_TRAJECTORIES
    )
    target, original = TARGETS.get(keep, (None, None)) if is_comparable else (None, None)
    return {
        "keep": keep, "seconds": seconds, "all_seconds": list(gaps), "target_seconds": target, "original_seconds": original,
        "phases": {name: {"seconds": value, "share": value / seconds} for name, value in phases.items()},
        "num_trajectories": counted[0]["rollout/num_trajectories"],
        "trained_trajectories": counted[0]["rollout/num_trajectories"] * counted[0]["filter/kept_fraction"],
        "sampled_tokens": median(sampled),
        "sampled_tokens_per_trajectory": median(sampled) / counted[0]["rollout/num_trajectories"],
        "rollout_tokens_per_second": median([row["rollout/tokens_per_second"] for row in counted]),
        "train_tokens_per_second": median([row["update/tokens_per_second"] for row in counted]),
        "mismatch": max(row["mismatch/logprob_max_abs_diff"] for row in counted),
        "rows": [{key: value for key, value in row.items() if key.startswith(("time/", "memory/"))} for row in counted],
    }  # fmt: skip


def is_phase(key: str) -> bool:
    """Whether a metric is the seconds of a phase, none of which is inside another."""
    return key.startswith("time/") and key != "time/step" and not key.startswith("time/sync_")


def hardware() -> str:
    """The GPU's name, or the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def versions() -> dict[str, str]:
    """Of what computes here; SGLang's may be that of another environment than the server's."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for name in (
        "torch",
        "triton",
        "megatron-core",
        "transformer-engine",
        "sglang",
        "transformers",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def table(report: Mapping[str, Any]) -> str:
    """For people."""
    runs = report["runs"]
    first = runs[0]
    lines = [
        (
            f"{report['model']} ({report['num_parameters'] / 1e6:.1f} M parameters, random) on"
            f" {report['hardware']}, {report['rollout_engine']} rollouts,"
            f" {first['num_trajectories']:.0f} trajectories a step,"
            f" {first['sampled_tokens_per_trajectory']:.1f} sampled tokens a trajectory"
        ),
        (
            f"{'keep':>6s} {'s/step':>8s} {'target':>8s} {'original':>9s} {'rollout tok/s':>14s}"
            f" {'train tok/s':>12s}"
        ),
    ]
    for run in runs:
        target, original = (
            f"{run[key]:.1f}" if run[key] else "-" for key in ("target_seconds", "original_seconds")
        )
        lines.append(
            f"{run['keep']:6.0%} {run['seconds']:8.2f} {target:>8s} {original:>9s} "
            f"{run['rollout_tokens_per_second']:14.0f} {run['train_tokens_per_second']:12.0f}"
        )
    for run in runs:
        ordered = sorted(run["phases"].items(), key=lambda item: -item[1]["seconds"])
        parts = ", ".join(
            f"{name} {phase['seconds']:.2f} s ({phase['share']:.0%})" for name, phase in ordered
        )
        lines.append(f"keep {run['keep']:.0%}: {parts}")
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; what stands behind `--` becomes `training`."""
    own, training = list(argv), []
    if "--" in own:
        own, training = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument(
        "--model", default="Qwen2.5-0.5B",
        help="a name in tools/model_shapes.json, or a directory with a config.json, of which only the shape counts "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="per run; the first does not count (default: %(default)s)",
    )
    parser.add_argument(
        "--num-groups", type=int, default=8, help="initial states a step (default: %(default)s)"
    )
    parser.add_argument(
        "--group-size", type=int, default=16, help="trajectories of each (default: %(default)s)"
    )
    parser.add_argument(
        "--response-length",
        type=int,
        default=68,
        help="sampled tokens a turn (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        type=float,
        nargs="+",
        default=[0.25, 1.0],
        metavar="SHARE",
        help="of the groups (default: 0.25 1)",
    )
    parser.add_argument(
        "--rollout-engine", choices=("sglang", "embedded"), default="sglang" if torch.cuda.is_available() else "embedded",
        help="default: sglang with CUDA, else embedded",
    )  # fmt: skip
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("bench_step"),
        help="checkpoint, runs and logs (default: %(default)s)",
    )
    arguments = parser.parse_args(own)
    arguments.training = training
    if arguments.steps < 2:
        fail(f"--steps must be at least 2, because the first does not count, not {arguments.steps}")
    if bad := [share for share in arguments.keep if not 0 < share <= 1]:
        fail(f"--keep must hold shares above 0 and up to 1, not {bad[0]:g}")
    return arguments


def main() -> None:
    arguments = parse(sys.argv[1:])
    checkpoint = arguments.output / "checkpoint"
    arguments.output.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "hardware": hardware(),
        "versions": versions(), "model": arguments.model, "rollout_engine": arguments.rollout_engine,
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32", "response_length": arguments.response_length,
        "num_turns": NUM_TURNS, "training_flags": arguments.training, "runs": [],
    }  # fmt: skip
    try:
        hf = model_config(arguments.model)
        print(f"writing a random {arguments.model} to {checkpoint}", flush=True)
        report["num_parameters"] = write_checkpoint(hf, "sokoban", checkpoint, dtype=torch.bfloat16)
        for keep in arguments.keep:
            report["runs"].append(
                summarize(arguments.model, keep, *train(arguments, checkpoint, keep))
            )
            if arguments.json:  # after every run, so that a later one that fails takes nothing away
                arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    except (ValueError, RuntimeError) as error:
        if report["runs"]:
            print(table(report), flush=True)
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from None
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    print(table(report))


if __name__ == "__main__":
    main()
