"""Stability signals on analytic cases and on the curves of arXiv:2504.20073 Fig. 6."""

import json
import math
import random
import statistics

import pytest
import torch

from ragen_mega.algorithm.diagnostics import (
    CollapseDetector,
    CollapseThresholds,
    EchoTrapMonitor,
    diagnose,
    distinct_responses,
    entropy_by_prompt,
    moving_average,
    mutual_information,
    probes,
    repetition_across_prompts,
)
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup

# In-group reward std and entropy of Fig. 6, one value per 10 steps from step 10 on; grad norm of
# the PPO runs.
REWARD_STD = {
    "FrozenLake PPO": [
        0.358,
        0.435,
        0.386,
        0.244,
        0.352,
        0.334,
        0.327,
        0.288,
        0.253,
        0.185,
        0.132,
        0.0545,
        0.017,
        0.003,
    ],
    "FrozenLake GRPO": [
        0.645,
        0.833,
        0.916,
        0.923,
        0.843,
        0.818,
        0.782,
        0.733,
        0.729,
        0.658,
        0.663,
        0.665,
        0.657,
        0.612,
        0.605,
        0.648,
        0.667,
        0.669,
        0.661,
        0.711,
    ],
    "Bandit PPO": [
        0.179,
        0.144,
        0.108,
        0.127,
        0.135,
        0.121,
        0.145,
        0.146,
        0.132,
        0.139,
        0.159,
        0.114,
        0.11,
        0.132,
        0.121,
        0.0976,
        0.0998,
        0.104,
        0.0802,
        0.0604,
    ],
    "Sokoban PPO": [
        1.55,
        0.706,
        1.11,
        1.14,
        0.95,
        0.813,
        0.712,
        0.935,
        0.715,
        0.67,
        0.497,
        0.457,
        0.0112,
        0.0025,
    ],
    "Sokoban GRPO": [0.962, 0.243, 0.247, 0.356, 0.362, 0.194, 0.145, 0.121, 0.0494],
}
ENTROPY = {
    "FrozenLake PPO": [
        1.242,
        1.197,
        1.308,
        1.225,
        1.193,
        1.133,
        1.09,
        1.062,
        1.041,
        1.052,
        1.029,
        0.984,
        0.867,
        0.742,
    ],
    "FrozenLake GRPO": [
        1.428,
        1.563,
        1.285,
        1.289,
        1.312,
        1.242,
        1.105,
        0.99,
        0.843,
        0.745,
        0.633,
        0.555,
        0.515,
        0.5,
        0.501,
        0.48,
        0.464,
        0.448,
        0.432,
        0.412,
    ],
    "Bandit PPO": [
        2.106,
        1.956,
        1.795,
        1.637,
        1.801,
        1.645,
        1.452,
        1.258,
        1.091,
        0.96,
        0.833,
        0.759,
        0.73,
        0.7,
        0.651,
        0.623,
        0.576,
        0.525,
        0.462,
        0.4,
    ],
    "Bandit GRPO": [2.074, 2.091, 2.205, 2.394, 2.294, 2.497, 2.784, 3.146, 3.593, 4.054],
    "Sokoban PPO": [
        1.242,
        1.087,
        1.071,
        1.025,
        1.086,
        0.992,
        0.928,
        0.872,
        0.794,
        0.729,
        0.718,
        0.72,
        0.813,
        0.939,
        1.041,
    ],
    "Sokoban GRPO": [1.035, 0.878, 0.952, 1.011, 0.986, 1.002, 1.074, 1.189, 1.411, 1.816],
}
GRAD_NORM = {
    "Bandit PPO": [
        10.6,
        34.7,
        80,
        25,
        34.7,
        34.2,
        48.1,
        40.5,
        42.4,
        45,
        57.1,
        52.5,
        49.8,
        52.2,
        49,
        47.2,
        3660,
        7030,
    ],
    "Sokoban PPO": [8, 8.55, 8.92, 12.1, 10.6, 11.4, 18, 21.1, 58.9, 75.9, 2910, 2980],
    "FrozenLake GRPO": [
        10.4,
        14.8,
        8.31,
        13.3,
        13.9,
        13.2,
        12.7,
        13.1,
        20.4,
        23.7,
        26.7,
        28.7,
        28,
        37.9,
        33.8,
        31,
        27.2,
        26.3,
        7.65,
        4.98,
    ],
}


