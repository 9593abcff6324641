"""Which layout: a prediction of the seconds of a step, to rank those layouts that fit.

The time of an ideal step plus what a layout adds: recomputation, the pipeline's bubble, exposed
collectives, copies to the host. The speeds are assumed, those of H100 SXM nodes with eight GPUs,
and nothing was measured: the numbers order layouts and promise nothing. FLOPs of a layer and
bubble: arXiv:2104.04473; traffic of tensor parallelism: arXiv:2205.05198.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ragen_mega.config import StarPOConfig
from ragen_mega.models.memory_plan import (
    GIB,
    Setting,
    engine_bytes,
    host_bytes,
    plan,
    state_of,
)
from ragen_mega.models.shape import ModelShape, cut_error

FLOPS = {"none": 400e12, "hybrid": 600e12, "e4m3": 600e12}
"""Assumed, sustained by a GPU in the matrix products of large microbatches, by --fp8."""
NVLINK, NETWORK, HOST_LINK, MEMORY = 300e9, 40e9, 40e9, 2.5e12
"""Assumed bytes per second of a GPU: to others in its node, to other nodes, to host memory, to its
own.
"""
NODE = 8
LAUNCHES = 0.2e-3
"""Assumed seconds of a layer and forward pass that a short microbatch cannot hide."""
EXCHANGE = 15e-6
"""Assumed seconds of an all-reduce of few bytes, two a layer of an engine on several GPUs."""
FILL = 0.9
"""Share of a GPU's memory that a chosen layout may use: terms of the plan are assumed."""
TOKENS = (16384, 8192, 4096)
"""Of a microbatch: what a layout is tried with."""
MARGIN = 1.1
"""Fewer pipeline stages are worth this factor of the predicted seconds."""
HOST_GIB = 200.0
"""Host memory for a GPU: nodes with eight have 2 TB."""


def step_seconds(shape: ModelShape, config: StarPOConfig, num_ranks: int) -> dict[str, float]:
    """What -> predicted seconds of a step whose trajectories all have their full length.

    The filter is taken to keep the share that it names, all groups if it names none.
    """
    layout, setting = config.parallel, Setting.from_config(config, num_ranks)
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    rollout, share = config.rollout, config.filter.value
    sampled = rollout.num_groups * rollout.group_size
    trained = sampled * share if share is not None and share <= 1 else sampled
    per_rank = trained * rollout.max_context_length / setting.dp * config.train.updates_per_rollout
    models = 1 + setting.has_critic
    # forward passes: log-probabilities or values, then forward and twice that backward
    passes = 4.0 * models - (config.loss.old_logprobs == "engine")
    extra = models * {"none": 0.0, "selective": _mlp_share(shape), "full": 1.0}[layout.recompute]

    work = 2 * shape.num_layers * sum(shape.linear_sizes()) + _head(shape)
    work += 2 * rollout.max_context_length * shape.q_size * shape.num_layers
    one_pass = per_rank * work / (tp * pp) / FLOPS[layout.fp8]
    layers = shape.num_layers / pp
    in_line = max(1.0, trained / setting.dp)  # trajectories, of which microbatches consist
    micros = max(min(4 * pp, in_line) if pp > 1 else 1, per_rank / setting.max_tokens)
    exchanged = 4 * (tp - 1) / tp * per_rank * shape.hidden_size * setting.itemsize * layers
    links = NVLINK if num_ranks <= NODE else NETWORK
    steps = max(1, round(trained / config.train.minibatch_size)) * models
    states = [state_of(shape, setting, 0, is_critic=bool(i)) for i in range(models)]
    moved = sum(state.parameters + state.optimizer for state in states)
    moved += states[0].parameters + states[0].optimizer if layout.offload == "turns" else 0
    return {
        "compute": passes * one_pass,
        "recomputation": extra * one_pass,
        "pipeline bubble": (passes + extra) * one_pass * (pp - 1) / min(4 * pp, in_line),
        "launches": (passes + extra) * micros * layers * LAUNCHES,
        "tensor parallelism": (passes / 2 + models + extra) * exchanged / NVLINK,
        "data parallelism": steps * states[0].parameters * (setting.dp - 1) / setting.dp / links,
        "offloading": 2 * moved / HOST_LINK if layout.offload != "none" else 0.0,
        **_engine_seconds(shape, config, setting),
    }


def _mlp_share(shape: ModelShape) -> float:
    """Of the products of a layer, those of its feed-forward part."""
    return 3 * shape.hidden_size * shape.ffn_size / sum(shape.linear_sizes())


def _head(shape: ModelShape) -> int:
    return 2 * shape.vocab_size * shape.hidden_size


