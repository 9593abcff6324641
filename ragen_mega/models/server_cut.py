"""The parameters of SGLang's models on its tensor-parallel ranks, from Hugging Face tensors.

Read in SGLang 0.5.17: models/qwen2.py, models/qwen3.py. Nothing of SGLang is imported.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.models.layout import Slot, complete, expected_tensors, model_slots
from ragen_mega.models.shape import ModelShape

_CPU_PADDING = 32


def linear_names(hf: PretrainedConfig) -> set[str]:
    """SGLang's parameters that are weights of a matrix product in a layer."""
    slots = model_slots(ModelShape.of(hf))
    return {slot.server for slot in slots if slot.layer is not None and slot.weight.is_matrix}


def check_cpu_cut(hf: PretrainedConfig, size: int) -> None:
    """Raise ValueError where SGLang on a CPU would lay the model out otherwise than on a GPU
    (configs/update_config.py).
    """
    if hf.num_key_value_heads % size or hf.intermediate_size % (_CPU_PADDING * size):
        raise ValueError(
            f"SGLang on a CPU adds key-value heads ({hf.num_key_value_heads}) up to a multiple of"
            f" rollout_tensor_parallel_size ({size}) and rows of the feed-forward layer"
            f" ({hf.intermediate_size}) up to one of {_CPU_PADDING} times it, for which there are"
            " no weights; choose a model that needs neither or --rollout-engine embedded"
        )


def cut_stream(
    weights: Iterable[tuple[str, Tensor]], hf: PretrainedConfig, rank: int, size: int
) -> Iterator[tuple[str, Tensor]]:
    """Stream of (Hugging Face name, full tensor) -> stream of (SGLang's name, shard of rank `rank`
    of `size`).

    Tensors of one parameter may come in any order; they are held until the last is there. A tied LM
    head is dropped. Raises ValueError unless every other tensor of the model comes once.
    """
    shape = ModelShape.of(hf)
    slots = {name: slot for slot in model_slots(shape) for name in slot.names}
    weights = ((name, t) for name, t in weights if not (shape.is_tied and name == "lm_head.weight"))

    def shards() -> Iterator[tuple[Slot, Tensor]]:
        held: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in complete(weights, expected_tensors(shape)):
            slot = slots[name]
            found = held[slot.parameter]
            found[name] = tensor
            if len(found) == len(slot.names):
                del held[slot.parameter]
                yield slot, slot.to_server([found[part] for part in slot.names], rank, size)

    yield from stack_experts(shards())


def stack_experts(shards: Iterable[tuple[Slot, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Stream of parameters' shards -> stream of (SGLang's name, shard): experts are held until the
    last of their layer is there, and stacked.
    """
    held: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for slot, shard in shards:
        if slot.expert is None:
            yield slot.server, shard
            continue
        held[slot.server][slot.expert] = shard
        if len(held[slot.server]) == slot.stack[1]:
            experts = held.pop(slot.server)
            yield slot.server, torch.stack([experts[number] for number in range(len(experts))])
