"""Flags of the layout over the ranks, and of precision."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from ragen_mega.config.sections.section import (
    Count,
    Natural,
    NonNegative,
    OnlyWith,
    Positive,
    Section,
)

OffloadMode = Literal["none", "rollout", "turns"]
Recompute = Literal["none", "selective", "full"]
FP8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]


class ParallelSizes(NamedTuple):
    """The cut of a model over the ranks that train it."""

    tp: int = 1  # ranks that share every matrix
    pp: int = 1  # pipeline stages
    ep: int = 1  # ranks that share the experts of a layer
    vp: int = 1  # chunks of layers on each pipeline stage


@dataclass(frozen=True)
class ParallelConfig(Section):
    """Layout of model and optimizer over the ranks, and the precision in which layers compute."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share every matrix (TP)."""
    pipeline_model_parallel_size: Count = 1
    """Pipeline stages (PP). Where they do not divide the layers, the last one has a layer fewer
    than others, then the first one, then those beside them.
    """
    virtual_pipeline_model_parallel_size: Annotated[
        Count, OnlyWith("pipeline_model_parallel_size", "--pipeline-model-parallel-size 2")
    ] = 1
    """Chunks of layers on each pipeline stage (VP). A microbatch passes the first chunks of all
    stages, then the second ones, and so on. Stages wait for each other for 1/VP of the time, send
    VP times as many activations, and keep more activations.
    """
    expert_model_parallel_size: Count = 1
    """Ranks that share the experts of a layer (EP): consecutive ones of a pipeline stage, whether
    tensor- or data-parallel. Each holds whole experts, and tokens travel to the rank of theirs.
    """
    context_parallel_size: Count = 1
    """Ranks that share the tokens of every microbatch (CP). Each takes a run of the tokens, of
    about equal cost, and receives the keys and values of the texts that its run continues.
    """
    sequence_parallel: Annotated[
        bool, OnlyWith("tensor_model_parallel_size", "--tensor-model-parallel-size 2")
    ] = False
    """Shard activations between tensor-parallel regions over the sequence (needs TP > 1)."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks."""
    optimizer_cpu_offload: bool = False
    """Keep Adam's moments and the float32 copies of parameters in host memory. An update passes
    them through the device part by part, with the same result to the bit.
    """
    recompute: Recompute | None = None
    """Recompute activations in the backward pass: none, the feed-forward part of each layer, which
    holds most activations, or whole layers (default: none, or what the memory of a rank demands).
    Attention is fused and never keeps its scores.
    """
    bf16: bool = False
    """Parameters and activations in bfloat16; their originals, gradient sums and Adam's moments in
    float32.
    """
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers: Transformer Engine's (CUDA and --bf16), or megatron-core's local ones. `auto` takes
    the former where they can compute and have fused attention for packed trajectories: from compute
    capability 9.0 on, elsewhere with flash-attn.
    """
    fp8: Literal["none", "hybrid", "e4m3"] = "none"
    """Matrix products of the layers in FP8 (Transformer Engine): `e4m3` throughout, `hybrid` with
    e5m2 for gradients. The LM head, the critic's head and attention stay in higher precision.
    """
    fp8_recipe: Annotated[FP8Recipe | None, OnlyWith("fp8", "--fp8 hybrid")] = None
    """Scales of FP8 tensors: from earlier passes, from the tensor itself (default), or one per
    block of 128 or 32 values. Maxima of earlier passes (delayed) are no part of a checkpoint: such
    a run resumes, but not exactly.
    """
    placement: Literal["colocated", "separate"] = "colocated"
    """Owners of the devices: engines and trainer share them, in turns (colocated); or the last
    ranks of the job only sample, while the others train on what was sampled before (separate).
    """
    rollout_ranks: Natural = 0
    """Ranks that only sample (placement separate): as many that both sides take about as long for
    a step. Evaluations are played by those that train.
    """
    weight_senders: Annotated[
        Count, OnlyWith("placement", "--placement separate --rollout-ranks 1")
    ] = 1
    """Ranks that train and send weights to those that sample, each a share through a process group
    of its own (placement separate with SGLang): several for large models on several nodes, one for
    each node.
    """
    sampler_timeout: Annotated[
        Positive, OnlyWith("placement", "--placement separate --rollout-ranks 1")
    ] = 1800.0
    """Seconds without a finished turn after which ranks that only sample count as lost (placement
    separate).
    """
    report_waits_after: NonNegative = 300.0
    """Seconds without progress of a rank after which all ranks print where they are, and which rank
    they wait for; again after twice as long, and so on; 0 for never.
    """
    offload: OffloadMode = "none"
    """State that is moved to host memory: nothing (none); parameters, gradients and optimizer state
    during rollouts (rollout); or, besides, actor and critic in turns, each while the other one
    computes (turns).
    """

    def check(self) -> None:
        if (self.placement == "separate") != (self.rollout_ranks > 0):
            raise ValueError(
                f"placement {self.placement} and rollout_ranks {self.rollout_ranks} do not go"
                " together; set --placement separate --rollout-ranks 1 or more, or none of them"
            )
        if self.transformer_impl == "transformer_engine" and not self.bf16:
            raise ValueError(
                "transformer_impl transformer_engine has no fused attention in float32; add --bf16"
                " or drop --transformer-impl"
            )
        if self.fp8 != "none" and self.transformer_impl == "local":
            raise ValueError(
                f"fp8 {self.fp8} needs Transformer Engine's layers; drop --transformer-impl local"
                " or --fp8"
            )
        if self.fp8 != "none" and not self.bf16:
            raise ValueError(
                f"fp8 {self.fp8} works beside bfloat16 parameters; add --bf16 or drop --fp8"
            )

    @property
    def cut(self) -> ParallelSizes:
        return ParallelSizes(
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.expert_model_parallel_size,
            self.virtual_pipeline_model_parallel_size,
        )

    @property
    def recomputation(self) -> Recompute:
        """Return what is recomputed where the memory does not decide."""
        return self.recompute or "none"

    @property
    def recipe(self) -> FP8Recipe:
        """Return the recipe that scales FP8 tensors. With `tensorwise` a log-probability depends on
        the weights and its own microbatch alone, not on what was computed before.
        """
        return self.fp8_recipe or "tensorwise"

    def num_trainers(self, world_size: int) -> int:
        """Return the number of ranks that train. Raises ValueError unless the others are as many as
        asked for, and the layout fits those that train.
        """
        trainers = world_size - self.rollout_ranks
        if trainers < 1:
            raise ValueError(
                f"rollout_ranks ({self.rollout_ranks}) must leave a rank that trains, and the job"
                f" has {world_size}; lower --rollout-ranks or start more ranks"
                f" (NPROC_PER_NODE={self.rollout_ranks + 1})"
            )
        if self.weight_senders > trainers:
            raise ValueError(
                f"weight_senders ({self.weight_senders}) must be at most the number of ranks that"
                f" train ({trainers}); lower --weight-senders"
            )
        self.check_world(trainers)
        return trainers

    def check_world(self, world_size: int) -> None:
        """Raise ValueError unless the layout fits `world_size` ranks that train."""
        context = self.context_parallel_size
        model_parallel = self.cut.tp * self.cut.pp * context
        if world_size % model_parallel:
            raise ValueError(
                f"tensor_model_parallel_size ({self.tensor_model_parallel_size}) x"
                f" pipeline_model_parallel_size ({self.pipeline_model_parallel_size})"
                f"{f' x context_parallel_size ({context})' if context > 1 else ''} must divide"
                f" the world size ({world_size}); start torchrun with --nproc-per-node"
                f" {model_parallel + self.rollout_ranks} or"
                f" {'more of them' if self.rollout_ranks else 'a multiple'}, or lower the parallel"
                " sizes"
            )
        ep, rest = self.expert_model_parallel_size, world_size // self.pipeline_model_parallel_size
        if rest % ep:
            raise ValueError(
                f"expert_model_parallel_size ({ep}) must divide the {rest} ranks of a pipeline"
                " stage; lower --expert-model-parallel-size to a divisor, or start more ranks"
            )
