"""Table, page and plot of a study: arms, paired differences and the claims of its source."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ragen_mega.report.markdown import MINUTES, table
from ragen_mega.report.metrics import METRICS_FILE, SUMMARY_FILE, read_metrics, write_json
from ragen_mega.report.plots import headless_pyplot
from ragen_mega.studies.definitions import Estimate, Study, estimate, percent
from ragen_mega.studies.runs import IDENTITY

PLAYERS = ("random", "optimum")
MATCHED = {"steps": "optimizer steps", "tokens": "sampled trajectories"}
"""Value of --match -> the amount that all arms share."""


def collect(study: Study, folder: Path, seeds: Sequence[int]) -> dict[str, dict[int, dict]]:
    """Collect arm -> seed -> summary with `cost`, of the runs that have finished."""
    found: dict[str, dict[int, dict]] = {arm.name: {} for arm in study.arms}
    for arm in study.arms:
        for seed in seeds:
            run = folder / f"{arm.name}-seed{seed}"
            if (run / SUMMARY_FILE).exists():
                summary = json.loads((run / SUMMARY_FILE).read_text())
                records = read_metrics(run / METRICS_FILE)
                tokens = sum(record.get("rollout/sampled_tokens") or 0 for record in records)
                cost = {"tokens": tokens, "seconds": summary["seconds"]}
                found[arm.name][seed] = summary | {
                    "cost": cost, "records": records, "directory": run
                }  # fmt: skip
    return found


def rates(runs: dict[int, dict], name: str, seeds: Sequence[int]) -> np.ndarray:
    """Return success [seeds, prompts] on an evaluated set."""
    return np.array([runs[seed]["sets"][name]["prompt_success"] for seed in seeds])


def compare(study: Study, found: dict[str, dict[int, dict]]) -> dict[str, Any]:
    """Compare on every evaluated set: each arm, its paired difference to the first arm, and the
    claims.

    Raises ValueError if runs were evaluated on different numbers of a set's prompts, which cannot
    be paired.
    """
    some = [summary for runs in found.values() for summary in runs.values()]
    names = list(dict.fromkeys(name for summary in some for name in summary["sets"]))
    sets: dict[str, dict[str, Any]] = {}
    for name in names:
        sizes = {
            f"{arm}-seed{seed}": len(run["sets"][name]["prompt_success"])
            for arm, runs in found.items()
            for seed, run in runs.items()
            if name in run["sets"]
        }
        if len(set(sizes.values())) > 1:
            (first, few), *_, (last, many) = sorted(sizes.items(), key=lambda size: size[1])
            raise ValueError(
                f"runs of a study are compared prompt by prompt, and of {name} {first} has {few}"
                f" and {last} {many}; give all arms and runs the same --eval-prompts"
            )
        arms = {
            arm: estimate(rates(runs, name, list(runs)))
            for arm, runs in found.items()
            if runs and all(name in run["sets"] for run in runs.values())
        }
        if not arms:  # evaluated in some runs of each only
            continue
        sets[name] = {
            "players": {arm: players(found[arm], name) for arm in arms},
            "arms": arms,
            "differences": {
                arm: difference(found, name, arm, study.arms[0].name)
                for arm in list(arms)
                if arm != study.arms[0].name and study.arms[0].name in arms
            },
        }
    claims = []
    for claim in study.claims:
        evaluated = sets[claim.set]["arms"] if claim.set in sets else {}
        there = evaluated.keys() >= {claim.better, claim.worse}
        less = difference(found, claim.set, claim.better, claim.worse) if there else None
        claims.append((claim, less))
    return {"sets": sets, "claims": claims}


def players(runs: dict[int, dict], name: str) -> dict[str, float | None]:
    """Return player -> success on an evaluated set under an arm's rules, which all of its runs
    have.
    """
    evaluated = next(iter(runs.values()))["sets"][name]
    return {player: evaluated[player] for player in PLAYERS}


def shared_players(evaluated: Mapping[str, Any]) -> dict[str, float | None] | None:
    """Return the players that all arms of a set share; None where arms differ in rules."""
    first, *others = evaluated["players"].values()
    return first if all(other == first for other in others) else None


def difference(found: dict[str, dict[int, dict]], name: str, a: str, b: str) -> Estimate | None:
    """Estimate the success of arm `a` minus the success of `b` on the seeds and prompts that both
    have.
    """
    shared = sorted(set(found[a]) & set(found[b]))
    if not shared:
        return None
    return estimate(rates(found[a], name, shared) - rates(found[b], name, shared), least=-1.0)


def markdown(
    study: Study, result: dict[str, Any], found: dict, place: dict, match: str, mixed: bool
) -> str:
    """Write the report as text."""
    parts = [
        f"# {study.title}",
        f"After {study.source}. Preset `{study.preset}`, recipe `{study.recipe}`"
        f" {shlex.join(study.flags)}.",
        f"{place['hardware']}; commit {place['commit']}; {place['date'][:10]}.",
    ]
    if match != "none":
        parts.append(
            f"Every arm has as many {MATCHED[match]} as the first one (`--match {match}`), so its"
            " number of steps is its own."
        )
    if mixed:
        parts.append("**Runs of different code or of another version of this study are mixed.**")
    if study.confounds:
        parts.append("Confounds of this preset: " + "; ".join(study.confounds) + ".")
    for name, evaluated in result["sets"].items():
        parts += [f"## {name}", set_table(study, name, evaluated, found)]
    if result["claims"]:
        rows = [
            (claim.says, claim.set, f"{claim.better} - {claim.worse}", *judged(less))
            for claim, less in result["claims"]
        ]
        parts += [
            "## What the source says",
            table(("claim", "set", "difference", "here", "verdict"), rows),
        ]
    if study.notes:
        parts.append(study.notes.strip())
    parts.append(f"![curves]({study.page}.svg)")
    parts.append(
        "Intervals allow for other seeds and other prompts; differences are paired by seed and"
        " prompt. Minutes depend on what else the machine did."
    )
    return "\n\n".join(parts) + "\n"


def set_table(study: Study, name: str, evaluated: Mapping[str, Any], found: dict) -> str:
    """Write a row for every arm on one evaluated set; the players below where all arms share them,
    else beside each arm.
    """
    shared, rows = shared_players(evaluated), []
    for arm, mean in evaluated["arms"].items():
        runs = found[arm].values()
        less = evaluated["differences"].get(arm)
        rows.append(
            (
                arm,
                percent(mean),
                ", ".join(f"{run['sets'][name]['success']:.1%}" for run in runs),
                "" if less is None else f"{percent(less, signed=True)}, {less.verdict}",
                *([] if shared else map(_rate, evaluated["players"][arm].values())),
                f"{np.mean([run['cost']['tokens'] for run in runs]) / 1e6:.2f}",
                f"{np.mean([run['cost']['seconds'] for run in runs]) / 60:.1f}",
            )
        )
    for player, rate in (shared or {}).items():
        rows.append((f"{player} player", _rate(rate), *[""] * 4))
    beside = () if shared else (f"{player} player" for player in PLAYERS)
    head = ("arm", "success (95% interval)", "seeds", f"less {study.arms[0].name}", *beside)
    return table((*head, "Mtokens", MINUTES), rows)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def judged(less: Estimate | None) -> tuple[str, str]:
    """Return a measured difference, and its verdict on a claim that it is positive."""
    if less is None:
        return "-", "not run"
    verdict = {"higher": "reproduced", "lower": "contradicted"}.get(less.verdict, less.verdict)
    return percent(less, signed=True), verdict


def plot(study: Study, found: dict[str, dict[int, dict]], path: Path) -> None:
    """Draw each metric of the study over the steps: the mean of an arm's seeds, and their range."""
    pyplot = headless_pyplot()
    figure, grid = pyplot.subplots(
        1, len(study.metrics), figsize=(4.2 * len(study.metrics), 3.4), layout="constrained"
    )
    for axes, key in zip(np.atleast_1d(grid), study.metrics):
        for arm, runs in found.items():
            lines = [
                {
                    record["step"]: record[key]
                    for record in run["records"]
                    if record.get(key) is not None
                }
                for run in runs.values()
            ]
            steps = sorted(set.intersection(*map(set, lines))) if lines else []
            values = np.array([[line[step] for step in steps] for line in lines])
            if len(steps):
                (line,) = axes.plot(steps, values.mean(axis=0), label=arm)
                axes.fill_between(steps, values.min(0), values.max(0), alpha=0.15, lw=0)
        axes.set(title=key, xlabel="step")
    np.atleast_1d(grid)[0].legend(fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)


