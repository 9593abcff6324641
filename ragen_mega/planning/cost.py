"""The cost of a step, its bound and the changes that help next, in words."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ragen_mega.config import StarPOConfig
from ragen_mega.models.shape import ModelShape, server_error
from ragen_mega.planning.hardware import INTERVAL, Machine
from ragen_mega.planning.layouts import fits
from ragen_mega.planning.memory import Capacity
from ragen_mega.planning.time import (
    Play,
    Terms,
    computed_length,
    ranks_usage,
    sampling,
    step_seconds,
    total,
)
from ragen_mega.run.idleness import sentence, shares

STEPS = 100
"""Steps whose price is given."""
WORTH = 0.02
"""Share of a step that a change must save to be listed."""
NAMED = 3


def bound(phases: Mapping[str, Terms]) -> tuple[str, str]:
    """Find (the longest phase, its largest term)."""
    longest = max(phases, key=lambda phase: sum(phases[phase].values()))
    return longest, max(phases[longest], key=lambda term: phases[longest][term])


def changes(config: StarPOConfig, machine: Machine) -> dict[str, StarPOConfig]:
    """List flags that a run might set next, with the run under them, where its other flags allow
    them.
    """
    layout, sampled, fp8 = config.parallel, config.rollout, bool(machine.hardware.fp8)
    is_served, tp = sampled.rollout_engine == "sglang", 2 * sampled.rollout_tensor_parallel_size
    tokens, room = 2 * config.train.microbatch_tokens, sampled.kv_cache_tokens
    offload = "none" if layout.offload == "none" else "rollout"
    has_critic = config.advantage.uses_critic
    has_critic &= config.advantage.reward_placement == "trajectory"
    wanted: dict[str, tuple[bool, dict[str, Any]]] = {
        f"--rollout-tensor-parallel-size {size}": (
            is_served and 1 <= size <= machine.hardware.node,
            {
                "rollout": {
                    "rollout_tensor_parallel_size": size,
                    "kv_cache_tokens": room and room * size * 2 // tp,
                }
            },
        )
        for size in (tp, tp // 4)
    } | {
        "--rollout-fp8": (
            is_served and fp8 and not sampled.rollout_fp8, {"rollout": {"rollout_fp8": True}}
        ),
        "--bf16": (not layout.bf16, {"parallel": {"bf16": True}}),
        "--fp8 hybrid": (
            fp8 and layout.fp8 == "none" and layout.bf16, {"parallel": {"fp8": "hybrid"}}
        ),
        "--recompute none": (layout.recomputation != "none", {"parallel": {"recompute": "none"}}),
        "--offload none": (layout.offload != "none", {"parallel": {"offload": "none"}}),
        f"--max-tokens-per-microbatch {tokens}": (
            True, {"train": {"max_tokens_per_microbatch": tokens}}
        ),
        "--advantage-estimator grpo (no critic; another algorithm)": (
            has_critic,
            {"advantage": {"advantage_estimator": "grpo"}, "parallel": {"offload": offload}},
        ),
    }  # fmt: skip
    found: dict[str, StarPOConfig] = {}
    for name, (helps, sections) in wanted.items():
        with suppress(ValueError):  # a rule of the configuration forbids it
            changed = {
                section: replace(getattr(config, section), **fields)
                for section, fields in sections.items()
            }
            found |= {name: replace(config, **changed)} if helps else {}
    return found


def advice(
    machine: Machine,
    shape: ModelShape,
    config: StarPOConfig,
    num_gpus: int,
    play: Play,
    capacity: Capacity,
) -> list[tuple[str, float]]:
    """List (flags, seconds that they save) of changes that still fit, best
    first.
    """
    now = total(step_seconds(machine, shape, config, num_gpus, play))
    trainers, saved = config.parallel.num_trainers(num_gpus), []
    for name, other in changes(config, machine).items():
        size = other.rollout.rollout_tensor_parallel_size
        server = size, other.rollout.rollout_expert_parallel_size
        if num_gpus % size or trainers % size or server_error(shape, *server):
            continue
        if fits(shape, other, num_gpus, capacity, play.sharing):
            seconds = total(step_seconds(machine, shape, other, num_gpus, play))
            saved.append((name, now - seconds))
    saved.sort(key=lambda item: -item[1])
    return [item for item in saved[:NAMED] if item[1] > WORTH * now]


def workload(config: StarPOConfig, play: Play) -> dict[str, Any]:
    """Describe the trajectories, updates and precisions of a step, for which its seconds hold."""
    sampled, kept = config.rollout, config.filter.num_kept(config.rollout.num_groups)
    trajectories = sampled.num_groups * sampled.group_size
    trains, samples = ("bfloat16" if config.parallel.bf16 else "float32",) * 2
    if config.parallel.fp8 != "none":
        trains += f" with matrix products in FP8 ({config.parallel.fp8})"
    if sampled.rollout_fp8:
        samples += " with linear layers in FP8"
    return {
        "environments": config.environment.environments,
        "groups": sampled.num_groups,
        "group_size": sampled.group_size,
        "trajectories": trajectories,
        "turns": play.turns,
        "tokens_per_trajectory": play.length,
        "sampled_per_trajectory": play.sampled,
        "tokens": trajectories * play.length,
        "filter": config.filter.filter_strategy,
        "groups_kept": kept,
        "trajectories_trained": (kept or sampled.num_groups) * sampled.group_size,
        "updates_per_rollout": config.train.updates_per_rollout,
        "estimator": config.advantage.advantage_estimator,
        "training": trains,
        "sampling": f"{sampled.rollout_engine} in {samples}",
    }


def workload_text(work: Mapping[str, Any]) -> str:
    """Write `workload` in two lines."""
    times = work["updates_per_rollout"]
    share = "keeps" if work["groups_kept"] else "is taken to keep"
    return (
        f"a step plays {work['trajectories']} trajectories ({work['groups']} groups of"
        f" {work['group_size']}, {work['environments']}) of {work['turns']} turns and"
        f" {work['tokens_per_trajectory']:.0f} tokens, {work['sampled_per_trajectory']:.0f} of them"
        f" sampled: {work['tokens']:.0f} tokens a step\n"
        f"the filter {work['filter']} {share} {work['trajectories_trained']} trajectories, trained"
        f" on {'once' if times == 1 else f'{times} times'} ({work['estimator']}) in"
        f" {work['training']}; sampled by {work['sampling']}"
    )


def cost(
    machine: Machine,
    shape: ModelShape,
    config: StarPOConfig,
    num_gpus: int,
    play: Play,
    dollars: float,
) -> dict[str, Any]:
    """Compute seconds by phase and term, rates, GPU-hours and money of STEPS steps, with an
    interval: how many times as much it was in published steps. `update_mfu` counts the
    tokens that updates compute, against the peak of the precision `mfu_of` of their products.
    """
    phases = step_seconds(machine, shape, config, num_gpus, play)
    sampled = sampling(machine, shape, config, num_gpus, play)
    ranks = ranks_usage(phases, sampled, config, num_gpus)
    seconds = total(phases)
    hours = STEPS * seconds * num_gpus / 3600
    work = workload(config, play)
    trained = work["trajectories_trained"] * work["updates_per_rollout"]
    computed = computed_length(config, play)
    flops = shape.cost.flops(play.text_length, play.sampled / computed)
    flops *= trained * computed
    updating = sum(phases["update actor"].values())
    trainers = config.parallel.num_trainers(num_gpus)
    phase, term = bound(phases)
    is_fp8, is_half = config.parallel.fp8 != "none", config.parallel.bf16
    peak = machine.hardware.peak(2 if is_half else 4, fp8=is_fp8)
    return {
        "workload": work,
        "hardware": machine.hardware.name,
        "phases_seconds": phases,
        "seconds": seconds,
        "interval": INTERVAL,
        "interval_seconds": [times * seconds for times in INTERVAL],
        "bound_by": {"phase": phase, "term": term},
        "shares": shares(ranks),
        "idleness": sentence(ranks, config),
        "tokens_per_second_per_gpu": work["tokens"] / seconds / num_gpus,
        "update_mfu": flops / updating / trainers / peak,
        "mfu_of": "FP8" if is_fp8 else "bfloat16" if is_half else "float32",
        "steps": STEPS,
        "gpu_hours": hours,
        "dollars": hours * dollars,
        "dollars_per_gpu_hour": dollars,
    }


def described(
    result: Mapping[str, Any], helps: list[tuple[str, float]], *, is_searched: bool
) -> str:
    """Write the cost as text. `is_searched`: no other layout is much faster."""
    seconds, phases = result["seconds"], result["phases_seconds"]
    lines = [f"{'phase':<24}{'seconds':>9}{'share':>7}  mostly"]
    for phase, terms in phases.items():
        spent = sum(terms.values())
        largest = sorted(terms.items(), key=lambda item: -item[1])[:2]
        mostly = ", ".join(f"{name} {time:.2f}" for name, time in largest if time)
        lines.append(f"{phase:<24}{spent:9.2f}{spent / seconds:7.0%}  {mostly}")
    low, high = result["interval"]
    dollars = result["dollars"]
    phase, term = result["bound_by"].values()
    spent = sum(phases[phase].values())
    spent_on = ", ".join(
        f"{part.replace('_', ' for ')} {share:.0%}"
        for part, share in result["shares"].items()
        if share
    )
    saved = "; ".join(f"{name} saves {time:.1f} s" for name, time in helps)
    others = "none of the flags tried; " + ("" if is_searched else "other layouts (--search), ")
    return "\n".join(
        (
            *lines,
            f"a step takes about {seconds:.1f} s; expect {low * seconds:.1f} to"
            f" {high * seconds:.1f} s, because four of five published numbers were {low:.2g} to"
            f" {high:.2g} times what this model predicts",
            f"{result['tokens_per_second_per_gpu']:.0f} tokens/s and GPU, MFU of the update"
            f" {result['update_mfu']:.0%} of the {result['mfu_of']} peak",
            f"{result['steps']} steps cost {result['gpu_hours']:.1f} {result['hardware']} hours,"
            f" {dollars:.0f} $ at {result['dollars_per_gpu_hour']:.2f} $ a GPU-hour"
            f" ({low * dollars:.0f} to {high * dollars:.0f} $)",
            f"bound by: {phase}, {spent / seconds:.0%} of the step, of which"
            f" {term} {phases[phase][term] / spent:.0%}",
            f"shares of all ranks (share/* in the log): {spent_on}; {result['idleness']}",
            f"what would help next: {saved or f'{others}more GPUs'}",
        )
    )
