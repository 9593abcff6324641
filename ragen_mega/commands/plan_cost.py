"""What a step costs, what bounds it and what would help next, in words and as a timeline."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragen_mega.config import StarPOConfig
from ragen_mega.models.hardware import Machine
from ragen_mega.models.layout_search import fits
from ragen_mega.models.memory_plan import GIB
from ragen_mega.models.shape import ModelShape
from ragen_mega.models.time_plan import Play, Sizes, Terms, computed_length, step_seconds

STEPS = 100
"""Steps whose price is given."""
WORTH = 0.02
"""Share of a step that a change must save to be listed."""
NAMED = 3


def total(phases: Mapping[str, Terms]) -> float:
    """Seconds of a step."""
    return sum(sum(terms.values()) for terms in phases.values())


def bound(phases: Mapping[str, Terms]) -> tuple[str, str]:
    """(the longest phase, what takes most of it)."""
    longest = max(phases, key=lambda phase: sum(phases[phase].values()))
    return longest, max(phases[longest], key=lambda term: phases[longest][term])


def changes(config: StarPOConfig, machine: Machine) -> dict[str, StarPOConfig]:
    """Flags that a run might set next -> the run with them, where its other flags allow them."""
    layout, sampled, fp8 = config.parallel, config.rollout, bool(machine.hardware.fp8)
    wanted: dict[str, dict[str, dict[str, Any]]] = {}
    if sampled.rollout_engine == "sglang":
        tp = 2 * sampled.rollout_tensor_parallel_size
        for size in (tp, tp // 4):
            if 1 <= size <= machine.hardware.node:
                scale = sampled.kv_cache_tokens and sampled.kv_cache_tokens * size * 2 // tp
                wanted[f"--rollout-tensor-parallel-size {size}"] = {
                    "rollout": {"rollout_tensor_parallel_size": size, "kv_cache_tokens": scale}
                }
        if fp8 and not sampled.rollout_fp8:
            wanted["--rollout-fp8"] = {"rollout": {"rollout_fp8": True}}
    if fp8 and layout.fp8 == "none" and layout.bf16:
        wanted["--fp8 hybrid"] = {"parallel": {"fp8": "hybrid"}}
    if layout.recompute != "none":
        wanted["--recompute none"] = {"parallel": {"recompute": "none"}}
    if layout.offload != "none":
        wanted["--offload none"] = {"parallel": {"offload": "none"}}
    tokens = 2 * config.train.max_tokens_per_microbatch
    wanted[f"--max-tokens-per-microbatch {tokens}"] = {
        "train": {"max_tokens_per_microbatch": tokens}
    }
    if config.advantage.uses_critic and config.advantage.reward_placement == "trajectory":
        wanted["--advantage-estimator grpo (no critic; another algorithm)"] = {
            "advantage": {"advantage_estimator": "grpo"},
            "parallel": {"offload": "none" if layout.offload == "none" else "rollout"},
        }
    found = {}
    for name, sections in wanted.items():
        with suppress(ValueError):  # a rule of the configuration forbids it
            found[name] = replace(
                config,
                **{
                    section: replace(getattr(config, section), **fields)
                    for section, fields in sections.items()
                },
            )
    return found


def advice(
    machine: Machine,
    shape: ModelShape,
    config: StarPOConfig,
    num_gpus: int,
    capacity: float,
    play: Play,
) -> list[tuple[str, float]]:
    """(flags, seconds that they save) of changes that still fit into `capacity` GiB, best first."""
    now = total(step_seconds(machine, shape, config, num_gpus, play))
    trainers = config.parallel.num_trainers(num_gpus)
    saved = []
    for name, other in changes(config, machine).items():
        size = other.rollout.rollout_tensor_parallel_size
        if num_gpus % size or trainers % size or shape.num_heads % size:
            continue
        if fits(shape, other, trainers, capacity * GIB, play.sharing):
            seconds = total(step_seconds(machine, shape, other, num_gpus, play))
            saved.append((name, now - seconds))
    saved.sort(key=lambda item: -item[1])
    return [item for item in saved[:NAMED] if item[1] > WORTH * now]


def cost(
    machine: Machine,
    shape: ModelShape,
    config: StarPOConfig,
    num_gpus: int,
    play: Play,
    dollars: float,
    factor: float,
) -> dict[str, Any]:
    """Seconds by phase and term, rates, GPU-hours and money of STEPS steps, with the interval from
    1 / `factor` to `factor` of them. `update_mfu` counts the tokens that updates compute.
    """
    phases = step_seconds(machine, shape, config, num_gpus, play)
    seconds = total(phases)
    hours = STEPS * seconds * num_gpus / 3600
    sampled = config.rollout.num_groups * config.rollout.group_size
    kept = config.filter.num_kept(config.rollout.num_groups) or config.rollout.num_groups
    trained = kept * config.rollout.group_size * config.train.updates_per_rollout
    computed = computed_length(config, play)
    flops = Sizes.of(shape).flops(play.text_length, play.sampled / computed)
    flops *= trained * computed
    updating = sum(sum(phases[phase].values()) for phase in phases if phase == "update actor")
    trainers = config.parallel.num_trainers(num_gpus)
    phase, term = bound(phases)
    return {
        "hardware": machine.hardware.name,
        "phases_seconds": phases,
        "seconds": seconds,
        "interval_seconds": [seconds / factor, seconds * factor],
        "bound_by": {"phase": phase, "term": term},
        "tokens_per_second_per_gpu": sampled * play.length / seconds / num_gpus,
        "update_mfu": flops
        / updating
        / trainers
        / machine.hardware.peak(2 if config.parallel.bf16 else 4),
        "steps": STEPS,
        "gpu_hours": hours,
        "dollars": hours * dollars,
        "dollars_per_gpu_hour": dollars,
        "tokens_per_trajectory": play.length,
    }


def described(result: Mapping[str, Any], helps: list[tuple[str, float]], factor: float) -> str:
    """The cost as text."""
    seconds, phases = result["seconds"], result["phases_seconds"]
    lines = [f"{'phase':<24}{'seconds':>9}{'share':>7}  mostly"]
    for phase, terms in phases.items():
        spent = sum(terms.values())
        largest = sorted(terms.items(), key=lambda item: -item[1])[:2]
        mostly = ", ".join(f"{name} {time:.2f}" for name, time in largest if time > 0)
        lines.append(f"{phase:<24}{spent:9.2f}{spent / seconds:7.0%}  {mostly}")
    low, high = result["interval_seconds"]
    phase, term = result["bound_by"].values()
    spent = sum(phases[phase].values())
    saved = "; ".join(f"{name} saves {time:.1f} s" for name, time in helps)
    return "\n".join(
        (
            *lines,
            f"a step takes {seconds:.1f} s ({low:.1f} to {high:.1f} s: half of the published RL"
            f" steps lie within a factor of {factor:.2g} of their prediction);"
            f" {result['tokens_per_second_per_gpu']:.0f} tokens/s and GPU, MFU of the update"
            f" {result['update_mfu']:.0%}",
            f"{result['steps']} steps cost {result['gpu_hours']:.1f} {result['hardware']} hours,"
            f" {result['dollars']:.0f} $ at {result['dollars_per_gpu_hour']:.2f} $ a GPU-hour"
            f" ({result['dollars'] / factor:.0f} to {result['dollars'] * factor:.0f} $)",
            f"bound by: {phase}, {spent / seconds:.0%} of the step, of which {term}"
            f" {phases[phase][term] / spent:.0%}",
            f"what would help next: {saved or 'none of the flags tried; more GPUs'}",
        )
    )


def timeline(result: Mapping[str, Any], title: str, path: Path) -> None:
    """Draw the step: phases one after the other, each with its terms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    phases, start = result["phases_seconds"], 0.0
    names = sorted({name for terms in phases.values() for name in terms})
    colors = {name: pyplot.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    shown = set()
    for row, terms in enumerate(phases.values()):
        for name, seconds in terms.items():
            if seconds > 0.002 * result["seconds"]:
                label = None if name in shown else name
                shown.add(name)
                axes.barh(row, seconds, left=start, color=colors[name], label=label)
            start += seconds
    axes.set_yticks(range(len(phases)), [*phases])
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step, predicted")
    axes.set_title(title, loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)
