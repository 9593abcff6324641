"""Sharding rules against an independent statement of Megatron's layout, and round trips through
every split.
"""

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config

from ragen_mega.config import ParallelConfig
from ragen_mega.megatron.model import check_model
from ragen_mega.models.cuts import GATE_UP, QKV, REPLICATED, ROW, VOCAB, Cut, trainer_vocab_size
from ragen_mega.models.layout import Slot, model_slots
from ragen_mega.models.shape import ModelShape

CONFIGS = {
    "qwen2": Qwen2Config(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    ),
    "qwen3": Qwen3Config(
        vocab_size=93,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=6,
    ),
}
HEAD_DIM = {"qwen2": 4, "qwen3": 6}


def tensors(architecture: str, cut: Cut) -> list[torch.Tensor]:
    dim, rand = HEAD_DIM[architecture], lambda *shape: torch.randn(*shape)
    return {
        QKV: [rand(8 * dim, 32), rand(4 * dim, 32), rand(4 * dim, 32)],
        GATE_UP: [rand(48, 32), rand(48, 32)],
        ROW: [rand(32, 8 * dim)],
        VOCAB: [rand(CONFIGS[architecture].vocab_size, 32)],
        REPLICATED: [rand(32)],
    }[cut]


def slot(architecture: str, cut: Cut) -> Slot:
    """The first weight of the model that is cut so."""
    slots = model_slots(ModelShape.of(CONFIGS[architecture]))
    return next(slot for slot in slots if slot.weight.cut == cut)


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("cut", [QKV, GATE_UP, ROW, VOCAB, REPLICATED])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_round_trip(architecture: str, cut: Cut, tp: int) -> None:
    one, full = slot(architecture, cut), tensors(architecture, cut)
    assert one.shapes == [tuple(tensor.shape) for tensor in full]
    shards = [one.shard(full, rank, tp) for rank in range(tp)]
    assert len({piece.shape for piece in shards}) == 1
    for expected, got in zip(full, one.unshard(shards), strict=True):
        assert torch.equal(expected, got)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_qkv_holds_whole_groups(tp: int) -> None:
    dim = 6
    q, k, v = tensors("qwen3", QKV)
    for rank in range(tp):
        local = slot("qwen3", QKV).shard([q, k, v], rank, tp)
        rows = []
        for group in range(
            rank * 4 // tp, (rank + 1) * 4 // tp
        ):  # each key-value head with its two query heads
            rows += [q[2 * group * dim : 2 * (group + 1) * dim], k[group * dim : (group + 1) * dim]]
            rows += [v[group * dim : (group + 1) * dim]]
        assert torch.equal(local, torch.cat(rows))


def test_gate_and_up_are_fused_per_rank() -> None:
    gate, up = tensors("qwen2", GATE_UP)
    local = slot("qwen2", GATE_UP).shard([gate, up], 1, 2)
    assert torch.equal(local, torch.cat([gate[24:], up[24:]]))


def test_vocabulary_is_padded_with_zero_rows_as_the_engine_pads_it() -> None:
    hf = CONFIGS["qwen3"]  # 93 rows over 4 ranks, filled up to a multiple of 64
    (weight,) = tensors("qwen3", VOCAB)
    third, last = (slot("qwen3", VOCAB).shard([weight], rank, 4) for rank in (2, 3))
    assert trainer_vocab_size(hf.vocab_size, 4) == 128 and third.shape == last.shape == (32, 32)
    assert torch.equal(third[:29], weight[64:]) and not third[29:].any() and not last.any()
    alone = slot("qwen3", VOCAB).shard([weight], 0, 1)
    assert trainer_vocab_size(hf.vocab_size, 1) == 93 and torch.equal(alone, weight)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(tensor_model_parallel_size=8), r"key-value heads \(4\)"),
        (ParallelConfig(tensor_model_parallel_size=3), r"attention heads \(8\)"),
        (ParallelConfig(pipeline_model_parallel_size=8), r"\(8\) must be at most .* layers \(4\)"),
        (
            ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3),
            r"\(2\) x virtual_pipeline_model_parallel_size \(3\) must be at most .* layers \(4\)",
        ),
    ],
)
def test_impossible_layouts_are_refused(parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(CONFIGS["qwen2"], parallel)
