"""Say what training runs have learned, and how far engine and trainer were apart.

    python tools/learned.py --json learned.json runs/reverse_0 runs/lookup_0
    python tools/learned.py --repeats --goal 0 runs/plain runs/once runs/twice

Each run is a directory with metrics.jsonl. Success is the share of a step's sampled trajectories
that were solved, null where none was played to its end; the minutes to the goal count all steps up
to the first that reaches it. With --repeats the last two runs are one run twice: the first step
whose row differs is named, clocks and memory left out, and the rollouts of the last run are timed
against the first run's. Exit code 1 for a run whose last step is below --goal or whose mean
mismatch is above --mismatch.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos import CLOCKED, MISMATCH

from ragen_mega.commands.command_line import JSON, command, flag
from ragen_mega.report.markdown import table
from ragen_mega.report.metrics import METRICS_FILE, read_metrics, write_json

FLAGS = (
    ("runs", {"nargs": "+", "type": Path, "help": "directories of runs"}),
    flag("--goal", "least success of the last step", 0.95),
    flag("--mismatch", "largest mean difference of log-probabilities, nats a token", 0.1),
    flag("--repeats", "the last two runs are one run twice", False),
    JSON,
)


def learned(rows: Sequence[dict[str, Any]], goal: float) -> dict[str, Any]:
    """Summarize a run."""
    seconds = [row["time/step"] for row in rows]
    success = [row.get("rollout/success") for row in rows]
    reached = [step for step, rate in enumerate(success) if rate is not None and rate >= goal]
    return {
        "last_success": success[-1],
        "held_out": rows[-1].get("eval/success"),
        "minutes_to_goal": sum(seconds[: reached[0] + 1]) / 60 if reached else None,
        "seconds_per_step": statistics.median(seconds),
        "largest_mismatch": max(row.get(MISMATCH, 0.0) for row in rows),
        "success": success,
        "mismatch": [row.get(MISMATCH) for row in rows],
    }


def repetition(*runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the last two runs with each other, and their rollouts with the first run's."""
    of_runs = (
        [{key: row[key] for key in row if not CLOCKED.match(key)} for row in rows]
        for rows in runs[1:]
    )
    pairs = itertools.zip_longest(*of_runs)  # one may have stopped early
    differing = [step for step, (once, twice) in enumerate(pairs) if once != twice]
    seconds = [statistics.median(row["time/rollout"] for row in rows) for rows in runs]
    return {
        "first_differing_step": differing[0] if differing else None,
        "repeats": not differing,
        "cost_percent": 100 * (seconds[-1] / seconds[0] - 1),
    }


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> int:
    runs = [read_metrics(run / METRICS_FILE) for run in arguments.runs]
    found = [learned(rows, arguments.goal) for rows in runs]
    report: dict[str, Any] = {
        "runs": {run.name: facts for run, facts in zip(arguments.runs, found)}
    }
    if arguments.repeats:
        report["repetition"] = repetition(runs[0], *runs[-2:])
    if arguments.json:
        write_json(arguments.json, report)
    shown = ("last_success", "held_out", "minutes_to_goal", "seconds_per_step", "largest_mismatch")
    cells = [(name, *(str(facts[key]) for key in shown)) for name, facts in report["runs"].items()]
    print(table(("run", *shown), cells), report.get("repetition", ""))
    return int(
        any((last := facts["last_success"]) is None or last < arguments.goal for facts in found)
        or any(facts["largest_mismatch"] > arguments.mismatch for facts in found)
    )


if __name__ == "__main__":
    main()
