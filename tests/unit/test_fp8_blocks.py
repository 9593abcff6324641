"""FP8 blocks for the rollout engine: against loops in float64, and cut before or after."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen_mega.engines.sglang.fp8_blocks import (
    BLOCK,
    SCALES,
    check_blocks,
    quantize,
    quantize_stream,
)
from ragen_mega.models.server_cut import cut_stream

CONFIG = Qwen2Config(
    vocab_size=64,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=4,
)  # heads of 64: two ranks have two key-value heads, one block


@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (1, 1), (128, 129)])
def test_scales_and_error_of_every_block(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (
        torch.randn(shape, generator=generator).bfloat16()
        * torch.logspace(-6, 3, shape[1]).bfloat16()
    )
    weight[:BLOCK, :BLOCK][torch.rand(weight[:BLOCK, :BLOCK].shape, generator=generator) < 0.1] = 0
    values, scales = quantize(weight)
    assert (
        values.dtype == torch.float8_e4m3fn
        and values.shape == shape
        and scales.dtype == torch.float32
    )
    assert scales.shape == (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = (
                slice(row * BLOCK, (row + 1) * BLOCK),
                slice(column * BLOCK, (column + 1) * BLOCK),
            )
            truth, scale = weight[part].double(), scales[row, column].double()
            assert scale == pytest.approx(float(truth.abs().max()) / 448, rel=1e-6)
            error = (values[part].double() * scale - truth).abs()
            # Half a step: three bits of mantissa, or the distance of the smallest values.
            assert bool(
                (error <= torch.maximum(truth.abs() * 2**-4, scale * 2**-10) * (1 + 1e-5)).all()
            )


def test_a_block_of_zeros_stays_zero() -> None:
    values, scales = quantize(torch.zeros(128, 256))
    assert not values.float().any() and bool((scales > 0).all())


def test_cutting_and_quantizing_commute() -> None:
    """A rank's blocks are blocks of the whole weight, so the number of ranks does not change the
    policy.
    """
    torch.manual_seed(0)
    weights = dict(Qwen2ForCausalLM(CONFIG).state_dict())
    check_blocks(CONFIG, 2)
    whole = dict(quantize_stream(cut_stream(weights.items(), CONFIG, 0, 1), CONFIG))
    names = {name for name in whole if name.endswith(SCALES)}
    assert len(names) == 4
    for rank in range(2):
        part = dict(quantize_stream(cut_stream(weights.items(), CONFIG, rank, 2), CONFIG))
        assert part.keys() == whole.keys()
        for dim, layer in ((1, "self_attn.o_proj"), (1, "mlp.down_proj")):
            for suffix in (".weight", ".weight" + SCALES):
                name = f"model.layers.0.{layer}{suffix}"
                expected = whole[name].float().chunk(2, dim=dim)[rank]
                assert torch.equal(part[name].float(), expected)
        name = "model.layers.0.mlp.gate_up_proj.weight"
        for suffix in ("", SCALES):
            gate, up = whole[name + suffix].float().chunk(2)
            assert torch.equal(
                part[name + suffix].float(), torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
            )


def test_blocks_on_two_ranks_are_refused() -> None:
    with pytest.raises(
        ValueError, match="key-value heads .* rollout_tensor_parallel_size 4; lower"
    ):
        check_blocks(CONFIG, 4)
