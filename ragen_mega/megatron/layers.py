"""The transformer layers: Transformer Engine's fused ones, or megatron-core's local ones with the
parts that machines without Transformer Engine need: RMSNorm under sequence parallelism and packed
causal attention. `ATTENTION` is the table of attention's implementations.

Both hold the same parameters. Transformer Engine keeps each norm inside the linear layer behind it,
which `layout` maps to the same Hugging Face names, and its attention takes packed sequences (`thd`)
to cuDNN or flash-attn with a padding-causal mask. Its layers add `_extra_state` to state dicts,
never a parameter: nothing here reads or stores it.
"""

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from ragen_mega.data.forest import Forest
from ragen_mega.data.types import move, offsets_of
from ragen_mega.megatron import cpu
from ragen_mega.megatron.attention import Schedule, attend, schedule_of
from ragen_mega.megatron.context import exchanged_keys
from ragen_mega.megatron.routing import MixtureLayer, Routing
from ragen_mega.ranks import collectives


@dataclass
class PackedForest(PackedSeqParams):
    """Packed trajectories, which may share prefixes. megatron-core takes them for one sequence: all
    that it does with their lengths is to look up rotary embeddings, which are gathered before.
    """

    forest: Forest = field(kw_only=True)
    routing: Routing | None = None
    """The experts that the nodes go through; None: the routers choose, or there are none."""
    context: ProcessGroup | None = None
    """Ranks that compute the other parts of the forest, if it is cut."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of the nodes' rotary angles [N, 1, head_dim / 2], for local layers."""

    @classmethod
    def of(cls, forest: Forest, device: torch.device) -> "PackedForest":
        """Return the arguments of the layers for the nodes of a forest."""
        longest = max(len(chain.path) for chain in forest.chains)
        whole = move(torch.tensor([0, forest.num_nodes], dtype=torch.int32), device)
        return cls("thd", whole, whole, max_seqlen_q=longest, max_seqlen_kv=longest, forest=forest)

    def attended(
        self, key: Tensor, value: Tensor, order: Tensor | None = None, *, again: bool = False
    ) -> AbstractContextManager[tuple[Tensor, Tensor]]:
        """Give a context the keys and values [M, kv_heads, head_dim] of the forest, or of these
        those that `order` names, from the keys and values [N, kv_heads, head_dim] of its nodes.
        Collective over the context-parallel ranks, see `exchanged_keys`.
        """
        if self.forest.received:
            return exchanged_keys(
                key, value, self.sent, self.forest, self.context, order, again=again
            )
        if order is not None:
            key, value = key.index_select(0, order), value.index_select(0, order)
        return nullcontext((key, value))

    @cached_property
    def sent(self) -> Tensor:
        """Nodes whose keys go to other ranks, rank by rank."""
        nodes = torch.from_numpy(np.concatenate(self.forest.sent))
        return move(nodes, self.cu_seqlens_q.device)

    @cached_property
    def schedule(self) -> Schedule:
        """The calls that compute the attention in torch."""
        return schedule_of(self.forest, self.cu_seqlens_q.device)

    @cached_property
    def chains(self) -> tuple[PackedSeqParams, Tensor | None]:
        """Return the chains as Transformer Engine computes them: every chain is a sequence of
        queries, whose keys are its whole path. The tensor lists the nodes of all paths; None if
        they are all nodes in order.
        """
        chains, device = self.forest.chains, self.cu_seqlens_q.device
        lengths = [[chain.length for chain in chains], [len(chain.path) for chain in chains]]
        offsets = [move(offsets_of(torch.tensor(row)), device) for row in lengths]
        packed = PackedSeqParams(
            "thd", *offsets, max_seqlen_q=max(lengths[0]), max_seqlen_kv=max(lengths[1])
        )
        if lengths[0] == lengths[1]:
            return packed, None
        paths = torch.from_numpy(np.concatenate([chain.path for chain in chains]))
        return packed, move(paths, device)


def layer_spec(config: TransformerConfig, chunk: int = 0) -> TransformerBlockSubmodules:
    """Build the layers and final norm of a chunk of this pipeline stage, as
    `config.transformer_impl` says.
    """
    num_layers = get_num_layers_to_build(config, chunk)
    if config.transformer_impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(
            config.num_moe_experts, config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
        )
        norm: type = TENorm
    else:
        layer, norm = _local_layer(config), RMSNorm
    attention = ATTENTION[attention_implementation(config)]
    layer.submodules.self_attention.submodules.core_attention = attention
    if config.num_moe_experts:
        layer.module = MixtureLayer
    return TransformerBlockSubmodules([layer] * num_layers, layer_norm=norm)


def attention_implementation(config: TransformerConfig) -> str:
    """Return the row of `ATTENTION` for this model on this device."""
    if config.transformer_impl == "transformer_engine":
        return "transformer_engine"
    return "compiled" if cpu.is_active() else "torch"


def drop_quantised_weights(model: nn.Module) -> None:
    """Free the FP8 copies of weights that Transformer Engine keeps between the microbatches of a
    pass.

    The first microbatch of the next pass rebuilds them from the weights.
    """
    for module in model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()


