"""Flags of the model that is trained."""

from dataclasses import dataclass
from typing import Annotated

from ragen_mega.config.sections.section import Bounds, Count, OnlyWith, Section


@dataclass(frozen=True)
class ModelConfig(Section):
    """Model that is trained, loaded or built."""

    load: str | None = None
    """Model to start from: a directory in Hugging Face's format, a .gguf file, or a name on the
    hub. Without it a small Qwen2 is built and warm-started.
    """
    critic_load: str | None = None
    """Model that the critic starts from, named as by --load (default: what the policy starts
    from).
    """
    hidden_size: Count = 96
    """Width of the small model (only without --load)."""
    num_layers: Count = 2
    """Depth of the small model (only without --load)."""
    num_attention_heads: Count = 4
    """Attention heads of the small model (only without --load)."""
    num_query_groups: Count = 2
    """Key-value heads of the small model (only without --load)."""
    ffn_hidden_size: Count = 256
    """Width of the small model's SwiGLU; a mixture divides it among the experts of a token (only
    without --load).
    """
    num_experts: Count | None = None
    """Experts in every layer of the small model, which is then a Qwen3-MoE (only without --load;
    default: none, a dense Qwen2).
    """
    experts_per_token: Annotated[
        int, Bounds("at least 2", 2), OnlyWith("num_experts", "--num-experts 8")
    ] = 2
    """Experts that a token of the small mixture passes through (only with --num-experts)."""

    def check(self) -> None:
        heads, groups = self.num_attention_heads, self.num_query_groups
        if self.hidden_size % (2 * heads) != 0:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of twice num_attention_heads"
                f" ({heads}); set --hidden-size"
                f" {2 * heads * max(1, self.hidden_size // (2 * heads))}"
            )
        if heads % groups != 0:
            raise ValueError(
                f"num_attention_heads ({heads}) must be a multiple of num_query_groups ({groups});"
                " set --num-query-groups to a divisor"
            )
        if self.num_experts is None:
            return
        chosen, width = self.experts_per_token, self.ffn_hidden_size
        if chosen > self.num_experts:
            raise ValueError(
                f"experts_per_token ({chosen}) must be at most num_experts ({self.num_experts});"
                " set --experts-per-token lower"
            )
        if width % chosen != 0:
            raise ValueError(
                f"experts_per_token ({chosen}) must divide ffn_hidden_size ({width}); set"
                f" --ffn-hidden-size {chosen * max(1, width // chosen)}"
            )
