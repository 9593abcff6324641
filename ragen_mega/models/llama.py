"""Llama and Mistral (arXiv:2302.13971, arXiv:2310.06825), whose sizes a plan can use. The trainer
does not know them.
"""

from dataclasses import replace

from ragen_mega.models.qwen import QWEN2

LLAMA = replace(
    QWEN2,
    model_type="llama",
    architecture="LlamaForCausalLM",
    layer=tuple(one for one in QWEN2.layer if one.key != "self_attention.linear_qkv.bias"),
)
MISTRAL = replace(LLAMA, model_type="mistral", architecture="MistralForCausalLM")
