"""Hugging Face names and layouts <-> Megatron shards, for any tensor- and pipeline-parallel layout.

Megatron fuses q, k and v per key-value group ([q of the group, k, v], group by group) and gate with up per rank
([gate_r; up_r]); everything else is a plain slice. One table, `_RULES`, states it for loading and for export.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega import distributed
from ragen_mega.megatron.model import QwenModel, ValueHead, head_dim, padded_vocab_size

# Megatron parameter (pattern) -> (Hugging Face names, how the full tensors are laid out over tensor-parallel ranks)
_RULES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (r"embedding\.word_embeddings\.weight", ("model.embed_tokens.weight",), "vocab"),
    (r"output_layer\.weight", ("lm_head.weight",), "vocab"),
    (r"decoder\.final_layernorm\.weight", ("model.norm.weight",), "replicated"),
    (r"(?:input_layernorm|self_attention\.linear_qkv\.layer_norm)[._]weight", ("input_layernorm.weight",), "replicated"),
    (r"(?:pre_mlp_layernorm|mlp\.linear_fc1\.layer_norm)[._]weight", ("post_attention_layernorm.weight",), "replicated"),
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


def slots(model: QwenModel) -> list[Slot]:
    """One slot per parameter of this rank's part of the model."""
    offset = get_transformer_layer_offset(model.config)
    return [_slot(name, offset, isinstance(getattr(model, "output_layer", None), ValueHead))
            for name, _ in model.named_parameters()]


def _slot(parameter: str, layer_offset: int, has_value_head: bool) -> Slot:
    if has_value_head and parameter == "output_layer.weight":
        return Slot(parameter, (VALUE_HEAD,), "replicated")
    layer = _LAYER.fullmatch(parameter)
    prefix, name = (f"model.layers.{int(layer[1]) + layer_offset}.", layer[2]) if layer else ("", parameter)
    for pattern, names, layout in _RULES:
        if match := re.fullmatch(pattern, name):
            return Slot(parameter, tuple(prefix + hf_name.format(*match.groups()) for hf_name in names), layout)
    raise ValueError(f"no Hugging Face name for Megatron parameter {parameter!r}; add a rule to weights._RULES")