def _local_layer(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = _residual_addition
    attention = layer.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = ColumnLinear, RowLinear
    mlp = layer.submodules.mlp.submodules
    if config.num_moe_experts:
        mlp = mlp.experts.submodules
        # a name that megatron-core 0.16.1 defines with Transformer Engine only, and always reads
        vars(moe_utils).setdefault("te_general_gemm", None)
        # In checkpoints this norm has the name that it has with Transformer Engine's layers.
        del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    mlp.linear_fc1, mlp.linear_fc2 = ColumnLinear, RowLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def _residual_addition(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Return the addition to the residual stream in the stream's own dtype; megatron-core's rounds
    the stream to the dtype of the layers.
    """
    return lambda output_with_bias, residual, dropout: residual + output_with_bias[0]


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv:1910.07467) in float32, rounded to the dtype of the layers;
    megatron-core's torch wrapper refuses sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=collectives.device())
        )
        # Tells finalize_model_grads to sum this gradient over tensor-parallel ranks, each of which
        # sees a slice of tokens.
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return normalized(x, self.weight, self.eps)


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root mean square norm of x."""
    return _Normalize.apply(x, weight, eps)


class _Normalize(Function):
    """The root mean square norm as a function that keeps its input alone, where plain torch keeps
    every intermediate, in float32 too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _widened(x)
        squares = torch.linalg.vecdot(wide, wide).unsqueeze(-1)
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()  # [.., 1]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normal, wide, factor = _widened(x) * scale, _widened(gradient), _widened(weight)
        # its sums over rows and over columns are products with a vector
        both, d_weight = (normal * wide).flatten(0, -2), None
        if ctx.needs_input_grad[1]:
            d_weight = torch.mv(both.t(), both.new_ones(len(both))).to(weight.dtype)
        mean = torch.mv(both, factor).div_(x.shape[-1]).view(scale.shape)
        d_x = (wide * factor).addcmul_(normal, mean, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight, None


def _widened(x: Tensor) -> Tensor:
    """Return x in the dtype in which norms and rotations are computed."""
    return x if x.dtype == torch.float64 else x.float()


class ColumnLinear(ColumnParallelLinear):
    """A plain product where one rank holds the whole weight: small batches feel the calls that
    megatron-core makes around each.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x if self.weight.requires_grad else _plain(x)
        return _product(self, x) if self.tp_group.size() == 1 else super().forward(x)


class RowLinear(RowParallelLinear):
    """See `ColumnLinear`."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x if self.weight.requires_grad else _plain(x)
        return _product(self, x) if self.tp_group.size() == 1 else super().forward(x)


def _plain(x: Tensor) -> Tensor:
    """Return x [N, 1, H] with the strides of its shape, whatever its middle stride was. With other
    ones torch multiplies by a copy of a frozen weight for each token.
    """
    return x.flatten(0, -2).view(x.shape)


def _product(
    linear: ColumnParallelLinear | RowParallelLinear, x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """x W^T with the bias, or beside the bias that the caller will add."""
    ours, theirs = (None, linear.bias) if linear.skip_bias_add else (linear.bias, None)
    if (adapter := getattr(linear, "adapter", None)) is not None:
        return adapter.product(x, linear.weight, ours), theirs
    return F.linear(x, linear.weight, ours), theirs


class _BottomRight(enum.Enum):
    """Transformer Engine's mask for queries that are the last of their keys; megatron-core has no
    name for it.
    """

    padding_causal_bottom_right = 0


class EngineAttention(TEDotProductAttention):
    """Transformer Engine's attention from every chain of a forest to its path. The backward pass
    exchanges keys of context-parallel ranks again, where local layers keep them.
    """

    def forward(
        self,
        query: Tensor,  # [N, heads/tp, head_dim]
        key: Tensor,  # [N, kv_heads/tp, head_dim]
        value: Tensor,  # [N, kv_heads/tp, head_dim]
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        *,
        packed_seq_params: PackedForest,
    ) -> Tensor:  # [N, heads/tp * head_dim]
        packed, paths = packed_seq_params.chains
        if paths is not None:
            attn_mask_type = _BottomRight.padding_causal_bottom_right
        again = self.config.recompute_granularity != "full"  # which computes the exchange again
        with packed_seq_params.attended(key, value, paths, again=again) as (key, value):
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, packed
            )


class PackedAttention(MegatronModule):
    """Rotary embedding, then causal attention within packed trajectories by torch's
    scaled_dot_product_attention. Keys of context-parallel ranks are kept for the backward pass.
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
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,  # [N, heads/tp, head_dim]
        key: Tensor,  # [N, kv_heads/tp, head_dim]
        value: Tensor,  # [N, kv_heads/tp, head_dim]
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        *,
        packed_seq_params: PackedForest,
    ) -> Tensor:  # [N, heads/tp * head_dim]
        assert packed_seq_params.rotation is not None and attention_mask is None, (
            "packed sequences are the only data layout"
        )
        query, key = (_rotated(x, *packed_seq_params.rotation) for x in (query, key))
        with packed_seq_params.attended(key, value) as (key, value):
            return self.attend(query, key, value, packed_seq_params)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedForest) -> Tensor:
        """Return the attention of the nodes of a forest; shapes as in `forward`."""
        return attend(query, key, value, packed.schedule, self.scale)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate x [N, heads, head_dim] in float32 (RoFormer, arXiv:2104.09864, Eq. 34), and round the
    result: megatron-core rounds cosines, sines and products.
    """
    a, b = _widened(x).chunk(2, dim=-1)
    return torch.cat([a * cosines - b * sines, b * cosines + a * sines], dim=-1).to(x.dtype)


class CompiledAttention(PackedAttention):
    """Rotary embedding, then causal attention within packed trajectories, compiled for a
    processor.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedForest) -> Tensor:
        # Only here, for it brings a compiler (numba).
        from ragen_mega.megatron.cpu.attention import forest_attention

        scale = self.scale or query.shape[-1] ** -0.5
        return forest_attention(query, key, value, packed.forest, scale)


ATTENTION: dict[str, type] = {
    "transformer_engine": EngineAttention,
    "compiled": CompiledAttention,
    "torch": PackedAttention,
}
"""Implementations of attention over a forest; `attention_implementation` chooses."""
