"""How SGLang lays out the model families over its tensor-parallel ranks: which Hugging Face tensors
are in which of its parameters, and the cut of each.

Read in SGLang 0.5.17: models/qwen2.py, models/qwen3.py, layers/linear.py (QKVParallelLinear,
MergedColumnParallelLinear), layers/vocab_parallel_embedding.py. Nothing of SGLang is imported.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.models.layout import Slot, fill_rows, split_groups
from ragen_mega.models.shape import FAMILIES, ModelShape, engine_vocab_size

_CPU_PADDING = 32
_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")
_WEIGHTS = {
    weight.server or next(iter(weight.tensors)): weight
    for family in FAMILIES.values()
    for weight in (*family.outer, *family.layer)
}
_BY_SOURCE = {source: name for name, weight in _WEIGHTS.items() for source in weight.tensors}


def _split(name: str) -> tuple[str, str]:
    """(the part of a name that says which layer, the rest)."""
    layer = _LAYER.fullmatch(name)
    return (layer[1], layer[2]) if layer else ("", name)


def engine_name(source: str) -> str:
    """SGLang's parameter that holds the Hugging Face tensor `source`."""
    prefix, name = _split(source)
    return prefix + _BY_SOURCE.get(name, name)


def is_linear(name: str) -> bool:
    """Whether SGLang's parameter `name` is the weight of a matrix product in a layer."""
    prefix, name = _split(name)
    return bool(prefix) and name in _WEIGHTS and _WEIGHTS[name].is_matrix


def sources(name: str) -> tuple[str, ...]:
    """Hugging Face tensors of SGLang's parameter `name`, in their order inside it."""
    prefix, name = _split(name)
    parts = _WEIGHTS[name].tensors if name in _WEIGHTS else (name,)
    return tuple(prefix + part for part in parts)


def head_rows(hf: PretrainedConfig, rank: int, size: int) -> tuple[slice, slice]:
    """Rows of the full q, and of the full k or v, that rank `rank` of `size` holds; with
    more ranks than key-value heads, these repeat.

    Raises ValueError where SGLang asserts.
    """
    shape = ModelShape.of(hf)
    heads, groups, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    if heads % size or (groups % size and size % groups):
        raise ValueError(
            f"rollout_tensor_parallel_size ({size}) must divide the model's attention heads"
            f" ({heads}) and divide or be a multiple of its key-value heads ({groups}); choose"
            " another size"
        )
    copies = max(1, size // groups)  # consecutive ranks that hold the same key-value head
    q_rows, kv_rows = heads // size * dim, max(1, groups // size) * dim
    return slice(rank * q_rows, (rank + 1) * q_rows), slice(
        rank // copies * kv_rows, (rank // copies + 1) * kv_rows
    )


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


def cut(name: str, tensors: Sequence[Tensor], hf: PretrainedConfig, rank: int, size: int) -> Tensor:
    """What rank `rank` of `size` holds of parameter `name`, from the full Hugging Face tensors
    `sources(name)`; a view of them where possible. Raises ValueError where SGLang cannot be split
    so.
    """
    weight = _WEIGHTS.get(_split(name)[1])
    kind = weight.cut if weight else "replicated"
    if kind == "qkv":
        q_rows, kv_rows = head_rows(hf, rank, size)
        query, key, value = tensors
        return torch.cat([query[q_rows], key[kv_rows], value[kv_rows]])
    if kind == "gate_up":  # [gate_r; up_r]
        return torch.cat([_part(tensor, 0, rank, size) for tensor in tensors])
    if kind == "row":
        return _part(tensors[0], 1, rank, size)
    if kind == "vocab":
        rows = engine_vocab_size(hf.vocab_size, size) // size
        return fill_rows(tensors[0][rank * rows : (rank + 1) * rows], rows)
    return tensors[0]


def from_trainer(slot: Slot, piece: Tensor, size: int) -> Tensor:
    """The trainer's slice of a tensor-parallel rank as SGLang's of the same rank and size:
    [q, k, v of every group] -> [q_r; k_r; v_r], the vocabulary filled up, the rest as it is.
    """
    if slot.weight.cut == "qkv":
        return torch.cat(split_groups(piece, slot.shape.head_dim, slot.shape.num_kv_heads // size))
    if slot.weight.cut == "vocab":  # one process has no rows to fill ranks with
        return fill_rows(piece, engine_vocab_size(slot.shape.vocab_size, size) // size)
    return piece


def cut_stream(
    weights: Iterable[tuple[str, Tensor]], hf: PretrainedConfig, rank: int, size: int
) -> Iterator[tuple[str, Tensor]]:
    """Stream of (Hugging Face name, full tensor) -> stream of (SGLang's name, shard of rank `rank`
    of `size`).

    Tensors of one parameter may come in any order; they are held until the last is there. A tied LM
    head is dropped. Raises ValueError if the stream ends before a parameter is complete.
    """
    held: dict[str, dict[str, Tensor]] = {}
    for source, tensor in weights:
        if source == "lm_head.weight" and hf.tie_word_embeddings:
            continue
        name = engine_name(source)
        found = held.setdefault(name, {})
        found[source] = tensor
        if len(found) == len(sources(name)):
            del held[name]
            yield name, cut(name, [found[part] for part in sources(name)], hf, rank, size)
    if held:
        name, found = min(held.items())
        missing = ", ".join(part for part in sources(name) if part not in found)
        raise ValueError(
            f"the weights ended without {missing}, a part of {name}; export every tensor of the"
            " model"
        )


def _part(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    if tensor.shape[dim] % size:
        raise ValueError(
            f"rollout_tensor_parallel_size ({size}) must divide dimension {dim} of a weight of"
            f" shape {list(tensor.shape)}; choose a divisor"
        )
    length = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * length, length)
