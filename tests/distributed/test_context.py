"""Context parallelism: the runs of a forest on several ranks compute what one rank computes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen_mega.data.balance import Cost, even_runs
from ragen_mega.data.forest import PrefixOrder
from ragen_mega.data.packing import ContextRank, Share, microbatch, part_of
from ragen_mega.data.types import TokenBatch
from ragen_mega.megatron.attention import attend, schedule_of
from ragen_mega.megatron.cpu.attention import forest_attention
from tests.unit.test_forest import TEXTS, batch_of, branching, by_chain

CPU = torch.device("cpu")


def share_of(batch: TokenBatch) -> Share:
    order = PrefixOrder.of(batch.tokens, batch.cu_seqlens)
    return Share(order.ids, order.shared)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 20))
def test_runs_cost_about_the_same_and_fit(costs: list[int], num_runs: int, most: int) -> None:
    bounds = even_runs(np.array(costs), num_runs, most)
    assert bounds[0] == 0 and bounds[-1] == len(costs) and bounds == sorted(bounds)
    assert len(bounds) == num_runs + 1
    sizes = np.diff(bounds)
    assert max(sizes) <= max(most, -(-len(costs) // num_runs))
    if most >= len(costs):
        totals = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        assert max(totals) <= sum(costs) / num_runs + max(costs)


@given(TEXTS, st.integers(1, 5), st.sampled_from([Cost(1, 0, 0), Cost(1, 9, 0), Cost(1, 1, 90)]))
def test_every_position_is_on_one_rank_with_its_label(
    texts: list[list[int]], size: int, cost: Cost
) -> None:
    batch = batch_of(texts)
    share = share_of(batch)
    whole = microbatch(part_of(batch, share), multiple=1, device=CPU)
    parts = [part_of(batch, share, ContextRank(rank, size, cost, 10**9)) for rank in range(size)]
    assert sum(part.forest.num_nodes for part in parts) == whole.forest.num_nodes
    found = torch.cat([part.positions for part in parts])
    assert sorted(found.tolist()) == list(range(batch.num_positions))
    rows = 0
    for part in parts:
        micro = microbatch(part, multiple=4, device=CPU)
        assert torch.equal(micro.labels, batch.labels[micro.positions])
        of_nodes = micro.per_position(micro.input_ids)
        assert torch.equal(of_nodes, batch.tokens[micro.positions])
        assert torch.equal(micro.per_position(micro.depths), batch.position_ids[micro.positions])
        rows += len(micro.rows)
    assert rows == len(whole.rows)


@pytest.mark.parametrize("way", ["runs", "chains", "compiled"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_attention_of_the_parts_is_that_of_the_whole(way: str, size: int) -> None:
    """Outputs and gradients in float64. Keys are handed over by hand, as `sent` and `received`
    say.
    """
    for seed, longest in enumerate((3, 20, 150)):
        batch = batch_of(branching(seed, 14, longest))
        share = share_of(batch)
        whole = part_of(batch, share).forest
        generator = torch.Generator().manual_seed(seed)
        inputs = [
            torch.randn(whole.num_nodes, heads, 8, dtype=torch.float64, generator=generator)
            for heads in (4, 2, 2)
        ]
        query, key, value = (x.requires_grad_() for x in inputs)
        expected = forest_attention(query, key, value, whole, 8**-0.5)
        weight = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
        truth = torch.autograd.grad((expected * weight).sum(), [query, key, value])
        context = [ContextRank(rank, size, Cost(1, 1, 0), 0) for rank in range(size)]
        forests = [part_of(batch, share, one).forest for one in context]
        starts = np.cumsum([0, *(forest.num_nodes for forest in forests)])
        outputs = []
        for rank, forest in enumerate(forests):
            own = slice(int(starts[rank]), int(starts[rank + 1]))
            senders = enumerate(forests if forest.received else [])
            arrived = [other.sent[rank] + starts[index] for index, other in senders]
            assert [len(nodes) for nodes in arrived] == [*forest.received]
            nodes = torch.from_numpy(np.concatenate([[], *arrived]).astype(int))
            k, v = (torch.cat([x[nodes], x[own]]) for x in (key, value))
            if not forest.num_nodes:
                continue
            if way == "runs":
                outputs.append(attend(query[own], k, v, schedule_of(forest, CPU), None))
            elif way == "chains":
                outputs.append(by_chain(query[own], k, v, forest))
            else:
                outputs.append(forest_attention(query[own], k, v, forest, 8**-0.5))
        actual = torch.cat(outputs)
        gradients = torch.autograd.grad((actual * weight).sum(), [query, key, value])
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        for one, other in zip(gradients, truth, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
