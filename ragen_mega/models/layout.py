"""Hugging Face names and layouts <-> Megatron shards, for any tensor- and pipeline-parallel layout.

Megatron fuses q, k and v per key-value group ([q of the group, k, v], group by group) and gate with
up per rank ([gate_r; up_r]); everything else is a plain slice. How each weight is cut, its family
says. In checkpoints megatron-core's dist_checkpointing stores every parameter whole: the layers
stacked, [gate; up] as if on one rank, the vocabulary padded for the layout that wrote it.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ragen_mega.models.family import CRITIC_HEAD, Weight
from ragen_mega.models.shape import ModelShape, trainer_vocab_size

T = TypeVar("T")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Slot:
    """A weight of a model: one of a layer, or one outside of them."""

    weight: Weight
    shape: ModelShape
    """Of the model."""
    layer: int | None
    """Counted over all pipeline stages."""
    parameter: str
    """Its name in this rank's module, or in that of a rank that holds all layers."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the Hugging Face tensors."""
        prefix = "" if self.layer is None else f"model.layers.{self.layer}."
        return tuple(prefix + name for name in self.weight.tensors)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the Hugging Face tensors, as config.json demands them."""
        return self.shape.shapes(self.weight)

    @property
    def key(self) -> str:
        """Name in a checkpoint, where the layers are one tensor, without the role."""
        return self.weight.key if self.layer is None else f"decoder.layers.{self.weight.key}"

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape in Megatron's layout on one rank: the tensors row by row in some order."""
        shapes = self.shapes
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def model_slots(shape: ModelShape, *, is_critic: bool = False) -> Iterator[Slot]:
    """Every weight of a policy, or of a critic, in order. A tied LM head is not one."""
    embedding, norm, head = shape.family.outer
    yield Slot(embedding, shape, None, embedding.key)
    for layer in range(shape.num_layers):
        for weight in shape.family.layer:
            yield Slot(weight, shape, layer, f"decoder.layers.{layer}.{weight.key}")
    yield Slot(norm, shape, None, norm.key)
    if is_critic or not shape.is_tied:
        head = CRITIC_HEAD if is_critic else head
        yield Slot(head, shape, None, head.key)


def expected_tensors(shape: ModelShape, *, is_critic: bool = False) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor of a policy, or of a critic."""
    return {
        name: size
        for slot in model_slots(shape, is_critic=is_critic)
        for name, size in zip(slot.names, slot.shapes, strict=True)
    }


def complete(
    weights: Iterable[tuple[str, Tensor]],
    expected: Mapping[str, tuple[int, ...]],
    *,
    optional: Collection[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """The stream (Hugging Face name, full tensor) itself. Raises ValueError where it is not exactly
    the expected tensors, each once, in any order, except for missing ones that are `optional`.
    """
    left = dict(expected)
    for name, tensor in weights:
        if name not in expected:
            raise ValueError(
                f"unexpected weight {name!r}; the model has {len(expected)} names, e.g."
                f" {min(expected)!r}; check that the weights belong to the model config"
            )
        if name not in left:
            raise ValueError(
                f"weight {name!r} arrived twice; each name must be exported by one rank only"
            )
        if tuple(tensor.shape) != (size := left.pop(name)):
            raise ValueError(
                f"weight {name!r} must have the full shape {size} ({math.prod(size)} elements), not"
                f" {tuple(tensor.shape)}; check the model config and that shards were gathered"
            )
        yield name, tensor
    if missing := sorted(left.keys() - set(optional)):
        raise ValueError(
            f"{len(missing)} of {len(expected)} weights are missing, first {missing[0]!r}; export"
            " the whole model"
        )


def group_by_size(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Consecutive items in lists of at most `limit` in total size, or of a single item."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + size(item) > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    yield group


def find_slot(
    parameter: str, shape: ModelShape, layer_offset: int = 0, *, is_critic: bool = False
) -> Slot:
    """The slot of a parameter by its name in a model whose first layer is number `layer_offset` of
    all.
    """
    if is_critic and parameter == CRITIC_HEAD.key:
        return Slot(CRITIC_HEAD, shape, None, parameter)
    match = _LAYER.fullmatch(parameter)
    layer, name = (int(match[1]) + layer_offset, match[2]) if match else (None, parameter)
    for weight in shape.family.outer if layer is None else shape.family.layer:
        if name in (weight.key, weight.alias):
            return Slot(weight, shape, layer, parameter)
    raise ValueError(
        f"no Hugging Face name for Megatron parameter {parameter!r}; add it to the family"
        f" {shape.model_type} in ragen_mega/models"
    )


def shard(slot: Slot, tensors: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
    """This rank's slice, in Megatron's layout, of the full Hugging Face tensors of one slot."""
    if slot.weight.cut == "replicated":
        return tensors[0]
    if slot.weight.cut == "row":
        return tensors[0].chunk(tp_size, dim=1)[tp_rank]
    if slot.weight.cut == "gate_up":
        return torch.cat([tensor.chunk(tp_size)[tp_rank] for tensor in tensors])
    if slot.weight.cut == "qkv":
        num_groups, trailing = slot.shape.num_kv_heads, tensors[0].shape[1:]
        grouped = torch.cat(
            [tensor.reshape(num_groups, -1, *trailing) for tensor in tensors], dim=1
        )
        return grouped.chunk(tp_size)[tp_rank].reshape(-1, *trailing)
    rows = trainer_vocab_size(slot.shape.vocab_size, tp_size)
    return fill_rows(tensors[0], rows).chunk(tp_size)[tp_rank]


def unshard(slot: Slot, shards: Sequence[Tensor]) -> list[Tensor]:
    """Inverse of `shard`: the full Hugging Face tensors from the slices of all tensor-parallel
    ranks.
    """
    if slot.weight.cut == "replicated":
        return [shards[0]]
    if slot.weight.cut == "row":
        return [torch.cat(list(shards), dim=1)]
    if slot.weight.cut == "gate_up":
        halves = [piece.chunk(2) for piece in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    if slot.weight.cut == "qkv":
        return split_groups(torch.cat(list(shards)), slot.shape.head_dim, slot.shape.num_kv_heads)
    return [torch.cat(list(shards))[: slot.shape.vocab_size]]


def split_groups(fused: Tensor, head_dim: int, num_groups: int) -> list[Tensor]:
    """[q, k, v of every key-value group] -> q, k, v, each with its heads one after the other."""
    trailing = fused.shape[1:]
    grouped = fused.reshape(num_groups, -1, *trailing)
    sizes = (grouped.shape[1] - 2 * head_dim, head_dim, head_dim)
    return [piece.reshape(-1, *trailing) for piece in grouped.split(sizes, dim=1)]


def fill_rows(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` padded with zero rows to `rows`, itself if it has them."""
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
