"""Qwen3, dense (arXiv:2505.09388)."""

from ragen_mega.models.cuts import REPLICATED
from ragen_mega.models.families import dense
from ragen_mega.models.families.qwen2 import NEUTRAL, limits
from ragen_mega.models.family import Family, Limit, Weight

QK_NORMS = tuple(
    Weight(
        f"self_attention.{x}_layernorm.weight",
        REPLICATED,
        {f"self_attn.{x}_norm.weight": ("head_dim",)},
    )
    for x in "qk"
)
NO_BIAS = Limit(
    lambda value: value is False, "false", "no released Qwen3 has it, load one of those"
)
"""A bias would belong to the output projection too, which megatron-core has with biases of the
feed-forward layers or not at all.
"""

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    outer=dense.OUTER,
    layer=(*dense.ATTENTION, *QK_NORMS, *dense.MLP),
    computed=dense.COMPUTED,
    limits=limits("Qwen3ForCausalLM") | {"attention_bias": NO_BIAS},
    neutral=NEUTRAL,
    overrides={"qk_layernorm": True},
)
