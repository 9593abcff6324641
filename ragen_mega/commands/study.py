"""Run a study of several arms and seeds, side by side, and write its table, page and plot.

    ragen-mega study filter                       # three seeds of every arm
    ragen-mega study my/study.toml --seeds 5 --jobs 2
    ragen-mega study filter --slurm lines.txt     # a command a line, for a job array
    ragen-mega study filter --report              # what there is so far, of all seeds
    ragen-mega study --list

Runs lie in studies/NAME-PRESET/ARM-seedK; the same command goes on where an earlier one was
stopped. Every arm has the same seeds, and with them the same warm start and training prompts;
evaluation prompts are the same for all. A warm start that several arms have is made once, by the
runs that go first. If the code, the study, or a module or file of yours that its flags name has
changed since the first run, their results are not mixed; --mixed accepts that, the report says so,
and further runs make their own warm starts.

--match steps gives every arm as many optimizer steps as the first one, --match tokens as many
sampled trajectories; none takes the number of steps from the arms.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ragen_mega.commands.command_line import (
    check_together,
    command,
    flag,
    name_or_path,
    report_folder,
)
from ragen_mega.config import parse
from ragen_mega.config.flags import in_one_form
from ragen_mega.extensions.extras import require
from ragen_mega.ranks.launcher import refuse_copies
from ragen_mega.run.check import check_environments
from ragen_mega.studies import tables
from ragen_mega.studies.definitions import PRESETS, STUDIES, Study, find
from ragen_mega.studies.runs import (
    Runner,
    check_ranks,
    claim_folder,
    find_jobs,
    flags_of,
    found_seeds,
    recorded,
)

OF_A_RUN = ("--seed", "--name", "--output")
"""Flags that a study gives each of its runs."""


@command(
    __doc__,
    (
        "study",
        {"nargs": "?", "type": name_or_path, "help": "name that --list shows, or a .toml file"},
    ),
    flag("--list", "name the studies", False),
    flag(
        "--preset",
        "small: here (default); paper: as published, confounds included",
        choices=PRESETS,
    ),
    flag("--seeds", "seeds of every arm (default: 3; to --report all found)", type=int),
    flag("--first-seed", "the first of them (default: 0; to --report all found)", type=int),
    flag(
        "--match",
        "what all arms have the same of (default: none; to --report that of the runs)",
        choices=("steps", "tokens", "none"),
    ),
    flag("--jobs", "runs at a time, a thread each (OMP_NUM_THREADS)", 1),
    flag("--ranks", "ranks of a run, unless its arm names them", 1),
    flag("--flags", "further flags of every run, e.g. '--num-steps 2'", ""),
    flag("--output", "folder of the runs (default: studies/NAME-PRESET)", type=Path),
    flag("--reports", "folder of the report (default: report/ in that of the runs)", type=Path),
    flag("--mixed", "go on although code, study or files have changed", False),
    flag("--report", "only report what has finished", False),
    flag("--slurm", "write the commands here, one a line, instead of running them", type=Path),
)
def main(arguments: argparse.Namespace) -> int | None:
    require("studies", "studies")
    if arguments.list or not arguments.study:
        for path in sorted(STUDIES.glob("*.toml")):
            study = Study.read(path)
            print(f"{study.name:16} {study.title} ({study.source}); {len(study.arms)} arms")
        return 0
    num_seeds = 3 if arguments.seeds is None else arguments.seeds
    if min(num_seeds, arguments.jobs, arguments.ranks) < 1:
        raise ValueError("--seeds, --jobs and --ranks must be at least 1")
    further = shlex.split(arguments.flags)
    own = {word.partition("=")[0] for word in in_one_form(further)}.intersection(OF_A_RUN)
    check_together(
        (
            arguments.report and arguments.slurm,
            "--report runs nothing, and --slurm writes what is to be run; drop one of them",
        ),
        (
            arguments.slurm and arguments.jobs > 1,
            f"--jobs {arguments.jobs} is for runs here, and --slurm runs none; drop one of them",
        ),
        (
            own,
            f"--flags must leave {', '.join(sorted(own))} to the study, which gives each run its"
            " own; set --seeds, --first-seed or --output of the study",
        ),
    )
    study = find(arguments.study, arguments.preset)
    study = replace(study, flags=(*study.flags, *further))
    folder = arguments.output or Path("studies") / f"{study.name}-{study.preset}"
    arguments.reports = arguments.reports or report_folder(
        "docs/results/studies", folder / "report"
    )
    match = arguments.match or "none"
    if arguments.report:
        study, match, mixed = recorded(folder, study, arguments.match, mixed=arguments.mixed)
    for arm in () if arguments.report else study.arms:
        # a wrong flag is said before anything runs
        try:
            check_environments(parse(flags_of(study, arm, match)).environment)
        except ValueError as error:
            raise ValueError(f"arm {arm.name} of {arguments.study}: {error}") from None
    first = arguments.first_seed or 0
    seeds: Sequence[int] = range(first, first + num_seeds)
    if arguments.report:
        if arguments.seeds is None and arguments.first_seed is None:
            seeds = found_seeds(study, folder)
        tables.write(study, folder, arguments.reports, seeds, mixed=mixed)
        return 0
    refuse_copies()
    check_ranks(study, match, arguments.ranks)
    mixed = claim_folder(folder, study, match, mixed=arguments.mixed, ranks=arguments.ranks)
    jobs = find_jobs(study, seeds, folder, match, arguments.ranks, mixed=mixed)
    if arguments.slurm:
        arguments.slurm.write_text("".join(shlex.join(job.command) + "\n" for job in jobs))
        print(f"{len(jobs)} commands in {arguments.slurm}; then --report")
        return 0
    runner = Runner(jobs)
    print(f"{len(jobs)} runs to go, {arguments.jobs} at a time, in {folder}", flush=True)
    runner.run(arguments.jobs)
    if runner.stopped_by:
        print("stopped; the same command goes on from the checkpoints", file=sys.stderr)
        return 128 + runner.stopped_by
    tables.write(study, folder, arguments.reports, seeds, mixed=mixed)
    return 1 if runner.failed else 0
