"""Compile the loops of the program for this processor, in all types: `python -m
tests.support.compile`. Ranks and workers that start together would each compile them.
"""

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from ragen_mega.data.forest import Forest
from ragen_mega.data.types import SamplingParams
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.megatron.cpu.attention import forest_attention

CONFIG = Qwen3Config(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


def compile_for(dtype: torch.dtype) -> None:
    query, key, value = (torch.ones(4, 1, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    forest_attention(query, key, value, Forest.of([4], [0]), 1.0).sum().backward()
    weights = AutoModelForCausalLM.from_config(CONFIG).state_dict()
    engine = EmbeddedEngine(CONFIG, max_context=64, max_sessions=1, dtype=dtype)
    with engine.awake():
        engine.load_weights(weights.items())
        asyncio.run(engine.generate([1, 2], SamplingParams(2, seed=0), session=0))


if __name__ == "__main__":
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as workers:
        list(workers.map(compile_for, (torch.float32, torch.float64, torch.bfloat16)))
