"""Mistral 7B (arXiv:2310.06825)."""

from dataclasses import replace

from ragen_mega.models.families.llama import LLAMA

MISTRAL = replace(LLAMA, model_type="mistral", architecture="MistralForCausalLM")
