"""A model that a run can start from, and its conversion to another format by the tool."""

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from ragen_mega.commands import convert_checkpoint
from ragen_mega.config import parse
from ragen_mega.models.huggingface import load_tokenizer, random_weights
from ragen_mega.report.console import Console
from ragen_mega.warm_start.small_model import write_small_model

FLAGS = """
    --environments bandit --prompt-style compact --max-response-length 8 --max-context-length 200
    --eval-prompts 4 --num-groups 2 --group-size 2 --minibatch-size 4 --filter-strategy none
    --lr 1e-3 --num-steps 1 --temperature 1
""".split()


def convert(source: Path, target: Path, format: str, **flags: Any) -> Path:
    names = "tensor_model_parallel_size pipeline_model_parallel_size base dtype max_shard_size"
    given = dict.fromkeys(names.split()) | flags
    arguments = argparse.Namespace(source=source, target=target, format=format, **given)
    convert_checkpoint.convert(arguments, Console(is_writer=True, num_steps=0))
    return target


def write_start(directory: Path, architecture: str) -> Path:
    """A model to start from, with a tokenizer and a vocabulary that two ranks must pad."""
    write_small_model(parse(FLAGS), directory / "tokenizer")
    tokenizer = load_tokenizer(str(directory / "tokenizer"))
    sizes = dict(
        vocab_size=len(tokenizer) // 2 * 2 + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        tie_word_embeddings=architecture == "qwen2_tied",
    )
    config = (
        Qwen2Config(**sizes) if architecture == "qwen2_tied" else Qwen3Config(**sizes, head_dim=12)
    )
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(random_weights(config, 1), strict=not config.tie_word_embeddings)
    model.save_pretrained(directory / "start")
    tokenizer.save_pretrained(directory / "start")
    (directory / "start" / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    return directory / "start"
