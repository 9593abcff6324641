"""Search for a layout: those that fit into the GPUs, ordered by the predicted seconds of a step."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ragen_mega.config import StarPOConfig
from ragen_mega.models.hardware import HARDWARE, Machine
from ragen_mega.models.memory_plan import GIB, Setting, host_bytes, plan
from ragen_mega.models.shape import ModelShape, cut_error
from ragen_mega.models.time_plan import Play, default_play, step_seconds

DEFAULT = Machine(HARDWARE["H100"])
"""The machine that recipes are made for."""
FILL = 0.9
"""Share of a GPU's memory that a chosen layout may use: some terms of the plan are assumed."""
TOKENS = (16384, 8192, 4096)
"""Tokens of a microbatch that a layout is tried with."""
MARGIN = 1.1
"""Fewer pipeline stages are worth this factor of the predicted seconds."""
HOST_GIB = 200.0
"""Host memory per GPU: nodes with eight have 2 TB."""


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


def fits(
    shape: ModelShape,
    config: StarPOConfig,
    num_ranks: int,
    gpu_bytes: float,
    sharing: float = 1.0,
) -> bool:
    """Whether every phase fits into `gpu_bytes`, and the host's part into `HOST_GIB` per GPU."""
    setting = Setting.from_config(config, num_ranks, sharing=sharing)
    peak = max(sum(terms.values()) for terms in plan(shape, setting).values())
    return peak <= gpu_bytes and host_bytes(shape, setting) <= HOST_GIB * GIB


def ranked(
    shape: ModelShape,
    config: StarPOConfig,
    num_ranks: int,
    gpu_bytes: float,
    machine: Machine = DEFAULT,
    play: Play | None = None,
) -> Iterator[tuple[float, StarPOConfig]]:
    """(predicted seconds of a step, configuration) of every layout that fits, the fastest first;
    among equals the one with less model parallelism.
    """
    play = play or default_play(config)
    timed = []
    for position, one in enumerate(layouts(shape, config, num_ranks)):
        phases = step_seconds(machine, shape, one, num_ranks, play)
        seconds = sum(sum(terms.values()) for terms in phases.values())
        timed.append((seconds, position, one))
    for seconds, _, one in sorted(timed, key=lambda item: item[:2]):
        if fits(shape, one, num_ranks, gpu_bytes, play.sharing):
            yield seconds, one


def best(
    shape: ModelShape,
    config: StarPOConfig,
    num_ranks: int,
    gpu_bytes: float,
    machine: Machine = DEFAULT,
    play: Play | None = None,
) -> StarPOConfig | None:
    """The layout that a recipe takes: of those that fit into `FILL` of a GPU and are within
    `MARGIN` of the fastest the one with the fewest pipeline stages, then the fastest. None if none
    fits.
    """
    found: StarPOConfig | None = None
    limit = None
    for seconds, one in ranked(shape, config, num_ranks, FILL * gpu_bytes, machine, play):
        limit = MARGIN * seconds if limit is None else limit
        if seconds > limit:
            break
        stages = one.parallel.pipeline_model_parallel_size
        if found is None or stages < found.parallel.pipeline_model_parallel_size:
            found = one
    return found
