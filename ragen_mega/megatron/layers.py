"""The transformer layers: Transformer Engine's fused ones, or megatron-core's local ones with the
parts of `attention`.

Both hold the same parameters. Transformer Engine keeps each norm inside the linear layer behind it,
which `layout` maps to the same Hugging Face names, and its attention takes packed sequences (`thd`)
to cuDNN or flash-attn with a padding-causal mask. Its layers add `_extra_state` to state dicts,
never a parameter: nothing here reads or stores it.
"""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from ragen_mega.megatron.attention import PackedAttention, RMSNorm


def layer_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Layers and final norm of this pipeline stage, as `config.transformer_impl` says."""
    num_layers = get_num_layers_to_build(config)
    if config.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        return TransformerBlockSubmodules([layer] * num_layers, layer_norm=TENorm)
    return TransformerBlockSubmodules([_local_layer(config)] * num_layers, layer_norm=RMSNorm)


def drop_quantised_weights(model: nn.Module) -> None:
    """Free the FP8 copies of weights that Transformer Engine keeps between the microbatches of a
    pass.

    The first microbatch of the next pass makes them again from the weights.
    """
    for module in model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()


def _local_layer(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer
