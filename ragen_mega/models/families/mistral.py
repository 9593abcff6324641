"""Mistral (arXiv:2310.06825), with attention to all tokens."""

from ragen_mega.models.families import dense
from ragen_mega.models.family import Family, Limit

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    outer=dense.OUTER,
    layer=(*dense.ATTENTION, *dense.MLP),
    computed=dense.COMPUTED,
    limits=dense.limits("MistralForCausalLM")
    | {
        "sliding_window": Limit(
            lambda value: value is None, "null", "set it so, and contexts stay below the window"
        )
    },
    neutral=dense.NEUTRAL,
)
