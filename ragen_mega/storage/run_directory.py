"""Which directory a run has: the one of its name, a number behind the default name, or that of the
run that it resumes. No torch: the launcher asks before it starts ranks.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from ragen_mega.config import StarPOConfig

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
BASE = "base"
"""Directory of the untrained small model of a run without --load."""
WARM_START, WARM_START_CRITIC = "warm_start", "warm_start_critic"
"""Directories of the small model after cloning, and of its critic."""
FINAL_EXPORT = "huggingface"
"""Directory of the trained policy, once the run has finished."""
_SECTION = '"warm_start": {'
"""Found in every config.json of a run, and in no model's."""
_IRRELEVANT = ("logging", "checkpoint", "parallel")
"""Sections of the configuration that may differ when a finished run is resumed."""


class Finished(ValueError):
    """A run that is to be resumed has done all its steps, under the same settings."""


def with_name(config: StarPOConfig) -> tuple[StarPOConfig, str | None]:
    """The configuration with the name of its run, and a message about a name that was chosen
    for it.

    Without --name a run begins under the default name, with a number appended if that is taken;
    --resume goes on with the newest of these runs.
    """
    default = config.run_directory
    if config.logging.name is not None or config.logging.overwrite:
        return config, None
    taken = {number: path for number, path in _numbered(default).items() if holds_work(path)}
    newest = max(taken, default=0)
    if not config.checkpoint.resume:
        path = default.with_name(f"{default.name}-{newest + 1}") if newest else default
        said = f"run {path}: {taken[newest]} is there already" if newest else None
    else:
        path = taken.get(newest, default)
        said = f"resume: {path} is the newest of {len(taken)} runs" if len(taken) > 1 else None
    return replace(config, logging=replace(config.logging, name=path.name)), said


def _numbered(default: Path) -> dict[int, Path]:
    """Number -> path of all runs of the default name; the first has no number appended."""
    paths = {1: default}
    for path in default.parent.glob("*") if default.parent.is_dir() else ():
        name, _, number = path.name.rpartition("-")
        if name == default.name and number.isdecimal():
            paths[int(number)] = path
    return paths


def holds_work(path: Path) -> bool:
    """Whether anything would be lost with `path`: more than a refused start leaves behind."""
    if not path.is_dir():
        return path.exists()
    names, config = {entry.name for entry in path.iterdir()}, path / CONFIG_FILE
    is_start = CONFIG_FILE in names <= {CONFIG_FILE, BASE} and _SECTION in config.read_text()
    return bool(names) and not is_start


def check_directory(directory: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise ValueError if a run may not use this directory; nothing is touched."""
    is_run, summary = (directory / CONFIG_FILE).exists(), directory / SUMMARY_FILE
    if resume and overwrite:
        raise ValueError(
            "resume continues a run and overwrite deletes it; drop resume or overwrite"
        )
    for path in (directory, *directory.parents):
        if path.exists() and not path.is_dir():
            raise ValueError(
                f"run directory {directory}: {path} is a file; choose another --name or --output"
            )
        if path.exists() and not os.access(path, os.W_OK | os.X_OK):
            raise ValueError(
                f"run directory {directory}: {path} cannot be written to (a read-only disk, or not"
                " yours); choose another --output"
            )
        if path.exists():
            break
    if not holds_work(directory):
        return
    if not is_run:
        raise ValueError(
            f"run directory {directory} holds files that are no run (no {CONFIG_FILE}) and stay"
            " untouched; choose another --name"
        )
    if not resume and not overwrite:
        raise ValueError(
            f"run directory {directory} already holds"
            f" {'a finished' if summary.exists() else 'an unfinished'} run; add --overwrite to"
            " delete it, --resume to go on with it, or choose another --name"
        )


def check_finished(config: StarPOConfig) -> None:
    """Raise Finished if --resume finds nothing left to do, ValueError if settings
    have changed all the same.
    """
    directory, now = config.run_directory, json.loads(json.dumps(config.to_dict()))
    summary = directory / SUMMARY_FILE
    if not (config.checkpoint.resume and summary.exists()):
        return
    done = json.loads(summary.read_text())["steps"]
    if done < config.train.num_steps:
        return
    text = (
        f"run {directory} has done its {done} steps, and num_steps is {config.train.num_steps};"
        " raise --num-steps to train on, or choose another --name"
    )
    before = json.loads((directory / CONFIG_FILE).read_text())
    changed = [
        name
        for section, values in now.items()
        if section not in _IRRELEVANT
        for name, value in values.items()
        if before.get(section, {}).get(name) != value
    ]
    if changed:
        raise ValueError(f"{text}; {', '.join(changed)} would change nothing")
    raise Finished(text)


def claim(directory: Path, *, resume: bool, overwrite: bool) -> None:
    """Make the directory of a run, mode 0700. Raises ValueError as `check_directory` does."""
    check_directory(directory, resume=resume, overwrite=overwrite)
    if directory.is_dir() and not resume:
        shutil.rmtree(directory)
    # A run that continues is not finished any more.
    (directory / SUMMARY_FILE).unlink(missing_ok=True)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
