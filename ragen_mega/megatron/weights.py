"""The weights of a model on its ranks: filled from a checkpoint directory, streamed out under
Hugging Face names.

How names and layouts correspond is in `layout`, how directories are read in `model_readers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from ragen_mega.data import distributed
from ragen_mega.megatron.model import QwenModel, ValueHead
from ragen_mega.megatron.reshard_plan import ReshardPlan
from ragen_mega.megatron.resharding import Traffic, aligned, gather
from ragen_mega.models.layout import VALUE_HEAD, Slot, find_slot, shard
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.rollout.engine import EngineShard
from ragen_mega.storage.model_readers import HuggingFaceReader, MegatronReader


def slots(model: QwenModel) -> list[Slot]:
    """One slot per parameter of this rank's part of the model."""
    offset = get_transformer_layer_offset(model.config)
    return [
        find_slot(name, offset, isinstance(getattr(model, "output_layer", None), ValueHead))
        for name, _ in model.named_parameters()
    ]


def mark_tensor_parallel(model: QwenModel) -> None:
    """Tell megatron-core which parameters are slices; it does so itself only while it draws random
    initial weights.

    An unmarked slice counts as a duplicate of rank 0's, and the gradient norm, and so clipping,
    would be wrong.
    """
    parameters = dict(model.named_parameters())
    for slot in slots(model):
        parameter = parameters[slot.parameter]
        if slot.layout != "replicated" and not getattr(parameter, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(
                parameter, True, 1 if slot.layout == "row" else 0, 1
            )


def load_weights(model: QwenModel, read: Callable[[str], Tensor | None]) -> None:
    """Fill this rank's part of the model. `read(name)` returns a full Hugging Face tensor or None
    if there is none.

    A tied LM head falls back to the embedding. A critic without a stored value head keeps its own.
    Raises ValueError on a missing or mis-shaped tensor.
    """
    tp_rank, tp_size = model.tp_group.rank(), model.tp_group.size()
    parameters = dict(model.named_parameters())
    for slot in slots(model):
        tensors = [read(name) for name in slot.names]
        if (
            slot.names == ("lm_head.weight",)
            and tensors[0] is None
            and model.hf.tie_word_embeddings
        ):
            tensors = [read("model.embed_tokens.weight")]
        if slot.names == (VALUE_HEAD,) and tensors[0] is None:
            continue
        if missing := [name for name, tensor in zip(slot.names, tensors) if tensor is None]:
            raise ValueError(
                f"the checkpoint lacks {', '.join(missing)}; is it a complete {model.hf.model_type}"
                " checkpoint?"
            )
        parameter = parameters[slot.parameter]
        try:
            local = shard(slot, tensors, model.hf, tp_rank, tp_size)
        except RuntimeError as error:
            raise ValueError(
                f"{', '.join(slot.names)} do not fit config.json ({error}); is the checkpoint"
                " damaged?"
            ) from None
        if local.shape != parameter.shape:
            raise ValueError(
                f"{', '.join(slot.names)} give shape {list(local.shape)} on this rank where"
                f" config.json asks for {list(parameter.shape)}; is the checkpoint damaged or of"
                " another model?"
            )
        with torch.no_grad():
            parameter.copy_(local)


class CheckpointReader:
    """Lazy access by Hugging Face name to the tensors of a checkpoint directory: one of Hugging
    Face (safetensors, sharded or not), or one that tools/convert_checkpoint.py wrote in megatron
    format, whose checksums rank 0 verifies.
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


_plans: WeakKeyDictionary[QwenModel, ReshardPlan] = WeakKeyDictionary()


def reshard_plan(model: QwenModel, groups: ProcessGroupCollection) -> ReshardPlan:
    """The plan of the model's weight syncs: built by all ranks together at the first call, the same
    object from then on.
    """
    if model not in _plans:
        _plans[model] = _build_plan(model, groups, dict(model.named_parameters()))
    return _plans[model]


def _build_plan(
    model: QwenModel, groups: ProcessGroupCollection, tensors: Mapping[str, Tensor]
) -> ReshardPlan:
    return ReshardPlan.build(
        model.hf, groups, [(slot, tensors[slot.parameter]) for slot in slots(model)]
    )


def export_weights(
    model: QwenModel,
    groups: ProcessGroupCollection,
    tensors: Mapping[str, Tensor] | None = None,
    traffic: Traffic | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, full tensor) in one order on all ranks, gathered over tensor and
    pipeline ranks.

    A collective: every rank must consume the whole stream. A tied LM head is not sent a second
    time. `tensors` replaces the parameters by something of their shapes, such as gradients.
    `traffic` counts what is moved.
    """
    if tensors is None:
        yield from gather(reshard_plan(model, groups), dict(model.named_parameters()), traffic)
    else:  # gradients have a dtype of their own
        yield from gather(_build_plan(model, groups, tensors), tensors, traffic)


def export_shards(
    model: QwenModel,
    groups: ProcessGroupCollection,
    part: EngineShard,
    traffic: Traffic | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Stream (SGLang's name, shard of rank `part.rank` of `part.size`), by the path that moves the
    least.

    A collective over pipeline stages, and over tensor-parallel ranks unless every rank is to have
    the engine's shard of its own number; then nothing moves over them. Raises ValueError where the
    model cannot be cut so.
    """
    plan, parameters = reshard_plan(model, groups), dict(model.named_parameters())
    if part.size == groups.tp.size():
        assert part.rank == groups.tp.rank(), (
            "engines and tensor-parallel groups are the same consecutive ranks"
        )
        yield from aligned(plan, parameters, part.size, traffic)
    else:
        yield from cut_stream(gather(plan, parameters, traffic), model.hf, *part)
