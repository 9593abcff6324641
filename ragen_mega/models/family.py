"""The description of a family of models from which everything else derives: its weights, and the
supported entries of a config.json. No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

VALUE_HEAD = "value_head.weight"


@dataclass(frozen=True)
class Weight:
    """A parameter of the trainer: what it is called, what it is made of, how ranks share it."""

    key: str
    """Megatron's name where linear layers hold the norms before them; inside a layer without its
    `decoder.layers.<number>.`.
    """
    cut: Literal["replicated", "row", "vocab", "gate_up", "qkv"]
    """Over tensor-parallel ranks: not at all; by columns (Megatron's row-parallel layers); by rows,
    padded to equal parts; both tensors by rows; all three by key-value groups.
    """
    tensors: Mapping[str, tuple[str | int, ...]]
    """Hugging Face name (inside a layer without `model.layers.<number>.`) -> shape: numbers, or
    names of sizes in `ModelShape`.
    """
    alias: str = ""
    """Megatron's name where every norm is a module of its own."""
    server: str = ""
    """SGLang's name if it is not Hugging Face's."""

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows and columns."""
        return all(len(shape) == 2 for shape in self.tensors.values())


CRITIC_HEAD = Weight("output_layer.weight", "replicated", {VALUE_HEAD: (1, "hidden_size")})
"""What a critic has in place of the LM head."""


@dataclass(frozen=True)
class Limit:
    """An entry of config.json that is supported for some values only."""

    is_met: Callable[[Any], bool]
    values: str
    """Those values, in words."""
    remedy: str = "load another model"


@dataclass(frozen=True)
class Family:
    """Models of one `model_type`."""

    model_type: str
    architecture: str
    """What `architectures` in config.json names, without which SGLang loads no model."""
    outer: tuple[Weight, ...]
    """Embedding, final norm and LM head, in the order of megatron-core's model."""
    layer: tuple[Weight, ...]
    """Of one layer, in the order of megatron-core's local layer."""
    computed: frozenset[str]
    """Entries of config.json that are sizes or positive numbers of the computation."""
    limits: Mapping[str, Limit]
    """Entries that would change the result with another value."""
    neutral: frozenset[str]
    """Entries that do not affect what a policy computes."""

    def has(self, key: str) -> bool:
        """Whether a layer has the parameter of this Megatron name."""
        return any(weight.key == key for weight in self.layer)

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
    """A value on one line; a list shows each distinct element once."""
    text = repr(sorted(set(map(str, value))) if isinstance(value, list) else value)
    return " ".join(text.split())[:200]
