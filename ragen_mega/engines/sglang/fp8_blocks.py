"""Weights of a rollout engine in FP8: e4m3 with one float32 scale per block of 128 x 128
(DeepSeek-V3, arXiv:2412.19437, 3.3).

The format of SGLang's block quantization, which scales activations by itself. Embeddings, LM head,
norms and biases stay as they are. The engine's log-probabilities then differ from the trainer's:
correct for the difference with --importance-cap.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.models.cuts import head_rows
from ragen_mega.models.server_cut import linear_names
from ragen_mega.models.shape import ModelShape

BLOCK = 128
SCALES = "_scale_inv"
"""Suffix of the name of a weight's scales in SGLang: value = e4m3 value x scale."""
QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""Entry `quantization_config` in the config.json of an FP8 model."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST = 1e-12  # lower bound of a scale, for blocks of zeros


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> e4m3 [N, K] and float32 scales [N / 128, K / 128], rounded up; the largest value of
    a block becomes 448.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    # [N / 128, 128, K / 128, 128]
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = (blocks.abs().amax(dim=(1, 3)) / _LARGEST).clamp(min=_SMALLEST)
    scaled = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return scaled.to(torch.float8_e4m3fn), scales


def quantize_stream(
    shards: Iterable[tuple[str, Tensor]], hf: PretrainedConfig
) -> Iterator[tuple[str, Tensor]]:
    """Stream of (SGLang's name, shard) with each linear weight of a layer as e4m3 values, and after
    it its scales.
    """
    linear = linear_names(hf)
    for name, tensor in shards:
        if name in linear:
            values, scales = quantize(tensor)
            yield name, values
            yield name + SCALES, scales
        else:
            yield name, tensor


def check_blocks(hf: PretrainedConfig, size: int) -> None:
    """Raise ValueError if a block of a weight that is cut over `size` ranks would span two ranks,
    or two of q, k, v, or if experts have separate weights.
    """
    shape = ModelShape.of(hf)
    if shape.num_experts:
        raise ValueError(
            f"--rollout-fp8 quantizes matrices, and a {hf.model_type} model has its experts in"
            " tensors of all; drop --rollout-fp8"
        )
    query, key = head_rows(shape, 0, size)
    lengths = {
        "the query heads of a rank": query.stop - query.start,
        "its key-value heads": key.stop - key.start,
        "its part of the feed-forward layer": hf.intermediate_size // size,
    }
    if wrong := {what: length for what, length in lengths.items() if length % BLOCK}:
        what, length = next(iter(wrong.items()))
        raise ValueError(
            f"--rollout-fp8 scales blocks of {BLOCK} rows, and {what} have {length} at"
            f" rollout_tensor_parallel_size {size}; lower it or drop --rollout-fp8"
        )
