"""The answer of `ragen-mega plan`, as values and as text: the run that is planned, whether its
layout fits, and the cost of a step.
"""

import argparse
import math
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_mega.config import RolloutConfig, StarPOConfig
from ragen_mega.config.cli import RECIPES, read_words
from ragen_mega.config.sections.section import flag_of
from ragen_mega.models.shape import ModelShape, check_config, cut_error, server_error
from ragen_mega.planning import cost
from ragen_mega.planning.hardware import HARDWARE, Machine, find_machine
from ragen_mega.planning.layouts import (
    LAYOUT,
    TOKENS,
    best,
    divides_context,
    fits,
    ranked,
    smallest,
)
from ragen_mega.planning.memory import (
    FILL,
    GIB,
    HOST_GIB,
    Capacity,
    Setting,
    host_bytes,
    plan,
    remedies,
)
from ragen_mega.planning.published import SHAPES, model_config
from ragen_mega.planning.time import Play, default_play, step_seconds, total, updating
from ragen_mega.run.check import check_environments


def examine(shape: ModelShape, setting: Setting, capacity: Capacity) -> dict[str, Any]:
    """Examine whether every phase fits into the GPUs, and what ranks keep on the host into their
    node: GiB of both, and remedies where one does not fit. Raises ValueError if the model cannot be
    cut this way.
    """
    layout, cut = setting.parallel, setting.parallel.cut
    server = setting.engine_tp, setting.engine_ep
    if error := cut_error(shape, cut) or server_error(shape, *server):
        raise ValueError(error)
    terms = {
        phase: {name: size / GIB for name, size in sizes.items()}
        for phase, sizes in plan(shape, setting).items()
    }
    totals = {phase: sum(sizes.values()) for phase, sizes in terms.items()}
    tight = [phase for phase, total in totals.items() if total > capacity.gpu / GIB]
    host = host_bytes(shape, setting, capacity.node)
    advice = {phase: remedies(shape, setting, phase) for phase in tight}
    if host > capacity.host:
        advice["host memory"] = ["set --offload none", "take nodes with more", "take more GPUs"]
    return {
        "status": "predicted",
        "parameters": shape.num_parameters,
        "num_gpus": setting.num_ranks,
        "tensor_parallel": cut.tp,
        "pipeline_parallel": cut.pp,
        "virtual_pipeline": cut.vp,
        "expert_parallel": cut.ep,
        "context_parallel": layout.context_parallel_size,
        "data_parallel": setting.dp // layout.context_parallel_size,
        "rollout_tensor_parallel": setting.engine_tp,
        "recompute": layout.recompute,
        "offload": layout.offload,
        "max_tokens": setting.max_tokens,
        "gpu_memory_gib": capacity.gpu / GIB,
        "phases_gib": totals,
        "terms_gib": terms,
        "peak_gib": max(totals.values()),
        "host_gib_per_rank": host_bytes(shape, setting) / GIB,
        "host_gib_per_node": host / GIB,
        "host_memory_gib": capacity.host / GIB,
        "fits": not advice,
        "remedies": advice,
    }


def summary(report: dict[str, Any]) -> str:
    """Write the line about memory that a recipe carries."""
    phases = ", ".join(f"{phase} {total:.1f}" for phase, total in report["phases_gib"].items())
    return (
        f"{phases} GiB of {report['gpu_memory_gib']:g}; host {report['host_gib_per_rank']:.1f} GiB"
        " a GPU"
    )


def layout_words(report: dict[str, Any]) -> str:
    """Name the layout; chunks of stages and expert parallelism only where there are several."""
    further = "".join(
        f" {name} {report[key]},"
        for name, key in (
            ("VP", "virtual_pipeline"),
            ("EP", "expert_parallel"),
            ("CP", "context_parallel"),
        )
        if report[key] > 1
    )
    return (
        f"TP {report['tensor_parallel']}, PP {report['pipeline_parallel']},{further} DP"
        f" {report['data_parallel']}, rollout TP {report['rollout_tensor_parallel']}"
    )