def _engine_seconds(shape: ModelShape, config: StarPOConfig, setting: Setting) -> dict[str, float]:
    """Sampling, bound by the memory that every token reads, and the weights' way to the engine."""
    weights, _ = engine_bytes(shape, setting)
    if not weights:
        return {}
    rollout, tp = config.rollout, setting.engine_tp
    sessions = rollout.sessions_per_engine(setting.num_ranks // tp)
    cache = sessions * rollout.max_context_length / 2
    cache *= shape.kv_cache_bytes(setting.itemsize, tp)
    exchanges = 2 * shape.num_layers * EXCHANGE if tp > 1 else 0.0
    tokens = config.environment.expected_turns * rollout.expected_response_length
    is_local = tp == setting.parallel.tensor_model_parallel_size
    gathered = 0 if is_local and setting.parallel.pipeline_model_parallel_size == 1 else weights
    return {
        "sampling": tokens * ((weights + cache) / MEMORY + exchanges),
        "weight sync": weights / MEMORY + gathered / NVLINK,
    }


def layouts(shape: ModelShape, config: StarPOConfig, num_ranks: int) -> Iterator[StarPOConfig]:
    """`config` under every layout of the GPUs that the model can be cut into, whether it fits or
    not: TP and engine within a node, PP, recomputation, offloading, tokens of a microbatch.
    """
    sizes = [size for size in (1, 2, 4, 8) if num_ranks % size == 0]
    engines = [1]
    if config.rollout.rollout_engine == "sglang":
        engines = [size for size in sizes if shape.num_heads % size == 0]
    stages = range(1, num_ranks + 1)
    cuts = [(tp, pp) for pp in stages for tp in sizes if num_ranks % (tp * pp) == 0]
    modes = ("none", "rollout", "turns") if config.advantage.uses_critic else ("none", "rollout")
    kv = config.rollout.kv_cache_tokens
    for (tp, pp), recompute, offload, engine_tp, max_tokens in itertools.product(
        cuts, ("none", "selective", "full"), modes, engines, TOKENS
    ):
        if cut_error(shape, tp, pp) or max_tokens < config.rollout.max_context_length:
            continue
        parallel = replace(
            config.parallel,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            sequence_parallel=tp > 1,
            use_distributed_optimizer=num_ranks > tp * pp,
            recompute=recompute,
            offload=offload,
        )
        scale = engine_tp / config.rollout.rollout_tensor_parallel_size
        rollout = replace(
            config.rollout,
            rollout_tensor_parallel_size=engine_tp,
            kv_cache_tokens=kv and int(kv * scale),
        )
        train = replace(config.train, max_tokens_per_microbatch=max_tokens)
        yield replace(config, parallel=parallel, rollout=rollout, train=train)


def fits(shape: ModelShape, config: StarPOConfig, num_ranks: int, gpu_bytes: float) -> bool:
    """Whether every phase fits into `gpu_bytes`, and the host's part into `HOST_GIB` a GPU."""
    setting = Setting.from_config(config, num_ranks)
    peak = max(sum(terms.values()) for terms in plan(shape, setting).values())
    return peak <= gpu_bytes and host_bytes(shape, setting) <= HOST_GIB * GIB


def ranked(
    shape: ModelShape, config: StarPOConfig, num_ranks: int, gpu_bytes: float
) -> Iterator[tuple[float, StarPOConfig]]:
    """(predicted seconds of a step, configuration) of every layout that fits, the fastest first; of
    equals the one with less model parallelism.
    """
    timed = [
        (sum(step_seconds(shape, one, num_ranks).values()), position, one)
        for position, one in enumerate(layouts(shape, config, num_ranks))
    ]
    for seconds, _, one in sorted(timed, key=lambda item: item[:2]):
        if fits(shape, one, num_ranks, gpu_bytes):
            yield seconds, one


def best(
    shape: ModelShape, config: StarPOConfig, num_ranks: int, gpu_bytes: float
) -> StarPOConfig | None:
    """The layout that a recipe takes: of those that fit into `FILL` of a GPU and are within
    `MARGIN` of the fastest the one with the fewest pipeline stages, then the fastest. None if none
    fits.
    """
    found: StarPOConfig | None = None
    limit = None
    for seconds, one in ranked(shape, config, num_ranks, FILL * gpu_bytes):
        limit = MARGIN * seconds if limit is None else limit
        if seconds > limit:
            break
        stages = one.parallel.pipeline_model_parallel_size
        if found is None or stages < found.parallel.pipeline_model_parallel_size:
            found = one
    return found
