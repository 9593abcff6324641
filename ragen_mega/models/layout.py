"""Hugging Face names and layouts <-> Megatron shards, for any tensor- and pipeline-parallel layout.

Megatron fuses q, k and v per key-value group ([q of the group, k, v], group by group) and gate with
up per rank ([gate_r; up_r]); everything else is a plain slice. One table, `_RULES`, states it for
loading, for export and for checkpoints, where megatron-core's dist_checkpointing stores every
parameter whole: the layers stacked, [gate; up] as if on one rank, the vocabulary padded for the
layout that wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.models.shape import head_dim, trainer_vocab_size

# Megatron parameter (pattern) -> (Hugging Face names, how the full tensors are laid out over
# tensor-parallel ranks)
_RULES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (r"embedding\.word_embeddings\.weight", ("model.embed_tokens.weight",), "vocab"),
    (r"output_layer\.weight", ("lm_head.weight",), "vocab"),
    (r"decoder\.final_layernorm\.weight", ("model.norm.weight",), "replicated"),
    (
        r"(?:input_layernorm|self_attention\.linear_qkv\.layer_norm)[._]weight",
        ("input_layernorm.weight",),
        "replicated",
    ),
    (
        r"(?:pre_mlp_layernorm|mlp\.linear_fc1\.layer_norm)[._]weight",
        ("post_attention_layernorm.weight",),
        "replicated",
    ),
    (r"self_attention\.q_layernorm\.weight", ("self_attn.q_norm.weight",), "replicated"),
    (r"self_attention\.k_layernorm\.weight", ("self_attn.k_norm.weight",), "replicated"),
    (
        r"self_attention\.linear_qkv\.(weight|bias)",
        ("self_attn.q_proj.{}", "self_attn.k_proj.{}", "self_attn.v_proj.{}"),
        "qkv",
    ),
    (r"self_attention\.linear_proj\.weight", ("self_attn.o_proj.weight",), "row"),
    (r"mlp\.linear_fc1\.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    (r"mlp\.linear_fc2\.weight", ("mlp.down_proj.weight",), "row"),
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
VALUE_HEAD = "value_head.weight"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one local parameter belongs in the Hugging Face checkpoint."""

    parameter: str  # name in this rank's module
    names: tuple[str, ...]  # Hugging Face names, full tensors
    layout: str  # vocab, replicated, qkv, row, gate_up


def find_slot(parameter: str, layer_offset: int = 0, has_value_head: bool = False) -> Slot:
    """The slot of a parameter by its name in a model whose first layer is number `layer_offset` of
    all.
    """
    if has_value_head and parameter == "output_layer.weight":
        return Slot(parameter, (VALUE_HEAD,), "replicated")
    layer = _LAYER.fullmatch(parameter)
    prefix, name = (
        (f"model.layers.{int(layer[1]) + layer_offset}.", layer[2]) if layer else ("", parameter)
    )
    for pattern, names, layout in _RULES:
        if match := re.fullmatch(pattern, name):
            return Slot(
                parameter,
                tuple(prefix + hf_name.format(*match.groups()) for hf_name in names),
                layout,
            )
    raise ValueError(
        f"no Hugging Face name for Megatron parameter {parameter!r}; add a rule to weights._RULES"
    )


def shard(
    slot: Slot, tensors: Sequence[Tensor], hf: PretrainedConfig, tp_rank: int, tp_size: int
) -> Tensor:
    """This rank's slice, in Megatron's layout, of the full Hugging Face tensors of one slot."""
    if slot.layout == "replicated":
        return tensors[0]
    if slot.layout == "row":
        return tensors[0].chunk(tp_size, dim=1)[tp_rank]
    if slot.layout == "gate_up":
        return torch.cat([tensor.chunk(tp_size)[tp_rank] for tensor in tensors])
    if slot.layout == "qkv":
        num_groups, trailing = hf.num_key_value_heads, tensors[0].shape[1:]
        grouped = torch.cat(
            [tensor.reshape(num_groups, -1, *trailing) for tensor in tensors], dim=1
        )
        return grouped.chunk(tp_size)[tp_rank].reshape(-1, *trailing)
    padding = trainer_vocab_size(hf.vocab_size, tp_size) - tensors[0].shape[0]
    full = (
        torch.cat([tensors[0], tensors[0].new_zeros(padding, tensors[0].shape[1])])
        if padding
        else tensors[0]
    )
    return full.chunk(tp_size)[tp_rank]