# Success of the same runs, Fig. 5.
SUCCESS = {
    "Bandit PPO": [
        0.172, 0.270, 0.391, 0.283, 0.372, 0.477, 0.573, 0.632, 0.692, 0.748, 0.634, 0.493, 0.384,
        0.358, 0.284, 0.416, 0.417, 0.403, 0.293, 0.198,
    ],
    "Bandit GRPO": [0.191, 0.098, 0.008, 0.083, 0.059, 0.021, 0.002, 0.0, 0.0, 0.0],
    "Sokoban PPO": [
        0.098, 0.090, 0.121, 0.104, 0.109, 0.107, 0.103, 0.090, 0.064, 0.042, 0.025, 0.011, 0.0,
    ],
    "FrozenLake PPO": [
        0.129, 0.172, 0.187, 0.148, 0.180, 0.191, 0.169, 0.137, 0.096, 0.057, 0.020, 0.009, 0.003,
    ],
    "FrozenLake GRPO": [
        0.152, 0.203, 0.172, 0.154, 0.188, 0.201, 0.201, 0.206, 0.204, 0.206, 0.205, 0.214, 0.223,
        0.231, 0.234, 0.237, 0.232, 0.227, 0.219, 0.211,
    ],
}  # fmt: skip


def per_step(curve):
    """Linear between the points of step 10, 20, ...; the first value before step 10."""
    steps = [curve[0]] * 10
    for low, high in zip(curve, curve[1:]):
        steps += [low + (high - low) * n / 10 for n in range(1, 11)]
    return steps


def first_warnings(run):
    """Rule -> step at which the monitor first warns on a run of Fig. 6, with its success."""
    curves = {"reward_std": REWARD_STD, "entropy": ENTROPY, "grad_norm": GRAD_NORM}
    curves |= {"success_rate": SUCCESS}
    signals = {name: per_step(curve[run]) for name, curve in curves.items() if run in curve}
    monitor, steps = EchoTrapMonitor(), {}
    for step in range(1, max(map(len, signals.values())) + 1):
        now = {name: values[step - 1] for name, values in signals.items() if step <= len(values)}
        for warning in monitor.observe(now):
            steps.setdefault(warning.rule, step)
    return steps


@pytest.mark.parametrize(
    ("run", "rule", "before"),
    # `before`: the step at which success (Fig. 5) is down to a tenth of its peak, or the end of the
    # curve
    [
        ("FrozenLake PPO", "reward_std_cliff", 111),
        ("Sokoban PPO", "reward_std_cliff", 120),
        ("Sokoban GRPO", "reward_std_cliff", 40),
        ("Bandit PPO", "reward_std_cliff", 201),
        ("Bandit GRPO", "entropy_rise", 80),
        ("Sokoban GRPO", "entropy_rise", 90),
        ("Sokoban PPO", "entropy_rise", 151),
        ("Sokoban PPO", "grad_norm_spike", 111),
        ("Bandit PPO", "grad_norm_spike", 170),
    ],
)
def test_collapsing_runs_of_the_paper_warn(run, rule, before):
    assert first_warnings(run)[rule] < before


def test_the_healthy_run_of_the_paper_does_not_warn():
    assert first_warnings("FrozenLake GRPO") == {}


def feed(monitor, name, values):
    return [[warning.rule for warning in monitor.observe({name: value})] for value in values]


def test_reward_std_rules_fire_once_and_rearm():
    monitor = EchoTrapMonitor()
    rules = feed(monitor, "reward_std", [1.0] * 10 + [0.4] * 12 + [1.0] * 12 + [0.05] * 12)
    flat = [(step, rule) for step, fired in enumerate(rules, start=1) for rule in fired]
    # The level is a median of 10 values, (0.4 + 1) / 2 = 0.7 after five such values, 0.4 after six.
    assert flat == [(16, "reward_std_cliff"), (40, "reward_std_cliff"), (44, "reward_std_lost")]


def test_no_spread_from_the_start_warns():
    assert feed(EchoTrapMonitor(), "reward_std", [0.0] * 10)[-1] == ["reward_std_lost"]


def test_single_outliers_do_not_move_a_level():
    values = [1.0] * 10 + ([0.0] + [1.0] * 4) * 5
    assert not any(feed(EchoTrapMonitor(), "reward_std", values))
    assert not any(feed(EchoTrapMonitor(), "entropy", [1.0] * 10 + ([9.0] + [1.0] * 4) * 5))


