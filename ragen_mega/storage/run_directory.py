"""Directory of a run: the one of its name, a number behind the default name, or the directory of
the run that it resumes. No torch: the launcher asks before it starts ranks.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from ragen_mega.config import StarPOConfig
from ragen_mega.config.recorded import (
    CONFIG_FILE,
    WITHOUT_EFFECT,
    is_run,
    read_object,
    read_recorded,
    with_defaults,
)
from ragen_mega.system.paths import dangling

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
BASE = "base"
"""Directory of the untrained small model of a run without --load."""
WARM_START, WARM_START_CRITIC = "warm_start", "warm_start_critic"
"""Directories of the small model after cloning, and of its critic."""
FINAL_EXPORT = "huggingface"
"""Directory of the trained policy, once the run has finished."""
FINAL_ADAPTER = "adapter"
"""Directory of its adapter in PEFT's format; the policy beside it is merged."""
_SECTION = '"warm_start": {'
"""Found in every config.json of a run, and in no model's."""


class Finished(ValueError):
    """A run that is to be resumed has done all its steps, under the same settings."""


def with_name(config: StarPOConfig, least: int = 1) -> tuple[StarPOConfig, str | None]:
    """Return the configuration with the name of its run, and a message about a name that was chosen
    for it.

    Without --name a run begins under the default name, with a number of at least `least` appended
    if that is taken; --resume goes on with the newest of these runs.
    """
    default = config.run_directory
    if config.logging.name is not None or config.logging.overwrite:
        return config, None
    taken = {number: path for number, path in _numbered(default).items() if holds_work(path)}
    newest = max(taken, default=0)
    if not config.checkpoint.resume:
        number = max(newest + 1, least)
        path = _numbered_path(default, number)
        there = _numbered_path(default, number - 1)
        said = f"run {path}: {there} is there already" if number > 1 else None
    else:
        path = taken.get(newest, default)
        said = f"resume: {path} is the newest of {len(taken)} runs" if len(taken) > 1 else None
    return replace(config, logging=replace(config.logging, name=path.name)), said


def _numbered_path(default: Path, number: int) -> Path:
    return default if number == 1 else default.with_name(f"{default.name}-{number}")


def _numbered(default: Path) -> dict[int, Path]:
    """Return a map: number -> path of all runs of the default name; the first has no number
    appended.
    """
    paths = {1: default}
    for path in default.parent.glob("*") if default.parent.is_dir() else ():
        name, _, number = path.name.rpartition("-")
        if name != default.name or not number.isdecimal():
            continue
        if int(number) > 1 and number == str(int(number)):
            paths[int(number)] = path
    return paths


def holds_work(path: Path) -> bool:
    """Check if anything would be lost with `path`: more than a refused start leaves behind."""
    if not path.is_dir():
        return path.exists()
    names, config = {entry.name for entry in path.iterdir()}, path / CONFIG_FILE
    has_only_begun = CONFIG_FILE in names <= {CONFIG_FILE, BASE}
    is_start = has_only_begun and _SECTION in config.read_text(errors="replace")
    return bool(names) and not is_start


def check_directory(directory: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise ValueError if a run may not use this directory; nothing is touched."""
    summary = directory / SUMMARY_FILE
    for path in (directory, *directory.parents):
        if problem := dangling(str(path)):
            raise ValueError(
                f"run directory {directory}: {problem}; make that folder or choose another --output"
            )
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
    if not is_run(directory):
        raise ValueError(
            f"run directory {directory} holds files that are no run (no {CONFIG_FILE} of a run)"
            " and stay untouched; choose another --name"
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
    directory = config.run_directory
    summary = directory / SUMMARY_FILE
    if not (config.checkpoint.resume and summary.exists()):
        return
    found = read_object(summary)
    done, steps = found.get("steps", 0), config.train.num_steps
    if config.evaluation.is_reached(found.get("reached")):
        goal = f"{config.evaluation.stop_at_success:g}"
        state = f"reached --stop-at-success {goal} after {done} steps; raise it"
    elif done >= steps:
        state = f"done its {done} steps, and num_steps is {steps}; raise --num-steps"
    else:
        return
    text = f"run {directory} has {state} to train on, or choose another --name"
    before = with_defaults(read_recorded(directory))
    now = json.loads(json.dumps(config.to_dict()))
    changed = [
        name
        for section, values in now.items()
        if section not in WITHOUT_EFFECT
        for name, value in values.items()
        if value is not None and before[section][name] != value  # a start chooses what none gives
    ]
    if changed:
        raise ValueError(f"{text}; {', '.join(changed)} would change nothing")
    raise Finished(text)


def claim(directory: Path, *, resume: bool, overwrite: bool) -> None:
    """Make the directory of a run; a run that is overwritten is set aside until `begin`. Raises
    ValueError as `check_directory` does.
    """
    check_directory(directory, resume=resume, overwrite=overwrite)
    directory = directory.resolve()  # a link to it stays
    if directory.is_dir() and not resume:
        if holds_work(directory) and not _aside(directory).exists():
            directory.rename(_aside(directory))
        else:  # a run that never began is not worth more than the run that it overwrote
            shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)


def begin(directory: Path) -> None:
    """Delete the run that this run replaces, and the mark that an earlier process had finished it,
    because nothing can refuse this run any more.
    """
    (directory / SUMMARY_FILE).unlink(missing_ok=True)
    if _aside(directory).exists():
        shutil.rmtree(_aside(directory))


def put_back(directory: Path) -> None:
    """Restore the run that the refused run in this directory was to overwrite."""
    if _aside(directory).exists():
        shutil.rmtree(directory.resolve(), ignore_errors=True)
        _aside(directory).rename(directory.resolve())


def recover(directory: Path) -> bool:
    """Call `put_back` for a process that was killed before its run held anything, and return
    whether it was needed.
    """
    is_lost = _aside(directory).exists() and not holds_work(directory)
    if is_lost:
        put_back(directory)
    return is_lost


def _aside(directory: Path) -> Path:
    """Return the path of a run that is to be overwritten: beside `directory`, also where that is a
    link.
    """
    directory = directory.resolve()
    return directory.with_name(f".{directory.name}.overwritten")
