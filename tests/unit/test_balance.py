"""Even shares of work: costs by counting, splits against the optimum of brute force."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen_mega.data.balance import SLACK, Cost, balanced_split
from ragen_mega.data.forest import PrefixOrder
from ragen_mega.data.packing import costs_of, microbatches, pack, shares
from ragen_mega.data.types import Completion, TokenBatch, Trajectory, offsets_of
from ragen_mega.models.shape import ModelShape

SHAPE = ModelShape(
    model_type="qwen2",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=128,
    vocab_size=500,
    is_tied=True,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
)
COST = Cost(3, 2, 5)
ITEMS = st.lists(st.integers(1, 60), min_size=1, max_size=7)


def largest(costs: list[int], parts: list[list[int]]) -> int:
    return max(sum(costs[i] for i in part) for part in parts)


def optimum(costs: list[int], num_parts: int) -> int:
    """Of all assignments."""
    return min(
        max(sum(c for c, at in zip(costs, parts) if at == part) for part in range(num_parts))
        for parts in itertools.product(range(num_parts), repeat=len(costs))
    )


def test_cost_counts_tokens_pairs_and_labels() -> None:
    pairs = sum(1 for query in range(9) for key in range(9) if key <= query)
    assert COST.of(9, 4) == 3 * 9 + 2 * pairs + 5 * 4


def test_the_predictor_and_the_assignment_have_one_cost() -> None:
    """FLOPs of matrix products, forward and twice as many backward; the predictor leaves out that
    a token attends to itself.
    """
    cost = SHAPE.cost
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128
    assert cost == (3 * 2 * 2 * layer, 3 * 2 * 2 * 2 * 64, 3 * 2 * 500 * 64)
    itself = cost.per_pair * 100 / 2
    assert cost.of(100, 100) == pytest.approx(100 * cost.flops(100) + itself)


@given(ITEMS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_split_is_within_grahams_bound(costs: list[int], num: int, draw: random.Random) -> None:
    bound = (4 / 3 - 1 / (3 * num)) * optimum(costs, num)
    anywhere = balanced_split(costs, num)
    parts = balanced_split(costs, num, [draw.randrange(num) for _ in costs])
    for split in (anywhere, parts):
        assert sorted(i for part in split for i in part) == list(range(len(costs)))
    assert largest(costs, anywhere) <= bound + 1e-9
    assert all(anywhere) == (len(costs) >= num)
    assert largest(costs, parts) <= SLACK * largest(costs, anywhere)


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 12), st.randoms())
def test_each_item_goes_to_the_part_with_the_least(
    costs: list[int], num: int, draw: random.Random
) -> None:
    """By definition: the most expensive item first, of equal parts to the one with fewest items."""

    def split(bound: float, homes: Sequence[int]) -> list[list[int]]:
        parts: list[list[int]] = [[] for _ in range(num)]

        def total(part: int) -> int:
            return sum(costs[i] for i in parts[part])

        for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            least = min(range(num), key=lambda part: (total(part), len(parts[part]), part))
            stays = total(homes[item]) + costs[item] <= bound
            parts[homes[item] if stays else least].append(item)
        return [sorted(part) for part in parts]

    homes = [draw.randrange(num) for _ in costs]
    anywhere = split(-1, homes)
    staying = split(largest(costs, anywhere), homes)
    is_even = largest(costs, staying) <= SLACK * largest(costs, anywhere)
    assert balanced_split(costs, num) == anywhere
    assert balanced_split(costs, num, homes) == (staying if is_even else anywhere)


def test_an_item_is_not_compared_with_every_part() -> None:
    """A pipeline's microbatches are divided into every number of parts in turn."""
    num_comparisons = 0

    class Counted(int):
        def __add__(self, other: int) -> "Counted":
            return Counted(int(self) + other)

        __radd__ = __add__

        def __lt__(self, other: int) -> bool:
            nonlocal num_comparisons
            num_comparisons += 1
            return int(self) < int(other)

    costs = [Counted(random.Random(i).randrange(1, 1000)) for i in range(512)]
    balanced_split(costs, 256)
    assert num_comparisons < 512 * 2 * 8 * 2  # log2(256) is 8; each with every part: 130,560


def test_a_part_that_is_nobodys_home_may_stay_empty() -> None:
    assert balanced_split([5, 1, 1], 3, [0, 1, 1]) == [[0], [1, 2], []]


def test_what_is_even_already_stays() -> None:
    homes = [i % 4 for i in range(32)]
    parts = balanced_split([7] * 32, 4, homes)
    assert parts == [[i for i in range(32) if homes[i] == part] for part in range(4)]


