"""The record that a run leaves of itself: its config.json, and JSON objects of other files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragen_mega.system.paths import named

CONFIG_FILE = "config.json"
WITHOUT_EFFECT = ("logging", "checkpoint", "parallel")
"""Sections of the settings that leave the numbers of a step as they are, but for rounding."""
_PLAYED = ("environment", "agent")
_ASIDE = (
    "environment.environment_processes",
    "environment.environment_timeout",
    "environment.eval_environments",
    "environment.curriculum",
    "environment.curriculum_success",
    "agent.agent_listen",
    "agent.agent_timeout",
)
"""Settings of the sections _PLAYED that leave the success of an evaluation as it is."""
_MOST_RUNS = 8


def read_recorded(directory: Path) -> dict[str, Any]:
    """Read section -> name -> value of a run's settings, and its provenance. Raises ValueError, in
    one line, if the directory holds no run, or a damaged one.
    """
    if not is_run(directory):
        what = f"holds no run (no {CONFIG_FILE} of one)" if directory.is_dir() else "does not exist"
        raise ValueError(f"{directory} {what}; give a run directory{beside(directory)}")
    remedy = "restore it; each of checkpoints/step_*/manifest.json has the settings as `config`"
    return read_object(directory / CONFIG_FILE, remedy)


def flat(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a map: section.name -> value, from section -> name -> value."""
    return {
        f"{section}.{name}": value
        for section, values in settings.items()
        for name, value in values.items()
    }


def plays_alike(
    before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], *further: str
) -> bool:
    """Return whether success under two settings can be compared: they play the same tasks by the
    same rules, and agree in the `further` section.name. A setting that one of them lacks is newer
    than its run, and does not count.
    """
    recorded, present = flat(before), flat(now)
    return all(
        recorded[key] == present[key]
        for key in recorded.keys() & present.keys()
        if key in further or (key.partition(".")[0] in _PLAYED and key not in _ASIDE)
    )


def is_run(directory: Path) -> bool:
    """Check if a directory has the config.json of a run, which a model's `model_type` is not in."""
    config = directory / CONFIG_FILE
    return config.exists() and '"model_type"' not in config.read_text(errors="replace")


def beside(directory: Path) -> str:
    """Write `, in ... are ...`: the runs in the folder where a directory would be, if there are
    any.
    """
    configs = directory.parent.glob(f"*/{CONFIG_FILE}")
    runs = sorted(path.parent.name for path in configs if is_run(path.parent))
    more = f" and {len(runs) - _MOST_RUNS} more" if len(runs) > _MOST_RUNS else ""
    return f"; in {directory.parent} are {', '.join(runs[:_MOST_RUNS])}{more}" if runs else ""


def read_json(text: str) -> Any:
    """Read the value of a JSON text. NaN and infinities, which JSON does not have and a browser
    refuses, become None.
    """
    return json.loads(text, parse_constant=lambda constant: None)


def read_object(path: Path, remedy: str = "restore or delete it") -> dict[str, Any]:
    """Read the JSON object in a file. Raises ValueError, in one line, if it is none."""
    try:
        with named(path):
            value = read_json(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); {remedy}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {value!r:.60}; {remedy}")
    return value
