"""Qwen2.5 in its sizes, or as many of its layers and words as a memory holds: what
tools/bench_reshard.py measures.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, Qwen2Config

from ragen_mega.config import ParallelConfig
from ragen_mega.megatron.model import check_model
from ragen_mega.models.layout import model_slots
from ragen_mega.models.shape import ModelShape

SHAPES = {
    name: shape
    for name, shape in json.loads(Path(__file__).with_name("model_shapes.json").read_text()).items()
    if name.startswith("Qwen2.5-")
}
MIN_VOCAB = 4096


def model_config(
    name: str, num_layers: int | None = None, vocab_size: int | None = None
) -> Qwen2Config:
    """The named shape, with another number of layers or words if given."""
    changes = {"num_hidden_layers": num_layers, "vocab_size": vocab_size}
    return AutoConfig.for_model(
        **SHAPES[name] | {key: value for key, value in changes.items() if value}
    )


def model_elements(hf: Qwen2Config) -> tuple[int, int]:
    """(elements of all weights, elements of the largest tensor)."""
    sizes = [
        torch.Size(shape).numel()
        for slot in model_slots(ModelShape.of(hf))
        for shape in slot.shapes
    ]
    return sum(sizes), max(sizes)


def memory_needed(hf: Qwen2Config, itemsize: int, num_ranks: int, bucket_bytes: int) -> int:
    """Bytes of all processes: the weights once, and per rank a bucket and the largest tensor in
    three stages each.
    """
    total, largest = model_elements(hf)
    return total * itemsize + num_ranks * (3 * bucket_bytes + 3 * largest * itemsize)


def fitting_config(
    name: str,
    parallel: ParallelConfig,
    itemsize: int,
    bucket_bytes: int,
    budget: int,
    layers: int | None,
) -> Qwen2Config:
    """The largest part of the model that fits into `budget` bytes. Raises ValueError if not even
    the smallest does.
    """
    pp = parallel.pipeline_model_parallel_size
    num_ranks = pp * parallel.tensor_model_parallel_size
    full = model_config(name, layers)
    check_model(full, parallel)
    for num_layers in range(full.num_hidden_layers, 0, -pp):
        if (
            memory_needed(hf := model_config(name, num_layers), itemsize, num_ranks, bucket_bytes)
            <= budget
        ):
            return hf
    vocab = full.vocab_size
    while (vocab := vocab // 2 // 64 * 64) >= MIN_VOCAB:
        if (
            memory_needed(hf := model_config(name, pp, vocab), itemsize, num_ranks, bucket_bytes)
            <= budget
        ):
            return hf
    raise ValueError(
        f"{name} with {pp} layers on {num_ranks} ranks does not fit into {budget / 1e9:.1f} GB; "
        "raise --memory-gb, or lower --bucket-mb, the parallel sizes or --model"
    )
