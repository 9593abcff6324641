"""Flags of the model that is trained."""

from dataclasses import dataclass

from ragen_mega.config.sections.section import Count, Section


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
    """Width of the small model's SwiGLU (only without --load)."""

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
