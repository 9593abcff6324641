"""Summarise finished runs: one table row each, the mean over seeds, and a plot of learning curves
and stability signals.

    python tools/report.py runs/frozen_lake-gae-seed* --output docs/results --title frozen_lake

Writes <output>/<title>.md, <title>.json and <title>.svg. The 95% interval of a run allows for
samples of one prompt being alike; mean and standard deviation are over runs, and given where these
differ by their seed only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ragen_mega.report.console import fail
from ragen_mega.report.metrics import (
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    read_metrics,
    write_json,
)

SIGNALS = {
    "rollout/in_group_std": "in-group std of returns",
    "actor/entropy": "policy entropy (nats per token)",
    "actor/grad_norm": "gradient norm before clipping",
}
"""Stability signals that are drawn, with their labels."""


def read_run(directory: Path) -> list[dict[str, Any]]:
    """One row per evaluated set of a finished run. Raises ValueError if it is not finished."""
    if not (directory / SUMMARY_FILE).exists():
        raise ValueError(
            f"{directory} holds no {SUMMARY_FILE}: it is no run, or has not finished; leave it out"
        )
    summary = json.loads((directory / SUMMARY_FILE).read_text())
    config = json.loads((directory / CONFIG_FILE).read_text())
    return [
        {
            "run": directory.name,
            "set": name,
            "seed": config["train"]["seed"],
            "success": result["success"],
            "ci_low": result["ci_low"],
            "ci_high": result["ci_high"],
            "warm_start": summary["warm_start"][name]["success"],
            "random": result["random"],
            "optimum": result["optimum"],
            "num_prompts": result["num_prompts"],
            "steps": summary["steps"],
            "minutes": summary["seconds"] / 60,
        }
        for name, result in summary["sets"].items()
    ]


def hardware() -> str:
    """Machine and versions, for the head of a report."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "megatron-core", "transformers")
    )
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},"
        f" {versions}"
    )


def differ_by_seed_only(directories: list[Path]) -> bool:
    """Whether the runs train alike, so that their mean says something."""
    kinds = set()
    for directory in directories:
        config = json.loads((directory / CONFIG_FILE).read_text())
        del config["logging"], config["checkpoint"], config["model"], config["train"]["seed"]
        kinds.add(json.dumps(config, sort_keys=True))
    return len(kinds) == 1


def markdown(title: str, rows: list[dict[str, Any]], *, has_mean: bool) -> str:
    """The table as Markdown; `has_mean`: with mean and standard deviation over the runs."""
    lines = [
        f"# {title}",
        "",
        hardware(),
        "",
        (
            "| run | set | success (95% CI) | warm start | random | optimum | prompts | steps |"
            " minutes |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        random, optimum = (
            "-" if row[player] is None else f"{row[player]:.1%}" for player in ("random", "optimum")
        )
        lines.append(
            f"| {row['run']} | {row['set']} | {row['success']:.1%} ({row['ci_low']:.1%} -"
            f" {row['ci_high']:.1%}) | {row['warm_start']:.1%} | {random} | {optimum} |"
            f" {row['num_prompts']} | {row['steps']} | {row['minutes']:.1f} |"
        )
    successes = [row["success"] for row in rows]
    if len(successes) > 1 and has_mean:
        lines += [
            "",
            (
                f"Mean {statistics.mean(successes):.1%}, standard deviation over {len(successes)}"
                f" runs {statistics.stdev(successes):.1%}."
            ),
        ]
    return "\n".join([*lines, "", f"![learning curves]({title}.svg)", ""])


def plot(directories: list[Path], rows: list[dict[str, Any]], path: Path) -> None:
    """Success in training (per step) and on the held-out boards (marked), beside random and optimal
    play; and SIGNALS.
    """
    figure, grid = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True)
    axes, panels = grid[0, 0], dict(zip(SIGNALS, grid.flat[1:]))
    for directory in directories:
        records = read_metrics(directory / METRICS_FILE)
        (line,) = axes.plot(*series(records, "rollout/success"), alpha=0.35)
        axes.plot(
            *series(records, "eval/success"),
            marker="o",
            color=line.get_color(),
            label=directory.name,
        )
        for key, panel in panels.items():
            panel.plot(*series(records, key), color=line.get_color())
    for key, style in (("random", ":"), ("optimum", "--")):
        if rows[0][key] is not None:
            axes.axhline(rows[0][key], color="black", linestyle=style, linewidth=1, label=key)
    axes.set(ylabel="success", ylim=(0, 1.02))
    axes.legend(fontsize="small")
    for key, panel in panels.items():
        panel.set(ylabel=SIGNALS[key], ylim=(0, None))
    for panel in grid[1]:
        panel.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def series(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps at which `key` was logged, and its values."""
    logged = [record for record in records if record.get(key) is not None]
    return [record["step"] for record in logged], [record[key] for record in logged]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    parser.add_argument(
        "--title", required=True, help="name of the files and heading of the report"
    )
    arguments = parser.parse_args()
    try:
        rows = [row for directory in arguments.runs for row in read_run(directory)]
    except (ValueError, OSError, KeyError) as error:
        fail(str(error))
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = markdown(arguments.title, rows, has_mean=differ_by_seed_only(arguments.runs))
    (arguments.output / f"{arguments.title}.md").write_text(text)
    write_json(arguments.output / f"{arguments.title}.json", {"hardware": hardware(), "runs": rows})
    plot(arguments.runs, rows, arguments.output / f"{arguments.title}.svg")
    print(text)


if __name__ == "__main__":
    main()
