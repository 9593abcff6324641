"""The transformer layers: Transformer Engine's fused ones, or megatron-core's local ones with the
parts that machines without Transformer Engine need: RMSNorm under sequence parallelism and packed
causal attention.

Both hold the same parameters. Transformer Engine keeps each norm inside the linear layer behind it,
which `layout` maps to the same Hugging Face names, and its attention takes packed sequences (`thd`)
to cuDNN or flash-attn with a padding-causal mask. Its layers add `_extra_state` to state dicts,
never a parameter: nothing here reads or stores it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ragen_mega.data import distributed

# Without cuDNN, which torch may prefer on Hopper: it builds a plan for every length, and no two
# trajectories have the same.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class PackedLengths(PackedSeqParams):
    """Packed trajectories whose lengths are also known on the host."""

    lengths: tuple[int, ...] = ()


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

    The first microbatch of the next pass rebuilds them from the weights.
    """
    for module in model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()


def _local_layer(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467) in float32; megatron-core's torch wrapper refuses
    sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=distributed.device())
        )
        # Tells finalize_model_grads to sum this gradient over tensor-parallel ranks, each of which
        # sees a slice of tokens.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype) * self.weight


class PackedAttention(MegatronModule):
    """Causal attention within each packed trajectory, by torch's scaled_dot_product_attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,  # [T, heads/tp, head_dim]
        key: Tensor,  # [T, kv_heads/tp, head_dim]
        value: Tensor,  # [T, kv_heads/tp, head_dim]
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedLengths | None = None,
    ) -> Tensor:  # [T, heads/tp * head_dim]
        assert packed_seq_params is not None and attention_mask is None, (
            "packed sequences are the only data layout"
        )
        lengths = packed_seq_params.lengths
        outputs = []
        with sdpa_kernel(_BACKENDS):
            # split, because its gradient is one concatenation; with slices each trajectory would
            # get a gradient as long as the whole pack
            for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths)):
                q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, L, dim]
                output = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
                )
                outputs.append(output.squeeze(0).transpose(0, 1))
        return torch.cat(outputs).flatten(1)
