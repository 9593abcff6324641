"""Run a study of several arms and seeds, side by side, and write its table, page and plot.

    ragen-mega study filter                       # three seeds of every arm
    ragen-mega study my/study.toml --seeds 5 --jobs 2
    ragen-mega study filter --slurm lines.txt     # a command a line, for a job array
    ragen-mega study filter --report              # what there is so far, of all seeds
    ragen-mega study --list
    ragen-mega study scaling --models 0.2M,3M --layouts all
    ragen-mega study pretrained --preset paper --hardware H100 --predict    # hours and money
    ragen-mega study --signals studies            # what foretold success and collapse in them

Runs lie in studies/NAME-PRESET/ARM-seedK; the same command goes on where an earlier one was
stopped. Every arm has the same seeds, and with them the same warm start and training prompts;
evaluation prompts are the same for all. A warm start that several arms have is made once, by the
runs that go first, or taken from another study beside this one. If the code or the study has
changed since the first run, their results are not mixed; --mixed accepts that, and the report says
so.

--match steps gives every arm as many optimizer steps as the first one, --match tokens as many
sampled trajectories; none takes the number of steps from the arms.
"""

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ragen_mega.commands.command_line import command, flag, report_folder
from ragen_mega.config import parse
from ragen_mega.config.cli import RECIPES
from ragen_mega.data.extras import require
from ragen_mega.planning.hardware import Machine, find_machine
from ragen_mega.studies import scaling, signals_page, tables
from ragen_mega.studies.definitions import PRESETS, Arm, Study
from ragen_mega.studies.runs import (
    IDENTITY,
    Runner,
    Terminated,
    check_ranks,
    claim_folder,
    find_jobs,
    flags_of,
    found_seeds,
    recorded,
)

STUDIES = RECIPES.parent / "studies"


def find(name: str, preset: str | None) -> Study:
    """The study of this name, or in this file. Raises ValueError if there is none."""
    path = Path(name) if name.endswith(".toml") else STUDIES / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in STUDIES.glob("*.toml")))
        raise ValueError(f"there is no study {name}; give a .toml file or one of {known}")
    return Study.read(path, preset)


def chosen(study: Study, models: str | None, layouts: str | None) -> list[Arm]:
    """The arms of these models under these layouts, names with commas between; by default all
    models under the first layout. Raises ValueError for a name that the study does not have.
    """
    if study.target is None:
        if models or layouts:
            raise ValueError(f"study {study.name} has no models and layouts; drop those flags")
        return list(study.arms)
    picked = {}
    for flag_name, kind, text in (("--models", "model", models), ("--layouts", "layout", layouts)):
        known = list(dict.fromkeys(getattr(arm, kind) for arm in study.arms))
        default = known if kind == "model" else known[:1]
        names = known if text == "all" else text.split(",") if text else default
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"{flag_name} names {', '.join(unknown)}; study {study.name} has"
                f" {', '.join(known)}, or all"
            )
        picked[kind] = names
    return [arm for arm in study.arms if all(getattr(arm, kind) in picked[kind] for kind in picked)]


def write_report(
    study: Study,
    folder: Path,
    output: Path,
    seeds: Sequence[int],
    mixed: bool,
    machine: Machine | None,
) -> None:
    """NAME.md, NAME.json and NAME.svg (NAME_paper of that preset) of the runs that have finished;
    those of a scaling study beside what is predicted for `machine`. Raises ValueError if none has.
    """
    found = tables.collect(study, folder, seeds)
    if not any(found.values()):
        raise ValueError(f"no run of {folder} has finished; there is nothing to report")
    of = json.loads((folder / IDENTITY).read_text())
    if study.target is not None:
        return scaling.write(study, found, output, of["place"], mixed, machine)
    tables.write(study, found, output, of["place"], of["match"], mixed)


def predict(
    study: Study,
    arms: Sequence[Arm],
    machine: Machine | None,
    arguments: argparse.Namespace,
    match: str,
    num_seeds: int,
) -> None:
    """NAME_predicted.md of these arms. Raises ValueError without a machine."""
    if machine is None:
        raise ValueError("--predict needs to know the GPU; add --hardware")
    whole = [
        replace(
            arm,
            flags=tuple(flags_of(study, arm, match)),
            ranks=arm.ranks or arguments.ranks,
        )
        for arm in arms
    ]
    scaling.write_predicted(study, whole, machine, arguments.reports, num_seeds)


