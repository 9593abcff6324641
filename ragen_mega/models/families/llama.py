"""Llama 1, 2 and 3 (arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783)."""

from ragen_mega.models.families import dense
from ragen_mega.models.family import Family, Limit

_NO_BIAS = Limit(lambda value: value is False, "false", "no released Llama has it")

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    outer=dense.OUTER,
    layer=(*dense.ATTENTION, *dense.MLP),
    computed=dense.COMPUTED,
    limits=dense.limits("LlamaForCausalLM") | {"attention_bias": _NO_BIAS, "mlp_bias": _NO_BIAS},
    # It once only divided products, and transformers ignores it.
    neutral=dense.NEUTRAL | {"pretraining_tp"},
)
