"""How SGLang lays out Qwen2, Qwen2.5 and Qwen3 over its tensor-parallel ranks: one table, and the
cut that it implies.

Read in SGLang 0.5.17: models/qwen2.py, models/qwen3.py, layers/linear.py (QKVParallelLinear,
MergedColumnParallelLinear), layers/vocab_parallel_embedding.py. Nothing of SGLang is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ragen_mega.models.shape import engine_vocab_size

# SGLang's name in a layer -> (Hugging Face names in it, how it is cut). What is not here keeps its
# name and is whole.
_LAYER_TABLE: dict[str, tuple[tuple[str, ...], str]] = {
    "self_attn.qkv_proj.weight": (
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv",
    ),
    "self_attn.qkv_proj.bias": (
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "qkv",
    ),
    "self_attn.o_proj.weight": (("self_attn.o_proj.weight",), "row"),  # [H, heads * head_dim / tp]
    "mlp.gate_up_proj.weight": (
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "gate_up",
    ),  # [gate_r; up_r]
    "mlp.down_proj.weight": (("mlp.down_proj.weight",), "row"),
}
_TABLE = {"model.embed_tokens.weight": "vocab", "lm_head.weight": "vocab"}
_CPU_PADDING = 32
_BY_SOURCE = {source: name for name, (sources, _) in _LAYER_TABLE.items() for source in sources}
_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")


def engine_name(source: str) -> str:
    """SGLang's parameter that holds the Hugging Face tensor `source`."""
    layer = _LAYER.fullmatch(source)
    return layer[1] + _BY_SOURCE.get(layer[2], layer[2]) if layer else source


def is_linear(name: str) -> bool:
    """Whether SGLang's parameter `name` is the weight of a matrix product in a layer."""
    layer = _LAYER.fullmatch(name)
    return layer is not None and layer[2] in _LAYER_TABLE and name.endswith(".weight")


def sources(name: str) -> tuple[str, ...]:
    """Hugging Face tensors of SGLang's parameter `name`, in the order in which they stand in it."""
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _LAYER_TABLE:
        return tuple(layer[1] + source for source in _LAYER_TABLE[layer[2]][0])
    return (name,)


def head_rows(hf: PretrainedConfig, rank: int, size: int) -> tuple[slice, slice]:
    """Rows of the full q, and of the full k or v, that rank `rank` of `size` holds; key-value heads
    repeat beyond their number.

    Raises ValueError where SGLang asserts.
    """
    heads, groups = hf.num_attention_heads, hf.num_key_value_heads
    if heads % size or (groups % size and size % groups):
        raise ValueError(
            f"rollout_tensor_parallel_size ({size}) must divide the model's attention heads"
            f" ({heads}) and divide or be a multiple of its key-value heads ({groups}); choose"
            " another size"
        )
    dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
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


def _qkv(tensors: Sequence[Tensor], hf: PretrainedConfig, rank: int, size: int) -> Tensor:
    q_rows, kv_rows = head_rows(hf, rank, size)
    query, key, value = tensors
    return torch.cat([query[q_rows], key[kv_rows], value[kv_rows]])


def _gate_up(tensors: Sequence[Tensor], hf: PretrainedConfig, rank: int, size: int) -> Tensor:
    return torch.cat([_part(tensor, 0, rank, size) for tensor in tensors])


def _row(tensors: Sequence[Tensor], hf: PretrainedConfig, rank: int, size: int) -> Tensor:
    return _part(tensors[0], 1, rank, size)


def _vocab(tensors: Sequence[Tensor], hf: PretrainedConfig, rank: int, size: int) -> Tensor:
    rows = engine_vocab_size(hf.vocab_size, size) // size
    return fill_rows(tensors[0][rank * rows : (rank + 1) * rows], rows)


def _whole(tensors: Sequence[Tensor], hf: PretrainedConfig, rank: int, size: int) -> Tensor:
    return tensors[0]


_CUTS: dict[str, Callable[[Sequence[Tensor], PretrainedConfig, int, int], Tensor]] = {
    "qkv": _qkv,
    "gate_up": _gate_up,
    "row": _row,
    "vocab": _vocab,
    "whole": _whole,
}


def cut(name: str, tensors: Sequence[Tensor], hf: PretrainedConfig, rank: int, size: int) -> Tensor:
    """What rank `rank` of `size` holds of parameter `name`, from the full Hugging Face tensors
    `sources(name)`.

    A view of them where it can be one. Raises ValueError where SGLang could not be split so.
    """
    layer = _LAYER.fullmatch(name)
    kind = _LAYER_TABLE.get(layer[2], ((), "whole"))[1] if layer else _TABLE.get(name, "whole")
    return _CUTS[kind](tensors, hf, rank, size)


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


def fill_rows(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with zero rows up to `rows`, itself if it has them."""
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _part(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    if tensor.shape[dim] % size:
        raise ValueError(
            f"rollout_tensor_parallel_size ({size}) must divide dimension {dim} of a weight of"
            f" shape {list(tensor.shape)}; choose a divisor"
        )
    length = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * length, length)