@pytest.mark.parametrize(
    ("success", "expected"),
    [(1.0, []), (0.9, []), (0.2, ["reward_std_cliff", "reward_std_lost"])],
)
def test_a_solved_task_may_lose_its_reward_std(success, expected):
    monitor = EchoTrapMonitor()
    fired = []
    for step in range(40):
        warnings = monitor.observe(
            {"reward_std": 1.0 if step < 20 else 0.0, "success_rate": success}
        )
        fired += [warning.rule for warning in warnings]
    assert fired == expected


# Recipe sokoban, seed 103: success in training and in-group reward std of each step.
SOLVED = {
    "success_rate": [
        0.07, 0.12, 0.21, 0.29, 0.54, 0.75, 0.81, 0.87, 0.81, 0.82, 0.84, 0.82, 0.86, 0.86, 0.90,
        0.80, 0.85, 0.87, 0.87, 0.79, 0.91, 0.89, 0.86, 0.87, 0.96, 0.78, 0.84, 0.84, 0.95, 0.92,
        0.92, 0.79, 0.78, 0.91, 0.91, 0.91, 0.93, 0.88, 0.82, 0.84,
    ],
    "reward_std": [
        1.06, 1.55, 2.27, 2.33, 2.06, 2.22, 2.07, 1.18, 1.01, 1.33, 1.06, 1.85, 0.85, 0.57, 0.43,
        0.85, 0.66, 1.30, 0.83, 1.04, 1.25, 0.55, 0.88, 0.18, 1.16, 0.92, 0.75, 0.56, 0.70, 0.87,
        0.75, 1.45, 0.86, 1.38, 1.12, 0.05, 0.63, 0.73, 0.74, 0.51,
    ],
}  # fmt: skip


def cliffs(success, reward_std):
    """Steps at which the monitor says that the reward std has fallen off a cliff."""
    monitor = EchoTrapMonitor()
    said = [
        monitor.observe({"success_rate": rate, "reward_std": std})
        for rate, std in zip(success, reward_std, strict=True)
    ]
    return [n for n, now in enumerate(said) if "reward_std_cliff" in [one.rule for one in now]]


def line(start, end, steps=30):
    return [start + (end - start) * n / (steps - 1) for n in range(steps)]


def test_groups_that_are_solved_are_no_cliff():
    success, std = SOLVED.values()
    assert statistics.median(std[-10:]) < statistics.mean(std[:10]) / 2, "a fall there is"
    assert cliffs(success, std) == []
    rising = [0.2] * 10 + line(0.2, 0.89) + [0.89] * 20
    # Every group alike; then prompts that are always or never solved but for a tenth of the
    # prompts.
    assert cliffs(rising, [(p * (1 - p)) ** 0.5 for p in rising]) == []
    assert cliffs(rising, [0.4 * (1 - p) for p in rising]) == []


@pytest.mark.parametrize("peak", [0.2, 0.6, 0.8])
def test_a_cliff_of_the_reward_std_is_told_whatever_was_learned_before(peak):
    """The std falls to a tenth while success stays, before it falls too; and while it falls."""
    learned = [0.2] * 10 + line(0.2, peak) + [peak] * 20
    before = [0.4 * min(1.0, 2 * (p * (1 - p)) ** 0.5) for p in learned]
    (told,) = cliffs(learned + [peak] * 10, before + [before[-1] / 10] * 10)
    assert told >= len(learned)
    (told,) = cliffs(learned + line(peak, 0.0), before + line(before[-1], 0.0))
    assert len(learned) < told < len(learned) + 30


def test_what_was_lost_does_not_tighten_the_cliff():
    """Success below its early level: the limit is half of the early std, no more."""
    lost = [0.8] * 10 + line(0.8, 0.2)
    assert cliffs(lost, [0.4] * 10 + line(0.4, 0.24)) == []
    assert cliffs(lost, [0.4] * 10 + line(0.4, 0.1)) != []


def test_entropy_rules():
    assert not any(feed(EchoTrapMonitor(), "entropy", [2.0 * 0.99**n for n in range(200)])), (
        "steady decay to 13%"
    )
    assert ["entropy_collapse"] in feed(EchoTrapMonitor(), "entropy", [2.0] * 10 + [0.1] * 10)
    assert ["entropy_rise"] in feed(
        EchoTrapMonitor(), "entropy", [2.0] * 10 + [1.0] * 10 + [1.5] * 10
    )
    assert not any(feed(EchoTrapMonitor(), "entropy", [2.0] * 10 + [1.0] * 10 + [1.3] * 10))
    assert not any(feed(EchoTrapMonitor(), "entropy", [0.0] * 20)), "nothing to fall from"