def test_long_tails_stay_where_they_were_sampled_without_losing_balance() -> None:
    draw = random.Random(0)
    costs = [COST.of(int(draw.lognormvariate(6, 1))) for _ in range(512)]
    homes = [draw.randrange(4) for _ in costs]
    anywhere, parts = balanced_split(costs, 4), balanced_split(costs, 4, homes)
    moved = sum(homes[i] != part for part, ids in enumerate(parts) for i in ids)
    assert largest(costs, parts) <= SLACK * largest(costs, anywhere)
    assert moved < 0.4 * 512  # 384 on average without homes
    assert sum(homes[i] != part for part, ids in enumerate(anywhere) for i in ids) > 340


def batch_of(lengths: list[int], *, stem: int = 0) -> TokenBatch:
    """Trajectories of these positions, of which the first `stem` are alike."""
    trajectories = []
    for index, length in enumerate(lengths):
        prompt = [1] * stem + [2 + index] * max(1, length // 2 - stem)
        trajectories.append(Trajectory(group_id=0))
        trajectories[-1].append_observation(prompt)
        sampled = [3] * (length + 1 - len(prompt))
        trajectories[-1].append_action(Completion(sampled, [-1.0] * len(sampled), "stop"))
    return pack(trajectories)


def test_long_tails_are_even_in_cost_not_in_tokens() -> None:
    """A few long trajectories, whose attention is most of the work."""
    draw = random.Random(1)
    batch = batch_of([min(3000, int(draw.lognormvariate(5, 1.3)) + 2) for _ in range(48)])
    costs, lengths = costs_of(batch, COST), batch.lengths.tolist()
    assert sum(costs) == sum(COST.of(size, size - size // 2 + 1) for size in lengths)
    by_cost = shares(batch.tokens, batch.cu_seqlens, costs, 4, cost=COST)
    by_tokens = shares(batch.tokens, batch.cu_seqlens, lengths, 4)
    mean = sum(costs) / 4
    assert largest(costs, by_cost) < 1.02 * mean
    assert largest(costs, by_tokens) > 1.1 * mean
    assert sorted(i for part in by_cost for i in part) == list(range(48))


def test_costs_of_segments_are_their_own() -> None:
    whole = Trajectory(group_id=0)
    whole.append_observation([1] * 10)
    whole.append_action(Completion([2] * 5, [-1.0] * 5, "stop"))
    whole.append_observation([3] * 6, afresh=True)
    whole.append_action(Completion([4] * 3, [-1.0] * 3, "stop"))
    batch = pack([whole, whole])
    assert costs_of(batch, COST) == [COST.of(14, 5) + COST.of(8, 3)] * 2
    assert costs_of(batch.by_segment(), COST) == [COST.of(14, 5), COST.of(8, 3)] * 2


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=7),
       st.integers(1, 3))  # fmt: skip
def test_runs_of_a_forest_are_as_even_as_runs_can_be(texts: list[list[int]], num: int) -> None:
    """Against every way to cut; a trajectory goes with its equal or its beginning before it."""
    tokens = torch.tensor([token for text in texts for token in text])
    offsets = offsets_of(torch.tensor([len(text) for text in texts]))
    order = PrefixOrder.of(tokens, offsets, cost=COST)

    def cost(ids: list[int]) -> int:
        nodes = {tuple(texts[i][:end]) for i in ids for end in range(1, len(texts[i]) + 1)}
        return sum(COST.per_token + COST.per_pair * len(node) for node in nodes)

    runs = order.cut(num, order.num_nodes)
    assert [i for run in runs for i in run.ids] == order.ids and len(runs) <= num
    allowed = [i for i in range(1, len(texts)) if order.lengths[i] > order.shared[i]]
    best = min(
        max(cost(order.ids[a:b]) for a, b in itertools.pairwise((0, *places, len(texts))))
        for size in range(num)
        for places in itertools.combinations(allowed, size)
    )
    assert max(cost(run.ids) for run in runs) == best


@pytest.mark.parametrize("lengths", [[900, *[50] * 60], [300, 290, *[20] * 100], [100] * 32])
def test_microbatches_of_a_pipeline_do_not_wait_for_long_trajectories(lengths: list[int]) -> None:
    """All are padded to the tokens of the longest, so that neither tokens nor cost alone decide."""
    batch = batch_of(lengths)
    costs, sizes = costs_of(batch, COST), batch.lengths.tolist()

    def slowest(parts: list[list[int]]) -> int:
        tokens = [sum(sizes[i] for i in part) for part in parts]
        padded = [COST.of(max(tokens) - number) for number in tokens]
        return max(sum(costs[i] for i in part) + more for part, more in zip(parts, padded))

    ours = microbatches(batch, 4000, range(len(lengths)), cost=COST, num_stages=2)
    by_tokens, by_cost = balanced_split(sizes, 8), balanced_split(costs, 8)
    assert len(ours) == 8 and slowest(ours) == min(slowest(by_tokens), slowest(by_cost))
