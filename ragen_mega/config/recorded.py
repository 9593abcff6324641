"""The record that a run leaves of itself: its config.json, and JSON objects of other files."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from ragen_mega.config.rules import section_types
from ragen_mega.config.sections.section import idle_fields
from ragen_mega.config.starpo import StarPOConfig
from ragen_mega.system.paths import named

CONFIG_FILE = "config.json"
STARTS = "provenance"
"""Key of config.json beside the settings: a list, one entry for every time the run was started."""
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
_T = TypeVar("_T")


def read_recorded(directory: Path) -> dict[str, Any]:
    """Read section -> name -> value of a run's settings, and its provenance. Raises ValueError, in
    one line, if the directory holds no run, or a damaged one.
    """
    if not is_run(directory):
        what = f"holds no run (no {CONFIG_FILE} of one)" if directory.is_dir() else "does not exist"
        raise ValueError(f"{directory} {what}; give a run directory{beside(directory)}")
    remedy = "restore it; each of checkpoints/step_*/manifest.json has the settings as `config`"
    return read_object(directory / CONFIG_FILE, remedy)


def with_defaults(recorded: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a copy of a run's settings in which flags that are newer than the run have their
    defaults.
    """
    default = StarPOConfig().to_dict()
    known = {**default, **recorded}
    return {
        name: default.get(name, {}) | dict(values)
        for name, values in known.items()
        if name != STARTS
    }


def known_config(recorded: Mapping[str, Any]) -> StarPOConfig:
    """Return the configuration of a run of any version, to look things up in: no rule judges it,
    what this version does not know is left out, and flags that are newer than the run have their
    defaults.
    """
    settings = with_defaults(recorded)
    sections = {
        name: _unjudged(kind, {item.name: settings[name][item.name] for item in fields(kind)})
        for name, kind in section_types().items()
    }
    return _unjudged(StarPOConfig, sections)


def _unjudged(kind: type[_T], values: Mapping[str, Any]) -> _T:
    found = kind.__new__(kind)
    vars(found).update(values)
    return found


def unknown_note(recorded: Mapping[str, Any]) -> str | None:
    """Return a line about recorded settings that this version does not know, if there are any."""
    unknown = flat(with_defaults(recorded)).keys() - flat(StarPOConfig().to_dict()).keys()
    if not unknown:
        return None
    return f"this version does not know these settings of the run: {', '.join(sorted(unknown))}"


def runnable(
    recorded: Mapping[str, Any], given: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """Return the settings of a run of any version that it runs again under, beside the `given` ones
    (name -> value): as `known_config` has them, and those that do nothing at their defaults, which
    may have been others. Rules are still to judge them.
    """
    settings, default = known_config(recorded).to_dict(), StarPOConfig().to_dict()
    while True:
        beside = {
            section: {name: given.get(name, value) for name, value in values.items()}
            for section, values in settings.items()
        }
        idle = {name for name, _ in idle_fields(*vars(known_config(beside)).values())}
        if not (idle := idle - given.keys()):
            return settings
        for section, values in settings.items():
            values |= {name: default[section][name] for name in values.keys() & idle}


@contextlib.contextmanager
def under_recorded(
    run: Path | str, remedy: str = "a flag given now replaces it, and its default drops it"
) -> Iterator[None]:
    """Add to a refusal of settings where those come from that no flag gives, and what to do."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error} (what no flag gives is recorded in {run}; {remedy})") from None


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
