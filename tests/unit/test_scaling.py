"""Fits of scaling laws against data whose constants are known, and their refusals."""

import numpy as np
import pytest

from ragen_mega.studies.fits import Curve, extrapolation_error, fit_power_law, fit_sigmoid

COMPUTE = np.geomspace(1e2, 1e5, 16)
QWEN_BASE = {
    0.5e9: 0.005, 1.5e9: 0.014, 3e9: 0.025, 7e9: 0.047, 14e9: 0.070, 32e9: 0.096, 72e9: 0.114,
}  # fmt: skip
"""Size -> slope that arXiv:2509.25300 publishes for Qwen2.5 base models over compute."""


def sigmoid(compute: np.ndarray, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """ScaleRL's form with asymptote 0.61, exponent 1.92 and midpoint 2542, from 0.2."""
    exact = 0.2 + 0.41 / (1 + (2542 / compute) ** 1.92)
    return exact + noise * np.random.default_rng(seed).standard_normal(len(compute))


def test_a_sigmoid_is_recovered_exactly_from_exact_points():
    constants = fit_sigmoid([Curve(COMPUTE, sigmoid(COMPUTE))], start=0.2).constants
    assert constants["asymptote"].value == pytest.approx(0.61, rel=1e-5)
    assert constants["exponent"].value == pytest.approx(1.92, rel=1e-4)
    assert constants["midpoint"].value == pytest.approx(2542, rel=1e-4)


def test_intervals_cover_the_truth_as_often_as_they_say():
    covered = {"asymptote": 0, "exponent": 0, "midpoint": 0}
    truth = {"asymptote": 0.61, "exponent": 1.92, "midpoint": 2542}
    repeats, runs = 10, 8
    for repeat in range(repeats):
        curves = [
            Curve(COMPUTE, sigmoid(COMPUTE, 0.02, runs * repeat + run)) for run in range(runs)
        ]
        found = fit_sigmoid(curves, start=0.2, seed=repeat).constants
        for name, constant in found.items():
            covered[name] += constant.low <= truth[name] <= constant.high
    # a percentile bootstrap over eight runs is a little narrow: at 90%, 6 of 10 or fewer: 1%
    assert min(covered.values()) >= 7, covered


def test_what_a_sigmoid_says_about_more_compute_is_judged_on_points_it_has_not_seen():
    curve = Curve(COMPUTE, sigmoid(COMPUTE, 0.01))
    assert extrapolation_error([curve], share=0.7, start=0.2) < 0.03
    bent = Curve(COMPUTE, np.where(COMPUTE < 2e4, sigmoid(COMPUTE), 0.3))
    assert extrapolation_error([bent], share=0.7, start=0.2) > 0.2


def test_the_published_slopes_of_qwen_give_their_saturation():
    """The paper's own constants for these slopes: K about 0.135, N0 about 13 billion."""
    curves = [Curve(COMPUTE, 0.8 * COMPUTE**-slope, size) for size, slope in QWEN_BASE.items()]
    fit = fit_power_law(curves)
    assert fit.constants["efficiency"].value == pytest.approx(0.135, rel=0.02)
    assert fit.constants["half_size"].value == pytest.approx(13e9, rel=0.05)
    for size, slope in QWEN_BASE.items():
        fitted = -np.diff(np.log(fit.predict(np.array([1.0, np.e]), size)))[0]
        assert fitted == pytest.approx(slope, abs=0.0015)


def test_a_power_law_is_recovered_from_noisy_runs_of_each_size():
    generator = np.random.default_rng(0)
    sizes, levels = (1e5, 4e5, 1.6e6, 6.4e6), (0.3, 0.2, 0.1, 0.0)
    curves = [
        Curve(
            COMPUTE,
            np.exp(level + 0.02 * generator.standard_normal(len(COMPUTE)))
            * COMPUTE ** -(0.2 / (1 + 5e5 / size)),
            size,
        )
        for size, level in zip(sizes, levels)
        for _ in range(3)
    ]
    fit = fit_power_law(curves)
    for name, truth in {"efficiency": 0.2, "half_size": 5e5, "level 100000": 0.3}.items():
        constant = fit.constants[name]
        assert constant.low < constant.high
        assert constant.value == pytest.approx(truth, rel=0.2)
    assert fit.r_squared > 0.98


@pytest.mark.parametrize(
    ("curves", "said"),
    [
        ([Curve(COMPUTE[:5], sigmoid(COMPUTE[:5]))], "at least 6 points of every run, not 5"),
        ([Curve(COMPUTE, np.full(16, 0.1))], "never rises above 0.2"),
        ([Curve(COMPUTE[::-1], sigmoid(COMPUTE))], "positive and rising"),
    ],
)
def test_a_sigmoid_is_refused(curves: list[Curve], said: str):
    with pytest.raises(ValueError, match=said):
        fit_sigmoid(curves, start=0.2)


@pytest.mark.parametrize(
    ("sizes", "points", "value", "said"),
    [
        ((), 16, 0.5, "at least 3 of them, not 0; add models"),
        ((1e6, 1e7), 16, 0.5, "at least 3 of them, not 2; add models"),
        ((1e6, 1e7, 1e8), 16, 0.0, "positive losses, not 0; add points"),
        ((1e6, 1e7, 1e8), 1, 0.5, "1 point"),
    ],
)
def test_a_power_law_is_refused(sizes: tuple[float, ...], points: int, value: float, said: str):
    curves = [Curve(COMPUTE[:points], np.full(points, value), size) for size in sizes]
    with pytest.raises(ValueError, match=said):
        fit_power_law(curves)
