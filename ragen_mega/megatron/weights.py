"""The weights of a model on its ranks: filled from a checkpoint directory, streamed out under Hugging Face names.

How names and layouts correspond is in `layout`, how directories are read in `model_readers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from ragen_mega import distributed
from ragen_mega.megatron.layout import VALUE_HEAD, Slot, find_slot, shard, unshard
from ragen_mega.megatron.model import QwenModel, ValueHead
from ragen_mega.megatron.model_readers import HuggingFaceReader, MegatronReader


def slots(model: QwenModel) -> list[Slot]:
    """One slot per parameter of this rank's part of the model."""
    offset = get_transformer_layer_offset(model.config)
    return [find_slot(name, offset, isinstance(getattr(model, "output_layer", None), ValueHead))
            for name, _ in model.named_parameters()]


def mark_tensor_parallel(model: QwenModel) -> None:
    """Tell megatron-core which parameters are slices; it does so itself only while it draws random initial weights.

    An unmarked slice counts as a duplicate of rank 0's, and the gradient norm, and so clipping, would be wrong.
    """
    parameters = dict(model.named_parameters())
    for slot in slots(model):
        parameter = parameters[slot.parameter]
        if slot.layout != "replicated" and not getattr(parameter, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(parameter, True, 1 if slot.layout == "row" else 0, 1)


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
    """Lazy access by Hugging Face name to the tensors of a checkpoint directory: one of Hugging Face (safetensors, sharded
    or not), or one that tools/convert_checkpoint.py wrote in megatron format, whose checksums rank 0 verifies.
    """

    def __init__(self, directory: Path) -> None:
        if MegatronReader.is_for(directory):
            self._reader = MegatronReader.open(directory, verify=distributed.is_main())
        else:
            self._reader = HuggingFaceReader(directory)

    def names(self) -> list[str]:
        """Names of all tensors."""
        return self._reader.names()

    def __call__(self, name: str) -> Tensor | None:
        return self._reader(name)


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
