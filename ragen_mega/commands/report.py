"""Summarise finished runs: one table row each, the mean over seeds, and a plot of learning curves
and stability signals.

    ragen-mega report runs/frozen_lake-gae-seed* --output docs/results --title frozen_lake

Writes <output>/<title>.md, <title>.json, which has mean returns as well, and <title>.svg. The 95%
interval of a run allows for samples of one prompt being alike; mean and standard deviation are over
runs whose model and settings differ by their seed only, each set of prompts by itself. A run that
is named twice, or beside its copy, counts once.
"""

import argparse
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ragen_mega.commands.command_line import command, flag, report_folder
from ragen_mega.extensions.extras import require
from ragen_mega.report.markdown import MINUTES, table
from ragen_mega.report.metrics import SUMMARY_FILE, write_json
from ragen_mega.report.plots import headless_pyplot
from ragen_mega.report.terminal import printable, shown

SIGNALS = {
    "rollout/in_group_std": "in-group std of returns",
    "actor/entropy": "policy entropy (nats per token)",
    "actor/grad_norm": "gradient norm before clipping",
}
"""Stability signals that are plotted, with their labels."""
STYLES = (":", "--")
"""Line styles of the players."""


def rows_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per evaluated set of a finished run (as `read_run` gives it); runs that are
    `alike` differ only by their seed. Raises ValueError if it is not finished.
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
            "warm_start": before.get("success"),
            "random": result["random"],
            "optimum": result["optimum"],
            "return": result.get("reward"),
            "warm_start_return": before.get("reward"),
            "num_prompts": result["num_prompts"],
            "steps": summary["steps"],
            "minutes": summary["seconds"] / 60,
            "hardware": summary.get("hardware", "unknown hardware"),
            "alike": run["alike"],
            "starts": result.get("starts"),
            "starts_met": result.get("starts_met"),
            "idleness": summary.get("idleness"),
        }
        for name, result in summary["sets"].items()
        # A set that a --resume added was not played before.
        for before in [summary["warm_start"].get(name, {})]
    ]


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean and standard deviation of success over the runs of each model, settings and
    set that more than one run has.
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
    """Return the report as text: where each run was made, a row of each, and the means."""
    places: defaultdict[str, dict[str, None]] = defaultdict(dict)
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
        f"Mean {mean['mean']:.1%}, standard deviation over {len(mean['runs'])} runs"
        f" {mean['standard_deviation']:.1%}: {mean['set']}, {', '.join(mean['runs'])}."
        for mean in means(rows)
    ]
    said += [
        f"The training of {row['run']} has met {row['starts_met']} of the {row['starts']} starts"
        f" that {row['set']} is evaluated on."
        for row in rows
        if row["starts_met"]
    ]
    idle = {row["run"]: row["idleness"] for row in rows if row["idleness"]}
    said += [f"In {run} {text}." for run, text in idle.items()]
    head = ("run", "set", "success (95% CI)", "warm start", "random", "optimum", "prompts")
    parts = [f"# {title}", *heads, table((*head, "steps", MINUTES), cells), *said]
    return "\n\n".join([*parts, f"![learning curves]({quote(title)}.svg)\n"])


def warnings(runs: Sequence[dict[str, Any]]) -> str:
    """List the warnings of the runs, a line each; an empty text without a warning."""
    lines = [
        f"- {run['name']}, step {event['step']}: {event['text']}"
        for run in runs
        for event in run["events"]
    ]
    return "\n".join(["", "## Warnings", "", *lines, ""]) if lines else ""


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot success in training (per step) and on the held-out boards (marked), beside random and
    optimal play where all runs have the same; and SIGNALS.
    """
    pyplot = headless_pyplot()
    figure, grid = pyplot.subplots(2, 2, figsize=(10, 6.5), sharex=True)
    axes, panels = grid[0, 0], dict(zip(SIGNALS, grid.flat[1:]))
    for run in runs:
        (line,) = axes.plot(*series(run, "rollout/success"), alpha=0.35)
        marks = {"marker": "o", "color": line.get_color(), "label": run["name"]}
        steps, values = series(run, "eval/initial_success")
        later_steps, later_values = series(run, "eval/success")
        axes.plot(steps + later_steps, values + later_values, **marks)
        for key, panel in panels.items():
            panel.plot(*series(run, key), color=line.get_color())
            panel.set(ylabel=SIGNALS[key], ylim=(0, None))
    for (key, value), style in zip(shared_players(runs).items(), STYLES):
        axes.axhline(value, color="black", linestyle=style, linewidth=1, label=key)
    axes.set(ylabel="success", ylim=(0, 1.02))
    axes.legend(fontsize="small")
    for panel in grid[1]:
        panel.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def shared_players(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the success of random and optimal play that belongs to the mean success of the trained
    environments, as far as it is known and equal for all runs.
    """
    rates = {
        player: [set(series(run, f"rollout/{player}")[1]) for run in runs]
        for player in ("random", "optimum")
    }
    return {
        player: min(first)
        for player, (first, *others) in rates.items()
        if len(first) == 1 and all(other == first for other in others)
    }


def series(run: dict[str, Any], key: str) -> tuple[list[int], list[float]]:
    """Return the steps at which `key` was logged, and its values. An evaluation is played when the
    step of its row is done; the number of done steps is its place.
    """
    done = key.startswith("eval/") and not key.startswith("eval/initial_")
    steps, values = run["metrics"]["steps"], run["metrics"]["values"].get(key, ())
    logged = [(step + done, value) for step, value in zip(steps, values) if value is not None]
    return [step for step, _ in logged], [value for _, value in logged]


@command(
    __doc__,
    ("runs", {"nargs": "+", "type": Path, "help": "run directories"}),
    flag("--output", "folder of the report (default: reports/ beside that of the runs)", type=Path),
    flag(
        "--title",
        "name of the files and heading of the report (default: the common beginning of the runs'"
        " names)",
    ),
)
def main(arguments: argparse.Namespace) -> None:
    shared = os.path.commonprefix([run.name for run in arguments.runs]).rstrip("-_.")
    title = shared or "report" if arguments.title is None else arguments.title
    if not title or Path(title).name != title:
        raise ValueError(
            f"--title names files in --output, so it cannot be {title!r}; take a name without a"
            " slash"
        )
    from ragen_mega.report.viewer.data import read_run  # with torch, which takes seconds

    # Patterns may overlap, and a copy has the seconds of every step too.
    same: dict[str, dict[str, Any]] = {}
    for run in map(read_run, arguments.runs):
        same.setdefault(json.dumps([run["config"], run["metrics"], run["summary"]]), run)
    runs = [*same.values()]
    rows = [row for run in runs for row in rows_of(run)]
    require("studies", "reports")
    beside = arguments.runs[0].parent.parent / "reports"
    folder = arguments.output or report_folder("docs/results", beside)
    folder.mkdir(parents=True, exist_ok=True)
    text = printable(markdown(title, rows) + warnings(runs))
    target = folder / title
    Path(f"{target}.md").write_text(text)
    published = [{key: row[key] for key in row if key != "alike"} for row in rows]
    hardware = ", ".join({row["hardware"]: None for row in rows})
    report = {"hardware": hardware, "runs": published, "means": means(rows)}
    write_json(f"{target}.json", report)
    plot(runs, Path(f"{target}.svg"))
    print(text)
    print(printable(f"written to {shown(target)}.md, .json and .svg"))
