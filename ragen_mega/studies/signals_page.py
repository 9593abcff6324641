"""The page of `ragen-mega study --signals`: what foretold success and collapse in finished runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragen_mega.report.markdown import table
from ragen_mega.report.metrics import write_json
from ragen_mega.report.plots import headless_pyplot
from ragen_mega.report.provenance import provenance
from ragen_mega.studies.runs import warm_start_key
from ragen_mega.studies.signals import (
    AHEAD,
    FALL,
    LEVEL,
    LEVEL_STEPS,
    MIN_STEPS,
    WINDOW,
    Correlation,
    Run,
    Table,
    groups_of,
    read_runs,
    with_collapse,
    with_final_success,
)

NAME = "signals"


def write(folder: Path, output: Path) -> None:
    """signals.md, signals.json and signals.svg of the studies in `folder`. Raises ValueError if it
    has too few runs.
    """
    runs, short = read_runs(folder, warm_start_key)
    tables, place = (with_final_success(runs), with_collapse(runs)), provenance()
    output.mkdir(parents=True, exist_ok=True)
    text = markdown(runs, short, place, *tables)
    (output / f"{NAME}.md").write_text(text)
    record = {
        title: {
            key: {name: one and asdict(one) for name, one in of.items()}
            for key, of in found.items()
        }
        for title, found in zip(("final_success", "collapse"), tables)
    }
    told = [
        {"study": run.study, "arm": run.arm, "seed": run.seed, "steps": len(run.signals),
         "final": run.final, "collapsed_at": first_collapse(run), "group": group}
        for run, group in zip(runs, groups_of(runs))
    ]  # fmt: skip
    write_json(output / f"{NAME}.json", {"place": place, **record, "runs": told})
    plot(*tables, output / f"{NAME}.svg")
    print(text)


def first_collapse(run: Run) -> int | None:
    """The step from which on its success has collapsed."""
    state = run.collapsed()
    return int(state.argmax()) if state.any() else None


def markdown(
    runs: Sequence[Run], short: int, place: Mapping[str, Any], final: Table, collapse: Table
) -> str:
    """The page as text."""
    shown = [one for part in (final, collapse) for of in part.values() for one in of.values()]
    shown = [one for one in shown if one is not None]
    beyond = sum(one.low > 0 or one.high < 0 for one in shown)
    studies = sorted({run.study for run in runs})
    fallen = [run for run in runs if first_collapse(run) is not None]
    return "\n\n".join(
        (
            "# What tells beforehand",
            f"Written by `ragen-mega study --signals`; {place['hardware']}; commit"
            f" {place['commit']}; {place['date'][:10]}. {len(runs)} different runs, of which"
            f" {len(fallen)} collapse, of {len(studies)} studies: {', '.join(studies)}. Left out:"
            f" {short} of fewer than {MIN_STEPS} steps.",
            "Spearman's rank correlation of a signal with what came later, within strata: ranks are"
            " taken among the runs (or steps) of a stratum, and only their order there counts. In"
            f" brackets the {LEVEL:.0%} interval of a bootstrap over groups of runs that share a"
            " warm start (that of a recipe and a seed, in whatever study) or study and seed; a dash"
            " where too few groups differ. Mutual information is bounded by the number of prompts:"
            " where arms differ by that, read `collapse/score`.",
            f"**Many comparisons.** {len(shown)} intervals are shown, of which about"
            f" {(1 - LEVEL) * len(shown):.0f} would miss 0 if nothing told anything; {beyond} do."
            f" Bold: different from 0 also with Bonferroni's correction for all {len(shown)}."
            " A number of groups that could agree by luck is never bold."
            " Signals depend on each other and studies share recipes, so neighbouring rows are not"
            " separate evidence, and bold ones hold for small models on these games.",
            "## Success at the end",
            "A signal's mean over the first half of a run, with success on held-out prompts at its"
            " end. All runs: recipes and games differ too, so read it as what goes together. Same"
            " study and seed: arms with equal start. Same study and arm: seeds of equal settings.",
            correlations(final, len(shown)),
            f"## Collapse, {' and '.join(map(str, AHEAD))} steps ahead",
            "A run has collapsed from a step on if the mean of its success in training over"
            f" {LEVEL_STEPS} steps stays {FALL:.0%} below the run's best such mean from there to"
            " its end, which the guard must tell without hindsight."
            f" A signal's mean over {WINDOW} steps (the last known one, where it is measured"
            " less often), at steps at which the run has not collapsed, with whether it has so many"
            " steps later: positive where high values come before a collapse. Within runs: steps of"
            " collapsing runs; whatever drifts one way in every run tells here too. Same step:"
            " between runs of one study and seed at the same step, where such drift does not"
            " count.",
            correlations(collapse, len(shown)),
            "![correlations with their intervals](signals.svg)",
        )
    ) + "\n"  # fmt: skip


def correlations(found: Table, comparisons: int) -> str:
    """A row for every signal that was measured, a column for every way to compare."""

    def cell(one: Correlation | None) -> str:
        if one is None:
            return "-"
        text = f"{one.value:+.2f} ({one.low:+.2f} to {one.high:+.2f})"
        return f"**{text}**" if one.holds(comparisons) else text

    names = list(next(iter(found.values())))
    kept = {key: of for key, of in found.items() if any(of.values())}
    sizes = [next((of[name] for of in kept.values() if of[name]), None) for name in names]
    heads = [
        name if size is None else f"{name} ({size.num_rows} rows, {size.num_groups} groups)"
        for name, size in zip(names, sizes)
    ]
    rows = [(f"`{key}`", *(cell(of[name]) for name in names)) for key, of in kept.items()]
    return table(("signal", *heads), rows) if rows else "Too few groups of runs differ."


def plot(final: Table, collapse: Table, path: Path) -> None:
    """A panel for each table: every correlation as a point with its interval."""
    pyplot = headless_pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 7), sharey=True, layout="constrained")
    for axes, found, title in zip(panels, (final, collapse), ("success at the end", "collapse")):
        names = list(next(iter(found.values())))
        for at, name in enumerate(names):
            there = [(row, of[name]) for row, of in enumerate(found.values()) if of[name]]
            axes.errorbar(
                [one.value for _, one in there],
                [row + 0.18 * (at - (len(names) - 1) / 2) for row, _ in there],
                xerr=[
                    [max(0.0, one.value - one.low) for _, one in there],
                    [max(0.0, one.high - one.value) for _, one in there],
                ],
                fmt=".", lw=1, label=name,
            )  # fmt: skip
        axes.axvline(0, color="black", lw=0.5)
        axes.set(title=title, xlabel="rank correlation", xlim=(-1, 1))
        axes.legend(fontsize="x-small")
    panels[0].set_yticks(range(len(final)), [*final])
    panels[0].invert_yaxis()
    figure.savefig(path)
    pyplot.close(figure)
