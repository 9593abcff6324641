"""Does it fit? The memory of a model on a GPU, phase by phase, before anything is rented or built.

    python tools/plan.py --model Qwen2.5-7B --num-gpus 8 --bf16 --tensor-model-parallel-size 4
    --rollout-engine sglang python tools/plan.py --recipe qwen2.5_7b --gpu-memory-gb 141 python
    tools/plan.py --model Qwen3-14B --num-gpus 16 --search

All other flags are those of training. Nothing here was measured on a GPU: see
ragen_mega/models/memory_plan.py for what is exact and what is assumed. GB are GiB. Exit code 0 if every
phase fits, 1 with remedies if one does not, 2 for bad input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragen_mega.config import StarPOConfig, parse
from ragen_mega.config.cli import RECIPES, read_flags
from ragen_mega.models.memory_plan import GIB, Setting, host_bytes, plan, remedies
from ragen_mega.models.shape import ModelShape, cut_error
from ragen_mega.report.console import fail
from ragen_mega.report.metrics import write_json

SHAPES = Path(__file__).with_name("model_shapes.json")
"""Model -> the entries of its config.json that decide its size."""


def find_shape(model: str | None, load: str | None) -> ModelShape:
    """The shape of a model by name, or of the directory or Hugging Face name to load. Raises
    ValueError if unknown.
    """
    shapes = json.loads(SHAPES.read_text())
    if load is not None and (path := Path(load) / "config.json").exists():
        return ModelShape.from_config(json.loads(path.read_text()))
    name = model or (load or "").rpartition("/")[2].removesuffix("-Instruct")
    if name not in shapes:
        raise ValueError(
            f"the size of {name or 'the model'} is not known; give --load a directory with"
            f" config.json, or --model one of {', '.join(shapes)}"
        )
    return ModelShape.from_config(shapes[name])


def examine(shape: ModelShape, setting: Setting, capacity: float) -> dict[str, Any]:
    """The plan as it is printed and written: phases in GiB, host memory, whether it fits, and if
    not what may help.
    """
    layout = setting.parallel
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


def show(report: dict[str, Any]) -> None:
    """Print the plan."""
    print(
        f"{report['parameters'] / 1e9:.2f} billion parameters on {report['num_gpus']} GPUs: TP"
        f" {report['tensor_parallel']}, PP {report['pipeline_parallel']}, DP"
        f" {report['data_parallel']}, rollout TP {report['rollout_tensor_parallel']}; GiB on the"
        f" GPU that needs most ({report['status']})"
    )
    for phase, terms in report["terms_gib"].items():
        print(f"\n{phase:<26}{report['phases_gib'][phase]:9.2f}")
        for name, size in terms.items():
            print(f"  {name:<24}{size:9.2f}")
    print(f"\nhost memory a GPU         {report['host_gib_per_rank']:9.2f}")
    for phase, advice in report["remedies"].items():
        print(f"{phase} does not fit: {'; '.join(advice)}")
    print(
        f"{'fits' if report['fits'] else 'does not fit'}: peak {report['peak_gib']:.2f} of"
        f" {report['gpu_memory_gib']:g} GiB"
    )
    print(f"in one line: {summary(report)}")


def search(
    shape: ModelShape, setting: Setting, capacity: float
) -> Iterator[tuple[Setting, dict[str, Any]]]:
    """Every layout of the GPUs that fits: least model parallelism first, then least recomputation,
    then least offloading.
    """
    num_ranks = setting.num_ranks
    sizes = [
        (tp, pp)
        for tp in (1, 2, 4, 8)
        for pp in range(1, num_ranks // tp + 1)
        if num_ranks % (tp * pp) == 0
    ]
    offloads = ("none", "rollout", "turns") if setting.has_critic else ("none", "rollout")
    rollouts = [tp for tp in (1, 2, 4, 8) if num_ranks % tp == 0 and shape.num_heads % tp == 0]
    for tp, pp in sorted(sizes, key=lambda cut: (cut[0] * cut[1], cut[1])):
        if cut_error(shape, tp, pp):
            continue
        for recompute, offload in itertools.product(("none", "selective", "full"), offloads):
            parallel = replace(
                setting.parallel, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, recompute=recompute,
                sequence_parallel=tp > 1, offload=offload, use_distributed_optimizer=num_ranks > tp * pp,
            )  # fmt: skip
            for engine_tp in rollouts:
                one = replace(
                    setting, parallel=parallel, engine_tp=engine_tp,
                    kv_cache_tokens=setting.kv_cache_tokens * engine_tp // setting.engine_tp,
                )  # fmt: skip
                if (report := examine(shape, one, capacity))["fits"]:
                    yield one, report
                    break


def show_search(found: Sequence[tuple[Setting, dict[str, Any]]]) -> None:
    """Print one line per layout."""
    print("TP  PP  DP  rollout TP  recompute  offload    peak GiB  host GiB")
    for setting, report in found:
        layout = setting.parallel
        print(
            f"{layout.tensor_model_parallel_size:<4}{layout.pipeline_model_parallel_size:<4}{setting.dp:<4}"
            f"{setting.engine_tp:<12}{layout.recompute:<11}{layout.offload:<9}{report['peak_gib']:10.1f}"
            f"{report['host_gib_per_rank']:10.1f}"
        )


def settings_of(argv: Sequence[str]) -> tuple[argparse.Namespace, StarPOConfig]:
    """This tool's arguments, and the configuration that the other flags make. Raises ValueError on
    an unknown flag.
    """
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", help="a name from tools/model_shapes.json (default: what --load names)"
    )
    parser.add_argument("--recipe", help="a recipe, whose flags come before the others")
    parser.add_argument(
        "--num-gpus", type=int, help="GPUs of the job (default: of the recipe, else 8)"
    )
    parser.add_argument("--gpu-memory-gb", type=float, default=80.0, help="GiB of one GPU")
    parser.add_argument(
        "--search", action="store_true", help="list the layouts of these GPUs that fit"
    )
    parser.add_argument("--json", type=Path, help="write the plan here")
    arguments, flags = parser.parse_known_args(argv)
    if arguments.recipe:
        path = RECIPES / f"{arguments.recipe}.flags"
        if not path.exists():
            raise ValueError(
                f"{path} is no recipe; name one of"
                f" {', '.join(sorted(p.stem for p in RECIPES.glob('*.flags')))}"
            )
        flags = [*read_flags(path), *flags]
        arguments.num_gpus = arguments.num_gpus or planned_gpus(path)
    arguments.num_gpus = arguments.num_gpus or 8
    return arguments, parse(flags)


def planned_gpus(recipe: Path) -> int | None:
    """GPUs of the line `# Plan: 8 GPUs ...` of a recipe."""
    found = re.search(r"^# Plan: (\d+) GPUs", recipe.read_text(), re.MULTILINE)
    return int(found[1]) if found else None


def main(argv: Sequence[str] | None = None) -> None:
    try:
        arguments, config = settings_of(sys.argv[1:] if argv is None else argv)
        shape = find_shape(arguments.model, config.model.load)
        if arguments.search:
            config = replace(
                config,
                parallel=replace(
                    config.parallel,
                    tensor_model_parallel_size=1,
                    sequence_parallel=False,
                    pipeline_model_parallel_size=1,
                ),
            )
        setting = Setting.from_config(config, arguments.num_gpus)
        if arguments.search:
            found = list(search(shape, setting, arguments.gpu_memory_gb))
            show_search(found)
            result: dict[str, Any] = {
                "layouts": [report for _, report in found],
                "fits": bool(found),
            }
        else:
            result = examine(shape, setting, arguments.gpu_memory_gb)
            show(result)
    except ValueError as error:
        fail(str(error))
    if arguments.json:
        write_json(arguments.json, result)
    raise SystemExit(0 if result["fits"] else 1)


if __name__ == "__main__":
    main()
