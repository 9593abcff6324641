"""Hugging Face names <-> Megatron parameters of a pipeline stage <-> SGLang's names.

A slot is one parameter with its names everywhere; how ranks divide it, its cut says. In checkpoints
megatron-core's dist_checkpointing stores every parameter whole: the layers stacked, [gate; up] as
if on one rank, the vocabulary padded for the layout that wrote it.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from ragen_mega.models.cuts import Group
from ragen_mega.models.family import CRITIC_HEAD, Weight
from ragen_mega.models.shape import ModelShape

T = TypeVar("T")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter of a model: one of a layer, of an expert in a layer, or outside of the layers."""

    weight: Weight
    shape: ModelShape
    """The shape of the model."""
    layer: int | None
    """The number of the layer, counted over all pipeline stages."""
    parameter: str
    """The name in the module of a rank that holds all layers; experts are counted on the rank."""
    expert: int | None = None

    @property
    def group(self) -> Group:
        """The ranks that divide the parameter: dense or expert ranks."""
        return self.weight.cut.group

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the Hugging Face tensors."""
        return tuple(map(self._full_name, self.weight.tensors))

    @property
    def server(self) -> str:
        """The name of SGLang's parameter."""
        return self._full_name(self.weight.server or next(iter(self.weight.tensors)))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the Hugging Face tensors, as config.json demands them."""
        return self.shape.shapes(self.weight)

    @property
    def key(self) -> str:
        """The name in a checkpoint, where layers and experts are one tensor, without the role."""
        if self.layer is None:
            return self.weight.key
        return f"decoder.layers.{self.weight.key}".replace("local_experts.{e}", "experts")

    @property
    def index(self) -> tuple[int, ...]:
        """The place in the leading dimensions of a checkpoint's tensor: layer and expert."""
        return tuple(number for number in (self.layer, self.expert) if number is not None)

    @property
    def stack(self) -> tuple[int, ...]:
        """The lengths of those dimensions."""
        lengths = (self.shape.num_layers, len(self.shape.experts(self.weight)))
        return lengths[: len(self.index)]

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape in Megatron's layout on one rank."""
        return self.shape.whole(self.weight)

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Cut the part of tensor-parallel rank `rank` of `size` from the Hugging Face tensors."""
        return self.weight.cut.shard(tensors, self.shape, rank, size)

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the Hugging Face tensors, from the parts of all tensor-parallel ranks."""
        return self.weight.cut.unshard(shards, self.shape)

    def is_served(self, rank: int, size: int, ep: int = 1) -> bool:
        """Return whether SGLang's rank `rank` of `size` holds a part of this weight, if `ep` of
        these ranks share the experts, 1 or all: of each expert a part, or a whole expert or
        nothing.
        """
        holder = (self.expert or 0) * ep // len(self.shape.experts(self.weight))
        return holder == rank // self.weight.cut.server_size(size, ep)

    def to_server(self, tensors: Sequence[Tensor], rank: int, size: int, ep: int = 1) -> Tensor:
        """SGLang's part of a rank that holds one, from the Hugging Face tensors."""
        return self.weight.cut.to_server(tensors, self.shape, *self._cut(rank, size, ep))

    def shard_to_server(self, shard: Tensor, rank: int, size: int, ep: int = 1) -> Tensor:
        """SGLang's part, from the part of the trainer's rank of the same number and size, or from a
        whole expert.
        """
        return self.weight.cut.shard_to_server(shard, self.shape, *self._cut(rank, size, ep))

    def _cut(self, rank: int, size: int, ep: int) -> tuple[int, int]:
        size = self.weight.cut.server_size(size, ep)
        return rank % size, size

    def _full_name(self, name: str) -> str:
        prefix = "" if self.layer is None else f"model.layers.{self.layer}."
        return prefix + name.format(e=self.expert)