def described(report: dict[str, Any]) -> str:
    """Write the plan of memory as text."""
    lines = [
        f"{report['parameters'] / 1e9:.2f} billion parameters on {report['num_gpus']} GPUs:"
        f" {layout_words(report)}; GiB on the GPU that needs most ({report['status']})"
    ]
    for phase, terms in report["terms_gib"].items():
        lines.append(f"\n{phase:<26}{report['phases_gib'][phase]:9.2f}")
        lines += [f"  {name:<24}{size:9.2f}" for name, size in terms.items()]
    advice = [
        f"{phase} does not fit: {'; '.join(advice)}" for phase, advice in report["remedies"].items()
    ]
    return "\n".join(
        (
            *lines,
            f"\nhost memory of a node     {report['host_gib_per_node']:9.2f} of"
            f" {report['host_memory_gib']:g}",
            *advice,
            f"{'fits' if report['fits'] else 'does not fit'}: peak {report['peak_gib']:.2f} of"
            f" {report['gpu_memory_gib']:g} GiB",
            f"in one line: {summary(report)}",
        )
    )


def layout_flags(config: StarPOConfig, given: Collection[str] = ()) -> str:
    """List the flags that lay a run out so, whatever a recipe before them says; settings in `given`
    are left out.
    """
    flags = []
    for section, names in LAYOUT.items():
        for name in names:
            value, flag_name = getattr(getattr(config, section), name), flag_of(name)
            if name in given or value is None:
                continue
            if isinstance(value, bool):
                flags.append(flag_name if value else f"--no-{flag_name[2:]}")
            else:
                flags.append(f"{flag_name} {value}")
    return " ".join(flags)


def listed(found: Sequence[dict[str, Any]]) -> str:
    """Write a line for each layout: predicted seconds of a step, its plan, and its bound."""
    lines = [
        "seconds  TP  PP  EP  CP  DP  rollout TP  recompute  offload  tokens   peak GiB  node GiB"
        "  by"
    ]
    for report in found:
        lines.append(
            f"{report['predicted_seconds']:<9.1f}{report['tensor_parallel']:<4}"
            f"{report['pipeline_parallel']:<4}{report['expert_parallel']:<4}"
            f"{report['context_parallel']:<4}{report['data_parallel']:<4}"
            f"{report['rollout_tensor_parallel']:<12}"
            f"{report['recompute']:<11}{report['offload']:<9}{report['max_tokens']:<7}"
            f"{report['peak_gib']:10.1f}{report['host_gib_per_node']:10.1f}"
            f"  {', '.join(report['bound_by'])}"
        )
    return "\n".join(lines)


def planned_gpus(recipe: str) -> int | None:
    """Read the number of GPUs in the line `# Plan: 8 GPUs ...` of a recipe."""
    path = RECIPES / f"{recipe}.flags"
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^# Plan: (\d+) GPUs", text, re.MULTILINE)
    return int(found[1]) if found else None


def recipe_for(model: str, shape: ModelShape) -> str:
    """Find the recipe of a named model; for a directory find the recipe of the model nearest in
    size, a mixture for a mixture.
    """
    name = model.lower().rpartition("/")[2].removesuffix("-instruct").replace("-", "_")
    if planned_gpus(name) is not None:
        return name
    others = {other: ModelShape.from_config(values) for other, values in SHAPES.items()}
    misses = {
        other: abs(math.log(known.num_parameters / shape.num_parameters))
        for other, known in others.items()
        if bool(known.num_experts) == bool(shape.num_experts)
    }
    return min(misses, key=misses.__getitem__).lower().replace("-", "_")


@dataclass(frozen=True)
class PlannedRun:
    """A run whose step is planned."""

    recipe: str
    words: Sequence[str]
    """Flags of training that come after the recipe's."""
    config: StarPOConfig
    """Settings of the run, without the layout of the recipe where that is searched."""
    given: frozenset[str]
    """Settings that flags of the command line decide, which no search changes."""
    is_searched: bool

    def flags(self, chosen: StarPOConfig) -> str:
        """Write the flags of training under which the run is `chosen`."""
        words = shlex.join(("--recipe", self.recipe, *self.words))
        return f"{words} {layout_flags(chosen, self.given)}".strip()


