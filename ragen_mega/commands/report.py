"""Summarise finished runs: one table row each, the mean over seeds, and a plot of learning curves
and stability signals.

    python tools/report.py runs/frozen_lake-gae-seed* --output docs/results --title frozen_lake

Writes <output>/<title>.md, <title>.json and <title>.svg. The 95% interval of a run allows for
samples of one prompt being alike; mean and standard deviation are over runs whose model and
settings differ by their seed only, each set of prompts by itself.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ragen_mega.commands.command_line import command, flag, read_settings
from ragen_mega.report.markdown import table
from ragen_mega.report.metrics import METRICS_FILE, SUMMARY_FILE, read_metrics, write_json

SIGNALS = {
    "rollout/in_group_std": "in-group std of returns",
    "actor/entropy": "policy entropy (nats per token)",
    "actor/grad_norm": "gradient norm before clipping",
}
"""Stability signals that are plotted, with their labels."""


def read_run(directory: Path) -> list[dict[str, Any]]:
    """One row per evaluated set of a finished run; runs of the same `settings` differ only by their
    seed. Raises ValueError if it is not finished.
    """
    if not (directory / SUMMARY_FILE).exists():
        raise ValueError(
            f"{directory} holds no {SUMMARY_FILE}: it is no run, or has not finished; leave it out"
        )
    summary = json.loads((directory / SUMMARY_FILE).read_text())
    settings, _ = read_settings(directory)
    seed = settings["train"].pop("seed")
    for section in ("logging", "checkpoint"):  # do not affect training
        del settings[section]
    return [
        {
            "run": directory.name,
            "set": name,
            "seed": seed,
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
            "settings": json.dumps(settings, sort_keys=True),
        }
        for name, result in summary["sets"].items()
    ]


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation of success over the runs of each model, settings and set that
    more than one run has.
    """
    alike = defaultdict(list)
    for row in rows:
        alike[row["settings"], row["set"]].append(row)
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


def plot(directories: Sequence[Path], rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Success in training (per step) and on the held-out boards (marked), beside random and optimal
    play; and SIGNALS.
    """
    figure, grid = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True)
    axes, panels = grid[0, 0], dict(zip(SIGNALS, grid.flat[1:]))
    for directory in directories:
        records = read_metrics(directory / METRICS_FILE)
        (line,) = axes.plot(*series(records, "rollout/success"), alpha=0.35)
        marks = {"marker": "o", "color": line.get_color(), "label": directory.name}
        before, after = (series(records, f"eval/{key}") for key in ("initial_success", "success"))
        axes.plot(*(one + other for one, other in zip(before, after)), **marks)
        for key, panel in panels.items():
            panel.plot(*series(records, key), color=line.get_color())
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


def series(records: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps at which `key` was logged, and its values."""
    logged = [record for record in records if record.get(key) is not None]
    return [record["step"] for record in logged], [record[key] for record in logged]


@command(
    __doc__,
    ("runs", {"nargs": "+", "type": Path, "help": "run directories"}),
    flag("--output", "folder of the report", Path("docs/results")),
    flag("--title", "name of the files and heading of the report", required=True),
)
def main(arguments: argparse.Namespace) -> None:
    rows = [row for directory in arguments.runs for row in read_run(directory)]
    arguments.output.mkdir(parents=True, exist_ok=True)
    text, target = markdown(arguments.title, rows), arguments.output / arguments.title
    Path(f"{target}.md").write_text(text)
    shown = [{key: row[key] for key in row if key != "settings"} for row in rows]
    hardware = ", ".join({row["hardware"]: None for row in rows})
    report = {"hardware": hardware, "runs": shown, "means": means(rows)}
    write_json(f"{target}.json", report)
    plot(arguments.runs, rows, Path(f"{target}.svg"))
    print(text)
