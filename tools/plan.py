"""Does it fit? The memory of a model on a GPU, phase by phase, before anything is rented or built.

    python tools/plan.py --model Qwen2.5-7B --num-gpus 8 --bf16 --tensor-model-parallel-size 4 \\
        --rollout-engine sglang
    python tools/plan.py --recipe qwen2.5_7b --gpu-memory-gb 141
    python tools/plan.py --model Qwen3-14B --num-gpus 16 --search

All other flags are those of training. Nothing here was measured on a GPU: see
ragen_mega/models/memory_plan.py for what is exact and what is assumed. GB are GiB. Exit code 0 if
every phase fits, 1 with remedies if one does not, 2 for bad input.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from command_line import JSON, command, flag
from random_models import model_config
from transformers import PretrainedConfig

from ragen_mega.config import StarPOConfig, parse
from ragen_mega.config.cli import RECIPES, with_recipe
from ragen_mega.models.memory_plan import GIB, Setting, host_bytes, plan, remedies
from ragen_mega.models.shape import ModelShape, cut_error
from ragen_mega.models.step_cost import best, ranked
from ragen_mega.report.metrics import write_json

FLAGS = (
    flag("--model", "a name from tools/model_shapes.json (default: what --load names)"),
    flag("--recipe", "a recipe, whose flags come before the others", "none"),
    flag("--num-gpus", "GPUs of the job (default: of the recipe, else 8)", type=int),
    flag("--gpu-memory-gb", "GiB of one GPU", 80.0),
    flag(
        "--search",
        "list the layouts of these GPUs that fit, the fastest by prediction first",
        False,
    ),
    JSON,
)


def examine(hf: PretrainedConfig, setting: Setting, capacity: float) -> dict[str, Any]:
    """The plan as it is printed and written: phases in GiB, host memory, whether it fits, and if
    not what may help. Raises ValueError if the model cannot be cut so.
    """
    layout = setting.parallel
    shape = ModelShape.of(hf)
    if error := cut_error(
        shape, layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    ):
        raise ValueError(error)
    phases = plan(shape, setting)
    totals = {phase: sum(terms.values()) / GIB for phase, terms in phases.items()}
    tight = [phase for phase, total in totals.items() if total > capacity]
    return {
        "status": "predicted, not yet run on a GPU",
        "parameters": shape.num_parameters,
        "num_gpus": setting.num_ranks,
        "tensor_parallel": layout.tensor_model_parallel_size,
        "pipeline_parallel": layout.pipeline_model_parallel_size,
        "data_parallel": setting.dp,
        "rollout_tensor_parallel": setting.engine_tp,
        "recompute": layout.recompute,
        "offload": layout.offload,
        "max_tokens": setting.max_tokens,
        "gpu_memory_gib": capacity,
        "phases_gib": totals,
        "terms_gib": {
            phase: {name: size / GIB for name, size in terms.items()}
            for phase, terms in phases.items()
        },
        "peak_gib": max(totals.values()),
        "host_gib_per_rank": host_bytes(shape, setting) / GIB,
        "fits": not tight,
        "remedies": {phase: remedies(setting, phase) for phase in tight},
    }


def summary(report: dict[str, Any]) -> str:
    """The line about memory that a recipe carries."""
    phases = ", ".join(f"{phase} {total:.1f}" for phase, total in report["phases_gib"].items())
    return (
        f"{phases} GiB of {report['gpu_memory_gib']:g}; host {report['host_gib_per_rank']:.1f} GiB"
        " a GPU"
    )


def described(report: dict[str, Any]) -> str:
    """The plan for people."""
    lines = [
        f"{report['parameters'] / 1e9:.2f} billion parameters on {report['num_gpus']} GPUs: TP"
        f" {report['tensor_parallel']}, PP {report['pipeline_parallel']}, DP"
        f" {report['data_parallel']}, rollout TP {report['rollout_tensor_parallel']}; GiB on the"
        f" GPU that needs most ({report['status']})"
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
            f"\nhost memory a GPU         {report['host_gib_per_rank']:9.2f}",
            *advice,
            f"{'fits' if report['fits'] else 'does not fit'}: peak {report['peak_gib']:.2f} of"
            f" {report['gpu_memory_gib']:g} GiB",
            f"in one line: {summary(report)}",
        )
    )


def layout_flags(config: StarPOConfig) -> str:
    """The flags that say how a run is laid out, as a recipe has them."""
    layout, rollout = config.parallel, config.rollout
    flags = [f"--tensor-model-parallel-size {layout.tensor_model_parallel_size}"]
    if layout.pipeline_model_parallel_size > 1:
        flags.append(f"--pipeline-model-parallel-size {layout.pipeline_model_parallel_size}")
    flags += ["--sequence-parallel"] if layout.sequence_parallel else []
    flags += ["--use-distributed-optimizer"] if layout.use_distributed_optimizer else []
    flags += [f"--recompute {layout.recompute} --offload {layout.offload}"]
    flags.append(f"--max-tokens-per-microbatch {config.train.max_tokens_per_microbatch}")
    if rollout.rollout_tensor_parallel_size > 1:
        flags.append(f"--rollout-tensor-parallel-size {rollout.rollout_tensor_parallel_size}")
    return " ".join(flags)


def listed(found: Sequence[tuple[float, dict[str, Any]]]) -> str:
    """One line per layout: predicted seconds of a step and its plan."""
    lines = ["seconds  TP  PP  DP  rollout TP  recompute  offload  tokens   peak GiB  host GiB"]
    for seconds, report in found:
        lines.append(
            f"{seconds:<9.1f}{report['tensor_parallel']:<4}{report['pipeline_parallel']:<4}"
            f"{report['data_parallel']:<4}{report['rollout_tensor_parallel']:<12}"
            f"{report['recompute']:<11}{report['offload']:<9}{report['max_tokens']:<7}"
            f"{report['peak_gib']:10.1f}{report['host_gib_per_rank']:10.1f}"
        )
    return "\n".join(lines)


def planned_gpus(recipe: str) -> int | None:
    """GPUs of the line `# Plan: 8 GPUs ...` of a recipe."""
    path = RECIPES / f"{recipe}.flags"
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^# Plan: (\d+) GPUs", text, re.MULTILINE)
    return int(found[1]) if found else None


@command(__doc__, *FLAGS, takes_others=True)
def main(arguments: argparse.Namespace) -> int:
    config = parse(with_recipe(arguments.others, default=arguments.recipe))
    hf = model_config(arguments.model or config.model.load or "")
    if arguments.search:  # what it varies starts from one rank
        alone = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        parallel = replace(config.parallel, sequence_parallel=False, **alone)
        config = replace(config, parallel=parallel)
    num_gpus = arguments.num_gpus or planned_gpus(arguments.recipe) or 8
    capacity, shape = arguments.gpu_memory_gb, ModelShape.of(hf)
    if arguments.search:
        found = [
            (seconds, examine(hf, Setting.from_config(one, num_gpus), capacity))
            for seconds, one in ranked(shape, config, num_gpus, capacity * GIB)
        ]
        text = listed(found)
        layouts = [report | {"predicted_seconds": seconds} for seconds, report in found]
        result: dict[str, Any] = {"layouts": layouts, "fits": bool(found)}
        if chosen := best(shape, config, num_gpus, capacity * GIB):
            text += f"\nbest with room to spare: {layout_flags(chosen)}"
    else:
        result = examine(hf, Setting.from_config(config, num_gpus), capacity)
        text = described(result)
    print(text)
    if arguments.json:
        write_json(arguments.json, result)
    return 0 if result["fits"] else 1


if __name__ == "__main__":
    main()
