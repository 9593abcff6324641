"""Models of real shapes with random weights, for measurements of time, not of quality."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.config import EnvironmentConfig
from ragen_mega.models.huggingface import random_weights
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import episode_maker
from ragen_mega.storage.model_writers import save_huggingface
from ragen_mega.warm_start.clone import scripted_texts

NUM_EPISODES = 60
"""Scripted episodes that the tokenizer learns from."""
NUM_MERGES = 2000
"""More than the texts yield, so that every word of a prompt is one token, as with Qwen's own."""
STOP = 256.0
"""Distance of the logits of stop tokens below all others, as a multiple of an activation of order
1.
"""


def write_checkpoint(
    hf: PretrainedConfig, environment: str, directory: Path, *, dtype: torch.dtype, seed: int = 0
) -> int:
    """Write a model that never samples a stop token, and a tokenizer for what the environment says,
    in Hugging Face format; returns the number of parameters.

    Words that the tokenizer does not have are sampled like all others and decode to nothing. Raises
    ValueError if the vocabulary is smaller than the tokenizer's.
    """
    episodes = episode_maker(EnvironmentConfig(environments=environment), environment)
    tokenizer = train_tokenizer(
        scripted_texts(episodes, range(NUM_EPISODES), skill=0.0), num_merges=NUM_MERGES
    )
    if hf.vocab_size < len(tokenizer):
        raise ValueError(
            f"vocab_size ({hf.vocab_size}) must be at least the tokenizer's {len(tokenizer)};"
            " choose another --model"
        )
    tokens = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id, "bos": None}
    hf.update({f"{name}_token_id": token for name, token in tokens.items()})
    weights = random_weights(hf, seed, "cuda" if torch.cuda.is_available() else "cpu")
    hf.dtype = str(dtype).removeprefix("torch.")  # initialisation has set float32
    forbid_stop_tokens(weights, ChatRenderer(tokenizer, think=True).stop_token_ids)
    weights = {name: weight.to("cpu", dtype) for name, weight in weights.items()}
    save_huggingface(directory, hf, tokenizer, weights.items(), is_writer=True)
    return sum(weight.numel() for weight in weights.values())


def forbid_stop_tokens(weights: dict[str, Tensor], stop_token_ids: tuple[int, ...]) -> None:
    """Make a random model, in place, unable to sample a stop token.

    Coordinate 0 of the residual stream becomes a constant: every word has 1 there, which no layer
    changes. In the LM head it is 0 or, if that is tied, 1 for all words but stop tokens, which have
    -STOP.
    """
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)
    head[:, 0] = 0.0
    embedding[:, 0] = 1.0
    head[list(stop_token_ids), 0] = -STOP
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
