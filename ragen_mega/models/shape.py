"""What of a config.json decides how large a dense Qwen model is. Architecture: arXiv:2412.15115,
arXiv:2505.09388.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

_VOCAB_MULTIPLE = 64


def engine_vocab_size(vocab_size: int, size: int) -> int:
    """Rows of SGLang's embedding over all `size` ranks: a multiple of 64, and of 64 * `size` where
    `size` does not divide that.

    Source: layers/vocab_parallel_embedding.py of SGLang 0.5.17.
    """
    padded = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    if padded % size == 0:
        return padded
    multiple = _VOCAB_MULTIPLE * size  # on a CPU; SGLang's GPU build refuses such a size
    return -(-vocab_size // multiple) * multiple


def trainer_vocab_size(vocab_size: int, size: int) -> int:
    """Rows of the trainer's embedding over all `size` ranks: as SGLang's, so that its shards are
    these; one needs no padding.

    Qwen's own sizes are multiples of 128 and stay as they are.
    """
    return vocab_size if size == 1 else engine_vocab_size(vocab_size, size)


def rope_parameters(hf: PretrainedConfig) -> dict[str, Any]:
    """RoPE settings of a transformers config (`rope_theta` moved into a dictionary in transformers
    5).
    """
    return getattr(hf, "rope_parameters", None) or {"rope_theta": hf.rope_theta}


def head_dim(hf: PretrainedConfig) -> int:
    """Channels of one attention head; older configurations leave it to be derived."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a Qwen2, Qwen2.5 or Qwen3 dense model decides its size."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    is_tied: bool

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> ModelShape:
        """From the entries of a config.json. Raises ValueError if one is missing or the model is of
        another kind.
        """
        if values.get("model_type") not in ("qwen2", "qwen3"):
            raise ValueError(
                f"model_type must be qwen2 or qwen3, not {values.get('model_type')!r}; choose"
                " another model"
            )
        try:
            return cls(
                model_type=values["model_type"],
                num_layers=values["num_hidden_layers"],
                hidden_size=values["hidden_size"],
                num_heads=values["num_attention_heads"],
                num_kv_heads=values["num_key_value_heads"],
                head_dim=values.get("head_dim")
                or values["hidden_size"] // values["num_attention_heads"],
                ffn_size=values["intermediate_size"],
                vocab_size=values["vocab_size"],
                is_tied=bool(values.get("tie_word_embeddings")),
            )
        except KeyError as error:
            raise ValueError(f"config.json lacks {error}; use the model's own file") from None

    def layer_sizes(self, tp: int = 1) -> list[int]:
        """Elements of the parameters of a layer on a tensor-parallel rank, in the order of
        megatron-core's local layer.
        """
        hidden, dim, ffn = self.hidden_size, self.head_dim, self.ffn_size // tp
        heads, qkv = (
            self.num_heads * dim // tp,
            (self.num_heads + 2 * self.num_kv_heads) * dim // tp,
        )
        attention = [hidden, hidden * heads, qkv * hidden]
        attention += (
            [qkv] if self.model_type == "qwen2" else [dim, dim]
        )  # biases, or norms of queries and keys
        return [*attention, hidden, 2 * ffn * hidden, hidden * ffn]

    def linear_sizes(self, tp: int = 1) -> list[int]:
        """Elements of those that are matrices of a product."""
        return [size for size in self.layer_sizes(tp) if size > 3 * self.hidden_size]

    def engine_weights(self, itemsize: int, tp: int, *, fp8: bool = False) -> int:
        """Bytes of the policy's weights on a rank of an engine; with `fp8` the layers' matrices
        have one byte an element.
        """
        total = self.num_parameters * itemsize
        if fp8:  # the scale of 128 x 128 of them is nothing
            total -= self.num_layers * sum(self.linear_sizes()) * (itemsize - 1)
        return total // tp

    def kv_cache_bytes(self, itemsize: int, tp: int) -> int:
        """Bytes of a token in the key-value cache of a rank of an engine."""
        heads = max(1, self.num_kv_heads // tp)  # above that they are replicated
        return self.num_layers * 2 * heads * self.head_dim * itemsize

    @property
    def num_parameters(self) -> int:
        """Of the whole policy."""
        vocab = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
        return self.num_layers * sum(self.layer_sizes()) + self.hidden_size + vocab
