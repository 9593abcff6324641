"""Group selection against definitions spelled out with the standard library, and the edge cases of
RAGEN's filter.
"""

import itertools
import math
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen_mega.algorithm import filters
from ragen_mega.algorithm.advantages import group_relative
from ragen_mega.algorithm.filters import filter_groups, group_uncertainty, soft_reweighting
from ragen_mega.data.types import Trajectory, TrajectoryGroup, Turn
from ragen_mega.report.step_metrics import filter_metrics

SCORES = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=12)


def select(scores, strategy, value, keep_zero=False):
    """Indices that a filter keeps of groups whose returns have these standard deviations."""
    groups = [group(i, 0.0, math.sqrt(2) * score) for i, score in enumerate(scores)]
    kept = filter_groups(groups, strategy=strategy, value=value, keep_zero=keep_zero)
    return [one.group_id for one in kept]


def group(group_id, *returns):
    trajectories = [
        Trajectory(group_id=group_id, turns=[Turn(0, 1, reward - 1.0), Turn(1, 2, 1.0)])
        for reward in returns
    ]
    return TrajectoryGroup(group_id, trajectories)


def test_uncertainty_is_the_unbiased_standard_deviation():
    rng = random.Random(0)
    rewards = [[rng.uniform(-5, 11) for _ in range(rng.randint(2, 16))] for _ in range(20)]
    expected = [statistics.stdev(group) for group in rewards]
    assert group_uncertainty(rewards).tolist() == pytest.approx(expected, abs=1e-12)
    assert group_uncertainty([[0.0, 1.0]]).tolist() == pytest.approx([math.sqrt(0.5)])


def test_uncertainty_needs_two_trajectories():
    with pytest.raises(ValueError, match="at least 2 trajectories"):
        group_uncertainty([[1.0, 2.0], [1.0]])


def test_top_fraction_keeps_a_quarter_of_the_groups():
    assert select([0.3, 0.9, 0.1, 0.5, 0.7, 0.2, 0.4, 0.6], "top_fraction", 0.25) == [1, 4]