def model_slots(shape: ModelShape, *, is_critic: bool = False) -> Iterator[Slot]:
    """Yield every parameter of a policy, or of a critic, in order. A tied LM head is not one."""
    embedding, norm, head = shape.family.outer
    yield Slot(embedding, shape, None, embedding.key)
    for layer in range(shape.num_layers):
        for weight in shape.family.layer:
            for expert in shape.experts(weight):
                parameter = f"decoder.layers.{layer}.{weight.key.format(e=expert)}"
                yield Slot(weight, shape, layer, parameter, expert)
    yield Slot(norm, shape, None, norm.key)
    if is_critic or not shape.is_tied:
        head = CRITIC_HEAD if is_critic else head
        yield Slot(head, shape, None, head.key)


def expected_tensors(shape: ModelShape, *, is_critic: bool = False) -> dict[str, tuple[int, ...]]:
    """Return a map: Hugging Face name -> shape of every tensor of a policy, or of a critic."""
    return {
        name: size
        for slot in model_slots(shape, is_critic=is_critic)
        for name, size in zip(slot.names, slot.shapes, strict=True)
    }


class Place(NamedTuple):
    """The place of a tensor of an expert in a tensor of all experts of its layer."""

    fused: str
    shape: tuple[int, ...]
    """The shape of the tensor of all experts."""
    expert: int
    rows: slice

    def of(self, tensor: Tensor) -> Tensor:
        """Return the expert's view of the tensor of all experts."""
        return tensor[self.expert, self.rows]


def fused_places(shape: ModelShape) -> dict[str, Place]:
    """Return a map: Hugging Face name of each expert's tensors -> place in a tensor of all experts,
    as transformers holds them in memory.
    """
    places = {}
    for slot in model_slots(shape):
        end = 0
        for name, size in zip(slot.names, slot.shapes, strict=True):
            start, end = end, end + size[0]
            if slot.weight.fused and slot.expert is not None:
                fused = f"model.layers.{slot.layer}.{slot.weight.fused}"
                whole = (shape.num_experts, *slot.whole)
                places[name] = Place(fused, whole, slot.expert, slice(start, end))
    return places


def split_experts(tensors: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return the tensors of a model by name, with tensors of single experts in place of tensors of
    all experts.
    """
    places = {name: p for name, p in fused_places(shape).items() if p.fused in tensors}
    fused = {place.fused for place in places.values()}
    whole = {name: tensor for name, tensor in tensors.items() if name not in fused}
    return whole | {name: place.of(tensors[place.fused]) for name, place in places.items()}


def complete(
    weights: Iterable[tuple[str, Tensor]],
    expected: Mapping[str, tuple[int, ...]],
    *,
    optional: Collection[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """Yield the stream (Hugging Face name, full tensor) itself. Raises ValueError where it is not
    exactly the expected tensors, each once, in any order, except for missing ones that are
    `optional`.
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
    """Yield consecutive items in lists of at most `limit` in total size, or of a single item."""
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
    parameter: str,
    shape: ModelShape,
    layer_offset: int = 0,
    expert_offset: int = 0,
    *,
    is_critic: bool = False,
    further: Sequence[Weight] = (),
) -> Slot:
    """Return the slot of a parameter by its name in a module whose first layer is number
    `layer_offset` of all, and whose first expert in a layer number `expert_offset`. `further`:
    weights of a layer that the family does not name.
    """
    embedding, _, head = shape.family.outer
    if parameter == head.key:  # the last stage's copy of the embedding if they are tied
        head = embedding if shape.is_tied else head
        return Slot(CRITIC_HEAD if is_critic else head, shape, None, parameter)
    match = _LAYER.fullmatch(parameter)
    layer, name = (int(match[1]) + layer_offset, match[2]) if match else (None, parameter)
    for weight in shape.family.outer if layer is None else (*shape.family.layer, *further):
        for key in (weight.key, weight.alias):
            if match := re.fullmatch(re.escape(key).replace(r"\{e\}", r"(\d+)"), name):
                expert = int(match[1]) + expert_offset if match.groups() else None
                prefix = "" if layer is None else f"decoder.layers.{layer}."
                return Slot(weight, shape, layer, prefix + name, expert)
    raise ValueError(
        f"no Hugging Face name for Megatron parameter {parameter!r}; add it to the family"
        f" {shape.model_type} in ragen_mega/models/families"
    )