def test_a_sure_policy_that_solves_the_task_has_not_collapsed():
    """The bandit's first run ends at 99% with an entropy near 0, and that is what it should do."""
    sure = [2.0] * 10 + [0.1] * 10
    for late, expected in ((0.99, []), (0.5, ["entropy_collapse"])):
        monitor, rules = EchoTrapMonitor(), []
        for entropy, success in zip(sure, [0.5] * 10 + [late] * 10, strict=True):
            begun = monitor.observe({"entropy": entropy, "success_rate": success})
            rules += [warning.rule for warning in begun]
        assert rules == expected, late


def test_grad_norm_rule():
    rules = feed(EchoTrapMonitor(), "grad_norm", [1.0] * 10 + [4.9, 5.1, 1.0])
    assert rules[9:] == [[], [], ["grad_norm_spike"], []]
    assert feed(EchoTrapMonitor(), "grad_norm", [1.0, 100.0]) == [
        [],
        [],
    ], "too few steps for a median"
    late = feed(EchoTrapMonitor(), "grad_norm", [1.0] * 9 + [100.0, 100.0])
    assert late[9:] == [[], ["grad_norm_spike"]], "a median is one of ten steps"
    solved = [0.3] * 10 + [0.001] * 60 + [0.01, 0.29, 0.31]
    assert feed(EchoTrapMonitor(), "grad_norm", solved)[-3:] == [[], [], ["grad_norm_spike"]]
    # 30 steps at 1 outweigh the 20 at 30 that came after them, until they are 50 steps ago.
    steps = [1.0] * 30 + [30.0] * 20 + [1.0] + [30.0] * 12
    rules = feed(EchoTrapMonitor(), "grad_norm", steps)
    fired = [step for step, found in enumerate(rules) if found]
    assert fired == [30, 51]


@pytest.mark.parametrize("name", ["reward_std", "entropy", "grad_norm", "success_rate"])
def test_values_that_are_not_finite_warn_and_leave_no_trace(name):
    monitor, undisturbed = EchoTrapMonitor(), EchoTrapMonitor()
    rule = [f"{name}_not_finite"]
    assert feed(monitor, name, [1.0, math.nan, math.inf, 1.0, -math.inf]) == [
        [],
        rule,
        [],
        [],
        rule,
    ]
    feed(monitor, name, [1.0] * 10)
    feed(undisturbed, name, [1.0] * 12)
    assert monitor.state_dict() == undisturbed.state_dict()


def test_warning_says_rule_values_and_remedy():
    monitor = EchoTrapMonitor()
    feed(monitor, "grad_norm", [2.0] * 10)
    (warning,) = monitor.observe({"grad_norm": 50.0})
    assert (warning.rule, warning.value, warning.limit) == ("grad_norm_spike", 50.0, 10.0)
    assert "grad_norm_spike: 50 crossed the limit 10; " in str(warning) and "learning rate" in str(
        warning
    )


