"""Search for a layout: those that fit into the GPUs, ordered by the predicted seconds of a step."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from ragen_mega.config import StarPOConfig
from ragen_mega.config.sections.parallel import ParallelSizes
from ragen_mega.models.shape import ModelShape, cut_error, server_error
from ragen_mega.planning.hardware import HARDWARE, Machine
from ragen_mega.planning.memory import (
    FILL,
    Capacity,
    Setting,
    device_state,
    engine_bytes,
    host_bytes,
    peak_bytes,
)
from ragen_mega.planning.time import Play, default_play, step_seconds, total

DEFAULT = Machine(HARDWARE["H100"])
"""The machine that recipes are made for."""
TOKENS = (16384, 8192, 4096)
"""Tokens of a microbatch that a layout is tried with."""
MARGIN = 1.1
"""Fewer pipeline stages are worth this factor of the predicted seconds."""
LAYOUT = {
    "parallel": (
        "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "expert_model_parallel_size", "context_parallel_size", "sequence_parallel",
        "use_distributed_optimizer", "optimizer_cpu_offload", "recompute", "offload",
    ),
    "train": ("max_tokens_per_microbatch",),
    "rollout": (
        "rollout_tensor_parallel_size", "rollout_expert_parallel_size", "kv_cache_tokens",
    ),
}  # fmt: skip
"""Section -> its settings that a search chooses."""


def layouts(
    shape: ModelShape, config: StarPOConfig, num_ranks: int, fixed: Collection[str] = ()
) -> Iterator[StarPOConfig]:
    """Lay `config` out in every way into which the model can be cut on these GPUs, whether it fits
    or not: TP, CP and engine within a node, PP, EP, recomputation, offloading, tokens of a
    microbatch. Several context-parallel ranks are tried for contexts longer than `TOKENS`. What
    `fixed` names of LAYOUT stays as it is, and so do the ranks that only sample.
    """
    samplers = config.parallel.rollout_ranks
    num_ranks -= samplers
    now = {
        name: getattr(getattr(config, section), name)
        for section, names in LAYOUT.items()
        for name in names
        if name in fixed
    }
    sizes = [size for size in (1, 2, 4, 8) if num_ranks % size == 0]
    engines = sizes if config.rollout.rollout_engine == "sglang" else [1]
    modes = ("none", "rollout", "turns") if config.advantage.uses_critic else ("none", "rollout")
    room, experts = config.rollout.max_context_length, shape.num_experts
    vp = config.parallel.virtual_pipeline_model_parallel_size
    usual = {
        "pipeline_model_parallel_size": range(1 if vp == 1 else 2, num_ranks + 1),
        "tensor_model_parallel_size": sizes,
        "expert_model_parallel_size": [
            size for size in range(1, (experts or 1) + 1) if num_ranks % size == 0
        ],
        "context_parallel_size": sizes if room > max(TOKENS) else [1],
        "recompute": ("none", "selective", "full"),
        "offload": modes,
        "rollout_tensor_parallel_size": engines,
    }
    tried = [(now[name],) if name in now else values for name, values in usual.items()]
    kv = config.rollout.kv_cache_tokens
    for pp, tp, ep, cp, recompute, offload, engine_tp in itertools.product(*tried):
        cut, least = ParallelSizes(tp, pp, ep, vp), -(-room // cp)
        if num_ranks % (tp * pp * cp) or num_ranks // pp % ep or cut_error(shape, cut):
            continue
        engine_ep = now.get("rollout_expert_parallel_size", engine_tp if experts else 1)
        if (
            num_ranks % engine_tp
            or samplers % engine_tp
            or engine_ep not in (1, engine_tp)
            or server_error(shape, engine_tp, engine_ep)
        ):
            continue
        parallel = replace(
            config.parallel,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            context_parallel_size=cp,
            sequence_parallel=now.get("sequence_parallel", tp > 1),
            use_distributed_optimizer=now.get(
                "use_distributed_optimizer", num_ranks > pp * (min(tp, ep) if experts else tp)
            ),
            recompute=recompute,
            offload=offload,
        )
        scale = engine_tp / config.rollout.rollout_tensor_parallel_size
        rollout = replace(
            config.rollout,
            rollout_tensor_parallel_size=engine_tp,
            rollout_expert_parallel_size=engine_ep,
            kv_cache_tokens=now.get("kv_cache_tokens", kv and int(kv * scale)),
        )
        tokens = [size for size in TOKENS if size >= least] or [least]
        if "max_tokens_per_microbatch" in now:
            tokens = [now["max_tokens_per_microbatch"]]
        for max_tokens in tokens:
            train = replace(config.train, max_tokens_per_microbatch=max_tokens)
            yield replace(config, parallel=parallel, rollout=rollout, train=train)


def divides_context(config: StarPOConfig) -> bool:
    """Return whether context-parallel ranks share the tokens of a trajectory."""
    return config.parallel.context_parallel_size > 1


def fits(
    shape: ModelShape,
    config: StarPOConfig,
    num_ranks: int,
    capacity: Capacity,
    sharing: float = 1.0,
) -> bool:
    """Return whether every phase fits into the GPUs, and the host's part into the nodes."""
    trainers = num_ranks - config.parallel.rollout_ranks
    setting = Setting.from_config(config, trainers, sharing=sharing)
    return (
        peak_bytes(shape, setting) <= capacity.gpu
        and host_bytes(shape, setting, capacity.node) <= capacity.host
    )


