"""What does it cost, and does it fit? The seconds, the money and the memory of a step, phase by
phase, before anything is rented or built.

    ragen-mega plan --model Qwen2.5-14B --num-gpus 16 --hardware H100
    ragen-mega plan --recipe qwen2.5_7b --hardware H200
    ragen-mega plan --model Qwen3-14B --num-gpus 16 --search --plot step.svg
    ragen-mega plan --model Qwen2.5-7B --num-gpus 8 --bf16 --tensor-model-parallel-size 4 \\
        --rollout-engine sglang
    ragen-mega plan --validate                # predicted beside published
    ragen-mega plan --calibrate machine.json  # measure this machine, in two minutes

All other flags are those of training. Without any, a named model has those of its recipe, under
the layout that --search finds best. Nothing here was measured on a GPU of ours: docs/predictor.md
states the assumptions about time, ragen_mega/models/memory_plan.py those about memory. GB are GiB.
Exit code 0 if every phase fits, 1 with remedies if one does not, 2 for bad input.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ragen_mega.commands import plan_calibration, plan_cost, plan_validation
from ragen_mega.commands.command_line import JSON, command, flag, target
from ragen_mega.config import StarPOConfig, parse
from ragen_mega.config.cli import RECIPES, with_recipe
from ragen_mega.models.hardware import HARDWARE, Constants, Hardware, Machine, find_hardware
from ragen_mega.models.layout_search import FILL, best, ranked
from ragen_mega.models.memory_plan import GIB, Setting, host_bytes, plan, remedies
from ragen_mega.models.published import model_config
from ragen_mega.models.shape import ModelShape, cut_error
from ragen_mega.models.time_plan import Play, default_play
from ragen_mega.report.metrics import write_json

FLAGS = (
    flag("--model", "a name from ragen_mega/models/model_shapes.json (default: what --load names)"),
    flag("--recipe", "a recipe, whose flags come before the others", "none"),
    flag("--num-gpus", "GPUs of the job (default: of the recipe, else 8)", type=int),
    flag("--hardware", f"kind of GPU: {', '.join(HARDWARE)}; or what --calibrate wrote", "H100"),
    flag("--gpu-memory-gb", "GiB of one GPU (default: of --hardware)", type=float),
    flag(
        "--dollars-per-gpu-hour",
        "price (default: of --hardware, see ragen_mega/models/hardware.py)",
        type=float,
    ),
    flag(
        "--response-tokens",
        "sampled in a turn, on average (default: half of --max-response-length)",
        type=float,
    ),
    flag("--environment-seconds", "of an environment for a turn", 0.01),
    flag("--sharing", "tokens of trajectories per token computed: 1 / actor/computed_share", 1.0),
    flag(
        "--search",
        "list the layouts of these GPUs that fit, the fastest by prediction first",
        False,
    ),
    flag("--plot", "draw the step as a timeline (svg, png or pdf)", type=target, metavar="OUT"),
    flag(
        "--validate",
        "print predicted beside published of our rows, or of a file of that form, and stop",
        type=Path,
        nargs="?",
        const=plan_validation.ROWS,
        metavar="ROWS",
    ),
    flag(
        "--calibrate",
        "measure what this machine reaches, write it here (.json) for --hardware, and stop",
        type=target,
        metavar="OUT",
    ),
    flag(
        "--check-steps",
        "with --calibrate: also train the configurations of plan_calibration.py and print"
        " their seconds beside the predicted ones (20 minutes on an idle machine)",
        False,
    ),
    JSON,
)


def examine(hf: PretrainedConfig, setting: Setting, capacity: float) -> dict[str, Any]:
    """The plan as it is printed and written: phases in GiB, host memory, whether it fits, and if
    not what may help. Raises ValueError if the model cannot be cut this way.
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
    """The plan as text."""
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
    """One line per layout: predicted seconds of a step, its plan, and what bounds it."""
    lines = [
        "seconds  TP  PP  DP  rollout TP  recompute  offload  tokens   peak GiB  host GiB  bound by"
    ]
    for seconds, report in found:
        lines.append(
            f"{seconds:<9.1f}{report['tensor_parallel']:<4}{report['pipeline_parallel']:<4}"
            f"{report['data_parallel']:<4}{report['rollout_tensor_parallel']:<12}"
            f"{report['recompute']:<11}{report['offload']:<9}{report['max_tokens']:<7}"
            f"{report['peak_gib']:10.1f}{report['host_gib_per_rank']:10.1f}"
            f"  {', '.join(report['bound_by'])}"
        )
    return "\n".join(lines)


def planned_gpus(recipe: str) -> int | None:
    """GPUs of the line `# Plan: 8 GPUs ...` of a recipe."""
    path = RECIPES / f"{recipe}.flags"
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^# Plan: (\d+) GPUs", text, re.MULTILINE)
    return int(found[1]) if found else None


