"""Families with experts that the package does not know: their weights are divided, joined, stored
and served from a description alone.
"""

import math
import random
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ragen_mega.config import ParallelConfig
from ragen_mega.megatron.model_writer import MegatronWriter
from ragen_mega.models.cuts import EXPERT_DOWN, EXPERT_GATE_UP, REPLICATED
from ragen_mega.models.families import FAMILIES, dense
from ragen_mega.models.family import Family, Weight
from ragen_mega.models.layout import expected_tensors, find_slot, model_slots
from ragen_mega.models.server_cut import cut_stream, stack_experts
from ragen_mega.models.shape import ModelShape
from ragen_mega.storage.model_readers import MegatronReader

WIDTH, EXPERT = 32, 24


def family(num_experts: int) -> Family:
    return Family(
        model_type=f"toy_{num_experts}",
        architecture="ToyForCausalLM",
        outer=dense.OUTER,
        layer=(
            *dense.ATTENTION,
            Weight("mlp.router.weight", REPLICATED, {"router.weight": ("num_moe_experts", WIDTH)}),
            Weight(
                "mlp.experts.local_experts.{e}.linear_fc1.weight",
                EXPERT_GATE_UP,
                {
                    "experts.{e}.w1": ("moe_ffn_hidden_size", WIDTH),
                    "experts.{e}.w3": ("moe_ffn_hidden_size", WIDTH),
                },
                server="experts.w13",
            ),
            Weight(
                "mlp.experts.local_experts.{e}.linear_fc2.weight",
                EXPERT_DOWN,
                {"experts.{e}.w2": (WIDTH, "moe_ffn_hidden_size")},
                server="experts.w2",
            ),
        ),
        computed=dense.COMPUTED,
        limits={},
        neutral=frozenset(),
        sizes={
            "num_moe_experts": itemgetter("experts"),
            "moe_ffn_hidden_size": itemgetter("expert_size"),
        },
    )


@pytest.fixture(params=[2, 8])
def hf(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The entries of a config.json."""
    toy = family(request.param)
    monkeypatch.setitem(FAMILIES, toy.model_type, toy)
    return SimpleNamespace(
        model_type=toy.model_type, experts=request.param, expert_size=EXPERT, vocab_size=90,
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip


def weights_of(shape: ModelShape) -> dict[str, Tensor]:
    return {name: torch.randn(size) for name, size in expected_tensors(shape).items()}


def test_every_expert_has_its_names_and_its_elements(hf: SimpleNamespace) -> None:
    shape = ModelShape.of(hf)
    weights = weights_of(shape)
    ours = {f"model.layers.1.experts.{e}.w{n}" for e in range(hf.experts) for n in (1, 2, 3)}
    assert {name for name in weights if ".1.experts" in name} == ours
    assert shape.num_parameters == sum(map(torch.numel, weights.values()))
    for ep in (1, 2):  # an expert is whole on its rank
        parts = shape.layer_sizes(4, ep)
        assert parts.count(2 * EXPERT * WIDTH) == parts.count(EXPERT * WIDTH) == hf.experts // ep
    parameter = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight"
    slot = find_slot(parameter, shape, 1, 1)  # the second stage, and the second half of two experts
    assert slot.names == ("model.layers.1.experts.1.w2",)
    assert {slot.parameter for slot in model_slots(shape)} >= {parameter}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_weights_are_divided_and_joined_again(hf: SimpleNamespace, tp: int) -> None:
    shape = ModelShape.of(hf)
    weights = weights_of(shape)
    for slot in model_slots(shape):
        full = [weights[name] for name in slot.names]
        shards = [slot.shard(full, rank, tp) for rank in range(tp)]
        assert {math.prod(part.shape) for part in shards} == {shape.num_elements(slot.weight, tp)}
        assert all(map(torch.equal, slot.unshard(shards), full))
        if slot.names[0].endswith("w1"):
            assert torch.equal(shards[-1], torch.cat(full))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_server_gets_all_experts_of_a_layer_as_one_tensor(hf: SimpleNamespace, size: int) -> None:
    shape = ModelShape.of(hf)
    weights = weights_of(shape)
    stream = list(weights.items())
    random.Random(0).shuffle(stream)
    for rank in range(size):
        part = slice(rank * EXPERT // size, (rank + 1) * EXPERT // size)
        served = dict(cut_stream(stream, hf, rank, size))
        assert len(served) == 2 + hf.num_hidden_layers * 6
        for layer in range(hf.num_hidden_layers):
            prefix = f"model.layers.{layer}.experts"
            for e in range(hf.experts):
                w1, w2, w3 = (weights[f"{prefix}.{e}.w{number}"] for number in (1, 2, 3))
                assert torch.equal(served[f"{prefix}.w13"][e], torch.cat([w1[part], w3[part]]))
                assert torch.equal(served[f"{prefix}.w2"][e], w2[:, part])
        local = (  # from the trainer's rank of the same number
            (
                slot,
                slot.shard_to_server(
                    slot.shard([weights[n] for n in slot.names], rank, size), rank, size
                ),
            )
            for slot in model_slots(shape)
        )
        direct = dict(stack_experts(local))
        torch.testing.assert_close(direct, served, rtol=0, atol=0)


def test_checkpoints_keep_every_bit(hf: SimpleNamespace, tmp_path: Path) -> None:
    shape = ModelShape.of(hf)
    weights = weights_of(shape)
    layout = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    writer = MegatronWriter(tmp_path, shape, dict.fromkeys(weights, torch.float32), layout)
    for slot in model_slots(shape):
        writer.write(slot, [weights[name] for name in slot.names])
    writer.close()
    read = MegatronReader(tmp_path, shape)
    assert set(read.names()) == weights.keys()
    assert all(torch.equal(read(name), weight) for name, weight in weights.items())