def unshard(slot: Slot, shards: Sequence[Tensor], hf: PretrainedConfig) -> list[Tensor]:
    """Inverse of `shard`: the full Hugging Face tensors from the slices of all tensor-parallel
    ranks.
    """
    if slot.layout == "replicated":
        return [shards[0]]
    if slot.layout == "row":
        return [torch.cat(list(shards), dim=1)]
    if slot.layout == "gate_up":
        halves = [piece.chunk(2) for piece in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    if slot.layout == "qkv":
        trailing, dim = shards[0].shape[1:], head_dim(hf)
        grouped = torch.cat(list(shards)).reshape(hf.num_key_value_heads, -1, *trailing)
        sizes = (grouped.shape[1] - 2 * dim, dim, dim)
        return [piece.reshape(-1, *trailing) for piece in grouped.split(sizes, dim=1)]
    return [torch.cat(list(shards))[: hf.vocab_size]]


@dataclass(frozen=True, slots=True)
class StoredSlot:
    """A parameter, or one layer of the parameters of all layers, in a checkpoint."""

    key: str  # name in the checkpoint without the role
    layer: int | None  # index in the first dimension, None if the key holds this parameter alone
    slot: Slot

    def huggingface_shapes(self, hf: PretrainedConfig) -> list[tuple[int, ...]]:
        """Shapes of the Hugging Face tensors of the slot, as config.json demands them."""
        heads, groups = hf.num_attention_heads * head_dim(hf), hf.num_key_value_heads * head_dim(hf)
        if self.slot.layout == "qkv":
            trailing = () if self.key.endswith(".bias") else (hf.hidden_size,)
            return [(rows, *trailing) for rows in (heads, groups, groups)]
        if self.slot.layout == "gate_up":
            return [(hf.intermediate_size, hf.hidden_size)] * 2
        if self.slot.layout == "row":
            return [
                (hf.hidden_size, heads if "self_attention" in self.key else hf.intermediate_size)
            ]
        if self.slot.layout == "vocab":
            return [(hf.vocab_size, hf.hidden_size)]
        return [(head_dim(hf) if re.search(r"[qk]_layernorm", self.key) else hf.hidden_size,)]

    def shape(self, hf: PretrainedConfig) -> tuple[int, ...]:
        """Shape in Megatron's layout on one rank, without the dimension of the layers."""
        tensors = [torch.empty(shape, device="meta") for shape in self.huggingface_shapes(hf)]
        return tuple(shard(self.slot, tensors, hf, 0, 1).shape)


def stored_slots(hf: PretrainedConfig) -> Iterator[StoredSlot]:
    """Every parameter of a policy, in the order of the model."""

    def stored(name: str, layer: int | None) -> StoredSlot:
        if layer is None:
            return StoredSlot(name, None, find_slot(name))
        return StoredSlot(
            f"decoder.layers.{name}", layer, find_slot(f"decoder.layers.{layer}.{name}")
        )

    yield stored("embedding.word_embeddings.weight", None)
    attention = ["linear_qkv.layer_norm_weight", "linear_qkv.weight"]
    if hf.model_type == "qwen2" or getattr(hf, "attention_bias", False):
        attention.append("linear_qkv.bias")
    if hf.model_type == "qwen3":
        attention += ["q_layernorm.weight", "k_layernorm.weight"]
    attention.append("linear_proj.weight")
    mlp = ("linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight")
    for layer in range(hf.num_hidden_layers):
        for name in (
            *(f"self_attention.{name}" for name in attention),
            *(f"mlp.{name}" for name in mlp),
        ):
            yield stored(name, layer)
    yield stored("decoder.final_layernorm.weight", None)
    if not hf.tie_word_embeddings:
        yield stored("output_layer.weight", None)
