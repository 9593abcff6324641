"""Low-rank adapters (LoRA, arXiv:2106.09685) as parameters of a family: beside a weight W of
several Hugging Face tensors, such as [q; k; v], stand their matrices A_q, A_k, A_v, one below the
other, and B with the rows of W. W is cut over ranks, and A or B with it: by rows B, by columns A.

PEFT's names: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ragen_mega.config.sections.lora import LoraConfig
from ragen_mega.models.cuts import ROW, Cut
from ragen_mega.models.family import Weight
from ragen_mega.models.shape import ModelShape

if TYPE_CHECKING:
    from ragen_mega.models.layout import Slot

PREFIX = "base_model.model."
"""PEFT's prefix of Hugging Face names."""


def kind_of(weight: Weight) -> str | None:
    """Return the kind of linear layer that a layer's weight belongs to (`TARGETS`); None for a
    router, and for what is no matrix.
    """
    if not weight.is_matrix or "router" in weight.key:
        return None
    if weight.cut.group == "expert":
        return "experts"
    return "attention" if weight.key.startswith("self_attention.") else "mlp"


def adapted(shape: ModelShape, lora: LoraConfig) -> list[Weight]:
    """Return the weights of a layer that have adapters. Raises ValueError if a target names
    none.
    """
    kinds = [(weight, kind_of(weight)) for weight in shape.family.layer]
    there = {kind for _, kind in kinds if kind}
    if missing := {*lora.lora_targets.split(",")} - there - {"all"}:
        raise ValueError(
            f"lora_targets {min(missing)}: a {shape.model_type} model has none; set --lora-targets"
            f" {','.join(sorted(there))}"
        )
    return [weight for weight, kind in kinds if kind in lora.targets]


def adapter_weights(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    """Return the matrices A and B beside a weight."""
    cuts = {"lora_A": weight.cut, "lora_B": weight.cut}
    if weight.cut.group == "dense":
        whole = "lora_B" if weight.cut == ROW else "lora_A"
        cuts[whole] = Cut(None, num_blocks=len(weight.tensors))

    def part(name: str) -> Weight:
        sizes = {
            tensor.replace(".weight", f".{name}.weight"): (
                (rank, size[1]) if name == "lora_A" else (size[0], rank)
            )
            for tensor, size in weight.tensors.items()
        }
        keys = (key.replace(".weight", f".adapter.{name}") for key in (weight.key, weight.alias))
        return Weight(next(keys), cuts[name], sizes, alias=next(keys))

    return part("lora_A"), part("lora_B")


def layer_weights(shape: ModelShape, lora: LoraConfig) -> tuple[Weight, ...]:
    """Return the weights of the adapters of a layer, in the order of their modules."""
    pairs = (adapter_weights(weight, lora.rank) for weight in adapted(shape, lora))
    return tuple(part for pair in pairs for part in pair)


def adapter_slots(shape: ModelShape, lora: LoraConfig) -> "Iterator[Slot]":
    """Yield every parameter of the adapters of a policy, in order."""
    from ragen_mega.models.layout import Slot  # it imports torch, which checks of flags do without

    for layer in range(shape.num_layers):
        for weight in layer_weights(shape, lora):
            for expert in shape.experts(weight):
                parameter = f"decoder.layers.{layer}.{weight.key.format(e=expert)}"
                yield Slot(weight, shape, layer, parameter, expert)


def expected_adapters(shape: ModelShape, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return a map: name without PEFT's prefix -> shape of every tensor of an adapter."""
    return {
        name: size
        for slot in adapter_slots(shape, lora)
        for name, size in zip(slot.names, slot.shapes, strict=True)
    }
