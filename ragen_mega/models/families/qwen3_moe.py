"""Qwen3 with a mixture of experts in every layer (arXiv:2505.09388)."""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from ragen_mega.models.cuts import EXPERT_DOWN, EXPERT_GATE_UP, REPLICATED
from ragen_mega.models.families import dense
from ragen_mega.models.families.qwen2 import NEUTRAL, limits
from ragen_mega.models.families.qwen3 import NO_BIAS, QK_NORMS
from ragen_mega.models.family import Family, Limit, Weight

_MIXTURE = (
    # Transformer Engine too keeps this norm as a separate module.
    Weight(
        "pre_mlp_layernorm.weight",
        REPLICATED,
        {"post_attention_layernorm.weight": ("hidden_size",)},
    ),
    Weight(
        "mlp.router.weight", REPLICATED, {"mlp.gate.weight": ("num_moe_experts", "hidden_size")}
    ),
    Weight(
        "mlp.experts.local_experts.{e}.linear_fc1.weight",
        EXPERT_GATE_UP,
        {
            "mlp.experts.{e}.gate_proj.weight": ("ffn_size", "hidden_size"),
            "mlp.experts.{e}.up_proj.weight": ("ffn_size", "hidden_size"),
        },
        alias="mlp.experts.linear_fc1.weight{e}",
        server="mlp.experts.w13_weight",
        fused="mlp.experts.gate_up_proj",
    ),
    Weight(
        "mlp.experts.local_experts.{e}.linear_fc2.weight",
        EXPERT_DOWN,
        {"mlp.experts.{e}.down_proj.weight": ("hidden_size", "ffn_size")},
        alias="mlp.experts.linear_fc2.weight{e}",
        server="mlp.experts.w2_weight",
        fused="mlp.experts.down_proj",
    ),
)


def _num_experts(values: Mapping[str, Any]) -> int:
    """Read the number of experts, which transformers 5 writes under another name."""
    name = "num_local_experts"
    return values[name if name in values else "num_experts"]


_ALL_SPARSE = "every released Qwen3-MoE has experts in every layer, load one of those"

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    outer=dense.OUTER,
    layer=(*dense.ATTENTION, *QK_NORMS, *_MIXTURE),
    computed=dense.COMPUTED - {"intermediate_size"}
    | {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"},
    limits=limits("Qwen3MoeForCausalLM")
    | {
        "attention_bias": NO_BIAS,
        "norm_topk_prob": Limit(lambda value: value in (True, False), "true or false"),
        "mlp_only_layers": Limit(lambda value: not value, "empty", _ALL_SPARSE),
        "decoder_sparse_step": Limit(lambda value: value == 1, "1", _ALL_SPARSE),
        "shared_expert_intermediate_size": Limit(
            lambda value: not value, "absent", "no released Qwen3-MoE has shared experts"
        ),
    },
    # Of a mixture's own: the width of layers without experts, and the loss that balances experts
    # in pretraining, which would change the gradient of a policy.
    neutral=NEUTRAL | {"intermediate_size", "output_router_logits", "router_aux_loss_coef"},
    overrides={"qk_layernorm": True},
    sizes={
        "num_moe_experts": _num_experts,
        "moe_router_topk": itemgetter("num_experts_per_tok"),
        # A softmax over the chosen experts alone is one over all, normalised to sum to 1.
        "moe_router_pre_softmax": lambda values: not values.get("norm_topk_prob", False),
    },
    ffn_entry="moe_intermediate_size",
)