def read_run(
    arguments: argparse.Namespace, machine: Machine, shape: ModelShape | None
) -> PlannedRun:
    """Read the recipe that is named, else the model's recipe, and the other flags over it. The
    layout of the model's recipe was made for other GPUs: it is searched, except for the sizes that
    flags give.
    """
    words, own = list(arguments.others), arguments.recipe is None and shape
    recipe = recipe_for(arguments.model, own) if own else arguments.recipe or "none"
    given = {name for section in read_words(words).values() for name in section}
    is_directory = arguments.model and Path(arguments.model, "config.json").is_file()
    if is_directory and "load" not in given:
        words = ["--load", arguments.model, *words]
    if own and not machine.hardware.fp8:
        words = ["--fp8", "none", *words]
    settings = read_words([f"--recipe={recipe}", *words])
    sampled = settings.get("rollout", {})
    if given & {"rollout_engine"} and sampled["rollout_engine"] == "embedded":
        for name in set(LAYOUT["rollout"]) & sampled.keys() - given:  # of the recipe's server
            del sampled[name]
            words += [flag_of(name), str(getattr(RolloutConfig(), name))]
    is_searched = arguments.search or bool(own)
    if is_searched:
        for section in ("parallel", "train"):
            for name in set(LAYOUT[section]) - given:
                settings.get(section, {}).pop(name, None)
    config = StarPOConfig.from_dict(settings)
    check_environments(config.environment)
    return PlannedRun(recipe, words, config, frozenset(given), is_searched)


def capacity_of(arguments: argparse.Namespace, machine: Machine) -> Capacity:
    """Read the memory of a GPU and of a node, by flags or of the hardware."""
    node = machine.hardware.node
    gpu = arguments.gpu_memory_gb or machine.hardware.gpu_gib
    host = arguments.host_memory_gb or HOST_GIB * node
    return Capacity(gpu * GIB, node, host * GIB)


def timed(
    shape: ModelShape,
    layout: StarPOConfig,
    machine: Machine,
    num_gpus: int,
    capacity: Capacity,
    play: Play,
) -> dict[str, Any]:
    """Examine a layout as `examine` does, with the predicted seconds of a step and their bound."""
    phases = step_seconds(machine, shape, layout, num_gpus, play)
    trainers = layout.parallel.num_trainers(num_gpus)
    report = examine(shape, Setting.from_config(layout, trainers, sharing=play.sharing), capacity)
    return report | {
        "bound_by": cost.bound(phases),
        "predicted_seconds": total(phases),
        "training_seconds": updating(phases),
    }


def searched(
    shape: ModelShape,
    run: PlannedRun,
    machine: Machine,
    num_gpus: int,
    capacity: Capacity,
    play: Play,
) -> tuple[dict[str, Any], str]:
    """Search the layouts that fit: their seconds and bounds as values, and their list as text."""
    layouts = ranked(shape, run.config, num_gpus, capacity, machine, play, run.given)
    found = [timed(shape, layout, machine, num_gpus, capacity, play) for _, layout in layouts]
    return {"layouts": found, "fits": bool(found)}, listed(found)


def context_ranks(
    shape: ModelShape,
    run: PlannedRun,
    machine: Machine,
    num_gpus: int,
    capacity: Capacity,
    play: Play,
    chosen: StarPOConfig,
) -> tuple[dict[str, Any], str]:
    """Compare a chosen layout with the best one with context-parallel ranks if it has none, or
    without: reports by `with` and `without`, and a line for each.
    """
    is_divided = divides_context(chosen)
    other = best(
        shape, run.config, num_gpus, capacity, machine, play, run.given,
        where=lambda layout: divides_context(layout) != is_divided,
    )  # fmt: skip
    reports, lines = {}, []
    for layout in filter(None, (chosen, other)):
        report = timed(shape, layout, machine, num_gpus, capacity, play)
        name = "with" if divides_context(layout) else "without"
        reports[name] = report | {"flags": run.flags(layout)}
        lines.append(
            f"{name} context ranks: {report['predicted_seconds']:.1f} s a step,"
            f" {report['training_seconds']:.1f} s of training, {report['peak_gib']:.1f} GiB a GPU,"
            f" {layout_words(report)}, recomputation {report['recompute']}"
        )
    if other is None:
        name = "without" if is_divided else "with"
        lines.append(f"{name} context ranks: no layout fits")
    return reports, "\n".join(lines)