def ranked(
    shape: ModelShape,
    config: StarPOConfig,
    num_ranks: int,
    capacity: Capacity,
    machine: Machine = DEFAULT,
    play: Play | None = None,
    fixed: Collection[str] = (),
    where: Callable[[StarPOConfig], bool] = lambda _: True,
) -> Iterator[tuple[float, StarPOConfig]]:
    """Order the layouts that fit by (predicted seconds of a step, configuration), the fastest
    first; among equals the one with less model parallelism. Those that `where` refuses are left
    out.
    """
    play = play or default_play(config)
    timed = []
    for position, candidate in enumerate(layouts(shape, config, num_ranks, fixed)):
        if not where(candidate):
            continue
        setting = Setting.from_config(candidate, num_ranks - config.parallel.rollout_ranks)
        state = sum(device_state(shape, setting, 0, is_critic=False))
        if max(state, engine_bytes(shape, setting)[0]) > capacity.gpu:
            continue  # whatever else it needs
        phases = step_seconds(machine, shape, candidate, num_ranks, play)
        timed.append((total(phases), position, candidate))
    for seconds, _, candidate in sorted(timed, key=lambda item: item[:2]):
        if fits(shape, candidate, num_ranks, capacity, play.sharing):
            yield seconds, candidate


def best(
    shape: ModelShape,
    config: StarPOConfig,
    num_ranks: int,
    capacity: Capacity,
    machine: Machine = DEFAULT,
    play: Play | None = None,
    fixed: Collection[str] = (),
    where: Callable[[StarPOConfig], bool] = lambda _: True,
) -> StarPOConfig | None:
    """Choose the layout of a recipe: of those that `where` allows and that fit into `FILL` of a
    GPU, else with Adam's state in host memory, else into all of a GPU, and are within `MARGIN` of
    the fastest the one with the fewest pipeline stages, then the fastest. None if none fits.
    """
    for share, tried in itertools.product((FILL, 1.0), _placements(config, fixed)):
        tight = capacity._replace(gpu=share * capacity.gpu)
        fitting = ranked(shape, tried, num_ranks, tight, machine, play, fixed, where)
        near, limit = list[StarPOConfig](), math.inf
        for seconds, candidate in fitting:
            limit = min(limit, MARGIN * seconds)
            if seconds > limit:
                break
            near.append(candidate)
        if near:
            return min(near, key=lambda found: found.parallel.pipeline_model_parallel_size)
    return None


def smallest(
    shape: ModelShape,
    config: StarPOConfig,
    num_ranks: int,
    sharing: float = 1.0,
    fixed: Collection[str] = (),
) -> StarPOConfig | None:
    """Choose the layout that needs least of a GPU, fitting or not; None if there is none."""

    def peak(candidate: StarPOConfig) -> int:
        trainers = num_ranks - config.parallel.rollout_ranks
        return peak_bytes(shape, Setting.from_config(candidate, trainers, sharing=sharing))

    tried = (layouts(shape, each, num_ranks, fixed) for each in _placements(config, fixed))
    return min(itertools.chain.from_iterable(tried), key=peak, default=None)


def _placements(config: StarPOConfig, fixed: Collection[str]) -> list[StarPOConfig]:
    """Return the run with Adam's state where a flag says, else on the device and in host memory."""
    own = config.parallel.optimizer_cpu_offload
    return [
        replace(config, parallel=replace(config.parallel, optimizer_cpu_offload=parks))
        for parks in sorted({own, own or "optimizer_cpu_offload" not in fixed})
    ]
