"""Prediction of the memory that a layout needs on a rank, before anything is built. The module
computes with integers and needs neither torch nor ranks.

Parameters, gradients and optimizer state are exact, as megatron-core's buffers lay them out.
Activations are what the local layers save for the backward pass, on a processor within 3% of what
autograd holds. Transformer Engine saves less: 3 instead of 5 widths in SwiGLU, no rotary tables,
and with FP8 one byte for inputs of linear layers. What CUDA, NCCL and SGLang need besides is
assumed. With adapters the model itself is there once for actor, critic and reference policy.
Ranks that compute on the processor share the machine's memory, in which checkpoints and the
embedded engine are too. Experts are whole, on the ranks of an expert-parallel group. Tensor and
sequence parallelism: arXiv:2205.05198; in flight under 1F1B: arXiv:2104.04473.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, get_args

from ragen_mega.config import LoraConfig, ParallelConfig, Recompute, StarPOConfig
from ragen_mega.config.sections.parallel import ParallelSizes
from ragen_mega.models.cuts import ROW
from ragen_mega.models.directory import check_model_directory
from ragen_mega.models.lora import adapted, kind_of, layer_weights
from ragen_mega.models.shape import ModelShape, stage_layers

GIB = 2**30
FP32 = 4
MOMENTS = 2 * FP32
"""Adam's two moments of an element."""
CUDA_CONTEXT = int(1.5 * GIB)
"""Assumed, for trainer and engine each: context, loaded kernels, cuBLAS workspaces."""
COMMUNICATOR = 1 * GIB
"""Assumed: NCCL's buffers per kind of group (TP, PP, EP, CP, DP) with more than one rank."""
ENGINE_GRAPHS = ENGINE_WORKSPACE = int(1.5 * GIB)
"""Assumed: SGLang's CUDA graphs, which it keeps while asleep, and its activations."""
PROGRAM = int(0.8 * GIB)
"""Measured on a processor: Python, torch and the libraries of a rank."""
FRAGMENTATION = 0.15
"""Assumed share of activations that is lost to fragmentation."""
SKEW = 1.5
"""Assumed: tokens that reach the experts of the busiest rank, over the mean of all ranks."""
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
FILL = 0.9
"""Share of a device's memory that a chosen setting may use: some terms are assumed."""
# of the whole vocabulary, in the fused loss: ragen_kernels.launch.CHUNK_BYTES
LOGITS_CHUNK = 600 * 2**20
TILE_ROWS = 128
"""Rows of a chunk on a processor, at least (`ragen_kernels.policy`)."""
# weights on their way to the engine: two of ragen_mega.engines.sglang.weights.BUCKET_BYTES, and
# what their checksum is computed with
SYNC_BUCKET = (2 * 128 + 256) * 2**20
ON_DEVICE = 16 * GIB
"""Most bytes of weights that wait on the device of a rank that trains until ranks that sample fetch
them; others wait in host memory (`ragen_mega.run.shares`).
"""
CACHE_BLOCK = 32
"""Positions of a page of the embedded engine's cache (`ragen_mega.engines.embedded.kernels`)."""
ADAM_PART = 512 * 2**20
"""Optimizer state that an update passes through the device at a time, or the state of one parameter
(`ragen_mega.megatron.adam`).
"""
ALIGN_PARAMETER, ALIGN_BUCKET = 64, 128
"""Elements to which megatron-core's distributed optimizer pads starts of parameters and ends of
buckets.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings besides the model's shape that decide the memory of a rank."""

    parallel: ParallelConfig
    num_ranks: int
    max_tokens: int
    """Positions of the largest microbatch on a rank."""
    has_critic: bool
    has_reference: bool
    engine: str
    kv_cache_tokens: int
    """Tokens in the cache of one engine."""
    num_sessions: int = 0
    """Trajectories that one engine plays at a time."""
    max_context: int = 0
    """Positions of the longest trajectory."""
    engine_tp: int = 1
    """Ranks that share an engine."""
    engine_ep: int = 1
    """Ranks of an engine that share experts."""
    engine_fp8: bool = False
    """Its linear weights in FP8."""
    weights_on_host: bool = False
    """A copy of the engine's weights in host memory."""
    senders: int = 0
    """Ranks with a share of the whole weights, which process groups carry to ranks that sample."""
    versions: int = 0
    """Most versions of the whole weights that wait for ranks that only sample."""
    sharing: float = 1.0
    """Tokens of trajectories per position that is computed."""
    on_host: bool = False
    """Whether ranks compute on the processor, and share the machine's memory."""
    lora: LoraConfig = LoraConfig()
    teachers: tuple[tuple[ModelShape, float], ...] = ()
    """Teachers besides what the policy starts from, which is the reference; with the share of the
    trajectories that each scores.
    """

    @classmethod
    def from_config(
        cls, config: StarPOConfig, num_ranks: int, *, sharing: float = 1.0, on_host: bool = False
    ) -> Setting:
        """Read the settings of a run on `num_ranks` devices. Raises ValueError if the layout does
        not fit them.
        """
        config.parallel.check_world(num_ranks)
        rollout = config.rollout
        num_engines = rollout.num_engines(num_ranks, num_ranks)
        shares, teachers = config.environment.shares, list[tuple[ModelShape, float]]()
        for name, taught in config.loaded_teachers.items():
            shape = check_model_directory("--teacher-load", name, needs_tokenizer=False)
            if shape is not None:  # one on the hub has no size yet
                part = sum(shares[each] for each in taught) / sum(shares.values())
                teachers.append((shape, part))
        return cls(
            parallel=replace(config.parallel, recompute=config.parallel.recomputation),
            num_ranks=num_ranks,
            max_tokens=max(config.train.microbatch_tokens, config.context_per_rank),
            max_context=rollout.max_context_length,
            has_critic=config.advantage.uses_critic,
            has_reference=config.needs_reference,
            engine="elsewhere" if rollout.given_engines else rollout.rollout_engine,
            kv_cache_tokens=rollout.kv_cache_size(rollout.sessions_per_engine(num_engines)),
            num_sessions=rollout.sessions_per_engine(num_engines),
            engine_tp=rollout.rollout_tensor_parallel_size,
            engine_ep=rollout.rollout_expert_parallel_size,
            engine_fp8=rollout.rollout_fp8,
            senders=len(config.senders(num_ranks)) * config.fetches_weights,
            versions=(1 if config.lora.lora_sync == "adapter" else rollout.max_staleness + 1)
            * (config.parallel.rollout_ranks > 0),
            weights_on_host=rollout.rollout_engine == "sglang"
            and rollout.weight_transfer == "file",
            sharing=sharing if config.shares_prefixes else 1.0,
            on_host=on_host,
            lora=config.lora,
            teachers=tuple(teachers),
        )

    @property
    def roles(self) -> tuple[bool, ...]:
        """Whether each of the models that train is the critic."""
        return (False, True) if self.has_critic else (False,)

    @property
    def dp(self) -> int:
        """Ranks that hold the same dense parameters, context-parallel ones too."""
        cut = self.parallel.cut
        return self.num_ranks // (cut.tp * cut.pp)

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        cut = self.parallel.cut
        return cut.tp * self.dp // cut.ep

    @property
    def sp(self) -> int:
        """Ranks that share the positions between tensor-parallel regions."""
        return self.parallel.cut.tp if self.parallel.sequence_parallel else 1

    @property
    def has_local_layers(self) -> bool:
        """Whether layers are not Transformer Engine's."""
        return self.on_host or self.parallel.transformer_impl == "local"

    @property
    def itemsize(self) -> int:
        return 2 if self.parallel.bf16 else FP32