def smallest_gpu(peak_gib: float) -> str:
    """Name the kind of GPU with the least memory that holds a peak."""
    kinds = sorted((kind.gpu_gib, name) for name, kind in HARDWARE.items() if kind.gpu_gib)
    fitting = (f"{name} ({size:g} GiB)" for size, name in kinds if size >= peak_gib)
    return next(fitting, "none that is known")


def answer(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Plan the run that the flags of `ragen-mega plan` describe: values for --json, and text."""
    machine = find_machine(arguments.hardware)
    hf = model_config(arguments.model) if arguments.model else None
    run = read_run(arguments, machine, ModelShape.of(hf) if hf else None)
    hf = hf or model_config(run.config.model.load or "")
    shape, capacity = ModelShape.of(hf), capacity_of(arguments, machine)
    num_gpus = arguments.num_gpus or planned_gpus(run.recipe) or 8
    play = default_play(
        run.config,
        arguments.response_tokens,
        environment_seconds=arguments.environment_seconds,
        sharing=arguments.sharing,
    )
    lines = [cost.workload_text(cost.workload(run.config, play))]
    try:
        check_config(hf)
    except ValueError as error:
        lines.append(f"a plan only, the trainer refuses the model: {error}")
    result: dict[str, Any] = {"fits": True}
    if arguments.search:
        result, text = searched(shape, run, machine, num_gpus, capacity, play)
        lines += [text] if result["fits"] else []
    is_listed, chosen = arguments.search and result["fits"], run.config
    if run.is_searched:
        found = best(shape, run.config, num_gpus, capacity, machine, play, run.given)
        least = None if found else smallest(shape, run.config, num_gpus, play.sharing, run.given)
        chosen, title = found or least or run.config, "best with room to spare"
        if not found:
            title = (
                f"no layout fits {capacity.gpu / GIB:g} GiB a GPU and {capacity.host / GIB:g} GiB"
                " of host memory a node; the one that needs least of the GPU"
            )
        elif not fits(
            shape, chosen, num_gpus, capacity._replace(gpu=FILL * capacity.gpu), play.sharing
        ):
            title = f"best that fits, with less than {1 - FILL:.0%} of a GPU to spare"
        result["flags"] = run.flags(chosen)
        lines.append(f"{title}: {result['flags']}")
        is_open = "context_parallel_size" not in run.given
        if found and is_open and run.config.rollout.max_context_length > max(TOKENS):
            beside = context_ranks(shape, run, machine, num_gpus, capacity, play, found)
            result["context_ranks"], text = beside
            lines.append(text)
    if not is_listed:
        trainers = chosen.parallel.num_trainers(num_gpus)
        setting = Setting.from_config(chosen, trainers, sharing=play.sharing)
        result |= examine(shape, setting, capacity)
        result["smallest_gpu"] = smallest_gpu(result["peak_gib"])
        lines += [described(result), f"smallest GPU for this layout: {result['smallest_gpu']}"]
    price, default = arguments.dollars_per_gpu_hour, machine.hardware.dollars
    dollars, used = default if price is None else price, (num_gpus, play)
    result["cost"] = cost.cost(machine, shape, chosen, *used, dollars)
    helps = cost.advice(machine, shape, chosen, *used, capacity)
    result["cost"]["helps"] = helps
    lines += ["", cost.described(result["cost"], helps, is_searched=run.is_searched)]
    if chosen.rollout.rollout_engine == "embedded":
        lines.append(
            "the rollout is that of --rollout-engine sglang: the embedded engine samples on the"
            " processor, which --hardware does not describe"
        )
    return result, "\n".join(lines)