@pytest.mark.parametrize("cut", [3, 12, 30, 75])
def test_resuming_continues_exactly(cut):
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(100, 3, generator=generator).tolist()
    steps = [
        {
            "reward_std": (0.2 if 40 < n < 60 else 1.0) * a,
            "entropy": 2.0 + b * n / 40,
            "grad_norm": 1.0 + 9.0 * c * (n % 17 == 0),
        }
        for n, (a, b, c) in enumerate(noise)
    ]
    monitor = EchoTrapMonitor()
    expected = [monitor.observe(signals) for signals in steps]
    assert sum(map(len, expected)) >= 3
    first, second = EchoTrapMonitor(), EchoTrapMonitor()
    actual = [first.observe(signals) for signals in steps[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    actual += [second.observe(signals) for signals in steps[cut:]]
    assert actual == expected
    assert second.state_dict() == monitor.state_dict()


def collapse_of(signals, **thresholds):
    """(step, what was said) of the first collapse of per-step signals, None if there is none."""
    detector = CollapseDetector(CollapseThresholds(**thresholds))
    for step in range(max(map(len, signals.values()))):
        now = {name: values[step] for name, values in signals.items() if step < len(values)}
        if said := detector.observe(now):
            return step, said
    return None


@pytest.mark.parametrize("run", SUCCESS)
def test_collapses_of_the_paper(run):
    """Found before success is at a third of its peak; the run that stays up is left alone."""
    curves = {"success_rate": SUCCESS, "entropy": ENTROPY, "grad_norm": GRAD_NORM}
    curves |= {"reward_std": REWARD_STD}
    signals = {name: per_step(curve[run]) for name, curve in curves.items() if run in curve}
    found, success = collapse_of(signals), signals["success_rate"]
    if run == "FrozenLake GRPO":
        assert found is None
    else:
        assert success[found[0]] > max(success) / 3


def noisy(rng, *levels):
    """Success of ten steps at each level, as a few prompts a step show it."""
    return [min(1.0, max(0.0, rng.gauss(level, 0.15))) for level in levels for _ in range(10)]


def test_noise_is_no_collapse_and_a_fall_is():
    rng = random.Random(0)
    steady = [collapse_of({"success_rate": noisy(rng, *[0.5] * 8)}) for _ in range(100)]
    assert sum(found is not None for found in steady) <= 5
    falls = [collapse_of({"success_rate": noisy(rng, *[0.5] * 4, *[0.1] * 2)}) for _ in range(100)]
    assert all(found and found[0] < 60 for found in falls)
    small = [0.5, 0.501] * 10 + [0.46, 0.461] * 10  # certain, and less than five points
    assert collapse_of({"success_rate": small}) is None
    assert collapse_of({"success_rate": small}, least_fall=0.03) is not None


@pytest.mark.parametrize(
    ("signal", "later"),
    [
        ("entropy", 2.5),
        ("entropy", 0.2),
        ("reward_std", 0.4),
        ("grad_norm", 4.0),
        ("distinct_openings", 0.4),
    ],
)
def test_a_sign_makes_a_smaller_fall_a_collapse(signal, later):
    success = noisy(random.Random(1), 0.5, 0.5, 0.35, 0.35)
    assert collapse_of({"success_rate": success}) is None
    step, said = collapse_of({"success_rate": success, signal: [1.0] * 20 + [later] * 20})
    windows = [success[at - 9 : at + 1] for at in range(9, step + 1)]
    best, now = max(windows, key=statistics.mean), windows[-1]
    error = math.sqrt((statistics.variance(best) + statistics.variance(now)) / 10)
    how = "rose" if later > 1 else "fell"
    assert (
        f"from {statistics.mean(best):.1%} to {statistics.mean(now):.1%} (means of 10 steps,"
        f" standard error {error:.1%}), {signal} {how} from 1 to" in said
    )
    assert statistics.mean(best) - statistics.mean(now) >= 1.5 * error
    steady = {"success_rate": noisy(random.Random(1), 0.5, 0.5, 0.5), signal: [1.0] * 20 + [later]}
    assert collapse_of(steady) is None, "a sign alone is none"


def test_signs_are_of_the_latest_best_level():
    """What else has moved while success stayed at its best is no sign of a later fall."""
    success = [0.25, 0.75] * 20 + [0.0, 0.5] * 5
    drifted, sudden = ([1.0] * at + [4.0] * (50 - at) for at in (20, 40))
    assert collapse_of({"success_rate": success, "entropy": drifted}) is None
    assert collapse_of({"success_rate": success, "entropy": sudden}) is not None


def test_the_last_step_takes_less():
    success = [0.5, 0.7] * 10 + [0.29, 0.49] * 5  # a fall of 4.5 standard errors
    detector, other = CollapseDetector(), CollapseDetector()
    for value in success[:-1]:
        assert detector.observe({"success_rate": value}) is None
        other.observe({"success_rate": value})
    assert other.observe({"success_rate": success[-1]}) is None
    assert detector.observe({"success_rate": success[-1]}, is_last=True) is not None


def test_a_detector_goes_on_from_its_state_and_forgets_what_was_undone():
    success = noisy(random.Random(3), 0.5, 0.5, 0.1)
    detector = CollapseDetector()
    for value in success[:21]:
        assert detector.observe({"success_rate": value, "entropy": math.nan}) is None
    state = json.loads(json.dumps(detector.state_dict()))
    resumed = CollapseDetector()
    resumed.load_state_dict(state)
    said = [[one.observe({"success_rate": v}) for v in success[21:]] for one in (detector, resumed)]
    assert said[0] == said[1] and any(said[0])
    detector.forget_recent()
    assert detector.success_level is None
    again = [detector.observe({"success_rate": 0.1}) for _ in range(10)]
    assert not any(again[:9]) and "success fell from" in again[9], "the best is still known"


def trajectory(group_id, prompt, *turns):
    one = Trajectory(group_id)
    for response in turns:
        one.append_observation(prompt)
        one.append_action(Completion(list(response), [0.0] * len(response), "stop"))
    return one


def test_distinct_responses_are_those_of_first_turns():
    same = [trajectory(0, [1], [5, 6], [n]) for n in range(3)]
    assert distinct_responses([TrajectoryGroup(0, same)]) == 1 / 3
    other = TrajectoryGroup(1, [trajectory(1, [1], [5])])
    assert distinct_responses([TrajectoryGroup(0, same), other]) == 0.5
    assert distinct_responses([]) == 0.0


def test_repetition_compares_one_first_response_of_each_prompt():
    long = list(range(20))
    groups = [
        TrajectoryGroup(0, [trajectory(0, [1], long, [7]), trajectory(0, [1], [3])]),
        TrajectoryGroup(1, [trajectory(1, [2], [*long[:16], 90, 91, 92, 93])]),
        TrajectoryGroup(2, [trajectory(2, [3], [50, 51, 52])]),
        TrajectoryGroup(3, [trajectory(3, [4], [*long[:8], 60])]),
    ]
    first = [g.trajectories[0] for g in groups]
    answers = [one.tokens[one.turns[0].start : one.turns[0].end] for one in first]
    grams = [{tuple(a[i : i + 4]) for i in range(len(a) - 3)} for a in answers]
    shared = [gram in other for i, own in enumerate(grams) for gram in own
              for j, other in enumerate(grams) if i != j]  # fmt: skip
    assert repetition_across_prompts(groups) == {
        "distinct_openings": 3 / 4,  # the first two differ behind their 16th token
        "ngram_overlap": pytest.approx(statistics.mean(shared)),
    }
    same = [TrajectoryGroup(i, [trajectory(i, [i], long)]) for i in range(3)]
    assert repetition_across_prompts(same) == {"distinct_openings": 1 / 3, "ngram_overlap": 1.0}
    assert repetition_across_prompts(groups[:1]) == {} == repetition_across_prompts([])
    brief = [TrajectoryGroup(i, [trajectory(i, [i], [i])]) for i in range(2)]
    assert repetition_across_prompts(brief)["ngram_overlap"] == 0.0


def test_trajectories_that_could_not_be_played_answer_nothing():
    """What several of them lack is no opening that they share."""
    answers = [list(range(n, n + 20)) for n in (0, 20, 40)]
    played = [TrajectoryGroup(i, [trajectory(i, [i], own)]) for i, own in enumerate(answers)]
    unplayed = [TrajectoryGroup(i, [trajectory(i, [i], [])] * 2) for i in range(3, 7)]
    groups = [*played[:2], TrajectoryGroup(2, [*unplayed[0].trajectories, *played[2].trajectories])]
    for measure in (repetition_across_prompts, distinct_responses):
        assert measure([*groups, *unplayed]) == measure(played)
    assert repetition_across_prompts(played) == {"distinct_openings": 1.0, "ngram_overlap": 0.0}
    assert repetition_across_prompts([played[0], *unplayed]) == {}


def test_entropy_by_prompt_weighs_tokens_within_and_prompts_between():
    def sampled(*logprobs):
        one = Trajectory(0)
        one.append_observation([1, 2])
        one.append_action(Completion([0] * len(logprobs), list(logprobs), "stop"))
        return one

    groups = [
        TrajectoryGroup(0, [sampled(-1.0, -2.0, -3.0), sampled(-6.0)]),  # 12 nats, 4 tokens
        TrajectoryGroup(1, [sampled(-0.5, -0.5)]),
        TrajectoryGroup(2, [Trajectory(2)]),
    ]
    assert entropy_by_prompt(groups) == pytest.approx(
        {"entropy": 1.75, "entropy_variance": statistics.pvariance([3.0, 0.5])}
    )
    assert entropy_by_prompt(groups[2:]) == {}


def test_the_average_of_the_score_begins_with_the_first():
    average, values = None, [2.0, 4.0, 0.0]
    for value in values:
        average = moving_average(average, value)
    assert average == pytest.approx(0.81 * 2 + 0.09 * 4)


def test_reasoning_that_ignores_its_input():
    own = torch.randn(12, 1, generator=torch.Generator().manual_seed(0)) - 20
    estimate = mutual_information(own.expand(12, 4), torch.arange(12) % 4)
    assert estimate["mutual_information"] == pytest.approx(0.0, abs=1e-12)
    expected = pytest.approx(-float(own.double().mean()))
    assert estimate["entropy"] == expected and estimate["conditional_entropy"] == expected
    assert estimate["retrieval_accuracy"] == estimate["retrieval_chance"] == 0.25


def test_reasoning_that_names_its_input():
    cross = torch.full((6, 3), -1000.0)
    ids = torch.tensor([0, 1, 2, 2, 1, 0])
    cross[torch.arange(6), ids] = -7.0
    estimate = mutual_information(cross, ids)
    assert estimate["mutual_information"] == pytest.approx(math.log(3), abs=1e-12)
    assert estimate["max_mutual_information"] == pytest.approx(math.log(3), abs=1e-12)
    assert estimate["conditional_entropy"] == 7.0
    assert estimate["retrieval_accuracy"] == 1.0
    assert estimate["retrieval_chance"] == pytest.approx(1 / 3)


def test_mutual_information_of_a_noisy_channel():
    """All outcomes of a symmetric binary channel, each as often as it occurs: I = log 2 - H(error
    rate), exactly.
    """
    ids = torch.tensor([0] * 10 + [1] * 10)
    outcomes = [0] * 9 + [1] + [1] * 9 + [0]  # 10% of the reasonings flip
    likelihood = [
        [math.log(0.9), math.log(0.1)],
        [math.log(0.1), math.log(0.9)],
    ]  # [outcome][input]
    cross = torch.tensor([likelihood[outcome] for outcome in outcomes], dtype=torch.float64)
    estimate = mutual_information(cross, ids)
    error_entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert estimate["mutual_information"] == pytest.approx(math.log(2) - error_entropy, abs=1e-12)
    assert estimate["conditional_entropy"] == pytest.approx(error_entropy, abs=1e-12)
    assert estimate["entropy"] == pytest.approx(math.log(2), abs=1e-12)
    assert estimate["retrieval_accuracy"] == pytest.approx(0.9)


def test_equal_inputs_count_as_one():
    cross = torch.tensor(
        [[-1.0, -1.0, -9.0], [-1.5, -1.5, -8.0], [-7.0, -7.0, -2.0]], dtype=torch.float64
    )
    ids = torch.tensor([0, 1, 2])
    estimate = mutual_information(cross, ids, input_keys=["a", "a", "b"])
    unmerged = mutual_information(cross, ids)
    for key in ("entropy", "mutual_information"):
        assert estimate[key] == pytest.approx(unmerged[key], abs=1e-12)
    assert estimate["retrieval_accuracy"] == 1.0 and estimate["retrieval_chance"] == 0.5
    # A tie of two shares one place.
    assert unmerged["retrieval_accuracy"] == pytest.approx(2 / 3)
    bound = (2 * math.log(3 / 2) + math.log(3)) / 3
    assert estimate["max_mutual_information"] == pytest.approx(bound)


def test_mutual_information_against_a_loop():
    generator = torch.Generator().manual_seed(1)
    cross = torch.randn(20, 6, generator=generator, dtype=torch.float64) * 3 - 50
    ids = torch.randint(0, 6, (20,), generator=generator)
    estimate = mutual_information(cross, ids)
    gaps, hits = [], []
    for row, own in zip(cross.tolist(), ids.tolist()):
        gaps.append(row[own] - math.log(math.fsum(math.exp(x) for x in row) / 6))
        hits.append(row[own] == max(row))
    assert estimate["mutual_information"] == pytest.approx(statistics.mean(gaps), abs=1e-9)
    assert estimate["retrieval_accuracy"] == pytest.approx(statistics.mean(hits))
    marginals = [row[own] - gap for row, own, gap in zip(cross.tolist(), ids.tolist(), gaps)]
    score = statistics.mean(gaps) / (statistics.pstdev(marginals) + 1e-3)
    assert estimate["score"] == pytest.approx(score, abs=1e-9)


VOCABULARY = 11


class TablePolicy:
    """p(token | the two tokens before it and the first of the sequence), drawn once: a policy whose
    log-probability of anything is a sum of entries of a table.
    """

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        shape = (VOCABULARY,) * 4
        self.table = torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(-1)
        self.passes = []

    def log_probability(self, prompt, reasoning):
        text = [*prompt, *reasoning]
        return math.fsum(
            float(self.table[text[0], text[i - 2], text[i - 1], text[i]])
            for i in range(len(prompt), len(text))
        )

    def logprobs(self, batch):
        """As a trainer answers: [T], float32, 0 where the label was not sampled."""
        self.passes.append(batch.num_trajectories)
        result = torch.zeros(batch.num_positions, dtype=torch.float64)
        for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:]):
            for t in range(start, end):
                if batch.loss_mask[t]:
                    first, before = batch.tokens[start], batch.tokens[t - 1]
                    result[t] = self.table[first, before, batch.tokens[t], batch.labels[t]]
        return result.float()


