"""Studies: arms that differ by flags but share seeds and prompts, and estimates of their
differences.

A study is a TOML file (ragen_mega/config/studies/); `Study.read` documents its format.
"""

import math
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragen_mega.environments.reference_players import wilson_interval

STUDIES = Path(str(files("ragen_mega.config") / "studies"))
PRESETS = ("small", "paper")
LEVEL = 0.95
ROUNDING = 1e-9
"""Half widths below this are errors of sums of equal rates."""


@dataclass(frozen=True)
class Arm:
    """One setting among those that a study compares."""

    name: str
    flags: tuple[str, ...]
    """Flags of the arm, appended to the flags of the study, which they override."""
    ranks: int | None = None
    """Ranks of each of its runs, in place of those that the command names."""


@dataclass(frozen=True)
class Claim:
    """Something that the paper says: one arm succeeds more than another on an evaluated set."""

    says: str
    better: str
    worse: str
    set: str


@dataclass(frozen=True)
class Study:
    """A study under one preset."""

    name: str
    title: str
    source: str
    preset: str
    recipe: str
    flags: tuple[str, ...]
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...] = ()
    metrics: tuple[str, ...] = ("rollout/success", "rollout/in_group_std", "actor/entropy")
    """Keys of metrics that are plotted over the steps."""
    confounds: tuple[str, ...] = ()
    """Differences between the arms besides the one that the study varies; the small preset has no
    avoidable ones.
    """
    notes: str = ""

    @property
    def page(self) -> str:
        """Name of its report's files, each preset its own."""
        return self.name if self.preset == PRESETS[0] else f"{self.name}_{self.preset}"

    @classmethod
    def read(cls, path: Path, preset: str | None = None) -> "Study":
        """Read the study in a file, under the first preset that it has unless one is named:
        `title`, `source`, `[small]` and `[paper]` with `recipe` and `flags` (`[paper]` also
        `confounds`), `[[arms]]` with `name`, `flags`, for models of several sizes `ranks`, and
        `paper_flags` where the paper's differ; optional `[[claims]]` with `says`, `better`,
        `worse`, `set`, and `metrics`, `notes`.

        Raises ValueError, in one line, for anything else.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no TOML: {error}; correct it there") from None
        _check_keys(path, "a study", data, ("title", "source", "arms"), _OTHERS)
        preset = preset or next((name for name in PRESETS if name in data), PRESETS[0])
        if preset not in data:
            known = ", ".join(name for name in PRESETS if name in data) or "none"
            raise ValueError(f"{path} has no preset [{preset}]; it has {known}")
        part = data[preset]
        _check_keys(path, f"[{preset}]", part, ("recipe",), ("flags", "confounds"))
        arms = _arms(path, data, preset)
        names = [arm.name for arm in arms]
        if len(set(names)) < len(names) or not all(map(_PLAIN.fullmatch, names)):
            raise ValueError(
                f"{path}: arms need different names of letters, digits, '.', '-' and '_', not"
                f" {', '.join(names)}"
            )
        claims = []
        for claim in data.get("claims", ()):
            _check_keys(path, "a claim", claim, ("says", "better", "worse", "set"))
            claims.append(Claim(**claim))
            if unknown := {claim["better"], claim["worse"]} - set(names):
                raise ValueError(f"{path}: a claim names no arm: {', '.join(unknown)}")
        return cls(
            name=path.stem,
            title=data["title"],
            source=data["source"],
            preset=preset,
            recipe=part["recipe"],
            flags=_words(path, part.get("flags", "")),
            arms=tuple(arms),
            claims=tuple(claims),
            metrics=tuple(data.get("metrics", cls.metrics)),
            confounds=tuple(part.get("confounds", ())),
            notes=data.get("notes", ""),
        )


def find(name: str, preset: str | None) -> Study:
    """Find the study of this name, or in this file. Raises ValueError if there is none."""
    path = Path(name) if name.endswith(".toml") else STUDIES / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in STUDIES.glob("*.toml")))
        raise ValueError(f"there is no study {name}; give a .toml file or one of {known}")
    return Study.read(path, preset)


def _arms(path: Path, data: Mapping[str, Any], preset: str) -> list[Arm]:
    arms = []
    for arm in data["arms"]:
        _check_keys(path, "an arm", arm, ("name", "flags"), ("paper_flags", "ranks"))
        words = arm.get("paper_flags", arm["flags"]) if preset == "paper" else arm["flags"]
        arms.append(Arm(arm["name"], _words(path, words), arm.get("ranks")))
    return arms


_OTHERS = (*PRESETS, "claims", "metrics", "notes")
_PLAIN = re.compile(r"[\w.-]+")


def _are(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


_Kind = tuple[Callable[[Any], bool], str]
_TEXT: _Kind = (lambda value: isinstance(value, str), "a string")
_TABLES: _Kind = (lambda value: _are(dict, value) and bool(value), "at least one table, as [[...]]")
_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(PRESETS, (lambda value: isinstance(value, dict), "a table")),
    "arms": _TABLES,
    "claims": (partial(_are, dict), "tables, as [[claims]]"),
    "metrics": (lambda value: _are(str, value) and bool(value), "at least one string in a list"),
    "confounds": (partial(_are, str), "strings in a list"),
    "ranks": (lambda value: type(value) is int and value > 0, "a positive integer"),
}
"""Key of a study file -> (whether a value is right, what is); all others are strings."""


def _check_keys(
    path: Path,
    where: str,
    data: Mapping[str, Any],
    required: Sequence[str],
    others: Sequence[str] = (),
) -> None:
    missing, unknown = set(required) - set(data), set(data) - {*required, *others}
    if missing or unknown:
        wrong = f"has no {', '.join(sorted(missing))}" if missing else f"knows no {unknown.pop()}"
        allowed = ", ".join((*required, *others))
        raise ValueError(f"{path}: {where} {wrong}; it takes {allowed}")
    for key, value in data.items():
        fits, what = _KINDS.get(key, _TEXT)
        if not fits(value):
            raise ValueError(f"{path}: {where} has {key} = {value!r}; it takes {what}")


def _words(path: Path, flags: str) -> tuple[str, ...]:
    """Split flags as a shell does."""
    try:
        return tuple(shlex.split(flags))
    except ValueError as error:
        raise ValueError(f"{path}: flags {flags!r} cannot be split: {error}") from None


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval, which is infinite where there is only one seed or prompt."""

    mean: float
    low: float
    high: float
    num_seeds: int
    seed_deviation: float = field(default=math.nan)
    """Standard deviation of the seeds' means."""

    @property
    def verdict(self) -> str:
        """Judge a difference: higher, lower, or not told apart."""
        return "higher" if self.low > 0 else "lower" if self.high < 0 else "not told apart"


