"""The harness of all benchmarks here: jobs that take turns, medians with their spread, and results
as JSON and Markdown.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ragen_mega.commands.command_line import JSON as JSON
from ragen_mega.commands.command_line import Flag, flag
from ragen_mega.report.markdown import table as table
from ragen_mega.report.metrics import write_json
from ragen_mega.report.provenance import provenance as provenance

sys.path.append(
    str(Path(__file__).parents[2] / "kernels")
)  # for `benchmarks`, which is not installed

T = TypeVar("T")


def model_flag(default: str) -> Flag:
    """Return the flag that names a model, of which a benchmark needs the shape alone."""
    about = "a name in ragen_mega/planning/model_shapes.json, or a directory with a config.json"
    return flag("--model", f"{about}; only its shape counts", default)


def interleave(
    jobs: Mapping[str, Callable[[], T]], repetitions: int, *, warmups: int = 0
) -> dict[str, list[T]]:
    """Return the results of every job in each repetition. The jobs take turns, so that other load
    on the machine affects all alike; the first `warmups` turns do not count. Raises ValueError,
    before any turn, for no repetition.
    """
    if repetitions < 1:
        raise ValueError(f"a benchmark needs at least 1 repetition that counts, not {repetitions}")
    readings: dict[str, list[T]] = {name: [] for name in jobs}
    for repetition in range(warmups + repetitions):
        for name, job in jobs.items():
            reading = job()
            if repetition >= warmups:
                readings[name].append(reading)
    return readings


def long_copy_bytes() -> int:
    """Return a size far beyond a GPU's caches, about a millisecond of its memory's bandwidth: a
    32nd of its memory, at most 4 GiB.
    """
    return min(4 << 30, torch.cuda.mem_get_info()[1] // 32)


@functools.cache
def _larger_than_caches() -> torch.Tensor:
    return torch.empty(long_copy_bytes(), dtype=torch.int8, device="cuda")


def seconds_of(work: Callable[[], object]) -> float:
    """Return the wall-clock seconds of `work`, until the device has finished."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def milliseconds_of(work: Callable[[], object], device: str) -> float:
    """Return the milliseconds of work on the device. On a GPU between two events, after a write
    that flushes its caches and lets the host run ahead by about 1 ms, so that launches do not
    count.
    """
    if device == "cpu":
        return 1e3 * seconds_of(work)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _larger_than_caches().zero_()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def spread(readings: Sequence[float]) -> dict[str, float]:
    """Return the median, smallest and largest."""
    return {"median": statistics.median(readings), "min": min(readings), "max": max(readings)}


def publish(arguments: argparse.Namespace, report: Mapping[str, Any], text: str) -> None:
    """Print `text` and write the report where --json asks for it."""
    print(text, flush=True)
    if arguments.json:
        write_json(arguments.json, report)
