"""The parts that dense decoders have in common: weights, and entries of config.json."""

from typing import Any

from ragen_mega.models.cuts import GATE_UP, QKV, REPLICATED, ROW, VOCAB
from ragen_mega.models.family import Limit, Weight

OUTER = (
    Weight(
        "embedding.word_embeddings.weight",
        VOCAB,
        {"model.embed_tokens.weight": ("vocab_size", "hidden_size")},
    ),
    Weight("decoder.final_layernorm.weight", REPLICATED, {"model.norm.weight": ("hidden_size",)}),
    Weight("output_layer.weight", VOCAB, {"lm_head.weight": ("vocab_size", "hidden_size")}),
)
ATTENTION = (
    Weight(
        "self_attention.linear_qkv.layer_norm_weight",
        REPLICATED,
        {"input_layernorm.weight": ("hidden_size",)},
        alias="input_layernorm.weight",
    ),
    Weight(
        "self_attention.linear_proj.weight",
        ROW,
        {"self_attn.o_proj.weight": ("hidden_size", "q_size")},
    ),
    Weight(
        "self_attention.linear_qkv.weight",
        QKV,
        {
            "self_attn.q_proj.weight": ("q_size", "hidden_size"),
            "self_attn.k_proj.weight": ("kv_size", "hidden_size"),
            "self_attn.v_proj.weight": ("kv_size", "hidden_size"),
        },
        server="self_attn.qkv_proj.weight",
    ),
)
MLP = (
    Weight(
        "mlp.linear_fc1.layer_norm_weight",
        REPLICATED,
        {"post_attention_layernorm.weight": ("hidden_size",)},
        alias="pre_mlp_layernorm.weight",
    ),
    Weight(
        "mlp.linear_fc1.weight",
        GATE_UP,
        {
            "mlp.gate_proj.weight": ("ffn_size", "hidden_size"),
            "mlp.up_proj.weight": ("ffn_size", "hidden_size"),
        },
        server="mlp.gate_up_proj.weight",
    ),
    Weight("mlp.linear_fc2.weight", ROW, {"mlp.down_proj.weight": ("hidden_size", "ffn_size")}),
)

COMPUTED = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    " num_key_value_heads head_dim max_position_embeddings rms_norm_eps".split()
)
NEUTRAL = frozenset(
    # storage, initialisation and training of weights, returned values, classification
    "transformers_version dtype initializer_range use_cache output_hidden_states return_dict"
    " chunk_size_feed_forward id2label label2id problem_type"
    # ids of the tokenizer
    " pad_token_id bos_token_id eos_token_id".split()
)


_ROPE = {
    "default": {"rope_theta"},
    "llama3": {
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}
"""`rope_type` -> its numbers."""


def _is_supported_rope(value: Any) -> bool:
    """Check for rotary positions that `rotary_frequencies` computes: in all channels, without
    sections.
    """
    rest = dict(value)
    kind = rest.pop("rope_type", "default")  # of any type, in a damaged file
    is_one_kind = kind in [*_ROPE] and rest.pop("type", kind) == kind
    if not is_one_kind or rest.pop("partial_rotary_factor", 1.0) != 1.0:
        return False
    are_positive = all(type(x) in (int, float) and x > 0 for x in rest.values())
    if rest.keys() != _ROPE[kind] or not are_positive:
        return False
    return kind == "default" or rest["low_freq_factor"] < rest["high_freq_factor"]


def limits(architecture: str, rope_remedy: str = "load another model") -> dict[str, Limit]:
    """Return the entries of a dense decoder of this class that are supported for some values only;
    `rope_remedy` is for a model with other positions.
    """
    return {
        "architectures": Limit(
            lambda value: not value or value == [architecture], f"[{architecture!r}]"
        ),
        "is_encoder_decoder": Limit(lambda value: value is False, "false"),
        "hidden_act": Limit(lambda value: value == "silu", "'silu'"),
        "tie_word_embeddings": Limit(lambda value: value in (True, False), "true or false"),
        "rope_parameters": Limit(
            _is_supported_rope,
            "of rope_type 'default' or 'llama3', with the positive numbers of that type alone",
            rope_remedy,
        ),
        "attention_dropout": Limit(lambda value: value == 0, "0.0", "set it so"),
        # Entries of no config class, which transformers still obeys.
        "is_causal": Limit(lambda value: value is True, "true"),
        "per_layer_config": Limit(lambda value: not value, "absent"),
    }
