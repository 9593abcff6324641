"""The families' models on megatron-core, as a policy that returns hidden states and as a critic.

The policy stops before the vocabulary: its loss is computed from hidden states and the LM-head
weight by `ragen_kernels.linear_policy_loss`, which never holds the full logits. Architecture:
arXiv:2407.10671, arXiv:2505.09388.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig

from ragen_mega.config import LoraConfig, ParallelConfig
from ragen_mega.data.types import Microbatch
from ragen_mega.megatron import cpu, precision
from ragen_mega.megatron.layers import PackedForest, layer_spec
from ragen_mega.megatron.lora import NoMemory, attach, share_base
from ragen_mega.megatron.routing import Routing
from ragen_mega.models.cuts import trainer_vocab_size
from ragen_mega.models.family import Weight
from ragen_mega.models.lora import layer_weights
from ragen_mega.models.rotary import rotary_frequencies
from ragen_mega.models.shape import ModelShape, check_config, cut_error, stage_layers
from ragen_mega.ranks import collectives

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    # a layer has one of the two
    "selective": dict(recompute_granularity="selective", recompute_modules=["mlp", "moe"]),
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}


def check_model(hf: PretrainedConfig, parallel: ParallelConfig) -> None:
    """Raise ValueError unless everything in the configuration is implemented, and the model can be
    split as `parallel` says.
    """
    check_config(hf)
    shape = ModelShape.of(hf)
    tp = parallel.tensor_model_parallel_size
    if error := cut_error(shape, parallel.cut):
        raise ValueError(error)
    if shape.num_experts and tp > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"tensor_model_parallel_size ({tp}) of a mixture of experts needs its tokens divided"
            " among the ranks; add --sequence-parallel"
        )
    if shape.num_experts and parallel.fp8 != "none":
        raise ValueError(
            f"fp8 {parallel.fp8} does not go with a mixture of experts, whose products in FP8 were"
            " never run; drop --fp8"
        )
    precision.check_widths(
        {
            "hidden size": shape.hidden_size,
            "attention width": shape.q_size // tp,
            "query, key and value width": (shape.q_size + 2 * shape.kv_size) // tp,
            "intermediate size": shape.ffn_size // tp,
        },
        parallel,
    )


def transformer_config(hf: PretrainedConfig, parallel: ParallelConfig) -> TransformerConfig:
    """megatron-core's configuration of a Hugging Face model."""
    check_model(hf, parallel)
    shape = ModelShape.of(hf)
    dtype = torch.bfloat16 if parallel.bf16 else torch.float32
    implementation = precision.choose_implementation(parallel, precision.Device.here())
    # Local layers add to a float32 residual stream, as the embedded engine does.
    is_widened = parallel.bf16 and implementation == "local"
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        **_pipeline_fields(shape, parallel),
        sequence_parallel=parallel.sequence_parallel,
        # megatron-core would wait for the device after every exchange, because of a torch bug that
        # was fixed long ago
        batch_p2p_sync=False,
        # gradients are summed over microbatches and ranks; weights[t] normalises
        calculate_per_token_loss=True,
        params_dtype=dtype,
        pipeline_dtype=torch.float32 if is_widened else dtype,
        fp32_residual_connection=is_widened,
        bf16=parallel.bf16,
        use_cpu_initialization=cpu.is_active(),
        perform_initialization=False,  # weights always come from a checkpoint
        gradient_accumulation_fusion=False,  # megatron-core's own LM head would need apex for it
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        # unfused, the rotation of packed trajectories reads lengths from the device four times a
        # layer, and SwiGLU keeps five activations of its width instead of three
        apply_rope_fusion=implementation == "transformer_engine",
        bias_activation_fusion=implementation == "transformer_engine",
        **shape.family.overrides,
        **dict(shape.further),
        **(_mixture_fields(shape, parallel, implementation) if shape.num_experts else {}),
        **precision.layer_fields(parallel, implementation),
        **_RECOMPUTE[parallel.recomputation],
    )