class ModelState(NamedTuple):
    """Bytes of one model on one rank."""

    parameters: int
    gradients: int
    optimizer: int


def state_of(
    shape: ModelShape,
    setting: Setting,
    stage: int,
    *,
    is_critic: bool,
    dp_rank: int = 0,
    expert_rank: int = 0,
) -> ModelState:
    """Compute the bytes of a pipeline stage's parameters, float32 gradient buffers and Adam state,
    with adapters of these alone. Exact. `expert_rank` is the rank's number among those that hold
    the same experts.
    """
    shards, lora = setting.parallel.use_distributed_optimizer, setting.lora
    item = FP32 if lora.rank else setting.itemsize
    sharers = ((setting.dp, dp_rank), (setting.expert_dp, expert_rank))
    cut = setting.parallel.cut
    return _state(shape, cut, sharers, stage, item, lora, shards=shards, is_critic=is_critic)


def base_bytes(shape: ModelShape, setting: Setting, stage: int) -> int:
    """Count the bytes of a stage of the frozen model beside which adapters stand. Exact."""
    return frozen_bytes(shape, setting, stage) if setting.lora.rank else 0


def frozen_bytes(shape: ModelShape, setting: Setting, stage: int) -> int:
    """Count the bytes of a stage of a model that is not trained. Exact."""
    layout = replace(setting.parallel, use_distributed_optimizer=False)
    whole = replace(setting, lora=LoraConfig(), parallel=layout)
    return state_of(shape, whole, stage, is_critic=False).parameters


def device_state(shape: ModelShape, setting: Setting, stage: int, *, is_critic: bool) -> ModelState:
    """Compute `state_of` without what stays in host memory all the time."""
    state = state_of(shape, setting, stage, is_critic=is_critic)
    return state._replace(optimizer=0) if setting.parallel.optimizer_cpu_offload else state


