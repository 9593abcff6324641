"""The dense Qwen families: Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115) and Qwen3
(arXiv:2505.09388).
"""

from typing import Any

from ragen_mega.models.family import Family, Limit, Weight

_OUTER = (
    Weight(
        "embedding.word_embeddings.weight",
        "vocab",
        {"model.embed_tokens.weight": ("vocab_size", "hidden_size")},
    ),
    Weight("decoder.final_layernorm.weight", "replicated", {"model.norm.weight": ("hidden_size",)}),
    Weight("output_layer.weight", "vocab", {"lm_head.weight": ("vocab_size", "hidden_size")}),
)
_INPUT_NORM = Weight(
    "self_attention.linear_qkv.layer_norm_weight",
    "replicated",
    {"input_layernorm.weight": ("hidden_size",)},
    alias="input_layernorm.weight",
)
_OUTPUT = Weight(
    "self_attention.linear_proj.weight",
    "row",
    {"self_attn.o_proj.weight": ("hidden_size", "q_size")},
)
_QKV = Weight(
    "self_attention.linear_qkv.weight",
    "qkv",
    {
        "self_attn.q_proj.weight": ("q_size", "hidden_size"),
        "self_attn.k_proj.weight": ("kv_size", "hidden_size"),
        "self_attn.v_proj.weight": ("kv_size", "hidden_size"),
    },
    server="self_attn.qkv_proj.weight",
)
_QKV_BIAS = Weight(
    "self_attention.linear_qkv.bias",
    "qkv",
    {
        "self_attn.q_proj.bias": ("q_size",),
        "self_attn.k_proj.bias": ("kv_size",),
        "self_attn.v_proj.bias": ("kv_size",),
    },
    server="self_attn.qkv_proj.bias",
)
_QK_NORMS = tuple(
    Weight(
        f"self_attention.{x}_layernorm.weight",
        "replicated",
        {f"self_attn.{x}_norm.weight": ("head_dim",)},
    )
    for x in "qk"
)
_MLP = (
    Weight(
        "mlp.linear_fc1.layer_norm_weight",
        "replicated",
        {"post_attention_layernorm.weight": ("hidden_size",)},
        alias="pre_mlp_layernorm.weight",
    ),
    Weight(
        "mlp.linear_fc1.weight",
        "gate_up",
        {
            "mlp.gate_proj.weight": ("ffn_size", "hidden_size"),
            "mlp.up_proj.weight": ("ffn_size", "hidden_size"),
        },
        server="mlp.gate_up_proj.weight",
    ),
    Weight("mlp.linear_fc2.weight", "row", {"mlp.down_proj.weight": ("hidden_size", "ffn_size")}),
)

_COMPUTED = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    " num_key_value_heads head_dim max_position_embeddings rms_norm_eps".split()
)
_NEUTRAL = frozenset(
    # how weights are stored, drawn or trained elsewhere, what is returned, and classification
    "transformers_version dtype initializer_range use_cache output_hidden_states return_dict"
    " chunk_size_feed_forward id2label label2id problem_type"
    # the tokenizer's, and windows without sliding-window attention
    " pad_token_id bos_token_id eos_token_id sliding_window max_window_layers".split()
)


def _is_default_rope(value: Any) -> bool:
    """RoPE of arXiv:2104.09864 in all channels, without scaling or sections."""
    rest = dict(value)
    kinds = {rest.pop(name, "default") for name in ("rope_type", "type")}
    theta, share = rest.pop("rope_theta", 0), rest.pop("partial_rotary_factor", 1.0)
    is_base = isinstance(theta, (int, float)) and theta > 0
    return kinds == {"default"} and is_base and share == 1.0 and not rest


def _limits(architecture: str) -> dict[str, Limit]:
    return {
        "architectures": Limit(
            lambda value: not value or value == [architecture], f"[{architecture!r}]"
        ),
        "is_encoder_decoder": Limit(lambda value: value is False, "false"),
        "hidden_act": Limit(lambda value: value == "silu", "'silu'"),
        "tie_word_embeddings": Limit(lambda value: value in (True, False), "true or false"),
        "rope_parameters": Limit(
            _is_default_rope,
            "of rope_type 'default' with a rope_theta and nothing else",
            "YaRN and the like only lengthen the context: delete them from config.json, and stay"
            " within max_position_embeddings",
        ),
        "use_sliding_window": Limit(
            lambda value: not value, "false", "set it so, and contexts stay below the window"
        ),
        "layer_types": Limit(
            lambda value: set(value) == {"full_attention"}, "'full_attention' in every layer"
        ),
        "attention_dropout": Limit(lambda value: value == 0, "0.0", "set it so"),
        # Entries of no config class, which transformers still obeys.
        "is_causal": Limit(lambda value: value is True, "true"),
        "per_layer_config": Limit(lambda value: not value, "absent"),
    }


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    outer=_OUTER,
    layer=(_INPUT_NORM, _OUTPUT, _QKV, _QKV_BIAS, *_MLP),
    computed=_COMPUTED,
    limits=_limits("Qwen2ForCausalLM"),
    neutral=_NEUTRAL,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    outer=_OUTER,
    layer=(_INPUT_NORM, _OUTPUT, _QKV, *_QK_NORMS, *_MLP),
    computed=_COMPUTED,
    # It would give the output projection a bias too, which megatron-core has with those of the
    # feed-forward layers or not at all.
    limits=_limits("Qwen3ForCausalLM")
    | {
        "attention_bias": Limit(
            lambda value: value is False, "false", "no released Qwen3 has it, load one of those"
        )
    },
    neutral=_NEUTRAL,
)