def random_groups(num_groups, sizes, seed=0):
    """Groups of two-turn trajectories with prompts and responses of ragged lengths; the last group
    begins as the first does.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(low, high):
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()

    prompts = [tokens(2, 6) for _ in range(num_groups)]
    prompts[-1] = prompts[0]
    return [
        TrajectoryGroup(
            i, [trajectory(i, prompts[i], tokens(1, 8), tokens(1, 4)) for _ in range(size)]
        )
        for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("cut", [None, 2, 0])
def test_diagnose_scores_every_reasoning_behind_every_prompt(cut):
    groups, policy = random_groups(4, [3, 1, 2, 2]), TablePolicy()
    length = (lambda tokens: min(cut, len(tokens))) if cut is not None else len
    estimate = diagnose(probes(groups), policy.logprobs, reasoning_length=length)
    assert policy.passes == [8 * 4], "one pass"

    prompts = [group.trajectories[0].tokens[: group.trajectories[0].turns[0].start]
               for group in groups]  # fmt: skip
    matched, marginal, hits = [], [], []
    for own, group in enumerate(groups):
        for one in group.trajectories:
            turn = one.turns[0]
            reasoning = one.tokens[turn.start : turn.end][: cut or (1 if cut == 0 else None)]
            scores = [policy.log_probability(prompt, reasoning) for prompt in prompts]
            matched.append(scores[own])
            marginal.append(math.log(math.fsum(map(math.exp, scores)) / len(scores)))
            hits.append(scores[own] == max(scores))
    expected = {
        "conditional_entropy": -statistics.mean(matched),
        "entropy": -statistics.mean(marginal),
        "mutual_information": statistics.mean(matched) - statistics.mean(marginal),
        "retrieval_accuracy": statistics.mean(hits),
        "retrieval_chance": 1 / 3,
        # Groups 0 and 3 have one prompt: five of the eight reasonings come from it.
        "max_mutual_information": (5 * math.log(2) + 3 * math.log(4)) / 8,
        "score": (statistics.mean(matched) - statistics.mean(marginal))
        / (statistics.pstdev(marginal) + 1e-3),
    }
    assert estimate == pytest.approx(expected, abs=1e-5)


def test_probes_are_groups_and_members_evenly_spaced():
    groups = random_groups(17, [6] * 17)
    chosen = probes(groups)
    assert [group.group_id for group in chosen] == [0, 3, 6, 9, 12, 15]
    for group, whole in zip(chosen, groups[::3], strict=True):
        for cut, member in zip(group.trajectories, whole.trajectories[:4], strict=True):
            assert cut.tokens == member.tokens[: member.turns[0].end] and len(cut.turns) == 1


def test_probes_have_the_first_prompt_of_their_group():
    members = [trajectory(0, prompt, [3, 4]) for prompt in ([1, 2], [1], [1, 2])]
    (chosen,) = probes([TrajectoryGroup(0, members)])
    assert [cut.tokens for cut in chosen.trajectories] == [[1, 2, 3, 4]] * 2


def test_collapse_is_that_of_the_first_requests_of_an_agent():
    """A helper, whose tokens come before the first request, changes no number."""
    groups = random_groups(5, [3] * 5)

    def helped(member: Trajectory) -> Trajectory:
        first = member.turns[0]
        response = member.tokens[first.start : first.end]
        one = trajectory(member.group_id, [0, 0], [1, 2, 3])
        one.append_observation(member.tokens[: first.start], afresh=True)
        one.append_action(Completion(response, [0.0] * len(response), "stop"))
        for index, turn in zip((1, 0), one.turns, strict=True):
            turn.info["call"] = {"index": index}
        return one

    trees = [TrajectoryGroup(g.group_id, [*map(helped, g.trajectories)]) for g in groups]
    policy = TablePolicy()
    expected = diagnose(probes(groups), policy.logprobs)
    assert abs(expected["mutual_information"]) > 0.1
    assert diagnose(probes(trees), policy.logprobs) == expected
    assert distinct_responses(trees) == distinct_responses(groups)
    assert repetition_across_prompts(trees) == repetition_across_prompts(groups)


def test_diagnose_without_turns_says_nothing():
    unplayed = TrajectoryGroup(0, [trajectory(0, [1, 2])])
    assert diagnose(probes([unplayed]), None) == {}
    played = TrajectoryGroup(1, [trajectory(1, [1, 2], [3, 4])])
    estimate = diagnose(probes([unplayed, played]), TablePolicy().logprobs)
    assert estimate["mutual_information"] == 0.0 and estimate["retrieval_chance"] == 1.0
