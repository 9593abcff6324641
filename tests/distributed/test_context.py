"""Context parallelism: the runs of a forest on several ranks compute what one rank computes."""

import itertools
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from ragen_kernels import PolicyObjective, linear_policy_loss, logprob_entropy

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.balance import Cost
from ragen_mega.data.forest import Forest, PrefixOrder, even_runs
from ragen_mega.data.packing import ContextRank, Share, microbatch, pack, part_of
from ragen_mega.data.types import Completion, TokenBatch, Trajectory, counts_of, offsets_of
from ragen_mega.megatron import context
from ragen_mega.megatron.attention import attend, schedule_of
from ragen_mega.megatron.cpu.attention import forest_attention
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.layers import PackedForest
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.megatron.weights import export_weights
from ragen_mega.ranks import collectives
from tests.support.forked_ranks import on_ranks
from tests.unit.test_forest import TEXTS, batch_of, branching, by_chain
from tools import parity

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
        assert torch.equal(micro.labels, batch.labels[micro.batch_positions])
        of_nodes = micro.per_position(micro.input_ids)
        assert torch.equal(of_nodes, batch.tokens[micro.batch_positions])
        assert torch.equal(
            micro.per_position(micro.depths), batch.position_ids[micro.batch_positions]
        )
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
        ranks = [ContextRank(rank, size, Cost(1, 1, 0), 0) for rank in range(size)]
        forests = [part_of(batch, share, one).forest for one in ranks]
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


def rows_of(whole: torch.Tensor, forests: list[Forest], rank: int) -> torch.Tensor:
    """The rows of a context-parallel rank's nodes."""
    start = sum(forest.num_nodes for forest in forests[:rank])
    return whole[start : start + forests[rank].num_nodes]


@pytest.mark.forks
@pytest.mark.parametrize(
    "size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]
)
def test_ranks_exchange_keys_and_their_gradients(size: int) -> None:
    """Attention of random forests in float64, with padding and with ranks that have no nodes; a
    key is sent to several ranks, whose gradients add up. Where keys are exchanged again in the
    backward pass, none is held until then.
    """

    def work() -> None:
        initialize(ParallelConfig(context_parallel_size=size))
        group = parallel_state.get_context_parallel_group()
        rank, num_repeated = group.rank(), 0
        cases = itertools.product(((1, 2), (1, 40), (9, 20), (14, 90)), (True, False))
        for seed, ((count, longest), again) in enumerate(cases):
            batch = batch_of(branching(seed, count, longest))
            share = share_of(batch)
            whole = part_of(batch, share).forest
            ranks = [ContextRank(index, size, Cost(1, 1, 0), 0) for index in range(size)]
            forests = [part_of(batch, share, one).forest for one in ranks]
            generator = torch.Generator().manual_seed(seed)
            query, key, value, weight = (
                torch.randn(whole.num_nodes, heads, 8, dtype=torch.float64, generator=generator)
                for heads in (4, 2, 2, 4)
            )
            inputs = [x.requires_grad_() for x in (query, key, value)]
            expected = forest_attention(*inputs, whole, 1.0)
            truth = torch.autograd.grad((expected * weight.flatten(1)).sum(), inputs)
            forest = forests[rank].padded(4)
            pad = [0, 0, 0, 0, 0, forest.padding]
            own = [F.pad(rows_of(x.detach(), forests, rank), pad).requires_grad_() for x in inputs]
            packed = PackedForest.of(forest, CPU)
            packed.context = group
            with packed.attended(*own[1:], again=again) as (keys, values):
                assert len(keys) == len(forest.ends) == forest.num_nodes + sum(forest.received)
                output = forest_attention(own[0], keys, values, forest, 1.0)
                held = [weakref.ref(x) for x in (keys, values)]
            del keys, values
            assert not forest.received or [x() is None for x in held] == [again] * 2
            scale = F.pad(rows_of(weight, forests, rank), pad).flatten(1)
            gradients = torch.autograd.grad((output * scale).sum(), own)
            real = forest.num_nodes - forest.padding
            for found, exact in zip((output, *gradients), (expected, *truth), strict=True):
                exact = rows_of(exact.detach(), forests, rank)
                torch.testing.assert_close(found[:real], exact, rtol=0, atol=1e-11)
            nodes = np.concatenate([[], *forests[rank].sent])
            num_repeated += len(nodes) - len(np.unique(nodes))
        repeated = int(collectives.sum_over_ranks(torch.tensor(num_repeated)))
        assert size == 2 or repeated

    on_ranks(work, size)


