"""Forests of shared prefixes against brute force: distinct prefixes, paths, attention, rows."""

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_mega.data.balance import TOKENS, Cost
from ragen_mega.data.forest import Forest, PrefixOrder
from ragen_mega.data.packing import Share, costs_of, microbatch, pack, part_of, parts_of, shares
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.megatron import attention
from ragen_mega.megatron.attention import attend, schedule_of
from ragen_mega.megatron.cpu.attention import forest_attention
from ragen_mega.megatron.layers import PackedForest

CPU = torch.device("cpu")
TEXTS = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), min_size=1, max_size=9)


def batch_of(texts: list[list[int]]) -> TokenBatch:
    """The second half of each text is sampled."""
    trajectories = []
    for text in texts:
        half = (len(text) + 1) // 2
        trajectories.append(Trajectory(group_id=0))
        trajectories[-1].append_observation(text[:half])
        sampled = text[half:]
        trajectories[-1].append_action(Completion(sampled, [-1.0] * len(sampled), "stop"))
    return pack(trajectories)


def prefixes(batch: TokenBatch) -> list[tuple[int, ...]]:
    """All tokens up to each position, which is what the model's output there depends on."""
    offsets = batch.cu_seqlens.tolist()
    return [
        tuple(batch.tokens[start : stop + 1].tolist())
        for start, end in itertools.pairwise(offsets)
        for stop in range(start, end)
    ]


def shared(batch: TokenBatch, multiple: int = 1) -> tuple[TokenBatch, Forest]:
    """The batch in the order of its forest, and the forest."""
    order = PrefixOrder.of(batch.tokens, batch.cu_seqlens)
    return batch.select(order.ids), Forest.of(order.lengths, order.shared, multiple=multiple)


@given(TEXTS, st.sampled_from([1, 4]))
def test_every_distinct_prefix_is_one_node(texts: list[list[int]], multiple: int) -> None:
    batch, forest = shared(batch_of(texts), multiple)
    prefix_of, seen = {}, prefixes(batch)
    for node, prefix in zip(forest.sources.tolist(), seen, strict=True):
        assert prefix_of.setdefault(node, prefix) == prefix
    assert len(prefix_of) == len(set(seen)) == forest.num_nodes - forest.padding
    assert forest.num_nodes % multiple == 0 and forest.padding < multiple
    assert forest.is_shared == (len(set(seen)) < len(seen))
    depths = forest.depths().tolist()
    for above, below in itertools.product(prefix_of, repeat=2):
        sees = prefix_of[below][: len(prefix_of[above])] == prefix_of[above]
        assert (above <= below < forest.ends[above]) == sees
        assert depths[below] == len(prefix_of[below]) - 1
    for padding in range(len(prefix_of), forest.num_nodes):
        assert not (forest.ends[: len(prefix_of)] > padding).any()


@given(TEXTS, st.randoms(use_true_random=False))
def test_positions_of_other_routes_are_other_nodes(
    texts: list[list[int]], random: random.Random
) -> None:
    batch = batch_of(texts)
    rows = [[[random.choice((0, 0, 3))] * 2] for _ in batch.tokens]  # [T, 1, 2]
    routes = torch.tensor(rows, dtype=torch.uint8)
    order = PrefixOrder.of(batch.tokens, batch.cu_seqlens, routes=routes)
    forest = Forest.of(order.lengths, order.shared)
    joint = batch.with_fields(tokens=batch.tokens + 10 * routes[:, 0, 0].long())
    assert forest.num_nodes == len(set(prefixes(joint)))
    of_nodes = forest.per_node(routes := routes[batch.positions(order.ids)])
    assert torch.equal(of_nodes[torch.from_numpy(forest.sources)], routes)


@given(
    TEXTS,
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([TOKENS, Cost(1, 3, 7)]),
)
def test_parts_cover_the_batch_within_the_budget(
    texts: list[list[int]], max_tokens: int, num_ranks: int, num_stages: int, cost: Cost
) -> None:
    batch = batch_of(texts)
    costs = costs_of(batch, cost)
    options = {"cost": cost, "most_nodes": math.inf}
    ids = shares(batch.tokens, batch.cu_seqlens, costs, num_ranks, **options)
    assert len(ids) == num_ranks
    parts = [
        part
        for share in ids
        if share
        for part in parts_of(batch, share, max_tokens, num_stages=num_stages, **options)
    ]
    order = PrefixOrder.of(batch.tokens, batch.cu_seqlens)
    assert [i for part in parts for i in part.ids] == order.ids
    for ids, common in parts:
        chosen = batch.select(ids)
        nodes = len(set(prefixes(chosen)))
        assert chosen.num_positions - sum(common) == nodes
        assert nodes <= max_tokens or nodes == int(chosen.lengths.max())


def test_parts_are_of_like_size() -> None:
    """The sizes of two halves of 40 equal trees differ by at most one trajectory."""
    batch = batch_of([[tree, 50, 51, 52, leaf, 7] for tree in range(40) for leaf in range(3)])
    order = PrefixOrder.of(batch.tokens, batch.cu_seqlens)
    sizes = [run.num_nodes for run in order.cut(4, order.num_nodes)]
    assert len(sizes) == 4 and max(sizes) - min(sizes) <= 5