def write(study: Study, folder: Path, output: Path, seeds: Sequence[int], *, mixed: bool) -> None:
    """Write NAME.md, NAME.json and NAME.svg (NAME_paper for the preset `paper`) of the runs in
    `folder` that have finished. In the JSON every arm has its players; the players of a set are
    null where arms differ. Raises ValueError if no run has finished.
    """
    found = collect(study, folder, seeds)
    if not any(found.values()):
        raise ValueError(f"no run of {folder} has finished; there is nothing to report")
    recorded = json.loads((folder / IDENTITY).read_text())
    place, match = recorded["place"], recorded["match"]
    result = compare(study, found)
    output.mkdir(parents=True, exist_ok=True)
    text = markdown(study, result, found, place, match, mixed)
    (output / f"{study.page}.md").write_text(text)
    report = {"study": asdict(study), "place": place, "match": match, "is_mixed": mixed}
    report["sets"] = {
        name: {
            **(shared_players(evaluated) or dict.fromkeys(PLAYERS)),
            "arms": {
                arm: asdict(mean) | evaluated["players"][arm]
                for arm, mean in evaluated["arms"].items()
            },
            "differences": {
                arm: less and asdict(less) for arm, less in evaluated["differences"].items()
            },
        }
        for name, evaluated in result["sets"].items()
    }
    report["runs"] = {
        f"{arm}-seed{seed}": {name: evaluated["success"] for name, evaluated in run["sets"].items()}
        for arm, runs in found.items()
        for seed, run in runs.items()
    }
    write_json(output / f"{study.page}.json", report)
    plot(study, found, output / f"{study.page}.svg")
    print(text)