def _pipeline_fields(shape: ModelShape, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the fields of TransformerConfig that place layers on pipeline stages."""
    pp, vp = parallel.cut.pp, parallel.cut.vp
    if pp == 1:
        return {}
    stages = stage_layers(shape.num_layers, pp, vp)
    runs = [[LayerType.decoder] * len(stage[chunk]) for chunk in range(vp) for stage in stages]
    runs[0].insert(0, LayerType.embedding)
    runs[-1].append(LayerType.loss)
    fields: dict[str, Any] = {"pipeline_model_parallel_layout": runs}
    if vp > 1:
        # A stage sends to its neighbours while it computes. One batch would mix the messages of
        # activations and gradients up where both neighbours are one rank.
        fields |= dict(
            virtual_pipeline_model_parallel_size=vp, overlap_p2p_comm=True, batch_p2p_comm=False
        )
    return fields


def _mixture_fields(
    shape: ModelShape, parallel: ParallelConfig, implementation: str
) -> dict[str, Any]:
    """Return the fields of TransformerConfig of a mixture of experts. No token is dropped, and no
    loss balances the experts: it would change the gradient of the policy.
    """
    is_fused = implementation == "transformer_engine"
    return dict(
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        moe_ffn_hidden_size=shape.ffn_size,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=is_fused,
        moe_permute_fusion=is_fused,
    )


class QwenModel(GPTModel):
    """A chunk of a policy or critic: all that this rank holds, or a part of it under the
    interleaved schedule. The output of the last chunk of the last stage is hidden states, not
    logits; of a critic, values.
    """

    def __init__(
        self,
        hf: PretrainedConfig,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        is_critic: bool,
        chunk: int,
    ) -> None:
        shape, stage = ModelShape.of(hf), groups.pp.rank()
        is_last = chunk == _num_chunks(config) - 1
        super().__init__(
            config=config,
            transformer_layer_spec=layer_spec(config, chunk),
            vocab_size=trainer_vocab_size(shape.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=stage == chunk == 0,
            post_process=is_last and stage == groups.pp.size() - 1,
            share_embeddings_and_output_weights=hf.tie_word_embeddings and not is_critic,
            position_embedding_type="rope",
            pg_collection=groups,
            vp_stage=chunk,
        )
        self.hf, self.shape, self.is_critic = hf, shape, is_critic
        self.lora = LoraConfig()
        """The adapters that `attach` has put beside the layers."""
        # megatron-core's own scaling has the context of Llama 3.1's pretraining built in
        rotary = self.rotary_pos_emb
        rotary.inv_freq = rotary_frequencies(shape).to(rotary.inv_freq.device)
        if is_critic and self.post_process:
            self.output_layer = ValueHead(config)
        for parameter in self.parameters():
            if parameter.device.type == "cpu":  # as megatron-core makes routers on every machine
                parameter.data = parameter.data.to(collectives.device())

    def setup_embeddings_and_output_layer(self) -> None:
        with cpu.cuda_literals_as_cpu():
            super().setup_embeddings_and_output_layer()

    def _preprocess(
        self, *, position_ids: Tensor, packed_seq_params: PackedForest, **arguments: Any
    ) -> tuple[Any, ...]:
        embedded, rotary, *rest = super()._preprocess(
            position_ids=position_ids, packed_seq_params=packed_seq_params, **arguments
        )
        rotary = rotary.index_select(0, position_ids.squeeze(0))  # of the nodes, [N, 1, 1, dim]
        if self.lora.rank and self.pre_process and torch.is_grad_enabled():
            embedded.requires_grad_()  # or recomputed layers would take it for a constant
        if self.config.transformer_impl == "local":
            angles = rotary.squeeze(1)[..., : rotary.shape[-1] // 2]  # [N, 1, dim / 2]
            packed_seq_params.rotation = angles.cos(), angles.sin()
            rotary = None
        return embedded, rotary, *rest

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        if self.is_critic and self.post_process:
            return self.output_layer(hidden_states)  # [N]
        return hidden_states  # [N/sp, 1, H]

    @property
    def adapter_weights(self) -> tuple[Weight, ...]:
        """Return the weights of the adapters of a layer."""
        return layer_weights(self.shape, self.lora)

    @property
    def layer_offset(self) -> int:
        """Number of the first layer of this chunk."""
        return self.decoder.layers[0].layer_number - 1

    @property
    def expert_offset(self) -> int:
        """Number of the first expert in each layer that this rank holds."""
        ep = self.pg_collection.ep
        return ep.rank() * self.shape.num_experts // ep.size()

    def head_weight(self) -> Tensor:
        """[V/tp, H] LM-head weight of the last stage, the embedding itself when tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def head_input(self, output: Tensor) -> Tensor:
        """Return the hidden states [N, H] of all nodes, with the collective in backward that a
        column-parallel head needs.
        """
        whole = (
            tensor_parallel.gather_from_sequence_parallel_region
            if self.config.sequence_parallel
            else tensor_parallel.copy_to_tensor_model_parallel_region
        )
        return whole(output, group=self.tp_group).squeeze(1)

    def vocab_arguments(self) -> dict[str, Any]:
        """Return the first row of the vocabulary on this rank, the number of real ids, and the
        group that holds the other rows.
        """
        rows = self.vocab_size // self.tp_group.size()
        group = self.tp_group if self.tp_group.size() > 1 else None
        return dict(
            vocab_start=self.tp_group.rank() * rows, vocab_valid=self.shape.vocab_size, group=group
        )


class Chunks(nn.ModuleList):
    """The chunks of a model that a rank holds: one, or several under the interleaved schedule."""

    if TYPE_CHECKING:  # torch's list has no type of its items

        def __iter__(self) -> Iterator[QwenModel]: ...
        def __getitem__(self, idx: int) -> QwenModel: ...  # type: ignore[override]  # no slices


class ValueHead(nn.Linear):
    """Hidden state -> value in float32, equal on all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(
            config.hidden_size, 1, bias=False, dtype=torch.float32, device=collectives.device()
        )
        self.sequence_parallel = config.sequence_parallel
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel
        nn.init.zeros_(self.weight)  # an untrained critic predicts 0, the same on every rank

    def forward(self, hidden: Tensor) -> Tensor:  # [N/sp, 1, H] -> [N]
        values = super().forward(hidden.float())
        if self.sequence_parallel:
            values = tensor_parallel.gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False
            )
        return values.flatten()


def model_inputs(
    batch: Microbatch, routing: Routing | None = None, context: ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the arguments of `QwenModel.forward` for one packed microbatch. `context`: the ranks
    that compute the other parts of its forest.
    """
    packed = PackedForest.of(batch.forest, batch.input_ids.device)
    packed.routing, packed.context = routing, context
    return dict(
        input_ids=batch.input_ids.unsqueeze(0),
        position_ids=batch.depths.unsqueeze(0),
        attention_mask=None,
        packed_seq_params=packed,
    )


def _num_chunks(config: TransformerConfig) -> int:
    """Return the number of chunks that each rank holds of a model."""
    return config.virtual_pipeline_model_parallel_size or 1


def build_model(
    hf: PretrainedConfig,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    *,
    is_critic: bool = False,
    lora: LoraConfig | None = None,
    base: Chunks | None = None,
) -> Chunks:
    """Build the chunks of a policy on this rank, with tied embeddings if the checkpoint ties them,
    or the chunks of a critic, with a scalar head in place of the vocabulary. With `lora` all but
    adapters and a critic's head is frozen, and may be shared with another model, `base`.
    """
    # the layers take whole sequences: megatron-core would rotate keys as it cuts sequences itself
    groups = copy(groups)
    groups.cp = groups.expt_tp
    build = partial(QwenModel, hf, config, groups, is_critic)
    with NoMemory() if base is not None else nullcontext():
        chunks = Chunks(map(build, range(_num_chunks(config))))
    if base is not None:
        share_base(chunks, base)
    if lora is not None and lora.rank:
        attach(chunks, lora)
    return chunks