def branching(seed: int, count: int, longest: int) -> list[list[int]]:
    """Texts that grow from random points of earlier ones; some equal, some a part of another."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    texts = [[draw(50) for _ in range(longest)]]
    while len(texts) < count:
        stem = texts[draw(len(texts))]
        grown = [draw(50) for _ in range(draw(longest // 2) * draw(2))]
        texts.append([*stem[: 2 + draw(len(stem) - 1)], *grown])
    return texts


def by_trajectory(q, k, v, batch: TokenBatch) -> torch.Tensor:
    """[T, heads * dim] causal attention, one trajectory at a time."""
    outputs = []
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        parts = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        output = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def packed_of(forest: Forest) -> PackedForest:
    return PackedForest.of(forest, CPU)


def by_chain(q, k, v, forest: Forest) -> torch.Tensor:
    """[N, heads * dim] as Transformer Engine is asked to compute it."""
    packed, paths = packed_of(forest).chains
    k, v = (x if paths is None else x[paths] for x in (k, v))
    outputs = []
    spans = [
        itertools.pairwise(one.tolist()) for one in (packed.cu_seqlens_q, packed.cu_seqlens_kv)
    ]
    for (start, end), (first, last) in zip(*spans, strict=True):
        parts = (
            x.transpose(0, 1).unsqueeze(0) for x in (q[start:end], k[first:last], v[first:last])
        )
        num_queries, num_keys = end - start, last - first
        assert num_queries <= packed.max_seqlen_q and num_keys <= packed.max_seqlen_kv
        sees = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        output = F.scaled_dot_product_attention(*parts, attn_mask=sees, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def compiled(q, k, v, forest: Forest) -> torch.Tensor:
    """[N, heads * dim] as a CPU computes it."""
    return forest_attention(q, k, v, forest, q.shape[-1] ** -0.5)


@pytest.mark.parametrize("way", ["runs", "repeated keys", "chains", "compiled"])
@pytest.mark.parametrize("longest", [20, 150, 700])
def test_attention_is_that_of_every_trajectory(
    way: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients, in float64; 700: trajectories that are separate calls, and runs that
    grow with their path. Keys are repeated where a CUDA kernel takes no grouped heads.
    """
    if way == "repeated keys":
        monkeypatch.setattr(attention, "is_quadratic", lambda query, mask: True)
    for seed in range(3):
        batch, forest = shared(batch_of(branching(seed, 14, longest)), multiple=8)
        assert forest.is_shared
        generator = torch.Generator().manual_seed(seed)
        inputs = [
            torch.randn(forest.num_nodes, heads, 8, dtype=torch.float64, generator=generator)
            for heads in (4, 2, 2)
        ]
        grown = [x.requires_grad_() for x in inputs]
        sources = torch.from_numpy(forest.sources)
        expected = by_trajectory(*(x[sources] for x in grown), batch)
        weight = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
        truth = torch.autograd.grad((expected * weight).sum(), grown)
        if way in ("runs", "repeated keys"):
            actual = attend(*grown, schedule_of(forest, CPU), None)
        else:
            actual = {"chains": by_chain, "compiled": compiled}[way](*grown, forest)
        gradients = torch.autograd.grad((actual[sources] * weight).sum(), grown)
        torch.testing.assert_close(actual[sources], expected, rtol=0, atol=1e-12)
        for one, other in zip(gradients, truth):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_long_trajectories_that_share_nothing_are_not_gathered() -> None:
    schedule = schedule_of(Forest.of([300, 700], [0, 0], multiple=128), CPU)
    assert schedule.queries is schedule.keys is schedule.outputs is None
    assert [(call.runs, call.queries, call.mask) for call in schedule.calls] == [
        (1, 300, None),
        (1, 700, None),
        (1, 24, None),
    ]


@settings(max_examples=50)
@given(TEXTS)
def test_edges_are_the_distinct_pairs_of_node_and_label(texts: list[list[int]]) -> None:
    batch = batch_of(texts)
    order = PrefixOrder.of(batch.tokens, batch.cu_seqlens)
    micro = microbatch(part_of(batch, Share(order.ids, order.shared)), multiple=4, device=CPU)
    seen, labels = prefixes(micro), micro.labels.tolist()
    sampled = micro.loss_mask.nonzero()[:, 0].tolist()
    assert sorted(micro.rows.tolist()) == sampled
    assert len(micro.input_ids) == micro.forest.num_nodes
    nodes = torch.arange(micro.forest.num_nodes)
    at = micro.per_position(nodes).tolist()
    assert [int(micro.input_ids[node]) for node in at] == micro.tokens.tolist()
    assert [int(micro.depths[node]) for node in at] == micro.position_ids.tolist()
    if micro.edges is None:
        assert len(set(seen)) == len(seen)
        return
    pairs = list(zip(micro.edges.nodes.tolist(), micro.edges.labels.tolist()))
    assert len(set(pairs)) == len(pairs) == len({(seen[t], labels[t]) for t in sampled})
    of_rows = micro.per_row(torch.arange(len(pairs))).tolist()
    assert of_rows == torch.arange(len(pairs)).repeat_interleave(micro.edges.repeats).tolist()
    for row, edge in zip(micro.rows.tolist(), of_rows, strict=True):
        assert pairs[edge] == (at[row], labels[row])
