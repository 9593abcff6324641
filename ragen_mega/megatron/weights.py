"""The weights of a model on its ranks: filled from a checkpoint directory, streamed out under
Hugging Face names.

How names correspond is in `ragen_mega.models.layout`, how ranks divide a parameter in
`ragen_mega.models.cuts`, how directories are read in `ragen_mega.storage.model_readers`.
"""

from collections.abc import Callable, Iterator, Mapping
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from ragen_mega.megatron.lora import Merged, draw
from ragen_mega.megatron.model import Chunks
from ragen_mega.megatron.resharding import ReshardPlan, Traffic, gather, serve
from ragen_mega.models.family import VALUE_HEAD
from ragen_mega.models.layout import Slot, find_slot
from ragen_mega.models.lora import expected_adapters
from ragen_mega.models.rounding import spread_bits
from ragen_mega.rollout.engine import EngineShard
from ragen_mega.storage.model_readers import check_finite


def held(chunks: Chunks) -> Iterator[tuple[Slot, nn.Parameter]]:
    """Yield every parameter of this rank's chunks of a model but for adapters, with its slot."""
    return ((slot, parameter) for slot, parameter in _slots(chunks) if ".lora_" not in slot.key)


def trained(chunks: Chunks) -> Iterator[tuple[Slot, nn.Parameter]]:
    """Yield every parameter of them that is trained, with its slot."""
    return ((slot, parameter) for slot, parameter in _slots(chunks) if parameter.requires_grad)


def _slots(chunks: Chunks) -> Iterator[tuple[Slot, nn.Parameter]]:
    for chunk in chunks:
        offsets, further = (chunk.layer_offset, chunk.expert_offset), chunk.adapter_weights
        for name, parameter in chunk.named_parameters():
            yield (
                find_slot(name, chunk.shape, *offsets, is_critic=chunk.is_critic, further=further),
                parameter,
            )


def mark_tensor_parallel(chunks: Chunks) -> None:
    """Tell megatron-core which parameters are slices; it does so itself only while it draws random
    initial weights. An unmarked slice counts as a duplicate of rank 0's, and the gradient norm, and
    so clipping, would be wrong. Transformer Engine's experts are never marked by megatron-core.

    The gradient of an expert is summed over the ranks that hold it. megatron-core 0.16.1 sums it
    over data-parallel ranks where experts are not divided, although each tensor-parallel rank has
    sent it other tokens (both faults: NVIDIA/Megatron-LM pull request 5916).
    """
    for slot, parameter in _slots(chunks):
        axis = slot.weight.cut.axis
        if axis is not None and not getattr(parameter, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)
        vars(parameter)["allreduce"] = slot.group == "dense"


def load_weights(
    chunks: Chunks,
    read: Callable[[str], Tensor | None],
    start: Callable[[nn.Parameter, Tensor], None] | None = None,
) -> None:
    """Fill this rank's chunks of a model. `read(name)` returns a full Hugging Face tensor or None
    if there is none; `start` gets each parameter with its values before they are rounded to its
    type.

    A critic without a stored value head keeps its own. Raises ValueError on a missing or mis-shaped
    tensor, and if a number is not finite.
    """
    for slot, parameter in held(chunks):
        if slot.names != (VALUE_HEAD,) or read(VALUE_HEAD) is not None:
            # a weight that stays as it is needs no bits below bfloat16
            spreads = start is not None and parameter.requires_grad
            values = _fill(slot, parameter, read, chunks[-1].tp_group, spreads=spreads)
            if start is not None:
                start(parameter, values)


def load_adapters(chunks: Chunks, read: Callable[[str], Tensor | None]) -> None:
    """Fill the adapters of this rank's chunks. Raises ValueError as `load_weights` does."""
    for slot, parameter in trained(chunks):
        if slot.names != (VALUE_HEAD,):
            _fill(slot, parameter, read, chunks[-1].tp_group)


def start_adapters(chunks: Chunks, seed: int) -> None:
    """Fill the adapters with which training starts, if there are any."""
    if (lora := chunks[0].lora).rank:
        load_adapters(chunks, draw(expected_adapters(chunks[0].shape, lora), seed))


def _fill(
    slot: Slot,
    parameter: nn.Parameter,
    read: Callable[[str], Tensor | None],
    tp: dist.ProcessGroup,
    *,
    spreads: bool = False,
) -> Tensor:
    tensors = [read(name) for name in slot.names]
    found = [None if tensor is None else tuple(tensor.shape) for tensor in tensors]
    if found != slot.shapes:
        raise ValueError(
            f"{', '.join(slot.names)} must have the shapes {slot.shapes} that config.json asks"
            f" for, not {found}; is the checkpoint complete, and of this model?"
        )
    whole = [
        spread_bits(tensor, name) if spreads and parameter.dtype == torch.bfloat16 else tensor
        for name, tensor in zip(slot.names, tensors)
        if tensor is not None
    ]
    local = slot.shard(whole, tp.rank(), tp.size())
    with torch.no_grad():
        parameter.copy_(local)
    check_finite(", ".join(slot.names), parameter)  # rounded: a spread infinity may be finite
    return local


_plans: WeakKeyDictionary[Chunks, ReshardPlan] = WeakKeyDictionary()


def reshard_plan(chunks: Chunks, groups: ProcessGroupCollection) -> ReshardPlan:
    """Return the plan of the model's weight syncs: built by all ranks together at the first call,
    the same object from then on.
    """
    if chunks not in _plans:
        _plans[chunks] = ReshardPlan.build(groups, held(chunks))
    return _plans[chunks]


def export_weights(
    chunks: Chunks,
    groups: ProcessGroupCollection,
    part: EngineShard | None = None,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    traffic: Traffic | None = None,
    is_merged: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Stream (Hugging Face name, full tensor) in one order on all ranks, gathered over tensor and
    pipeline ranks; with `part` (SGLang's name, shard) of this rank's part of a server, by the path
    that moves the least.

    A collective: every rank must consume the whole stream. A tied LM head is not sent a second
    time. Adapters are merged if `is_merged`. `tensors` replaces the parameters that are trained by
    something of their shapes, such as gradients, under the names that their slots have. `traffic`
    counts what is moved. Raises ValueError where the model cannot be cut into such parts.
    """
    if tensors is not None:  # gradients have their own dtype
        local = [(slot, tensors[slot.parameter]) for slot, _ in trained(chunks)]
        plan = ReshardPlan.build(groups, local, lora=chunks[0].lora)
        yield from gather(plan, tensors, traffic)
        return
    plan = reshard_plan(chunks, groups)
    weights: Mapping[str, Tensor] = {slot.parameter: weight for slot, weight in held(chunks)}
    if chunks[0].lora.rank and is_merged:
        weights = Merged(chunks, weights)
    if part is None:
        yield from gather(plan, weights, traffic)
    else:
        yield from serve(plan, weights, part, traffic)
