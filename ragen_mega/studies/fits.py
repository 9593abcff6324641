"""Fits of scaling studies: the sigmoid of success over compute and the power law over model sizes,
each with bootstrap intervals and the error of its extrapolation.

Sigmoid: ScaleRL, arXiv:2510.13786, equation 1. Power law: arXiv:2509.25300, equations 1 and 2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVEL = 0.95
NUM_RESAMPLES = 200
MIN_POINTS = 6
"""Fewest budgets of a curve: three more than a sigmoid has constants."""
MIN_SIZES = 3
"""Fewest model sizes of a power law, whose efficiency has two constants."""


@dataclass(frozen=True)
class Curve:
    """Success of one run, or loss, at growing compute."""

    compute: Floats
    """[points], positive and rising, in any unit that all curves share."""
    value: Floats
    """[points]; success from 0 to 1, or a positive loss."""
    size: float = 1.0
    """Parameters of the model."""

    def split(self, share: float) -> tuple["Curve", "Curve"]:
        """The first `share` of the points, rounded up, and the others."""
        cut = math.ceil(share * len(self.compute))
        return (
            Curve(self.compute[:cut], self.value[:cut], self.size),
            Curve(self.compute[cut:], self.value[cut:], self.size),
        )


@dataclass(frozen=True)
class Constant:
    """A fitted constant and its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """A law fitted to curves."""

    constants: dict[str, Constant]
    r_squared: float
    predict: Callable[[Floats, float], Floats]
    """(compute, size) -> value."""

    def error(self, curves: Sequence[Curve]) -> float:
        """Mean absolute difference between the law and the points of `curves`."""
        misses = [np.abs(self.predict(one.compute, one.size) - one.value) for one in curves]
        return float(np.concatenate(misses).mean())


def fit_sigmoid(curves: Sequence[Curve], *, start: float, seed: int = 0) -> Fit:
    """R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B) through the points of all curves, which are runs
    of one setting with different seeds. `start` is R0, the success before training.

    Constants: `asymptote` A, `exponent` B, `midpoint` C_mid. Runs are resampled for the intervals;
    of a single run its points. Raises ValueError where points are too few or
    success never leaves `start`.
    """
    _check(curves)
    fewest = min((len(one.compute) for one in curves), default=0)
    if fewest < MIN_POINTS:
        raise ValueError(
            f"a sigmoid needs at least {MIN_POINTS} points of every run, not {fewest}; evaluate"
            " more often (--eval-interval), or train longer"
        )
    if all((one.value <= start).all() for one in curves):
        raise ValueError(
            f"success never rises above {start:.3g}, where it starts, so that no sigmoid fits;"
            " train longer"
        )

    from scipy.optimize import least_squares  # an optional package

    def solve(chosen: Sequence[Curve], near: Floats | None = None) -> Floats:
        compute, value = _joined(chosen)
        unit = np.exp(np.log(compute).mean())

        def misses(constants: Floats) -> Floats:
            return _sigmoid(compute / unit, start, *constants) - value

        guesses = [
            (ceiling, exponent, midpoint)
            for ceiling in (min(1.0, value.max()), 0.5 * (1 + value.max()))
            for exponent in (0.7, 2.0)
            for midpoint in np.quantile(compute, (0.3, 0.7))
        ]
        bounds = ([start, 0.05, 1e-4], [1.0, 20.0, 1e4])
        found = min(
            (
                least_squares(misses, np.clip(np.divide(one, (1, 1, unit)), *bounds), bounds=bounds)
                for one in (guesses if near is None else [near])
            ),
            key=lambda result: result.cost,
        )
        return found.x * (1, 1, unit)

    best = solve(curves)
    names = ("asymptote", "exponent", "midpoint")
    constants = _intervals(names, best, curves, solve, seed)
    return _fit(curves, constants, lambda compute, _: _sigmoid(compute, start, *best))


