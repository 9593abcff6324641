"""The parameters of SGLang's models on its tensor-parallel ranks, from Hugging Face tensors.

Read in SGLang 0.5.17: models/qwen2.py, models/qwen3.py. Nothing of SGLang is imported.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.models.layout import Slot, complete, expected_tensors, model_slots
from ragen_mega.models.shape import ModelShape

_CPU_PADDING = 32


def linear_names(hf: PretrainedConfig) -> set[str]:
    """SGLang's parameters that are weights of a matrix product in a layer."""
    slots = model_slots(ModelShape.of(hf))
    return {slot.server for slot in slots if slot.layer is not None and slot.weight.is_matrix}


def check_cpu_cut(shape: ModelShape, size: int, ep: int = 1) -> None:
    """Raise ValueError where SGLang on a CPU would lay the model out otherwise than on a GPU
    (configs/update_config.py), or cannot compute it (layers/moe/fused_moe_native.py).
    """
    if shape.num_kv_heads % size or shape.ffn_size % (_CPU_PADDING * size):
        raise ValueError(
            f"SGLang on a CPU adds key-value heads ({shape.num_kv_heads}) up to a multiple of"
            f" rollout_tensor_parallel_size ({size}) and rows of the feed-forward layer"
            f" ({shape.ffn_size}) up to one of {_CPU_PADDING} times it, for which there are"
            " no weights; choose a model that needs neither or --rollout-engine embedded"
        )
    if ep > 1:
        raise ValueError(
            f"rollout_expert_parallel_size ({ep}) needs a GPU: SGLang's experts on a CPU"
            " (moe_forward_native) take no tokens of other ranks' experts; drop"
            " --rollout-expert-parallel-size"
        )


def cut_stream(
    weights: Iterable[tuple[str, Tensor]], hf: PretrainedConfig, rank: int, size: int, ep: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Stream of (Hugging Face name, full tensor) -> stream of (SGLang's name, shard of rank `rank`
    of `size`, `ep` of which share the experts).

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
                if slot.is_served(rank, size, ep):
                    tensors = [found[part] for part in slot.names]
                    yield slot, slot.to_server(tensors, rank, size, ep)

    yield from stack_experts(shards(), ep)


def stack_experts(
    shards: Iterable[tuple[Slot, Tensor]], ep: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Stream of parameters' shards -> stream of (SGLang's name, shard): the experts of a rank are
    held until the last of their layer is there, and stacked.
    """
    held: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for slot, shard in shards:
        held[slot.server][slot.expert or 0] = shard
        if len(held[slot.server]) == slot.shape.num_local(slot.weight, ep):
            parts = held.pop(slot.server)
            yield slot.server, slot.weight.cut.stack([parts[number] for number in sorted(parts)])
