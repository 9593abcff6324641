"""Which signals foretell success, and which collapse: rank correlations over the runs of studies.

Spearman's correlation within strata: ranks are taken within each stratum and centered there, so
that what whole strata differ by (their recipe, their seed, their step) does not count.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ragen_mega.config import StarPOConfig
from ragen_mega.config.recorded import read_object, read_recorded
from ragen_mega.report.metrics import METRICS_FILE, SUMMARY_FILE, read_metrics
from ragen_mega.report.provenance import known_config

Floats = NDArray[np.float64]
SUCCESS = "rollout/success"
SIGNALS = (
    SUCCESS,
    "rollout/reward",
    "rollout/in_group_std",
    "filter/constant_groups",
    "filter/kept_fraction",
    "rollout/entropy",
    "rollout/entropy_variance",
    "actor/entropy",
    "actor/grad_norm",
    "actor/approx_kl",
    "actor/clip_fraction_high",
    "critic/explained_variance",
    "rollout/distinct_openings",
    "rollout/ngram_overlap",
    "rollout/thought_length",
    "rollout/response_length",
    "rollout/valid_format_rate",
    "collapse/mutual_information",
    "collapse/conditional_entropy",
    "collapse/entropy",
    "collapse/retrieval_accuracy",
    "collapse/score",
    "collapse/score_average",
)
"""Keys of metrics.jsonl, which `glossary.py` explains. Success and reward are there to compare
with: a signal that tells less than they do is not needed.
"""
AHEAD = (10, 20)
"""Steps by which a collapse is foretold."""
WINDOW = 5
"""Steps whose mean is the level of a signal, where a collapse is foretold."""
LEVEL_STEPS = 10
"""Steps of training whose mean success is the level of a run."""
FALL = 0.1
"""How far below its best level one that has collapsed stays."""
MIN_STEPS = 10
MIN_RUNS = 12
MIN_GROUPS = 8
"""Fewest groups of runs that an interval is resampled from; from fewer it is far too narrow."""
LEVEL = 0.95
NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Run:
    """A finished run of a study."""

    study: str
    arm: str
    seed: int
    signals: Floats
    """[steps, signals], NaN where one was not measured."""
    final: float
    """Success on the held-out prompts of what it was trained on."""
    start: str
    """Equal for runs that have the same warm start."""

    @property
    def block(self) -> tuple[str, int]:
        """Study and seed: runs that differ by their arm only."""
        return self.study, self.seed

    def early(self) -> Floats:
        """[signals] mean over the first half of the steps."""
        return _mean(self.signals[: len(self.signals) // 2])

    def levels(self) -> Floats:
        """[steps, signals] mean of the last WINDOW steps at each step; where none of them has a
        value, that of the step before. NaN before there is any, and before the window is full.
        """
        levels = np.full_like(self.signals, np.nan)
        for step in range(WINDOW - 1, len(levels)):
            now = _mean(self.signals[step - WINDOW + 1 : step + 1])
            levels[step] = np.where(np.isnan(now), levels[step - 1], now)
        return levels

    def collapsed(self) -> NDArray[np.bool_]:
        """[steps] whether success in training has collapsed for good by then: from that step to the
        last its level stays FALL below the run's best. The guard has to tell without hindsight. A
        step that played nothing has no part in a level.
        """
        success = self.signals[:, SIGNALS.index(SUCCESS)]
        window, known = np.ones(LEVEL_STEPS), ~np.isnan(success)
        counts = np.convolve(known, window, "valid")
        totals = np.convolve(np.where(known, success, 0.0), window, "valid")
        levels = np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)
        low = levels < np.fmax.reduce(levels) - FALL
        for_good = np.logical_and.accumulate(low[::-1])[::-1]
        return np.append(np.zeros(LEVEL_STEPS - 1, bool), for_good)


@dataclass(frozen=True)
class Correlation:
    """A rank correlation within strata, and its bootstrap interval over groups of runs."""

    value: float
    low: float
    high: float
    error: float
    """Standard error."""
    num_rows: int
    num_groups: int

    def holds(self, comparisons: int) -> bool:
        """Whether it differs from 0 at LEVEL with Bonferroni's correction. However strong it is, it
        takes so many groups that their agreement by luck, as of coins, is less probable than that.
        """
        alpha = (1 - LEVEL) / comparisons
        bound = NormalDist().inv_cdf(1 - alpha / 2)
        return abs(self.value) > bound * self.error and 2.0 ** (1 - self.num_groups) < alpha


def groups_of(runs: Sequence[Run]) -> list[int]:
    """A label for each run, equal for those that depend on each other: they share a warm start or a
    block, or both share one with a third.
    """
    labels: dict[Hashable, int] = {}
    for number, run in enumerate(runs):
        own = (run.start, run.block)
        joined = {labels[name] for name in own if name in labels}
        labels = {name: number if label in joined else label for name, label in labels.items()}
        labels |= dict.fromkeys(own, number)
    return [labels[run.block] for run in runs]


def read_runs(folder: Path, start_of: Callable[[StarPOConfig], str]) -> tuple[list[Run], int]:
    """The finished runs of the studies in `folder` (STUDY/ARM-seedK), and how many were left out
    since they are shorter than MIN_STEPS. A run that two studies share, or that an arm did not
    change, is in the list once. `start_of` is equal for configurations with the same warm start.

    Raises ValueError if fewer than MIN_RUNS are there, or one cannot be read.
    """
    found: dict[bytes, Run] = {}
    short = 0
    for summary in sorted(folder.glob(f"*/*/{SUMMARY_FILE}")):
        named = re.fullmatch(r"(.+)-seed(\d+)", summary.parent.name)
        if named is None:
            continue
        records = read_metrics(summary.parent / METRICS_FILE)
        if len(records) < MIN_STEPS:
            short += 1
            continue
        signals = [[record.get(key) for key in SIGNALS] for record in records]
        values = np.array(signals, dtype=float)
        final, start = _outcome(summary.parent, start_of)
        run = Run(summary.parts[-3], named[1], int(named[2]), values, final, start)
        found.setdefault(values.tobytes(), run)
    if len(found) < MIN_RUNS:
        raise ValueError(
            f"correlations over runs need at least {MIN_RUNS} different finished ones of"
            f" {MIN_STEPS} steps or more, and {folder} has {len(found)} (STUDY/ARM-seedK); run more"
            " studies, or name the folder that they are in"
        )
    return list(found.values()), short


def _outcome(run: Path, start_of: Callable[[StarPOConfig], str]) -> tuple[float, str]:
    """`Run.final` and `Run.start`."""
    try:
        config = known_config(read_recorded(run))
        sets = read_object(run / SUMMARY_FILE)["sets"]
        final = [sets[name]["success"] for name in config.environment.shares]
        return float(np.mean(final)), start_of(config)
    except KeyError as error:
        raise ValueError(f"{run}: {SUMMARY_FILE} has no {error}; leave the run out") from None
    except ValueError as error:
        raise ValueError(f"{run}: {error}; leave the run out") from None


def correlation(
    signal: Floats, outcome: Floats, strata: Sequence[Hashable], groups: Sequence[Hashable]
) -> Correlation | None:
    """Spearman's rank correlation of `signal` and `outcome`, [rows], within `strata`, which are
    labels of the rows; `groups` are labels of what the bootstrap resamples. Rows without a signal
    do not count, nor do strata whose outcomes are equal.

    The correlation is Pearson's of all rows' ranks, each centered in its stratum and divided by the
    size of it. Resampling keeps the ranks. None where fewer than MIN_GROUPS are left, or the signal
    is constant within all strata.
    """
    from scipy.stats import rankdata  # an optional package

    rows: dict[Hashable, list[int]] = {}
    for row in np.flatnonzero(~np.isnan(signal)):
        rows.setdefault(strata[row], []).append(row)
    sums: dict[Hashable, Floats] = {}
    count = 0
    for members in rows.values():
        if np.ptp(outcome[members]) == 0:
            continue
        ranks = np.stack([rankdata(values[members]) for values in (signal, outcome)])
        x, y = (ranks - (len(members) + 1) / 2) / len(members)
        count += len(members)
        for row, terms in zip(members, np.stack([x * y, x * x, y * y], axis=1)):
            sums[groups[row]] = sums.get(groups[row], 0.0) + terms
    terms = np.array([*sums.values()])
    if len(sums) < MIN_GROUPS or not terms[:, 1].any():
        return None
    generator = np.random.default_rng(0)
    drawn = generator.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), NUM_RESAMPLES)
    value, draws = _ratio(terms.sum(axis=0)), _ratio(drawn @ terms)
    low, high = np.quantile(draws, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Correlation(float(value), float(low), float(high), float(draws.std()), count, len(sums))


Table = dict[str, dict[str, Correlation | None]]
"""Signal -> column -> its correlation there."""


def with_final_success(runs: Sequence[Run]) -> Table:
    """Each signal's mean over the first half of a run with the success at its end: over all runs,
    between runs of the same study and seed (arms of equal start), and between those of the same arm
    (seeds of equal settings).
    """
    early, final = np.array([run.early() for run in runs]), np.array([run.final for run in runs])
    groups = groups_of(runs)
    columns = {
        "all runs": [0] * len(runs),
        "same study and seed": [run.block for run in runs],
        "same study and arm": [(run.study, run.arm) for run in runs],
    }
    return {
        key: {name: correlation(early[:, at], final, own, groups) for name, own in columns.items()}
        for at, key in enumerate(SIGNALS)
    }


def with_collapse(runs: Sequence[Run]) -> Table:
    """Each signal's level with whether the run has collapsed so many steps later, at the steps at
    which it has not yet: between the steps of a run, and between the runs of the same study and
    seed at the same step, where what drifts in all of them does not count.
    """
    table: Table = {key: {} for key in SIGNALS}
    curves = [
        (run, group, run.levels(), run.collapsed()) for run, group in zip(runs, groups_of(runs))
    ]
    for ahead in AHEAD:
        rows = [
            (run, step, group, levels[step], float(state[step + ahead]))
            for run, group, levels, state in curves
            for step in range(WINDOW - 1, len(state) - ahead)
            if not state[step]
        ]
        columns = {
            f"{ahead} steps ahead, within runs": [(run.block, run.arm) for run, *_ in rows],
            f"{ahead} steps ahead, same step": [(run.block, step) for run, step, *_ in rows],
        }
        groups, later = [row[2] for row in rows], np.array([row[4] for row in rows])
        for at, key in enumerate(SIGNALS):
            signal = np.array([row[3][at] for row in rows])
            for name, strata in columns.items():
                table[key][name] = correlation(signal, later, strata, groups)
    return table


def _mean(values: Floats) -> Floats:
    """Mean over the first axis of what is no NaN, NaN where nothing is."""
    counts = (~np.isnan(values)).sum(axis=0)
    return np.where(counts > 0, np.nansum(values, axis=0) / np.maximum(counts, 1), np.nan)


def _ratio(terms: Floats) -> Floats:
    """Correlation from sums of x y, x^2 and y^2 along the last axis; 0 where nothing varies."""
    product, x, y = np.moveaxis(terms, -1, 0)
    scale = np.sqrt(x * y)
    return np.where(scale > 0, product / np.where(scale > 0, scale, 1.0), 0.0)