@lru_cache(maxsize=4096)
def _state(
    shape: ModelShape,
    cut: ParallelSizes,
    sharers: tuple[tuple[int, int], tuple[int, int]],
    stage: int,
    item: int,
    lora: LoraConfig,
    *,
    shards: bool,
    is_critic: bool,
) -> ModelState:
    """Compute `state_of` from all that it depends on, of which a search meets few combinations.
    `sharers`: how many ranks hold the same parameters, and the same experts, and their numbers.
    """
    is_tied = shape.is_tied and not is_critic
    # an expert's weights stand together, in buffers apart from the other weights' buffers
    sizes: dict[str, list[int]] = {"dense": [], "expert": []}
    is_whole = not lora.rank
    for weight in shape.family.layer if is_whole else layer_weights(shape, lora):
        sizes[weight.cut.group].append(shape.num_elements(weight, cut.tp))
    layer, experts = sizes["dense"], sizes["expert"] * (shape.num_experts // cut.ep)
    vocab = shape.num_elements(shape.family.outer[0], cut.tp)
    dp = sharers[0][0]
    parameters = gradients = optimizer = 0
    for chunk, layers in enumerate(stage_layers(shape.num_layers, cut.pp, cut.vp)[stage]):
        is_first, is_last = stage == chunk == 0, stage == cut.pp - 1 and chunk == cut.vp - 1
        embedding = [vocab] if is_first and is_whole else []
        body = layer * len(layers) + [shape.hidden_size] * (is_last and is_whole)
        head = [vocab] if is_last and is_whole and (not is_tied or cut.pp > 1) else []
        if is_critic and is_last:
            head = [shape.hidden_size]
        buffers = [([embedding + body + head], item, sharers[0])]
        if is_tied and cut.pp > 1:  # its copies have separate buckets, to be sharded alike
            buffers = [([embedding, body, head], item, sharers[0])]
        elif is_critic and is_last and item != FP32:  # the value head is always float32
            buffers = [([embedding + body], item, sharers[0]), ([head], FP32, sharers[0])]
        buffers.append(([experts * len(layers)], item, sharers[1]))
        # only the first chunk of the first stage sends its gradients bucket by bucket, which
        # megatron-core closes from so many elements on
        bucket_size = max(40_000_000, 1_000_000 * dp) if is_first and dp > 1 else None
        for buckets, itemsize, (count, rank) in buffers:
            length = owned = sum(map(sum, buckets))
            if shards:
                length, owned = _distributed_buffer(buckets, count, rank, bucket_size)
            parameters += length * itemsize
            gradients += length * FP32
            optimizer += owned * (MOMENTS + (FP32 if itemsize != FP32 else 0))
    return ModelState(parameters, gradients, optimizer)


def _distributed_buffer(
    buckets: Sequence[Sequence[int]], dp: int, dp_rank: int, bucket_size: int | None
) -> tuple[int, int]:
    """Lay out a contiguous buffer: (its elements with padding, elements of parameters that a
    data-parallel rank updates), from the sizes of the parameters that may share a bucket.

    As `_ParamAndGradBuffer` of megatron-core lays it out: from the last parameter to the first; a
    bucket ends with its last parameter, or with the one that brings it to `bucket_size`; each rank
    owns an equal piece of every bucket.
    """
    end = owned = 0
    for sizes in reversed(buckets):
        begin, ranges = end, []
        for position, size in enumerate(reversed(sizes), start=1):
            start = _padded(end, ALIGN_PARAMETER)
            end = start + size
            ranges.append((start, end))
            is_full = bucket_size is not None and end - begin >= bucket_size
            if not is_full and position < len(sizes):
                continue
            end = _padded(end, math.lcm(dp, ALIGN_BUCKET))
            piece = (end - begin) // dp
            low, high = begin + dp_rank * piece, begin + (dp_rank + 1) * piece
            owned += sum(max(0, min(b, high) - max(a, low)) for a, b in ranges)
            begin, ranges = end, []
    return end, owned


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def layer_activations(shape: ModelShape, setting: Setting) -> dict[str, int]:
    """Count the bytes per position that one layer saves for the backward pass, by part, without
    recomputation.
    """
    cut, item, hidden = setting.parallel.cut, setting.itemsize, shape.hidden_size
    queries, keys = shape.q_size // cut.tp, shape.kv_size // cut.tp
    # gate and up, silu(gate), a copy of up, their product
    mlp = 5 * shape.ffn_size * item
    if shape.num_experts:  # inputs of experts, products weighted; logits and choices of the router
        chosen = dict(shape.further)["moe_router_topk"] * (SKEW if cut.ep > 1 else 1)
        mlp = int(chosen * (hidden * item + mlp + shape.ffn_size * item))
        mlp += shape.num_experts * 2 * FP32
    parts = {
        # twice: the input, the output, the inverse root mean square
        "norms": 2 * _of_norm(shape, setting),
        "qkv": (queries + 2 * keys) * item,
        # rotated queries and keys; where megatron-core rotates, cosines and sines of both
        "rotary": (queries + keys + 4 * shape.head_dim * (not setting.on_host)) * item,
        # its output and log-sum-exps
        "attention": queries * item + shape.num_heads // cut.tp * FP32,
        "mlp": mlp // cut.tp,
    }
    if setting.parallel.context_parallel_size > 1:  # values are copied, behind those received
        needs_qkv = "qk_layernorm" in shape.family.overrides
        parts["qkv"] = (queries + 2 * keys) * item * needs_qkv + keys * item
    elif setting.sharing > 1:  # Transformer Engine gets every trajectory's keys and values
        parts["keys and values of paths"] = int(2 * keys * item * setting.sharing)
    if setting.lora.rank:
        parts |= _of_adapters(shape, setting, parts)
    if "qk_layernorm" in shape.family.overrides:
        # the queries of several key heads are copied to stand side by side
        parts["query and key norms"] = (
            queries * (keys > shape.head_dim) * item
            + (shape.num_heads + shape.num_kv_heads) // cut.tp * FP32
        )
    return parts


def _of_norm(shape: ModelShape, setting: Setting) -> int:
    """Return the bytes per position that a norm saves, with its output."""
    width = _stream_itemsize(setting) + setting.itemsize
    return (shape.hidden_size * width + FP32) // setting.sp


def _of_adapters(shape: ModelShape, setting: Setting, parts: dict[str, int]) -> dict[str, int]:
    """Return the parts that differ beside frozen weights, which need no inputs of linear layers
    where no adapters do: norms, feed-forward layer, and the numbers between A and B.
    """
    lora, item, sp = setting.lora, setting.itemsize, setting.sp
    weights = adapted(shape, lora)
    kinds = {kind_of(weight) for weight in weights}
    chosen = shape.experts_per_token or 1
    between = sum(
        lora.rank * len(weight.tensors) * (chosen if weight.cut.group == "expert" else 1)
        for weight in weights
    )
    of_inputs = shape.hidden_size * item // sp
    found = {"between A and B": between * item, "norms": parts["norms"]}
    found["norms"] -= of_inputs * ("attention" not in kinds)
    if not kinds & {"mlp", "experts"}:
        width = shape.ffn_size
        if shape.num_experts:  # the router keeps the output of the norm
            width += shape.hidden_size
        else:
            found["norms"] -= of_inputs
        found["mlp"] = parts["mlp"] - chosen * width * item // setting.parallel.cut.tp
    return found


class AdapterSizes(NamedTuple):
    """The sizes, on a rank, of the low-rank matrices A and B beside one weight of a layer."""

    inner: int
    width: int
    """Numbers of a token between A and B: the rank, for each of the weight's tensors."""
    columns: int
    rank: int
    experts: int = 0
    """Experts that have such a weight each; 0 of a weight that every token passes."""

    @property
    def elements(self) -> int:
        """Count the elements of all that stand beside the weight."""
        return (self.experts or 1) * (self.width * self.inner + self.rank * self.columns)


def adapter_sizes(shape: ModelShape, setting: Setting) -> Iterator[AdapterSizes]:
    """Yield the sizes of the adapters beside the weights of a layer."""
    cut, rank = setting.parallel.cut, setting.lora.rank
    if not rank:
        return
    for weight in adapted(shape, setting.lora):
        columns, inner = shape.whole(weight)
        is_expert, is_row = weight.cut.group == "expert", weight.cut == ROW
        tp = 1 if is_expert else cut.tp
        experts = shape.num_local(weight, cut.ep) if is_expert else 0
        size = (inner // tp, columns) if is_row else (inner, columns // tp)
        yield AdapterSizes(size[0], rank * len(weight.tensors), size[1], rank, experts)


def matrices_bytes(shape: ModelShape, setting: Setting) -> int:
    """Count the bytes of a layer's matrices A and B as a pass multiplies by them: A scaled, B with
    zeros between the rows of its tensors.
    """
    is_cast = setting.itemsize != FP32
    return setting.itemsize * sum(
        (each.experts or 1)
        * each.width
        * (each.inner + each.columns * (is_cast or each.width > each.rank))
        for each in adapter_sizes(shape, setting)
    )


def _stream_itemsize(setting: Setting) -> int:
    """Return the bytes of a number of the residual stream, which local layers add up in float32."""
    return FP32 if setting.has_local_layers else setting.itemsize


def in_flight(stage: int, pp: int, vp: int) -> int:
    """Return the largest number of passes through a chunk of a stage of which the backward pass has
    not come: under 1F1B or, with several chunks, megatron-core's interleaved schedule.
    """
    return pp - stage if vp == 1 else 2 * (pp - stage - 1) + (vp - 1) * pp + 1


def activations(shape: ModelShape, setting: Setting, stage: int) -> int:
    """Count the bytes that all microbatches in flight on a pipeline stage have saved at their peak,
    the loss not included.
    """
    cut, recompute = setting.parallel.cut, setting.parallel.recomputation
    parts = layer_activations(shape, setting)
    one_layer = sum(parts.values())
    kept = {
        "none": one_layer,
        "selective": one_layer - parts["mlp"],
        "full": shape.hidden_size * _stream_itemsize(setting) // setting.sp,
    }[recompute]
    num_layers = max(map(len, stage_layers(shape.num_layers, cut.pp, cut.vp)[stage]))
    per_position = kept * num_layers
    if recompute == "full" or setting.on_host:
        # angles of the rotary embedding, or their cosines and sines, for all layers
        per_position += shape.head_dim * FP32
    per_position *= in_flight(stage, cut.pp, cut.vp)
    beside = matrices_bytes(shape, setting)
    if setting.has_local_layers:  # they keep what arrives: at most the longest trajectory
        beside += exchanged_bytes(shape, setting) * setting.max_context
    beside *= in_flight(stage, cut.pp, cut.vp) * (0 if recompute == "full" else num_layers)
    if stage == 0:
        per_position += 8 * cut.pp  # token ids of the embedding
    if stage == cut.pp - 1:  # the final norm; the loss keeps its output
        per_position += (
            _of_norm(shape, setting) - shape.hidden_size * setting.itemsize // setting.sp
        )
    return per_position * setting.max_tokens + beside


def exchanged_bytes(shape: ModelShape, setting: Setting) -> int:
    """Count the bytes per position of the keys and values that context-parallel ranks exchange in a
    layer; 0 if there are none.
    """
    if setting.parallel.context_parallel_size == 1:
        return 0
    return 2 * shape.kv_size // setting.parallel.cut.tp * setting.itemsize


def workspace(shape: ModelShape, setting: Setting, stage: int, *, is_critic: bool) -> int:
    """Estimate from above the further bytes that a backward pass needs at a time.

    One layer's recomputed activations and the gradients of all these activations, the largest
    gradient of a weight before it is added to its float32 buffer; on the policy's last stage, at
    another time, the chunked loss of `ragen_kernels`.
    """
    cut, item, tokens = setting.parallel.cut, setting.itemsize, setting.max_tokens
    parts = layer_activations(shape, setting)
    recomputed = {"none": 0, "selective": parts["mlp"], "full": sum(parts.values())}[
        setting.parallel.recomputation
    ]
    # a frozen weight has no gradient
    largest = 0 if setting.lora.rank else max(shape.layer_sizes(cut.tp, cut.ep))
    layer = (recomputed + sum(parts.values())) * tokens + largest * item
    # attended keys, at most of the longest trajectory and of every path: they arrive, are put
    # together and gathered, and have gradients
    attended = int(4 * setting.max_context + tokens * setting.sharing)
    layer += exchanged_bytes(shape, setting) * attended
    if is_critic or stage != cut.pp - 1:
        return layer
    head, hidden = shape.num_elements(shape.family.outer[-1], cut.tp), shape.hidden_size
    logits = min(LOGITS_CHUNK, tokens * shape.vocab_size * item) // cut.tp
    if setting.on_host:  # smaller chunks, of which plain torch makes copies in float32
        logits = min(tokens, TILE_ROWS) * shape.vocab_size * (item + 4 * FP32) // cut.tp
    # hidden states: gathered, of the rows in the loss, their gradient; the head's gradient in
    # float32 and as it is returned
    loss = logits + 3 * tokens * hidden * item
    # A tied gradient of the head waits for the embedding's; the allocator of a processor returns
    # memory late.
    of_head = 0 if setting.lora.rank else head * (FP32 + item)
    return max(layer, loss) + of_head if setting.on_host else max(layer, loss + of_head)


def engine_bytes(shape: ModelShape, setting: Setting) -> tuple[int, int]:
    """Count the bytes of (weights, key-value cache) of the engine on a device of its group; none
    for one elsewhere, and on a GPU for the embedded engine, which uses the CPU.
    """
    if setting.engine == "elsewhere" or (setting.engine == "embedded" and not setting.on_host):
        return 0, 0
    weights = shape.engine_weights(setting.itemsize, setting.engine_tp, fp8=setting.engine_fp8)
    return weights, setting.kv_cache_tokens * shape.kv_cache_bytes(
        setting.itemsize, setting.engine_tp
    )


def _besides_models(shape: ModelShape, setting: Setting, *, has_engine: bool) -> dict[str, int]:
    """List term -> bytes of what a GPU that trains holds all the time besides models."""
    cut, cp = setting.parallel.cut, setting.parallel.context_parallel_size
    groups = sum(size > 1 for size in (cut.tp, cut.pp, cut.ep, cp, setting.dp))
    base = {"CUDA and NCCL": CUDA_CONTEXT * (1 + has_engine) + COMMUNICATOR * groups}
    base |= {"engine's CUDA graphs": ENGINE_GRAPHS} if has_engine else {}
    if setting.senders:
        share = shape.engine_weights(setting.itemsize, 1) // setting.senders
        base["weights on their way"] = min(ON_DEVICE, share)
    return base


def stage_phases(
    shape: ModelShape, setting: Setting, stage: int
) -> Iterator[tuple[str, dict[str, int]]]:
    """List (phase, term -> bytes) of a rank of a pipeline stage, at the phase's peak."""
    offload, cut = setting.parallel.offload, setting.parallel.cut
    names = ("actor", "critic") if setting.has_critic else ("actor",)
    trains = {
        name: device_state(shape, setting, stage, is_critic=name == "critic") for name in names
    }
    weights, kv = engine_bytes(shape, setting)
    is_apart = setting.parallel.rollout_ranks > 0 and not setting.on_host
    in_fp8 = {}
    if (
        setting.parallel.fp8 != "none"
    ):  # Transformer Engine keeps each linear weight as it is and transposed
        layers = sum(map(len, stage_layers(shape.num_layers, cut.pp, cut.vp)[stage]))
        in_fp8["FP8 weights"] = 2 * layers * sum(shape.layer_sizes(cut.tp, cut.ep, matrices=True))
    if setting.on_host:
        base = {"program": PROGRAM * (2 if setting.engine == "sglang" else 1)}
        # each rank has an equal part of the checkpoint
        staged = staged_bytes(shape, setting, stage) // setting.dp
        base["checkpoint and host copies"] = host_copies(shape, setting, stage) + staged
    else:
        base = _besides_models(shape, setting, has_engine=bool(weights) and not is_apart)
    if setting.lora.rank:
        base["frozen model"] = base_bytes(shape, setting, stage)
    if setting.lora.lora_sync == "adapter" and not is_apart:
        base["engine weights"] = weights  # it keeps them
    turns, teachers = offload == "turns", teacher_bytes(setting, stage)
    teacher = {"teacher": sum(teachers)} if teachers else {}
    if turns and teachers:
        whole = replace(setting, lora=LoraConfig())
        alone = [
            {"teacher": size, "workspace": workspace(each, whole, stage, is_critic=False)}
            for size, (each, _) in zip(teachers, setting.teachers)
        ]
        yield "score", base | max(alone, key=lambda terms: sum(terms.values()))
    for name in trains:
        present = [name] if turns else trains
        saved = activations(shape, setting, stage)
        passing = workspace(shape, setting, stage, is_critic=name == "critic")
        states = {
            f"{other} {kind}": size
            for other in present
            for kind, size in trains[other]._asdict().items()
        }
        copies = {what: size * len(present) for what, size in in_fp8.items()}
        passes = {
            "activations": saved,
            "workspace": passing,
            "fragmentation": int(FRAGMENTATION * (saved + passing)),
        }
        if setting.parallel.optimizer_cpu_offload:
            vocabulary = shape.num_elements(shape.family.outer[0], cut.tp)
            largest = max(vocabulary, *shape.layer_sizes(cut.tp, cut.ep))
            largest *= not setting.lora.rank
            passes["part of optimizer"] = max(ADAM_PART, (MOMENTS + FP32) * largest)
        yield f"train {name}", base | states | copies | passes | ({} if turns else teacher)
    if offload == "none":
        stays = {f"{name} state": sum((*state, *in_fp8.values())) for name, state in trains.items()}
        stays, sending = stays | teacher, {}
    else:
        stays, sending = {}, {"actor parameters": trains["actor"].parameters}
    largest = 2 * shape.head_size * setting.itemsize  # gathered and joined
    if is_apart:  # a GPU that samples has nothing of those that train
        base = {"CUDA and NCCL": CUDA_CONTEXT + COMMUNICATOR, "engine's CUDA graphs": ENGINE_GRAPHS}
        stays, sending, largest = {}, {}, 0
    if weights and setting.engine == "embedded":
        # received as they are, then joined and transposed
        yield "sync", base | stays | {"engine weights": 2 * weights}
        yield "rollout", base | stays | {"engine weights": weights, "key-value cache": kv}
    elif weights:
        engine = {"engine weights": weights, "engine workspace": ENGINE_WORKSPACE}
        yield "sync", base | stays | sending | engine | {"buffers": largest + SYNC_BUCKET}
        yield "rollout", base | stays | engine | {"key-value cache": kv}


def plan(shape: ModelShape, setting: Setting) -> dict[str, dict[str, int]]:
    """Plan phase -> term -> bytes, on the rank that needs most in that phase."""
    stages = [dict(stage_phases(shape, setting, stage)) for stage in _largest(shape, setting)]
    return {
        phase: max((stage[phase] for stage in stages), key=lambda terms: sum(terms.values()))
        for phase in stages[0]
    }


def peak_bytes(shape: ModelShape, setting: Setting) -> int:
    """Return the bytes of the phase that needs most."""
    return max(sum(terms.values()) for terms in plan(shape, setting).values())


def _largest(shape: ModelShape, setting: Setting) -> set[int]:
    """Return the stages among which one needs most: those with a vocabulary, and the first one with
    the most layers. Behind it fewer microbatches are in flight.
    """
    cut = setting.parallel.cut
    held = [sum(map(len, stage)) for stage in stage_layers(shape.num_layers, cut.pp, cut.vp)]
    return {0, held.index(max(held)), cut.pp - 1}


HOST_GIB = 200.0
"""Assumed: host memory of a node for each of its GPUs; nodes with eight have 2 TB."""


class Capacity(NamedTuple):
    """The memory of GPUs and of the nodes that hold them, in bytes."""

    gpu: float
    node: int = 8
    """GPUs of a node."""
    host: float = 8 * HOST_GIB * GIB
    """Host memory of a node."""


def host_bytes(shape: ModelShape, setting: Setting, node: int = 1) -> int:
    """Count the bytes of host memory of the node of so many GPUs that needs most: copies of its
    ranks, their engines' weights if copies are kept, weights for ranks that only sample, and a
    checkpoint on its way to the disk, of which one data-parallel rank writes every part. An export
    goes tensor by tensor.
    """
    cut, ranks = setting.parallel.cut, min(node, setting.num_ranks)
    stages = max(1, ranks * cut.pp // setting.num_ranks)
    writers = min(ranks, stages * max(cut.tp, cut.ep))
    kept = engine_bytes(shape, setting)[0] if setting.weights_on_host else 0
    senders = setting.senders or 1
    waiting = setting.versions * shape.engine_weights(setting.itemsize, 1) // senders
    waiting *= -(-senders * ranks // setting.num_ranks)  # senders are spread over the nodes
    return (
        ranks * kept
        + waiting
        + max(
            ranks * host_copies(shape, setting, stage)
            + writers * staged_bytes(shape, setting, stage)
            for stage in _largest(shape, setting)
        )
    )


def staged_bytes(shape: ModelShape, setting: Setting, stage: int) -> int:
    """Count the bytes of a checkpoint that a rank which writes its part copies to host memory."""
    layout = replace(setting.parallel, use_distributed_optimizer=False)
    whole = replace(setting, parallel=layout)
    states = [state_of(shape, whole, stage, is_critic=role) for role in setting.roles]
    return sum(state.parameters + state.optimizer for state in states)


def host_copies(shape: ModelShape, setting: Setting, stage: int) -> int:
    """Count the bytes of what a rank of a pipeline stage keeps in host memory: offloaded tensors
    and the reference policy.
    """
    layout, total = setting.parallel, 0
    if layout.offload != "none":
        total += sum(teacher_bytes(setting, stage))
    for is_critic in setting.roles:
        state = state_of(shape, setting, stage, is_critic=is_critic)
        if setting.has_reference and not is_critic and not setting.lora.rank:
            # the actor's own wait here too while the reference computes
            total += state.parameters * (2 if layout.offload == "none" else 1)
        if layout.offload != "none":
            total += state.parameters
        if layout.offload != "none" or layout.optimizer_cpu_offload:
            total += state.optimizer
    return total


def teacher_bytes(setting: Setting, stage: int) -> list[int]:
    """Count the bytes of a pipeline stage of each teacher. Exact."""
    return [frozen_bytes(shape, setting, stage) for shape, _ in setting.teachers]


def fit(
    config: StarPOConfig, shape: ModelShape, num_ranks: int, device_bytes: int, *, on_host: bool
) -> tuple[StarPOConfig, list[str]]:
    """Return `config` with the microbatch and the recomputation that fit into the `device_bytes` of
    a rank, where no flag decides them, and lines about it. Raises ValueError, with remedies, unless
    every phase fits.

    The largest microbatch that fits is chosen, down to one whole context, and recomputation only
    where none fits without.
    """
    setting = Setting.from_config(config, num_ranks, on_host=on_host)
    given, mode = config.train.max_tokens_per_microbatch, config.parallel.recompute
    sizes, least = [setting.max_tokens], config.context_per_rank
    while given is None and sizes[-1] > least:
        sizes.append(max(least, sizes[-1] // 2))
    for recompute, tokens in itertools.product(RECOMPUTE if mode is None else (mode,), sizes):
        layout = replace(config.parallel, recompute=recompute)
        setting = replace(setting, parallel=layout, max_tokens=tokens)
        peak = max(sum(terms.values()) for terms in training(shape, setting).values())
        if peak <= FILL * device_bytes:
            break
    lines = check_fits(shape, setting, device_bytes)
    config = replace(config, parallel=layout)
    if given is None:
        config = replace(config, train=replace(config.train, max_tokens_per_microbatch=tokens))
    if tokens < sizes[0] or layout.recomputation != (mode or "none"):
        lines.insert(
            0,
            f"memory: {tokens} positions a microbatch, recomputation {recompute}: the plan needs"
            f" {peak / GIB:.1f} of {device_bytes / GIB:.1f} GiB a rank",
        )
    return config, lines


def training(shape: ModelShape, setting: Setting) -> dict[str, dict[str, int]]:
    """Return the phases of `plan` in which a model is trained."""
    phases = plan(shape, setting).items()
    return {phase: terms for phase, terms in phases if phase.startswith("train")}


def check_fits(shape: ModelShape, setting: Setting, device_bytes: int) -> list[str]:
    """Raise ValueError, with remedies, unless every phase fits into `device_bytes`. A cache of the
    embedded engine that would not fit if all contexts filled up is only told, in the lines that
    are returned, since its pages are taken as they are written; each trajectory takes one at least.
    """
    lines = []
    page = CACHE_BLOCK * shape.kv_cache_bytes(setting.itemsize, setting.engine_tp)
    for phase, terms in plan(shape, setting).items():
        if (total := sum(terms.values())) <= device_bytes:
            continue
        largest = [
            f"{name} {size / GIB:.1f}"
            for name, size in sorted(terms.items(), key=lambda term: -term[1])[:4]
        ]
        line = (
            f"the plan needs {total / GIB:.1f} GiB of {device_bytes / GIB:.1f} GiB in phase"
            f" {phase} ({', '.join(largest)}); {'; '.join(remedies(shape, setting, phase))}"
        )
        if (
            phase == "rollout"
            and setting.engine == "embedded"
            and (total - terms["key-value cache"] + setting.num_sessions * page <= device_bytes)
        ):
            lines.append(f"memory: with all contexts full {line}")
        else:
            raise ValueError(line)
    return lines


TRAJECTORY_BYTES = 4096
"""Host memory of the shortest trajectory on rank 0, which holds all of a step: 4,309 bytes for an
episode of the bandit with 48 tokens.
"""


def check_trajectories(config: StarPOConfig, host: int) -> None:
    """Raise ValueError unless all trajectories of a step fit into the `host` bytes of rank 0's
    machine, however small the engine's cache is.
    """
    groups, size = config.rollout.num_groups, config.rollout.group_size
    if (least := groups * size * TRAJECTORY_BYTES) > host:
        raise ValueError(
            f"num_groups ({groups}) x group_size ({size}) = {groups * size} trajectories of a step"
            f" take at least {least / GIB:.1f} GiB of host memory, and there are {host / GIB:.1f};"
            " lower --group-size or --num-groups"
        )


def remedies(shape: ModelShape, setting: Setting, phase: str) -> list[str]:
    """List remedies for a phase that does not fit, the cheapest first."""
    layout = setting.parallel
    smaller = ["give a smaller --teacher-load"] if setting.teachers else []
    if phase == "score":
        return [*smaller, "raise --tensor-model-parallel-size or --pipeline-model-parallel-size"]
    if not phase.startswith("train"):
        fewer = "lower --group-size, --num-groups or --max-context-length"
        if setting.engine == "embedded":
            return [fewer, "start fewer ranks"]
        unload = ["set --offload rollout"] if layout.offload == "none" else []
        return [*unload, "lower --kv-cache-tokens", fewer, "share an engine among more GPUs"]
    shards_optimizer = layout.use_distributed_optimizer or setting.dp == 1
    shards_sequence = layout.sequence_parallel or layout.tensor_model_parallel_size == 1
    advice = {
        "add --use-distributed-optimizer": not shards_optimizer,
        "set --recompute full": layout.recompute != "full",
        "add --sequence-parallel": not shards_sequence,
        "lower --max-tokens-per-microbatch": True,
        "add --optimizer-cpu-offload": not layout.optimizer_cpu_offload and not setting.on_host,
        "set --offload turns": (setting.has_critic or len(setting.teachers) > 0)
        and layout.offload != "turns"
        and not setting.on_host,
        "start fewer ranks on this machine": setting.on_host and setting.num_ranks > 1,
        "raise --expert-model-parallel-size": shape.num_experts > 0 and setting.expert_dp > 1,
        "raise --context-parallel-size": layout.context_parallel_size < setting.dp
        and setting.max_tokens * layout.context_parallel_size <= setting.max_context,
        "raise --tensor-model-parallel-size or --pipeline-model-parallel-size": True,
        "take more GPUs": not setting.on_host,
    }
    return smaller + [remedy for remedy, helps in advice.items() if helps]
