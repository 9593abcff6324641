"""Provenance of a run: command, code, versions, machine and layout of every start, in its
config.json; and the settings and layout that a step was trained under.
"""

import datetime
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragen_mega.config import StarPOConfig
from ragen_mega.config.recorded import STARTS, read_recorded, with_defaults
from ragen_mega.report.hardware import device, versions

REPOSITORY = Path(__file__).parents[2]


def code() -> dict[str, Any]:
    """Return the commit of this repository and whether files differ from it; outside of git the
    commit in the environment variable COMMIT, by default `unknown`.
    """
    commit, changes = (_git("rev-parse", "HEAD"), _git("status", "--porcelain"))
    is_ours = _git("rev-parse", "--show-toplevel") == str(REPOSITORY)
    outside = {"commit": os.environ.get("COMMIT", "unknown")}
    return {"commit": commit, "dirty": bool(changes)} if is_ours else outside


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", REPOSITORY, *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def provenance() -> dict[str, Any]:
    """Return the date, machine and commit of a result."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **code(),
        "hardware": device(),
        "versions": versions(),
    }


def describe_start(
    config: StarPOConfig, directory: str, *, first_step: int, world_size: int, ranks_per_node: int
) -> dict[str, Any]:
    """Return the record of a start of a run in a working directory, as JSON values."""
    import torch  # takes seconds, which readers of runs need not wait

    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "directory": directory,
        "recipe": config.logging.recipe,
        "first_step": first_step,
        **code(),
        "versions": versions(),
        "host": platform.node(),
        "hardware": device(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "world_size": world_size,
        "ranks_per_node": ranks_per_node,
        "parallel": config.to_dict()["parallel"],
    }


def append_start(
    before: Mapping[str, Any], settings: Mapping[str, Any], start: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config.json of a run that was `before` (empty at its first start) and now starts
    with `settings`; the start records which of them changed, as section.name -> [old, new].
    """
    starts = before.get(STARTS, [])
    changed = {
        f"{section}.{name}": [before[section].get(name), value]
        for section, values in settings.items()
        for name, value in values.items()
        if before.get(section, {}).get(name, value) != value
    }
    return {**settings, STARTS: [*starts, {**start, "changed": changed}]}


def alike(recorded: Mapping[str, Any]) -> str:
    """Return a digest that is equal for runs whose model and settings differ by their seed only,
    however old they are: flags that are newer than a run have their defaults.
    """
    settings = with_defaults(recorded)
    seed, start = settings["train"].pop("seed"), settings["warm_start"]
    if start["warm_start_from"] is not None:  # in a study another arm's, seed by seed
        start["warm_start_from"] = re.sub(rf"seed{seed}\b", "seed", start["warm_start_from"])
    for section in ("logging", "checkpoint"):  # do not affect training
        del settings[section]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def read_settings(
    run: Path, step: int = sys.maxsize
) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Return a map: section -> flag -> value under which a run trained that step (its last one);
    flags that are newer than the run have their defaults. Also the recorded start that the step
    belongs to, None for an older run. Raises ValueError if the directory holds no run.
    """
    recorded = read_recorded(run)
    settings = with_defaults(recorded)
    starts = list(recorded.get(STARTS, []))
    while len(starts) > 1 and starts[-1]["first_step"] > step:
        for key, (old, _) in starts.pop()["changed"].items():
            section, name = key.split(".")
            settings.setdefault(section, {})[name] = old
    return settings, starts[-1] if starts else None