def estimate(rates: NDArray[np.float64], least: float = 0.0) -> Estimate:
    """Estimate the mean over seeds and prompts from the success rate of each, [seeds, prompts].

    Seeds and prompts are both samples: another person has other seeds and boards. With S seeds and
    P prompts, independent effects of both and noise, the variance of the mean is estimated by v_S +
    v_P, the variance of the seeds' means over S plus the variance of the prompts' means over P
    (which counts the noise twice, so it errs on the wide side). The half width is

        sqrt(t(S - 1)^2 v_S + t(P - 1)^2 v_P),

    t(f) the quantile of Student's t with f degrees of freedom: each part has the half width that
    it would have alone, and as errors of independent parts these add in squares. One t with
    Satterthwaite's degrees of freedom covers 87 to 92% with two seeds, because these jump from 1
    to P - 1 where the seeds agree by luck; this covers 97 to 98%. For paired differences give the
    differences of two arms and `least` -1.

    Where nothing varies, up to 1 - P / (P + z^2) of the prompts (Wilson's bound for 0 of P, z the
    normal quantile) may still be of the other kind: at a rate of 0 or 1 this is Wilson's interval.
    """
    num_seeds, num_prompts = rates.shape
    by_seed = rates.mean(axis=1)
    mean = float(by_seed.mean())
    if num_seeds < 2 or num_prompts < 2:
        return Estimate(mean, -math.inf, math.inf, num_seeds)
    deviation = float(by_seed.std(ddof=1))
    half = math.hypot(_half_width(by_seed), _half_width(rates.mean(axis=0)))
    if half < ROUNDING:
        share = wilson_interval(0, num_prompts)[1]
        low, high = mean - share * (mean - least), mean + share * (1.0 - mean)
    else:
        low, high = max(least, mean - half), min(1.0, mean + half)
    return Estimate(mean, low, high, num_seeds, deviation)


def _half_width(means: NDArray[np.float64]) -> float:
    """Compute half the Student's t interval of the mean of these."""
    from scipy import stats  # an optional package

    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(means) - 1))
    return quantile * float(means.std(ddof=1)) / math.sqrt(len(means))


def percent(found: Estimate, *, signed: bool = False) -> str:
    """Write `61.2% (58.0% to 64.4%)`."""
    form = "{:+.1%}" if signed else "{:.1%}"
    mean = form.format(found.mean)
    if math.isinf(found.low):
        return f"{mean} (one {'seed' if found.num_seeds < 2 else 'prompt'}: no interval)"
    return f"{mean} ({form.format(found.low)} to {form.format(found.high)})"