def mark_tensor_parallel(model: QwenModel) -> None:
    """Tell megatron-core which parameters are slices; it does so itself only while it draws random initial weights.

    An unmarked slice counts as a duplicate of rank 0's, and the gradient norm, and so clipping, would be wrong.
    """
    parameters = dict(model.named_parameters())
    for slot in slots(model):
        parameter = parameters[slot.parameter]
        if slot.layout != "replicated" and not getattr(parameter, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(parameter, True, 1 if slot.layout == "row" else 0, 1)


def shard(slot: Slot, tensors: Sequence[Tensor], hf: PretrainedConfig, tp_rank: int, tp_size: int) -> Tensor:
    """This rank's slice, in Megatron's layout, of the full Hugging Face tensors of one slot."""
    if slot.layout == "replicated":
        return tensors[0]
    if slot.layout == "row":
        return tensors[0].chunk(tp_size, dim=1)[tp_rank]
    if slot.layout == "gate_up":
        return torch.cat([tensor.chunk(tp_size)[tp_rank] for tensor in tensors])
    if slot.layout == "qkv":
        num_groups, trailing = hf.num_key_value_heads, tensors[0].shape[1:]
        grouped = torch.cat([tensor.reshape(num_groups, -1, *trailing) for tensor in tensors], dim=1)
        return grouped.chunk(tp_size)[tp_rank].reshape(-1, *trailing)
    padding = padded_vocab_size(hf, tp_size) - tensors[0].shape[0]
    full = torch.cat([tensors[0], tensors[0].new_zeros(padding, tensors[0].shape[1])]) if padding else tensors[0]
    return full.chunk(tp_size)[tp_rank]


def unshard(slot: Slot, shards: Sequence[Tensor], hf: PretrainedConfig) -> list[Tensor]:
    """Inverse of `shard`: the full Hugging Face tensors from the slices of all tensor-parallel ranks."""
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


def load_weights(model: QwenModel, read: Callable[[str], Tensor | None]) -> None:
    """Fill this rank's part of the model. `read(name)` returns a full Hugging Face tensor or None if there is none.

    A tied LM head falls back to the embedding. A critic without a stored value head keeps its own. Raises ValueError on a
    missing or mis-shaped tensor.
    """
    tp_rank, tp_size = model.tp_group.rank(), model.tp_group.size()
    parameters = dict(model.named_parameters())
    for slot in slots(model):
        tensors = [read(name) for name in slot.names]
        if slot.names == ("lm_head.weight",) and tensors[0] is None and model.hf.tie_word_embeddings:
            tensors = [read("model.embed_tokens.weight")]
        if slot.names == (VALUE_HEAD,) and tensors[0] is None:
            continue
        if missing := [name for name, tensor in zip(slot.names, tensors) if tensor is None]:
            raise ValueError(f"the checkpoint lacks {', '.join(missing)}; is it a complete {model.hf.model_type} checkpoint?")
        parameter = parameters[slot.parameter]
        try:
            local = shard(slot, tensors, model.hf, tp_rank, tp_size)
        except RuntimeError as error:
            raise ValueError(f"{', '.join(slot.names)} do not fit config.json ({error}); is the checkpoint damaged?") from None
        if local.shape != parameter.shape:
            raise ValueError(
                f"{', '.join(slot.names)} give shape {list(local.shape)} on this rank where config.json asks for "
                f"{list(parameter.shape)}; is the checkpoint damaged or of another model?"
            )
        with torch.no_grad():
            parameter.copy_(local)


class CheckpointReader:
    """Lazy access by name to the tensors of a Hugging Face checkpoint directory (safetensors, sharded or not)."""

    def __init__(self, directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        if index.exists():
            files = {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        elif (directory / "model.safetensors").exists():
            path = directory / "model.safetensors"
            files = dict.fromkeys(self._open(path).keys(), path)
        else:
            raise ValueError(f"no model.safetensors or model.safetensors.index.json in {directory}; give --load a "
                             "Hugging Face checkpoint directory")
        self._files = files
        self._handles: dict[Path, safe_open] = {}

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._files)

    @staticmethod
    def _open(path: Path) -> safe_open:
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read {path}: {error}; the file is missing or damaged, copy it again") from None

    def __call__(self, name: str) -> Tensor | None:
        path = self._files.get(name)
        if path is None:
            return None
        if path not in self._handles:
            self._handles[path] = self._open(path)
        return self._handles[path].get_tensor(name)


def export_weights(
    model: QwenModel, groups: ProcessGroupCollection, tensors: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, full tensor) in one order on all ranks, gathered over tensor and pipeline ranks.

    A collective: every rank must consume the whole stream. A tied LM head is not sent a second time. `tensors` replaces
    the parameters by something of their shapes, such as gradients.
    """
    tensors = dict(model.named_parameters()) if tensors is None else tensors
    local = [(slot, tensors[slot.parameter].shape, tensors[slot.parameter].dtype) for slot in slots(model)]
    stages: list[list] = [local]
    if groups.pp.size() > 1:
        stages = [[] for _ in range(groups.pp.size())]
        dist.all_gather_object(stages, local, group=groups.pp)
    for stage, entries in enumerate(stages):
        for slot, shape, dtype in entries:
            if slot.names == ("lm_head.weight",) and model.share_embeddings_and_output_weights:
                continue
            if groups.pp.rank() == stage:
                piece = tensors[slot.parameter].detach().contiguous()
            else:
                piece = torch.empty(shape, dtype=dtype, device=distributed.device())
            if groups.pp.size() > 1:
                dist.broadcast(piece, src=dist.get_global_rank(groups.pp, stage), group=groups.pp)
            pieces = [piece]
            if groups.tp.size() > 1 and slot.layout != "replicated":
                pieces = [torch.empty_like(piece) for _ in range(groups.tp.size())]
                dist.all_gather(pieces, piece, group=groups.tp)
            yield from zip(slot.names, unshard(slot, pieces, model.hf))
