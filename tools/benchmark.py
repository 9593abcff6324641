"""The harness of all benchmarks here: where they ran, jobs that take turns, medians with their
spread, and results as JSON, Markdown and a plot.
"""

import argparse
import datetime
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from command_line import JSON, ROOT, flag

from ragen_mega.report.hardware import device, versions
from ragen_mega.report.metrics import write_json
from ragen_mega.report.provenance import code

sys.path.append(str(ROOT / "kernels"))  # for `benchmarks`, which is not installed

T = TypeVar("T")
OUTPUTS = (
    JSON,
    flag("--markdown", "and its tables here", type=Path, metavar="OUT"),
    flag("--plot", "draw medians and spread here (svg, png or pdf)", type=Path, metavar="OUT"),
)
"""Output flags of a benchmark, for `publish`."""


def provenance() -> dict[str, Any]:
    """Date, machine and commit of a result."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **code(),
        "hardware": device(),
        "versions": versions(),
    }


def interleave(
    jobs: Mapping[str, Callable[[], T]], repetitions: int, *, warmups: int = 0
) -> dict[str, list[T]]:
    """What every job returned in each repetition. They take turns, so that other load on
    the machine affects all alike; the first `warmups` turns do not count.
    """
    readings: dict[str, list[T]] = {name: [] for name in jobs}
    for repetition in range(warmups + repetitions):
        for name, job in jobs.items():
            reading = job()
            if repetition >= warmups:
                readings[name].append(reading)
    return readings


def seconds_of(work: Callable[[], object]) -> float:
    """Wall-clock seconds of `work`, until the device has finished."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


@functools.cache
def _larger_than_caches() -> torch.Tensor:
    return torch.empty(4 << 30, dtype=torch.int8, device="cuda")


def milliseconds_of(work: Callable[[], object], device: str) -> float:
    """Seconds of work on the device. On a GPU between two events, after a write that flushes its
    caches and lets the host run ahead by about 1 ms, so that launches do not count.
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
    """Median, smallest and largest."""
    return {"median": statistics.median(readings), "min": min(readings), "max": max(readings)}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def publish(
    arguments: argparse.Namespace,
    report: Mapping[str, Any],
    text: str,
    panels: Mapping[str, Mapping[str, Sequence[float]]],
) -> None:
    """Print `text` and write what OUTPUTS ask for; the plot has a panel for each title (with the
    unit) in `panels`, and in it a row for each name with its readings.
    """
    print(text, flush=True)
    if arguments.json:
        write_json(arguments.json, report)
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n")
    if arguments.plot:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        heights = [0.8 + 0.25 * len(rows) for rows in panels.values()]
        size = {"figsize": (9, sum(heights)), "height_ratios": heights}
        figure, grid = pyplot.subplots(len(panels), squeeze=False, layout="constrained", **size)
        for axes, (title, rows) in zip(grid.flat, panels.items()):
            axes.boxplot(
                [*rows.values()], tick_labels=[*rows], whis=(0, 100), orientation="horizontal"
            )
            axes.invert_yaxis()
            axes.set_title(title, loc="left")
        figure.suptitle(report["hardware"])
        figure.savefig(arguments.plot)
