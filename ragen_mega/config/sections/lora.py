"""Flags of low-rank adapters."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ragen_mega.config.sections.section import Count, OnlyWith, PathName, Positive, Section

_WITH_RANK = OnlyWith("lora_rank", "--lora-rank 16")
TARGETS = ("attention", "mlp", "experts")
"""Kinds of linear layers that adapters can stand beside."""
_LARGEST_EPS_OF_ADAM = 1e-5
"""Epsilon above which steps of Adam depend on the size of gradients: usual ones are below."""


@dataclass(frozen=True)
class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685) of actor and critic beside one frozen model."""

    lora_rank: Count | None = None
    """Rank of the adapters of actor and critic, which then train these alone: beside each weight W
    of the model the product B A, of this many rows of A. The model itself is held once for actor,
    critic and reference policy and never changes. Published runs of reinforcement learning learn
    as much as full fine-tuning with ranks of 1 to 32 (default: none, all weights are trained).
    """
    lora_alpha: Annotated[Positive, _WITH_RANK] = 32.0
    """The product B A counts lora_alpha / lora_rank times, so that the learning rate need not
    change with the rank.
    """
    lora_targets: Annotated[str, _WITH_RANK] = "all"
    """Linear layers with adapters, separated by commas: attention, mlp, experts, or all. Adapters
    of the attention alone learn less. Routers have none, and neither has the LM head: in most
    small models its matrix is the embedding too, which a merged adapter would change with it.
    """
    lora_lr_factor: Annotated[Positive | None, _WITH_RANK] = None
    """Adapters are trained at this many times the learning rates of the flags, which are the rates
    of full fine-tuning: the best rates of the two differ by about ten in published comparisons
    (default: 10; the policy's is 1 where adam_eps is above 1e-5, because steps near gradient
    descent grow with gradients, which lora_alpha / lora_rank and A scale already).
    """
    lora_load: Annotated[PathName | None, _WITH_RANK] = None
    """Adapter in PEFT's format to go on from, beside the model that it was trained on (--load).
    The critic starts with a fresh one.
    """
    lora_sync: Annotated[Literal["merged", "adapter"], _WITH_RANK] = "merged"
    """Weights that go to the engine: `merged`, the sums of model and adapters, computed in float32
    from the model each time; or `adapter`, the adapters alone after the first time, which the
    engine applies to each token beside the model that it keeps.
    """

    def check(self) -> None:
        unknown = [name for name in self.lora_targets.split(",") if name not in (*TARGETS, "all")]
        if unknown:
            is_head = unknown[0] == "head"
            why = " (in most small models the LM head is the embedding too)" if is_head else ""
            raise ValueError(
                f"lora_targets must be of {', '.join(TARGETS)}, or all, not {unknown[0]!r}{why};"
                " set --lora-targets all"
            )

    @property
    def rank(self) -> int:
        """Return the rank; 0 where all weights are trained."""
        return self.lora_rank or 0

    @property
    def scale(self) -> float:
        """Return the factor of the product B A."""
        return self.lora_alpha / max(1, self.rank)

    @property
    def targets(self) -> frozenset[str]:
        """Return the kinds of linear layers with adapters; none where all weights are trained."""
        if not self.rank:
            return frozenset()
        names = frozenset(self.lora_targets.split(","))
        return frozenset(TARGETS) if "all" in names else names

    def lr_factor(self, adam_eps: float = 1e-8) -> float:
        """Return the factor of the learning rates of a model whose Adam has this epsilon."""
        if not self.rank:
            return 1.0
        return self.lora_lr_factor or (10.0 if adam_eps <= _LARGEST_EPS_OF_ADAM else 1.0)