def find_machine(name: str) -> Machine:
    """A row of the table, or what --calibrate wrote. Raises ValueError for neither."""
    if not name.endswith(".json"):
        return Machine(find_hardware(name))
    try:
        values = json.loads(Path(name).read_text())
        return Machine(Hardware(**values["hardware"]), Constants(**values["constants"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--hardware {name} must be a file that --calibrate wrote ({error}); write it again"
        ) from None


def alone(config: StarPOConfig) -> StarPOConfig:
    """`config` on one rank, where a search starts."""
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    return replace(config, parallel=replace(config.parallel, sequence_parallel=False, **sizes))


def own_recipe(arguments: argparse.Namespace) -> str | None:
    """The recipe of a named model; None where flags were given, or no recipe is the model's."""
    name = (arguments.model or "").lower().rpartition("/")[2].removesuffix("-instruct")
    name = name.replace("-", "_")
    if arguments.others or arguments.recipe != "none" or planned_gpus(name) is None:
        return None
    return name


def on_machine(recipe: str, machine: Machine) -> StarPOConfig:
    """What a recipe says, for the precisions of the machine and on one rank."""
    config = alone(parse(with_recipe([], default=recipe)))
    if not machine.hardware.fp8:
        config = replace(config, parallel=replace(config.parallel, fp8="none"))
    return config


def searched(
    shape: ModelShape, hf: PretrainedConfig, config: StarPOConfig, machine: Machine,
    num_gpus: int, capacity: float, play: Play,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """The layouts that fit, with their seconds and what bounds them, and the list as text."""
    found = []
    for seconds, one in ranked(shape, config, num_gpus, capacity * GIB, machine, play):
        phases = plan_cost.step_seconds(machine, shape, one, num_gpus, play)
        setting = Setting.from_config(one, num_gpus, sharing=play.sharing)
        report = examine(hf, setting, capacity)
        found.append((seconds, report | {"bound_by": plan_cost.bound(phases)}))
    layouts = [report | {"predicted_seconds": seconds} for seconds, report in found]
    return {"layouts": layouts, "fits": bool(found)}, listed(found)


def priced(
    arguments: argparse.Namespace, machine: Machine, shape: ModelShape, config: StarPOConfig,
    num_gpus: int, capacity: float, play: Play,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """What a step costs under a layout, and in words; draws it if asked to."""
    factor = plan_validation.uncertainty()
    price = arguments.dollars_per_gpu_hour
    dollars = machine.hardware.dollars if price is None else price
    result = plan_cost.cost(machine, shape, config, num_gpus, play, dollars, factor)
    helps = plan_cost.advice(machine, shape, config, num_gpus, capacity, play)
    if arguments.plot:
        title = f"{arguments.model or config.model.load} on {num_gpus} {machine.hardware.name}"
        plan_cost.timeline(result, title, arguments.plot)
    return result | {"helps": helps}, plan_cost.described(result, helps, factor)


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an impossible number, or a file that --hardware would not read."""
    if arguments.calibrate and arguments.calibrate.suffix != ".json":
        raise ValueError(
            f"--calibrate {arguments.calibrate} must end in .json, by which --hardware tells a file"
            " from a name; rename it"
        )
    for name in ("num_gpus", "gpu_memory_gb", "dollars_per_gpu_hour", "response_tokens"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(
                f"--{name.replace('_', '-')} must be positive and finite, not {value:g}; correct it"
            )
    if not 1 <= arguments.sharing < float("inf"):
        raise ValueError(
            f"--sharing must be at least 1 and finite, not {arguments.sharing:g}: 1 computes every"
            " token of every trajectory; correct it"
        )
    if not 0 <= arguments.environment_seconds < float("inf"):
        raise ValueError(
            "--environment-seconds must be at least 0 and finite, not"
            f" {arguments.environment_seconds:g}; correct it"
        )


@command(__doc__, *FLAGS, takes_others=True)
def main(arguments: argparse.Namespace) -> int:
    check_flags(arguments)
    if arguments.validate or arguments.calibrate:
        if arguments.validate:
            result = plan_validation.report(arguments.validate)
            print(plan_validation.markdown(result))
        else:
            result = plan_calibration.calibrate(arguments.calibrate, arguments.check_steps)
        if arguments.json:
            write_json(arguments.json, result)
        return 0
    machine = find_machine(arguments.hardware)
    recipe = own_recipe(arguments)
    if recipe:
        config = on_machine(recipe, machine)
    else:
        config = parse(with_recipe(arguments.others, default=arguments.recipe))
    if arguments.search and config.parallel.placement != "colocated":
        raise ValueError(
            f"--search knows placement colocated, not {config.parallel.placement}; drop --search,"
            " or --placement and --rollout-ranks"
        )
    hf = model_config(arguments.model or config.model.load or "")
    if arguments.search:  # the search starts from one rank
        config = alone(config)
    num_gpus = arguments.num_gpus or planned_gpus(recipe or arguments.recipe) or 8
    capacity, shape = arguments.gpu_memory_gb or machine.hardware.gpu_gib, ModelShape.of(hf)
    play = default_play(
        config,
        arguments.response_tokens,
        environment_seconds=arguments.environment_seconds,
        sharing=arguments.sharing,
    )
    result, chosen, lines = {"fits": True}, config, []
    if arguments.search:
        result, text = searched(shape, hf, config, machine, num_gpus, capacity, play)
        lines.append(text)
    if arguments.search or recipe:
        chosen = best(shape, config, num_gpus, capacity * GIB, machine, play)
        if chosen:
            lines.append(f"best with room to spare: {layout_flags(chosen)}")
        elif not arguments.search:
            raise ValueError(
                f"no layout of {arguments.model} on {num_gpus} GPUs fits into {FILL:.0%} of"
                f" {capacity:g} GiB each; give more GPUs or larger ones, or --search to see more"
            )
    if not arguments.search:
        trainers = chosen.parallel.num_trainers(num_gpus)
        setting = Setting.from_config(chosen, trainers, sharing=play.sharing)
        result = examine(hf, setting, capacity)
        lines.append(described(result))
    if chosen:
        price, text = priced(arguments, machine, shape, chosen, num_gpus, capacity, play)
        result, lines = result | {"cost": price}, [*lines, f"\n{text}"]
        if chosen.rollout.rollout_engine == "embedded" and not machine.hardware.cores:
            lines.append(
                "the rollout is that of --rollout-engine sglang: the embedded engine samples on the"
                " processor, which --hardware does not describe"
            )
    print("\n".join(lines))
    if arguments.json:
        write_json(arguments.json, result)
    return 0 if result["fits"] else 1