@pytest.mark.forks
@pytest.mark.parametrize("gspo", [True, False])
def test_sequences_on_several_ranks_have_one_ratio(gspo: bool) -> None:
    """GSPO's ratio and the importance of a whole sequence, whose tokens two ranks have."""
    objective = PolicyObjective(
        surrogate="gspo" if gspo else "clip",
        importance_cap=1.2,
        importance_mode="mask",
        importance_floor=0.8,
        importance_level="sequence",
    )
    generator = torch.Generator().manual_seed(0)
    num_tokens, offsets = 30, torch.tensor([0, 11, 12, 20, 30])

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)

    hidden, head = drawn(num_tokens, 6), drawn(9, 6)
    labels = torch.randint(0, 9, (num_tokens,), generator=generator)
    exact = logprob_entropy(hidden @ head.t(), labels)[0].detach()
    old = exact + drawn(num_tokens, scale=0.1)
    rollout = old + drawn(num_tokens, scale=0.05)
    advantages, weights = drawn(num_tokens), torch.rand(num_tokens, generator=generator)

    def loss(kept: torch.Tensor, cu_seqlens: torch.Tensor, group: Any) -> list[torch.Tensor]:
        rows = hidden[kept].requires_grad_()
        terms = (x[kept] for x in (labels, old, advantages, weights))
        value, stats = linear_policy_loss(
            rows,
            head,
            *terms,
            objective,
            rollout_logprobs=rollout[kept],
            cu_seqlens=cu_seqlens,
            context_group=group,
        )
        return [torch.autograd.grad(value, rows)[0], stats.ratio, stats.importance]

    expected = loss(torch.ones(num_tokens, dtype=torch.bool), offsets, None)
    assert 0 < int((expected[2] == 0).sum()) < num_tokens

    def work() -> None:
        initialize(ParallelConfig(context_parallel_size=2))
        group = parallel_state.get_context_parallel_group()
        kept = (torch.arange(num_tokens) < 15) == (group.rank() == 0)
        found = loss(kept, offsets_of(counts_of(kept, offsets)), group)
        for one, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(one, truth[kept].to(one.dtype), rtol=1e-6, atol=1e-9)

    on_ranks(work, 2)


def windows_and_short_texts() -> TokenBatch:
    """Branching episodes, an episode of two windows, and one of a single position, which leaves
    most ranks without a node.
    """
    model = parity.random_model("qwen2", num_hidden_layers=2)
    trajectories = parity.random_trajectories(97, 4)
    trajectories += parity.branches(trajectories)
    for texts in (([5, 6, 7], [8, 5, 6, 7, 1]), ([5],)):
        episode = Trajectory(group_id=9)
        for text in texts:
            episode.append_observation(text, afresh=True)
            episode.append_action(Completion([3, 4][: len(text)], [0.0, 0.0][: len(text)], "stop"))
        trajectories.append(episode)
    batch = pack(trajectories)
    assert batch.cu_segments is not None and int(batch.lengths.min()) == 1
    generator = torch.Generator().manual_seed(3)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(batch.num_positions, generator=generator) * batch.loss_mask

    logprobs = parity.transformers_logprobs(model, batch.by_segment())
    old = logprobs + noise(0.1)
    return batch.with_fields(
        old_logprobs=old,
        rollout_logprobs=old + noise(0.1),
        ref_logprobs=logprobs,
        values=noise(1.0),
        advantages=noise(1.0),
        returns=noise(1.0),
    )


def trained(parallel: ParallelConfig, batch: TokenBatch, folder: Path) -> dict[str, torch.Tensor]:
    """Results of an actor with GSPO and a critic, the bytes that ranks sent among them."""
    model = parity.random_model("qwen2", num_hidden_layers=2)
    groups, num_bytes = initialize(parallel), 0
    options = TrainConfig(
        lr=1e-3, clip_grad=1e6, max_tokens_per_microbatch=30, shared_prefixes="on"
    )
    loss = LossConfig(
        policy_loss="gspo",
        loss_aggregation="seq-mean-token-mean",
        importance_cap=1.3,
        importance_level="sequence",
    )
    policy = MegatronPolicy(model.config, groups, parallel, options, loss, temperature=0.7)
    critic = MegatronCritic(model.config, groups, parallel, options, loss)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    policy.load_weights(weights.get)
    critic.load_weights(weights.get)
    found = {"logprobs": policy.logprobs(batch)}

    def counted(rows: torch.Tensor, *arguments: Any) -> torch.Tensor:
        nonlocal num_bytes
        arrived = send(rows, *arguments)
        num_bytes += arrived.numel() * arrived.itemsize
        return arrived

    send, context._sent = context._sent, counted
    metrics = policy.update(batch)
    context._sent = send
    moved = float(collectives.sum_over_ranks(torch.tensor(num_bytes)))
    assert metrics.get("context_gbytes", 0.0) * 1e9 == pytest.approx(moved / 2)  # and gradients
    for role, learner in (("policy", policy), ("critic", critic)):
        if role == "critic":
            critic.update(batch)
        gradients = learner.trainer.gradients()
        for name, gradient in export_weights(learner.chunks, groups, tensors=gradients):
            found[f"{role} {name}"] = gradient.clone()
    found["values"] = critic.values(batch)
    found["computed_share"] = torch.tensor(metrics["computed_share"])
    if collectives.is_main():
        torch.save(found, folder / str(parallel.context_parallel_size))
    collectives.barrier()
    return found


@pytest.mark.forks
@pytest.mark.parametrize("size", [2, 3])
def test_models_train_as_on_one_rank(size: int, tmp_path: Path) -> None:
    batch = windows_and_short_texts()
    expected = trained(ParallelConfig(), batch, tmp_path)
    on_ranks(
        lambda: trained(ParallelConfig(context_parallel_size=size), batch, tmp_path) and None, size
    )
    found = torch.load(tmp_path / str(size))
    assert found.keys() == expected.keys()
    # a microbatch of several ranks is larger, and shares more
    assert found.pop("computed_share") < expected.pop("computed_share") < 1
    for name, truth in expected.items():
        scale = max(1.0 if name == "logprobs" else 0.0, float(truth.abs().max()), 1e-6)
        assert float((found[name] - truth).abs().max()) <= 2e-5 * scale, name
