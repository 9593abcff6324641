"""Flags of the model that is trained."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

from ragen_mega.config.sections.environment import json_object
from ragen_mega.config.sections.section import (
    Bounds,
    Count,
    Natural,
    OnlyWith,
    PathName,
    PathOf,
    Section,
)
from ragen_mega.system.paths import expanded

_PATH_OR_NAME = PathOf(when=os.path.exists)
_TEACHERS = '{"sokoban": "models/one", "frozen_lake": "models/other"}'


@dataclass(frozen=True)
class ModelConfig(Section):
    """Models: the one that is trained, loaded or built, and its teacher."""

    load: Annotated[str | None, _PATH_OR_NAME] = None
    """Model to start from: a directory in Hugging Face's format, a .gguf file, or a name on the
    hub. Without it a small Qwen2 is built and warm-started.
    """
    critic_load: Annotated[str | None, _PATH_OR_NAME] = None
    """Model that the critic starts from, named as by --load (default: what the policy starts
    from).
    """
    teacher_load: Annotated[str | None, _PATH_OR_NAME] = None
    """Teacher (--reward teacher), named as by --load: any model with the same tokens (default: what
    the policy starts from). Of several environments each may have its own: a JSON object, e.g.
    '{"sokoban": "models/one", "frozen_lake": "models/other"}'.
    """
    teacher_prompt_examples: Natural | None = None
    """Worked examples in the prompts behind which the teacher scores the policy's tokens (default:
    the policy's), so that the policy learns without examples what they teach.
    """
    teacher_prompt_examples_file: Annotated[
        PathName | None, OnlyWith("teacher_prompt_examples", "--teacher-prompt-examples 2")
    ] = None
    """File of the teacher's examples, as --prompt-examples-file takes it."""
    teacher_system_prompt: str | None = None
    """The teacher's text in place of --system-prompt."""
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
        for name, model in self.teachers.items():
            if not isinstance(model, str) or not model:
                raise ValueError(
                    f"teacher_load must name a model for {name}, not {model!r}; write e.g."
                    f" '{_TEACHERS}'"
                )
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

    @property
    def teachers(self) -> dict[str, str]:
        """Return a map: environment -> model of its teacher; "" stands for all environments."""
        given = self.teacher_load
        if given is None or not given.startswith("{"):
            return {} if given is None else {"": given}
        return json_object("teacher_load", given, _TEACHERS)

    def with_teachers(self, models: Mapping[str, str]) -> Self:
        """Return the section with these models as `teachers`."""
        is_one = [*models] == [""]
        return replace(self, teacher_load=models[""] if is_one else json.dumps(models))

    def located(self) -> Self:
        models = {name: expanded(model) for name, model in self.teachers.items()}
        models = {
            name: os.path.abspath(model) if os.path.exists(model) else model
            for name, model in models.items()
        }
        located = super().located()
        return located.with_teachers(models) if models else located

    @property
    def restates_prompts(self) -> bool:
        """Return whether the teacher has its own prompts."""
        own = (self.teacher_prompt_examples, self.teacher_system_prompt)
        return any(value is not None for value in own)

    def small_model(self, vocab_size: int) -> dict[str, Any]:
        """Return the config.json of the small Qwen2 or Qwen3-MoE of runs without --load."""
        entries = {
            "model_type": "qwen2",
            "vocab_size": vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_query_groups,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            # Contexts are short and the widths far below Qwen's: its own 1e6 and 0.02 make the warm
            # start 2 to 4 times slower.
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
            "initializer_range": 0.1,
            "dtype": "float32",
        }
        if self.num_experts is None:
            return entries
        return entries | {
            "model_type": "qwen3_moe",
            "head_dim": self.hidden_size // self.num_attention_heads,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.ffn_hidden_size // self.experts_per_token,
            "norm_topk_prob": True,
        }
