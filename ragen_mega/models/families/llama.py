"""Llama and Mistral (arXiv:2302.13971, arXiv:2310.06825), whose sizes a plan can use. The trainer
does not know them.
"""

from dataclasses import replace

from ragen_mega.models.families import dense
from ragen_mega.models.families.qwen2 import QWEN2

LLAMA = replace(
    QWEN2,
    model_type="llama",
    architecture="LlamaForCausalLM",
    layer=(*dense.ATTENTION, *dense.MLP),
    overrides={},
)
MISTRAL = replace(LLAMA, model_type="mistral", architecture="MistralForCausalLM")
