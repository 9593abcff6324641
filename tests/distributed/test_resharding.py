"""Engine shards out of every training layout, bit by bit against slices of the Hugging Face
checkpoint, and bytes counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from ragen_mega.config import ParallelConfig
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.model import (
    build_model,
    transformer_config,
)
from ragen_mega.megatron.resharding import (
    ReshardPlan,
    Traffic,
    check_same_on_all_ranks,
    gather,
)
from ragen_mega.megatron.weights import (
    export_weights,
    held,
    load_weights,
    reshard_plan,
)
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.ranks import collectives
from ragen_mega.rollout.engine import EngineShard
from tests.support import forked_ranks

SIZES = (1, 2, 4)
pytestmark = [pytest.mark.forks, pytest.mark.timeout(600)]


def random_config(kind: str, seed: int) -> PretrainedConfig:
    """A shape that four ranks can share; vocabularies of no special size, as many key-value heads
    as ranks or fewer.
    """
    draw = random.Random(seed)
    groups = 2 if kind == "few_groups" else 4 * draw.choice((1, 2))
    heads, dim = (
        groups * draw.choice((2, 4) if kind == "few_groups" else (1, 2, 3)),
        2 * draw.choice((1, 2, 3)),
    )
    sizes = dict(
        vocab_size=draw.randrange(65, 400), hidden_size=heads * dim,
        intermediate_size=4 * draw.randrange(3, 12), num_hidden_layers=4 * draw.choice((1, 3)),
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=64,
    )  # fmt: skip
    if kind == "qwen3":
        return Qwen3Config(**sizes, head_dim=dim + 2, tie_word_embeddings=draw.random() < 0.5)
    return Qwen2Config(**sizes, tie_word_embeddings=kind != "qwen2_untied")


CONFIGS = {
    f"{kind}_{seed}": random_config(kind, seed)
    for kind in ("qwen2_tied", "qwen2_untied", "qwen3", "few_groups")
    for seed in (1, 2)
}


def checkpoint(hf: PretrainedConfig) -> dict[str, Tensor]:
    """Names and shapes by transformers, every element random."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(hf).state_dict()
    generator = torch.Generator().manual_seed(0)
    kept = {
        name: tensor
        for name, tensor in empty.items()
        if not (hf.tie_word_embeddings and name == "lm_head.weight")
    }
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in kept.items()}


