"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115)."""

from ragen_mega.models.cuts import QKV
from ragen_mega.models.families import dense
from ragen_mega.models.family import Family, Limit, Weight

NEUTRAL = dense.NEUTRAL | {"sliding_window", "max_window_layers"}
"""Windows are of no effect without sliding-window attention."""
QKV_BIAS = Weight(
    "self_attention.linear_qkv.bias",
    QKV,
    {
        "self_attn.q_proj.bias": ("q_size",),
        "self_attn.k_proj.bias": ("kv_size",),
        "self_attn.v_proj.bias": ("kv_size",),
    },
    server="self_attn.qkv_proj.bias",
)


def limits(architecture: str) -> dict[str, Limit]:
    """Return the entries of Qwen2 and Qwen3 that are supported for some values only."""
    yarn = (
        "YaRN and the like only lengthen the context: delete them from config.json, and stay"
        " within max_position_embeddings"
    )
    return dense.limits(architecture, yarn) | {
        "use_sliding_window": Limit(
            lambda value: not value, "false", "set it so, and contexts stay below the window"
        ),
        "layer_types": Limit(
            lambda value: set(value) == {"full_attention"}, "'full_attention' in every layer"
        ),
    }


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    outer=dense.OUTER,
    layer=(*dense.ATTENTION, QKV_BIAS, *dense.MLP),
    computed=dense.COMPUTED,
    limits=limits("Qwen2ForCausalLM"),
    neutral=NEUTRAL,
    overrides={"add_qkv_bias": True},
)