@command(
    __doc__,
    ("study", {"nargs": "?", "help": "name that --list shows, or a .toml file"}),
    flag("--list", "name the studies", False),
    flag("--preset", "small: here (default); paper: as published, confounds included"),
    flag("--seeds", "seeds of every arm (default: 3; to --report all found)", type=int),
    flag("--first-seed", "the first of them (default: 0; to --report all found)", type=int),
    flag(
        "--match",
        "steps, tokens or none: what all arms have the same of (default: none; to --report that of"
        " the runs)",
    ),
    flag("--jobs", "runs at a time, a thread each (OMP_NUM_THREADS)", 1),
    flag("--ranks", "ranks of a run", 1),
    flag("--models", "of a scaling study: which, with commas between (default: all)"),
    flag("--layouts", "of a scaling study: which, or all (default: its first; to --predict all)"),
    flag("--hardware", "predict for this GPU, or for what --calibrate wrote"),
    flag("--predict", "only predict what the study takes and costs, and run nothing", False),
    flag("--flags", "further flags of every run, e.g. '--num-steps 2'", ""),
    flag("--output", "folder of the runs (default: studies/NAME-PRESET)", type=Path),
    flag("--reports", "folder of the report (default: report/ in that of the runs)", type=Path),
    flag("--mixed", "go on although code or study has changed", False),
    flag("--report", "only report what has finished", False),
    flag("--signals", "only correlate signals with outcomes, over the studies in here", type=Path),
    flag("--slurm", "write the commands here, one a line, instead of running them", type=Path),
)
def main(arguments: argparse.Namespace) -> int | None:
    require("studies", "studies")
    if arguments.signals:
        beside = report_folder("docs/results/studies", arguments.signals / "report")
        return signals_page.write(arguments.signals, arguments.reports or beside)
    if arguments.list or not arguments.study:
        for path in sorted(STUDIES.glob("*.toml")):
            study = Study.read(path)
            print(f"{study.name:16} {study.title} ({study.source}); {len(study.arms)} arms")
        return 0
    matches = (None, "steps", "tokens", "none")
    if arguments.preset not in (None, *PRESETS) or arguments.match not in matches:
        raise ValueError("--preset is small or paper, --match is steps, tokens or none")
    num_seeds = 3 if arguments.seeds is None else arguments.seeds
    if min(num_seeds, arguments.jobs, arguments.ranks) < 1:
        raise ValueError("--seeds, --jobs and --ranks must be at least 1")
    study = find(arguments.study, arguments.preset)
    study = replace(study, flags=(*study.flags, *shlex.split(arguments.flags)))
    scales = study.target is not None
    layouts = arguments.layouts or ("all" if arguments.predict and scales else None)
    arms = chosen(study, arguments.models, layouts)
    folder = arguments.output or Path("studies") / f"{study.name}-{study.preset}"
    arguments.reports = arguments.reports or report_folder(
        "docs/results/studies", folder / "report"
    )
    match, only_reports = arguments.match or "none", arguments.report and not arguments.predict
    if only_reports:
        study, match, mixed = recorded(folder, study, arguments.match, mixed=arguments.mixed)
    for arm in study.arms:
        parse(flags_of(study, arm, match))  # a wrong flag is said before anything runs
    machine = find_machine(arguments.hardware) if arguments.hardware else None
    if arguments.predict:
        return predict(study, arms, machine, arguments, match, num_seeds)
    first = arguments.first_seed or 0
    seeds: Sequence[int] = range(first, first + num_seeds)
    if only_reports:
        if arguments.seeds is None and arguments.first_seed is None:
            seeds = found_seeds(study, folder)
        return write_report(study, folder, arguments.reports, seeds, mixed, machine)
    check_ranks(study, arms, match, arguments.ranks)
    mixed = claim_folder(folder, study, match, mixed=arguments.mixed, ranks=arguments.ranks)
    jobs = find_jobs(study, arms, seeds, folder, match, arguments.ranks)
    if arguments.slurm:
        arguments.slurm.write_text("".join(shlex.join(job.command) + "\n" for job in jobs))
        print(f"{len(jobs)} commands in {arguments.slurm}; then --report")
        return 0
    runner = Runner(jobs)
    print(f"{len(jobs)} runs to go, {arguments.jobs} at a time, in {folder}", flush=True)
    try:
        runner.run(arguments.jobs)
    except KeyboardInterrupt as stopped:
        print("stopped; the same command goes on from the checkpoints", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(stopped, Terminated) else signal.SIGINT)
    write_report(study, folder, arguments.reports, seeds, mixed, machine)
    return 1 if runner.failed else 0