def engine_truth(
    weights: dict[str, Tensor], hf: PretrainedConfig, rank: int, size: int
) -> dict[str, Tensor]:
    """What SGLang's weight loaders leave on rank `rank` of `size`, stated head by head and row by
    row.
    """
    dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    queries = [
        head
        for head in range(hf.num_attention_heads)
        if head * size // hf.num_attention_heads == rank
    ]
    groups = sorted({head * hf.num_key_value_heads // hf.num_attention_heads for head in queries})
    rows = {"q": queries, "k": groups, "v": groups}
    shards = {}
    for name, tensor in weights.items():
        layer, _, last = name.rpartition("self_attn.")
        if last[1:].startswith("_proj.") and last[0] in rows:
            heads = [tensor[head * dim : (head + 1) * dim] for head in rows[last[0]]]
            shards.setdefault(f"{layer}self_attn.qkv{last[1:]}", {})[last[0]] = torch.cat(heads)
        elif "gate_proj" in name or "up_proj" in name:
            width = hf.intermediate_size // size
            target = (
                name.replace("gate_proj", "gate_up_proj")
                if "gate" in name
                else name.replace("up_proj", "gate_up_proj")
            )
            shards.setdefault(target, {})["gate" if "gate" in name else "up"] = tensor[
                width * rank : width * (rank + 1)
            ]
        elif "o_proj" in name or "down_proj" in name:
            width = tensor.shape[1] // size
            shards[name] = tensor[:, width * rank : width * (rank + 1)]
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            padded = torch.zeros((hf.vocab_size + 63) // 64 * 64, hf.hidden_size)
            padded[: hf.vocab_size] = tensor
            shards[name] = padded[len(padded) // size * rank : len(padded) // size * (rank + 1)]
        else:
            shards[name] = tensor
    order = {3: ("q", "k", "v"), 2: ("gate", "up")}
    return {
        name: (
            torch.cat([found[part] for part in order[len(found)]])
            if isinstance(found, dict)
            else found
        )
        for name, found in shards.items()
    }


@contextmanager
def counted() -> Iterator[Counter]:
    """Payload bytes and calls of every collective of torch.distributed inside, by (what, group)."""
    names = (
        "broadcast", "all_gather", "all_gather_into_tensor", "all_reduce", "reduce",
        "reduce_scatter", "scatter", "gather", "reduce_scatter_tensor", "all_to_all",
        "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv",
        "all_gather_object", "broadcast_object_list", "gather_object", "barrier",
        "all_gather_single", "reduce_scatter_single",
    )  # fmt: skip
    counts, originals = (
        Counter(),
        {name: getattr(dist, name) for name in names if hasattr(dist, name)},
    )

    def counting(name: str, original: Callable) -> Callable:
        def call(*arguments: object, group: object = None, **others: object) -> object:
            tensors = [value for value in arguments if isinstance(value, Tensor)]
            counts[name, group] += (
                tensors[-1].numel() * tensors[-1].element_size() if tensors else 1
            )
            counts["calls", group] += 1
            return original(*arguments, group=group, **others)

        return call

    for name, original in originals.items():
        setattr(dist, name, counting(name, original))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def assert_same(ours: dict[str, Tensor], truth: dict[str, Tensor], what: str) -> None:
    assert ours.keys() == truth.keys(), (what, ours.keys() ^ truth.keys())
    for name, tensor in truth.items():
        assert torch.equal(ours[name], tensor), f"{what}: {name}"


def check_layout(hf: PretrainedConfig, parallel: ParallelConfig, groups) -> None:
    """On every rank: both paths, every rollout size, every engine rank."""
    tp, pp = groups.tp.size(), groups.pp.size()
    weights = checkpoint(hf)
    model = build_model(hf, transformer_config(hf, parallel), groups)
    load_weights(model, weights.get)
    plan = reshard_plan(model, groups)
    assert plan.names == [name for entry in plan.entries for name in entry.slots[0].names]

    traffic = Traffic()
    with counted() as counts:
        full = list(export_weights(model, groups, traffic=traffic))
    assert_same(dict(full), weights, "gathered")
    assert len(full) == len(weights)
    gathered = counts["all_gather_single", groups.tp] + counts["all_gather_into_tensor", groups.tp]
    assert gathered == (plan.shard_bytes if tp > 1 else 0)
    assert traffic.group_bytes["dense"] == (tp - 1) * plan.shard_bytes
    assert counts["calls", groups.tp] == (len(plan.buckets) if tp > 1 else 0)
    assert counts["broadcast", groups.pp] == traffic.pp_bytes == (plan.shard_bytes if pp > 1 else 0)
    assert counts["calls", groups.pp] == (len(plan.buckets) if pp > 1 else 0)
    assert {group for _, group in counts} <= {groups.tp, groups.pp}

    for size in SIZES:
        for rank in range(size):
            truth = engine_truth(weights, hf, rank, size)
            shards = dict(cut_stream(iter(full), hf, rank, size))
            assert_same(shards, truth, f"gather, rollout rank {rank} of {size}")
        traffic, part = Traffic(), EngineShard(collectives.rank() % size, size)
        with counted() as counts:
            ours = dict(export_weights(model, groups, part, traffic=traffic))
        truth = engine_truth(weights, hf, part.rank, size)
        assert_same(ours, truth, f"rank {part.rank} of {size}")
        if size != tp:
            assert counts["calls", groups.tp] == (len(plan.buckets) if tp > 1 else 0)
            continue
        # Nothing but broadcasts over pipeline stages, together as long as one shard of the model.
        assert {key: value for key, value in counts.items() if key[0] != "calls"} == (
            {("broadcast", groups.pp): plan.shard_bytes} if pp > 1 else {}
        )
        assert counts["calls", groups.pp] == (len(plan.buckets) if pp > 1 else 0)
        assert traffic.group_bytes.total() == 0
        assert traffic.pp_bytes == (plan.shard_bytes if pp > 1 else 0)
        if tp > 1:
            assert plan.shard_bytes == sum(
                tensor.numel() * tensor.element_size() for tensor in truth.values()
            )

    check_small_buckets(model, groups, plan, weights)


def check_small_buckets(model, groups, plan: ReshardPlan, weights: dict[str, Tensor]) -> None:
    """Bounded buckets, and none written again after it was handed out: the stream is read only when
    it has ended.
    """
    limit = groups.tp.size() * plan.shard_bytes // 10
    parameters = {slot.parameter: parameter for slot, parameter in held(model)}
    small = ReshardPlan.build(groups, held(model), bucket_bytes=limit)
    assert len(small.buckets) > len(plan.buckets)
    assert all(
        len(b.entries) == 1 or b.num_bytes * groups.tp.size() <= limit for b in small.buckets
    )
    assert small.names == plan.names
    assert_same(dict(list(gather(small, parameters))), weights, "small buckets")


def on_ranks(work: Callable[[], None], num_ranks: int) -> None:
    """Run `work()` on forked ranks, which leave together."""

    def rank() -> None:
        torch.set_num_threads(1)
        work()
        collectives.barrier()

    forked_ranks.on_ranks(rank, num_ranks)


LAYOUTS = [
    pytest.param(tp, pp, marks=pytest.mark.slow if (tp, pp) != (2, 2) else ())
    for tp in SIZES
    for pp in SIZES
]  # tensors and layers cut by two show nearly all that others do


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_every_layout_gives_the_shards_of_the_checkpoint(tp: int, pp: int) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)

    def work() -> None:
        groups = initialize(parallel)
        for hf in CONFIGS.values():
            if hf.num_key_value_heads % tp == 0:  # Megatron's own limit
                check_layout(hf, parallel, groups)

    on_ranks(work, tp * pp)


@pytest.mark.parametrize("kind", ["qwen2_tied_1", "qwen2_untied_1"])
def test_a_critic_and_its_gradients_travel_with_the_value_head(kind: str) -> None:
    hf, parallel = (
        CONFIGS[kind],
        ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    )

    def work() -> None:
        groups = initialize(parallel)
        weights = {
            name: value for name, value in checkpoint(hf).items() if name != "lm_head.weight"
        }
        weights["value_head.weight"] = torch.randn(
            1, hf.hidden_size, generator=torch.Generator().manual_seed(1)
        )
        model = build_model(hf, transformer_config(hf, parallel), groups, is_critic=True)
        load_weights(model, weights.get)
        assert_same(dict(export_weights(model, groups)), weights, "critic")
        doubled = {slot.parameter: 2 * p.detach().double() for slot, p in held(model)}
        gradients = dict(export_weights(model, groups, tensors=doubled))
        assert_same(
            gradients, {name: 2 * value.double() for name, value in weights.items()}, "gradients"
        )

    on_ranks(work, 4)


def test_ranks_that_plan_differently_are_named() -> None:
    def work() -> None:
        collectives.start()
        check_same_on_all_ranks("a" * 64)
        with pytest.raises(ValueError, match="ranks 2 differ .*bbbbbbbb against aaaaaaaa"):
            check_same_on_all_ranks(("b" if collectives.rank() == 2 else "a") * 64)

    on_ranks(work, 3)
