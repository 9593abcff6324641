"""The description of a family of models from which everything else derives: its weights, and the
supported entries of a config.json. No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ragen_mega.models.cuts import REPLICATED, Cut

VALUE_HEAD = "value_head.weight"


@dataclass(frozen=True)
class Weight:
    """A parameter of the trainer: its names, its tensors in a checkpoint, its cut over ranks. In a
    mixture of experts a name with `{e}` is one parameter for each expert.
    """

    key: str
    """Megatron's name where linear layers hold the norms before them; inside a layer without its
    `decoder.layers.<number>.`.
    """
    cut: Cut
    """Cut of the weight over tensor-parallel ranks."""
    tensors: Mapping[str, tuple[str | int, ...]]
    """Hugging Face name (inside a layer without `model.layers.<number>.`) -> shape: numbers, or
    names of sizes in `ModelShape`.
    """
    alias: str = ""
    """Megatron's name where every norm is a separate module."""
    server: str = ""
    """SGLang's name if it is not Hugging Face's; of experts, the name of the tensor of all experts.
    """
    fused: str = ""
    """Hugging Face name of a tensor that may stand for the tensors of all experts: [experts, rows
    of the tensors one after the other, columns].
    """

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows and columns."""
        return all(len(shape) == 2 for shape in self.tensors.values())


CRITIC_HEAD = Weight("output_layer.weight", REPLICATED, {VALUE_HEAD: (1, "hidden_size")})
"""The head of a critic, in place of the LM head."""


@dataclass(frozen=True)
class Limit:
    """An entry of config.json that is supported for some values only."""

    is_met: Callable[[Any], bool]
    values: str
    """The supported values, in words."""
    remedy: str = "load another model"


@dataclass(frozen=True)
class Family:
    """Models of one `model_type`."""

    model_type: str
    architecture: str
    """The class in `architectures` of config.json, without which SGLang loads no model."""
    outer: tuple[Weight, ...]
    """Embedding, final norm and LM head, in the order of megatron-core's model."""
    layer: tuple[Weight, ...]
    """Weights of one layer, in the order of megatron-core's local layer."""
    computed: frozenset[str]
    """Entries of config.json that are sizes or positive numbers of the computation."""
    limits: Mapping[str, Limit]
    """Entries that would change the result with another value."""
    neutral: frozenset[str]
    """Entries that do not affect what a policy computes."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig with a value of the family."""
    sizes: Mapping[str, Callable[[Mapping[str, Any]], int]] = field(default_factory=dict)
    """Further fields of TransformerConfig -> functions that read their values from the entries of a
    config.json. `num_moe_experts` is the number of experts.
    """
    ffn_entry: str = "intermediate_size"
    """Entry of config.json with the width of a feed-forward layer, or of an expert."""

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise ValueError if entries of a config.json ask for something that is not supported.
        Entries that the family does not know, transformers ignores too.
        """
        for name in sorted(self.computed & values.keys()):
            if not (isinstance(values[name], (int, float)) and values[name] > 0):
                raise ValueError(
                    f"{name} in config.json must be above 0, not {values[name]!r}; is the file"
                    " damaged?"
                )
        for name, limit in self.limits.items():
            if name in values and not limit.is_met(values[name]):
                raise ValueError(
                    f"{name} in config.json must be {limit.values}, not {_short(values[name])}: no"
                    f" other is supported; {limit.remedy}"
                )


def _short(value: Any) -> str:
    """Return a value on one line; a list shows each distinct element once."""
    text = repr(sorted(set(map(str, value))) if isinstance(value, list) else value)
    return " ".join(text.split())[:200]
