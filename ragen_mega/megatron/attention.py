"""Layer parts for machines without Transformer Engine: RMSNorm under sequence parallelism and
packed causal attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ragen_mega.data import distributed

# Without cuDNN, which torch may prefer on Hopper: it builds a plan for every length, and no two
# trajectories have the same.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
    """Causal attention of each packed trajectory to itself, through torch's
    scaled_dot_product_attention.
    """

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
        if config.context_parallel_size != 1:
            raise ValueError(
                "context parallelism needs Transformer Engine; install the h100 extra or drop it"
            )
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,  # [T, heads/tp, head_dim]
        key: Tensor,  # [T, kv_heads/tp, head_dim]
        value: Tensor,  # [T, kv_heads/tp, head_dim]
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:  # [T, heads/tp * head_dim]
        assert packed_seq_params is not None and attention_mask is None, (
            "packed sequences are the only data layout"
        )
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        outputs = []
        with sdpa_kernel(_BACKENDS):
            # split, whose gradient is one concatenation; that of a slice is as long as the whole
            # pack, for every trajectory
            for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths)):
                q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, L, dim]
                output = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
                )
                outputs.append(output.squeeze(0).transpose(0, 1))
        return torch.cat(outputs).flatten(1)
