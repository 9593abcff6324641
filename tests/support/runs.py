"""Runs of the program on forked ranks, and what they leave: metrics without the clock, tensors of
checkpoints.
"""

import json
import os
import signal
from multiprocessing.context import ForkProcess as Process
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ragen_mega.rollout.engine import Interrupted
from ragen_mega.run.run import Run
from ragen_mega.train import main, starpo
from tests.support.forked_ranks import fork_ranks, join_ranks


def finish(run: Run) -> Path:
    """Train to the end in this process; returns the directory."""
    with run:
        starpo(run)
    return run.logger.directory


def stop(run: Run) -> None:
    """Train until the SIGTERM that something in the run sends, and leave as the program does."""
    before = signal.getsignal(signal.SIGTERM)
    run.stop.listen()
    try:
        with pytest.raises(Interrupted), run:
            starpo(run)
    finally:
        signal.signal(signal.SIGTERM, before)


def send_sigterm_after(target: object, name: str, is_time) -> None:
    """Let the method `name` send SIGTERM to this process when `is_time(its arguments)`."""
    method = getattr(target, name)

    def calling(*args, **kwargs):
        result = method(*args, **kwargs)
        if is_time(*args):
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    setattr(target, name, calling)


def start_ranks(output: Path, name: str, num_ranks: int, *flags: str) -> list[Process]:
    """Start the program on `num_ranks` forked ranks."""
    return fork_ranks(lambda: main([*flags, "--output", str(output), "--name", name]), num_ranks)


def launch(output: Path, name: str, num_ranks: int, *flags: str) -> Path:
    """Run the program on so many ranks to its end; returns the run directory."""
    join_ranks(start_ranks(output, name, num_ranks, *flags))
    return output / name


def metrics(run: Path) -> list[dict]:
    """What was logged, without what depends on the clock or the process."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = ("time/", "memory/", "engine/", "share/")
    return [
        {
            key: value
            for key, value in row.items()
            if not key.startswith(measured) and "per_second" not in key
        }
        for row in rows
    ]


def state(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: parameters and moments of both models, as the ranks wrote
    them.
    """
    files = (run / "checkpoints" / f"step_{step:08d}").glob("*.safetensors")
    return {f"{path.name}/{key}": value for path in files for key, value in load_file(path).items()}
