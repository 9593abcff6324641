"""A tokenizer for FrozenLake's compact prompts and a tiny Qwen2 with random weights: a policy that
costs nothing.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from ragen_mega.environments.episode import Episode
from ragen_mega.models.tokenizer import train_tokenizer


def lake_tokenizer(episode: Callable[[], Episode]) -> PreTrainedTokenizerFast:
    texts = [
        "system\nuser\nassistant\n Left Right Up Down || 0 1 2 3 4 5 6 7 8 9 left",
        "first second third",
    ]
    texts += [message.content for seed in range(20) for message in episode().start(seed)]
    return train_tokenizer(texts)


def tiny_qwen2(vocab_size: int, seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config).eval()