def fit_power_law(curves: Sequence[Curve], *, seed: int = 0) -> Fit:
    """log L(N, C) = E(N) - k(N) log C with k(N) = K / (1 + N0 / N) through the points of all
    curves, whose values are losses, such as 1 - success; runs of a size share its E. Of a size that
    no curve has, E is predicted by the line through the others' over log N.

    Constants: `efficiency` K, `half_size` N0 and `level N` for every size, E(N). Runs are resampled
    within their size for the intervals. Raises ValueError where sizes or points are too few.
    """
    _check(curves)
    sizes = sorted({one.size for one in curves})
    if len(sizes) < MIN_SIZES:
        raise ValueError(
            f"a power law over sizes needs at least {MIN_SIZES} of them, not {len(sizes)}; add"
            " models"
        )
    least = min(float(one.value.min()) for one in curves)
    if least <= 0:
        raise ValueError(
            f"a power law over sizes needs positive losses, not {least:.3g}; add points before"
            " success is perfect"
        )
    few = [one for one in curves if len(one.compute) < 2]
    if few:
        raise ValueError(
            f"a run of size {few[0].size:g} has {len(few[0].compute)} point, and a slope needs 2;"
            " evaluate more often (--eval-interval)"
        )

    from scipy.optimize import minimize_scalar  # an optional package

    def solve(chosen: Sequence[Curve], _: Floats | None = None) -> Floats:
        compute, loss = (np.log(part) for part in _joined(chosen))
        own = np.concatenate([np.full(len(one.compute), one.size) for one in chosen])
        levels = (own[:, None] == np.array(sizes)).astype(float)

        def given(log_half: float) -> tuple[float, Floats]:
            slope = -compute / (1 + np.exp(log_half) / own)
            columns = np.column_stack([slope, levels])
            weights = np.linalg.lstsq(columns, loss, rcond=None)[0]
            return float(np.square(columns @ weights - loss).sum()), weights

        low, high = np.log(sizes[0]) - 5, np.log(sizes[-1]) + 5
        grid = np.linspace(low, high, 40)
        near = grid[int(np.argmin([given(one)[0] for one in grid]))]
        span = grid[1] - grid[0]
        half = minimize_scalar(
            lambda one: given(one)[0], bounds=(near - span, near + span), method="bounded"
        ).x
        weights = given(half)[1]
        return np.array([weights[0], np.exp(half), *weights[1:]])

    best = solve(curves)
    known, line = dict(zip(sizes, best[2:])), np.polyfit(np.log(sizes), best[2:], 1)
    names = ("efficiency", "half_size", *(f"level {size:g}" for size in sizes))

    def predict(compute: Floats, size: float) -> Floats:
        level = known.get(size, np.polyval(line, np.log(size)))
        return np.exp(level - best[0] / (1 + best[1] / size) * np.log(compute))

    return _fit(curves, _intervals(names, best, curves, solve, seed), predict)


def extrapolation_error(curves: Sequence[Curve], *, start: float, share: float = 0.5) -> float:
    """Mean absolute error, at the compute that follows, of a sigmoid that was fitted on the first
    `share` of every run's points.
    """
    early, late = zip(*(one.split(share) for one in curves))
    return fit_sigmoid(early, start=start).error(late)


def size_extrapolation_error(curves: Sequence[Curve]) -> tuple[float, float]:
    """Mean absolute error of a power law fitted on the smaller half of the sizes (MIN_SIZES of them
    at least), on the larger ones; and that of saying that they do as the largest of the smaller.

    Raises ValueError where no larger size is left.
    """
    sizes = sorted({one.size for one in curves})
    count = max(MIN_SIZES, math.ceil(len(sizes) / 2))
    if count >= len(sizes):
        raise ValueError(
            f"extrapolation over sizes needs {MIN_SIZES + 1} of them, {MIN_SIZES} to fit and one to"
            f" check, not {len(sizes)}; add models"
        )
    law = fit_power_law([one for one in curves if one.size < sizes[count]])
    larger = [one for one in curves if one.size >= sizes[count]]
    stay = [replace(one, size=sizes[count - 1]) for one in larger]
    return law.error(larger), law.error(stay)


def _sigmoid(
    compute: Floats, start: float, asymptote: float, exponent: float, midpoint: float
) -> Floats:
    return start + (asymptote - start) / (1 + (midpoint / compute) ** exponent)


def _joined(curves: Sequence[Curve]) -> tuple[Floats, Floats]:
    compute = np.concatenate([one.compute for one in curves])
    return compute, np.concatenate([one.value for one in curves])


def _check(curves: Sequence[Curve]) -> None:
    for one in curves:
        rises = (np.diff(one.compute, prepend=0.0) > 0).all()
        if one.compute.shape != one.value.shape or not rises:
            raise ValueError(
                f"compute must be positive and rising, a value for each, not {one.compute} and"
                f" {one.value}"
            )


def _intervals(
    names: Sequence[str],
    best: Floats,
    curves: Sequence[Curve],
    solve: Callable[[Sequence[Curve], Floats | None], Floats],
    seed: int,
) -> dict[str, Constant]:
    """Percentile intervals from resampled curves."""
    generator = np.random.default_rng(seed)
    found = [solve(_resampled(curves, generator), best) for _ in range(NUM_RESAMPLES)]
    edges = np.quantile(found, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), axis=0)
    return {
        name: Constant(float(value), float(min(low, value)), float(max(high, value)))
        for name, value, low, high in zip(names, best, *edges)
    }


def _resampled(curves: Sequence[Curve], generator: np.random.Generator) -> list[Curve]:
    """As many runs of every size, drawn with replacement; of a lone run its points."""
    drawn = []
    for size in sorted({one.size for one in curves}):
        runs = [one for one in curves if one.size == size]
        if len(runs) > 1:
            drawn += [runs[index] for index in generator.integers(len(runs), size=len(runs))]
            continue
        points = np.sort(generator.integers(len(runs[0].compute), size=len(runs[0].compute)))
        drawn.append(Curve(runs[0].compute[points], runs[0].value[points], size))
    return drawn


def _fit(
    curves: Sequence[Curve],
    constants: dict[str, Constant],
    predict: Callable[[Floats, float], Floats],
) -> Fit:
    values = np.concatenate([one.value for one in curves])
    missed = np.concatenate([predict(one.compute, one.size) - one.value for one in curves])
    spread = float(np.square(values - values.mean()).sum())
    explained = 1 - float(np.square(missed).sum()) / spread if spread else 1.0
    return Fit(constants, explained, predict)
