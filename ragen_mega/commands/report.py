"""Summarise finished runs: one table row each, the mean over seeds, and a plot of learning curves
and stability signals.

    ragen-mega report runs/frozen_lake-gae-seed* --output docs/results --title frozen_lake

Writes <output>/<title>.md, <title>.json and <title>.svg. The 95% interval of a run allows for
samples of one prompt being alike; mean and standard deviation are over runs whose model and
settings differ by their seed only, each set of prompts by itself.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ragen_mega.commands.command_line import command, flag
from ragen_mega.report.markdown import table
from ragen_mega.report.metrics import SUMMARY_FILE, write_json
from ragen_mega.report.viewer.data import read_run

SIGNALS = {
    "rollout/in_group_std": "in-group std of returns",
    "actor/entropy": "policy entropy (nats per token)",
    "actor/grad_norm": "gradient norm before clipping",
}
"""Stability signals that are plotted, with their labels."""


def rows_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per evaluated set of a finished run (as `read_run` gives it); runs that are `alike`
    differ only by their seed. Raises ValueError if it is not finished.
    """
    if (summary := run["summary"]) is None:
        raise ValueError(f"{run['name']} has not finished: it has no {SUMMARY_FILE}; leave it out")
    return [
        {
            "run": run["name"],
            "set": name,
            "seed": run["config"]["train"]["seed"],
            "success": result["success"],
            "ci_low": result["ci_low"],
            "ci_high": result["ci_high"],
            "warm_start": summary["warm_start"][name]["success"],
            "random": result["random"],
            "optimum": result["optimum"],
            "num_prompts": result["num_prompts"],
            "steps": summary["steps"],
            "minutes": summary["seconds"] / 60,
            "hardware": summary.get("hardware", "unknown hardware"),
            "alike": run["alike"],
        }
        for name, result in summary["sets"].items()
    ]


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation of success over the runs of each model, settings and set that
    more than one run has.
    """
    alike = defaultdict(list)
    for row in rows:
        alike[row["alike"], row["set"]].append(row)
    return [
        {
            "set": name,
            "runs": [row["run"] for row in group],
            "mean": statistics.mean(row["success"] for row in group),
            "standard_deviation": statistics.stdev(row["success"] for row in group),
        }
        for (_, name), group in alike.items()
        if len(group) > 1
    ]


def markdown(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """The report as text: where each run was made, a row of each, and the means."""
    places = defaultdict(dict)
    for row in rows:
        places[row["hardware"]][row["run"]] = None
    heads = [
        place if len(places) == 1 else f"{place}: {', '.join(runs)}"
        for place, runs in places.items()
    ]
    cells = [
        (
            row["run"],
            row["set"],
            f"{row['success']:.1%} ({row['ci_low']:.1%} - {row['ci_high']:.1%})",
            *(
                "-" if row[key] is None else f"{row[key]:.1%}"
                for key in ("warm_start", "random", "optimum")
            ),
            row["num_prompts"],
            row["steps"],
            f"{row['minutes']:.1f}",
        )
        for row in rows
    ]
    said = [
        f"Mean {of['mean']:.1%}, standard deviation over {len(of['runs'])} runs"
        f" {of['standard_deviation']:.1%}: {of['set']}, {', '.join(of['runs'])}."
        for of in means(rows)
    ]
    head = ("run", "set", "success (95% CI)", "warm start", "random", "optimum", "prompts")
    parts = [f"# {title}", *heads, table((*head, "steps", "minutes"), cells), *said]
    return "\n\n".join([*parts, f"![learning curves]({title}.svg)\n"])


def warnings(runs: Sequence[dict[str, Any]]) -> str:
    """What the runs warned of, a line each; empty if nothing."""
    lines = [
        f"- {run['name']}, step {event['step']}: {event['text']}"
        for run in runs
        for event in run["events"]
    ]
    return "\n".join(["", "## Warnings", "", *lines, ""]) if lines else ""


def plot(runs: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Success in training (per step) and on the held-out boards (marked), beside random and optimal
    play; and SIGNALS.
    """
    figure, grid = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True)
    axes, panels = grid[0, 0], dict(zip(SIGNALS, grid.flat[1:]))
    for run in runs:
        (line,) = axes.plot(*series(run, "rollout/success"), alpha=0.35)
        marks = {"marker": "o", "color": line.get_color(), "label": run["name"]}
        before, after = (series(run, f"eval/{key}") for key in ("initial_success", "success"))
        axes.plot(*(one + other for one, other in zip(before, after)), **marks)
        for key, panel in panels.items():
            panel.plot(*series(run, key), color=line.get_color())
            panel.set(ylabel=SIGNALS[key], ylim=(0, None))
    for key, style in (("random", ":"), ("optimum", "--")):
        if rows[0][key] is not None:
            axes.axhline(rows[0][key], color="black", linestyle=style, linewidth=1, label=key)
    axes.set(ylabel="success", ylim=(0, 1.02))
    axes.legend(fontsize="small")
    for panel in grid[1]:
        panel.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def series(run: dict[str, Any], key: str) -> tuple[list[int], list[float]]:
    """Steps at which `key` was logged, and its values."""
    steps, values = run["metrics"]["steps"], run["metrics"]["values"].get(key, ())
    logged = [(step, value) for step, value in zip(steps, values) if value is not None]
    return [step for step, _ in logged], [value for _, value in logged]


@command(
    __doc__,
    ("runs", {"nargs": "+", "type": Path, "help": "run directories"}),
    flag("--output", "folder of the report", Path("docs/results")),
    flag("--title", "name of the files and heading of the report", required=True),
)
def main(arguments: argparse.Namespace) -> None:
    runs = [read_run(directory) for directory in arguments.runs]
    rows = [row for run in runs for row in rows_of(run)]
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = markdown(arguments.title, rows) + warnings(runs)
    target = arguments.output / arguments.title
    Path(f"{target}.md").write_text(text)
    shown = [{key: row[key] for key in row if key != "alike"} for row in rows]
    hardware = ", ".join({row["hardware"]: None for row in rows})
    report = {"hardware": hardware, "runs": shown, "means": means(rows)}
    write_json(f"{target}.json", report)
    plot(runs, rows, Path(f"{target}.svg"))
    print(text)