@pytest.mark.parametrize("num_groups", [1, 3, 10, 100])
@pytest.mark.parametrize("percent", [7, 25, 29, 57, 70, 100])
def test_top_fraction_counts_exactly(num_groups, percent):
    """0.29 * 100 is 28.999... in floating point; the count must not depend on it."""
    kept = select([1.0] * num_groups, "top_fraction", percent / 100)
    assert len(kept) == max(1, percent * num_groups // 100)


def test_ties_go_to_the_smaller_index():
    assert select([1.0, 2.0, 1.0, 1.0, 2.0], "top_k", 3) == [0, 1, 4]
    assert select([0.5] * 4, "top_p_linear", 0.5) == [0, 1]


@given(SCORES, st.floats(0.01, 1.0))
def test_top_p_linear_is_the_smallest_set_that_holds_the_mass(scores, p):
    kept = select(scores, "top_p_linear", p)
    ranked = sorted((s for s in scores if s > 0), reverse=True)
    total = math.fsum(ranked)
    held = math.fsum(scores[i] for i in kept)
    assert sorted((scores[i] for i in kept), reverse=True) == ranked[: len(kept)]
    if ranked:
        assert held >= (p - 1e-8) * total
        assert held - ranked[len(kept) - 1] < (p + 1e-8) * total
    else:
        assert kept == []


def test_top_p_linear_known_values():
    scores = [0.0, 4.0, 3.0, 2.0, 1.0]
    assert select(scores, "top_p_linear", 0.4) == [1]
    assert select(scores, "top_p_linear", 0.7) == [1, 2]
    assert select(scores, "top_p_linear", 0.71) == [1, 2, 3]
    assert select(scores, "top_p_linear", 1.0) == [1, 2, 3, 4]


def test_selection_does_not_depend_on_the_scale_of_the_rewards():
    scores = [0.7, 0.2, 1.1, 0.05, 0.4]
    for strategy in ("top_p_linear", "min_p", "top_fraction"):
        small = select([1e-4 * score for score in scores], strategy, 0.6)
        assert small == select(scores, strategy, 0.6)


def test_top_p_softmax_known_values():
    scores = [math.log(1.0), math.log(2.0), math.log(5.0)]  # shares 1/8, 2/8, 5/8
    assert select(scores, "top_p_softmax", 0.6, keep_zero=True) == [2]
    assert select(scores, "top_p_softmax", 0.875, keep_zero=True) == [1, 2]
    assert select(scores, "top_p_softmax", 0.9, keep_zero=True) == [0, 1, 2]
    assert select(scores, "top_p_softmax", 0.9) == [1, 2], "the constant group takes no share"


def test_min_p_is_relative_to_the_best_group():
    assert select([1.0, 0.5, 0.49, 0.0], "min_p", 0.5) == [0, 1]


@pytest.mark.parametrize(
    ("strategy", "value", "kept_zeros"),
    [
        ("top_fraction", 0.5, [0, 1]),
        ("top_k", 3, [0, 1, 2]),
        ("top_p_linear", 0.5, [0, 1]),
        ("top_p_softmax", 0.5, [0, 1]),
        ("min_p", 0.5, [0, 1, 2, 3]),
    ],
)
def test_constant_groups(strategy, value, kept_zeros):
    assert select([0.0] * 4, strategy, value) == []
    assert select([0.0] * 4, strategy, value, keep_zero=True) == kept_zeros
    assert select([0.0, 1e-17, 1.0, 0.0], strategy, value) == [2]


@given(SCORES, st.integers(0, 3))
def test_quarters_of_the_ranking_are_disjoint_and_complete(scores, quarter):
    """Each quarter against a sort; together they are all groups that vary."""
    scores = scores * 4
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    size = len(scores) // 4
    value = (quarter / 4, (quarter + 1) / 4)
    expected = ranked[quarter * size : (quarter + 1) * size]
    assert select(scores, "percentile_range", value, keep_zero=True) == sorted(expected)
    assert select(scores, "percentile_range", value) == sorted(i for i in expected if scores[i] > 0)


@given(st.integers(1, 60), st.data())
def test_a_range_as_wide_as_one_group_holds_one(num_groups, data):
    """Whatever its decimal fractions round to."""
    rank = data.draw(st.integers(0, num_groups - 1))
    value = (rank / num_groups, (rank + 1) / num_groups)
    scores = [float(num_groups - index) for index in range(num_groups)]
    assert select(scores, "percentile_range", value) == [rank]


@given(st.lists(st.sampled_from([-0.5, 0.0, 0.1, 1.0, 9.7]), min_size=2, max_size=7), st.data())
def test_within_group_keeps_the_trajectories_that_vary_most(returns, data):
    """Against every choice of that size."""
    value = data.draw(st.sampled_from([0.25, 0.5, 0.75, 1.0]))
    size = max(2, math.floor(value * len(returns)))
    (kept,) = filters.within_group([returns], value=value, keep_zero=False)
    assert kept == sorted(set(kept)) and len(kept) == size
    best = max(map(statistics.pvariance, itertools.combinations(returns, size)))
    assert statistics.pvariance([returns[i] for i in kept]) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("won", range(1, 6))
def test_the_baseline_of_the_kept_members_keeps_the_direction_of_the_update(won: int):
    """Over all orders of a group with two returns, whose members' gradients are anything."""
    returns = torch.tensor([1.0] * won + [0.0] * (6 - won), dtype=torch.float64)
    gradients = torch.randn(6, 3, generator=torch.Generator().manual_seed(won), dtype=torch.float64)

    def relative(scores: torch.Tensor) -> torch.Tensor:
        one_group = torch.zeros(len(scores), dtype=torch.int64)
        return group_relative(scores, one_group, normalize_std=False)

    everything = relative(returns) @ gradients
    of_kept = torch.zeros(3, dtype=torch.float64)
    of_whole = torch.zeros(3, dtype=torch.float64)  # the alternative
    for order in itertools.permutations(range(6)):
        (kept,) = filters.within_group([returns[list(order)].tolist()], value=0.5, keep_zero=False)
        indices = [order[index] for index in kept]
        of_kept += relative(returns[indices]) @ gradients[indices]
        of_whole += relative(returns)[indices] @ gradients[indices]

    def cosine(one: torch.Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(one, everything, dim=0))

    assert cosine(of_kept) == pytest.approx(1.0)
    assert cosine(of_whole) < 0.999 or won == 2  # two of six, as one of the three that are kept


def test_within_group_leaves_parts_of_groups_and_drops_constant_ones():
    groups = [group(0, 0.0, 3.0, 1.0, 2.0), group(1, 5.0, 5.0, 5.0, 5.0)]
    (kept,) = filter_groups(groups, strategy="within_group", value=0.5, keep_zero=False)
    assert kept.trajectories == groups[0].trajectories[:2]
    both = filter_groups(groups, strategy="within_group", value=0.5, keep_zero=True)
    assert [len(one.trajectories) for one in both] == [2, 2]


def test_none_keeps_everything():
    assert select([0.0, 1.0], "none", 0.25) == [0, 1]
    groups = [group(0, 1.0), group(1, 2.0)]  # one trajectory each: no spread to compute
    assert filter_groups(groups, strategy="none", value=0.25, keep_zero=False) == groups


def test_filter_ranks_total_returns_and_keeps_order():
    """Returns normalised by group, returns of single turns and relative spreads would each rank
    otherwise.
    """
    groups = [group(7, 0.0, 1.0), group(3, 5.0, 5.0), group(9, 101.0, 110.0), group(4, 2.0, 4.0)]
    kept = filter_groups(groups, strategy="top_k", value=2, keep_zero=False)
    assert [one.group_id for one in kept] == [9, 4]
    assert filter_groups([groups[1]], strategy="top_fraction", value=0.25, keep_zero=False) == []


def test_float_noise_of_equal_returns_counts_as_constant():
    noisy = [0.1 * n for n in (3, 3)] + [0.1 + 0.2]
    assert (
        filter_groups([group(0, *noisy)], strategy="top_fraction", value=1.0, keep_zero=False) == []
    )


def test_soft_reweighting():
    assert soft_reweighting([1.0, 0.0, 4.0]).tolist() == [0.25, 0.0, 1.0]
    assert soft_reweighting([0.0, 0.0]).tolist() == [0.0, 0.0]
    assert soft_reweighting(torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize(
    ("strategy", "value"),
    [
        ("top_fraction", 0.0),
        ("top_fraction", 1.1),
        ("top_k", 0),
        ("top_k", 1.5),
        ("top_k", 4),
        ("top_p_linear", -0.1),
        ("top_p_softmax", 2.0),
        ("min_p", 0.0),
        ("top_fraction", math.nan),
        ("top_k", None),
        ("best", 1.0),
        ("within_group", 0.0),
        ("percentile_range", (0.0, None)),
        ("percentile_range", (0.5, 0.5)),
        ("percentile_range", (0.5, 1.1)),
        ("percentile_range", (0.0, 0.3)),  # less than one of three groups
    ],
)
def test_values_out_of_range(strategy, value):
    with pytest.raises(ValueError):
        select([1.0, 2.0, 3.0], strategy, value)


@pytest.mark.parametrize(
    "name", ["top_fraction", "top_k", "top_p_linear", "top_p_softmax", "min_p"]
)
def test_every_filter_of_the_table_is_a_function_of_raw_returns(name):
    returns = [[0.0, 1.0], [2.0, 2.0], [0.0, 4.0, 2.0]]
    found = getattr(filters, name)(returns, value=1, keep_zero=False)
    assert set(found) <= {0, 2} and 2 in found
    assert filters.keep_all(returns, value=None, keep_zero=False) == [0, 1, 2]


def worlds(*scales, size=4):
    """Groups of environments whose rewards differ in scale alone; a group's spread grows with its
    place.
    """
    groups = []
    for scale_id, scale in enumerate(scales):
        for place in range(size):
            one = group(len(groups), 0.0, scale * (1 + place))
            for trajectory in one.trajectories:
                trajectory.environment = f"world {scale_id}"
            groups.append(one)
    return groups


@pytest.mark.parametrize(
    ("strategy", "value"),
    [("top_fraction", 0.25), ("top_k", 2), ("top_p_linear", 0.4), ("min_p", 0.9)],
)
def test_each_environment_is_ranked_by_itself(strategy, value):
    """The same task paid 0.01 and 100: both are trained, by their widest groups."""
    kept = filter_groups(worlds(0.01, 100.0), strategy=strategy, value=value, keep_zero=False)
    assert [one.group_id for one in kept] == [3, 7]
    assert filter_metrics(worlds(0.01, 100.0), kept) | {"kept_std": 0, "constant_groups": 0} == {
        "kept_groups": 2.0, "kept_fraction": 0.25, "constant_groups": 0,
        "kept_groups/world 0": 1.0, "kept_groups/world 1": 1.0, "kept_std": 0,
    }  # fmt: skip


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12), st.integers(0, 99))
def test_a_number_of_groups_is_divided_in_proportion(sizes, total, turn):
    total = min(total, sum(sizes))
    counts = filters._apportioned(total, sizes, turn)
    assert sum(counts) == total or (sum(counts) > total and 1 in counts)
    for count, size in zip(counts, sizes, strict=True):
        assert 1 <= count <= size and count < 2 + total * size / sum(sizes)


def test_equal_environments_take_turns_with_the_odd_group():
    assert {tuple(filters._apportioned(3, [4, 4], turn)) for turn in range(2)} == {(2, 1), (1, 2)}
