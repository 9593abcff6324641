"""What does it cost, and does it fit? The seconds, the money and the memory of a step, phase by
phase, before anything is rented or built.

    ragen-mega plan --model Qwen2.5-14B --num-gpus 16 --hardware H100
    ragen-mega plan --recipe qwen2.5_7b --hardware H200
    ragen-mega plan --model Qwen3-14B --num-gpus 16 --search --plot step.svg
    ragen-mega plan --model Qwen2.5-7B --num-gpus 8 --bf16 --tensor-model-parallel-size 4 \\
        --rollout-engine sglang
    ragen-mega plan --validate                # predicted beside published
    ragen-mega plan --calibrate machine.json  # measure this machine, in some minutes

All other flags are those of training. They come after those of --recipe, which is planned as it is,
or of the model's own recipe (for a directory that of the model nearest in size), whose layout is
searched but for what flags say of it. Nothing here was measured on a GPU of ours: docs/predictor.md
states the assumptions about time, ragen_mega/models/memory_plan.py those about memory. GB are GiB.
Exit code 0 if every phase fits, 1 with remedies if one does not, 2 for bad input.
"""

import argparse
import math
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_mega.commands import plan_calibration, plan_cost, plan_validation
from ragen_mega.commands.command_line import JSON, command, flag, target
from ragen_mega.commands.plan_machine import find_machine
from ragen_mega.config import RolloutConfig, StarPOConfig
from ragen_mega.config.cli import RECIPES, with_recipe
from ragen_mega.config.flags import read_settings
from ragen_mega.config.schema import flag_of
from ragen_mega.models.hardware import HARDWARE, Machine
from ragen_mega.models.layout_search import FILL, HOST_GIB, LAYOUT, best, ranked, smallest
from ragen_mega.models.memory_plan import GIB, Setting, host_bytes, plan, remedies
from ragen_mega.models.published import SHAPES, model_config
from ragen_mega.models.shape import ModelShape, check_config, cut_error
from ragen_mega.models.time_plan import Play, default_play
from ragen_mega.report.metrics import write_json

FLAGS = (
    flag("--model", "a name from ragen_mega/models/model_shapes.json (default: what --load names)"),
    flag(
        "--recipe",
        "a recipe as it is, whose flags come before the others, or none (default: that of --model,"
        " under the layout that is fastest)",
    ),
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
        " their seconds beside the predicted ones (5 to 20 minutes on an idle machine)",
        False,
    ),
    JSON,
)


NUMBERS = {
    "sharing": (1, "at least 1, where every token of every trajectory is computed,"),
    "environment_seconds": (0, "at least 0"),
} | dict.fromkeys(
    ("num_gpus", "gpu_memory_gb", "dollars_per_gpu_hour", "response_tokens"),
    (math.ulp(0.0), "positive"),
)
"""Flag -> its least value and its rule."""


def examine(shape: ModelShape, setting: Setting, capacity: float) -> dict[str, Any]:
    """The plan as it is printed and written: phases in GiB, host memory, whether it fits, and if
    not what may help. Raises ValueError if the model cannot be cut this way.
    """
    layout = setting.parallel
    if error := cut_error(
        shape, layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    ):
        raise ValueError(error)
    if shape.num_heads % setting.engine_tp:
        raise ValueError(
            f"rollout_tensor_parallel_size ({setting.engine_tp}) must divide the model's attention"
            f" heads ({shape.num_heads}); lower --rollout-tensor-parallel-size to a divisor"
        )
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


def layout_flags(config: StarPOConfig, given: Collection[str] = ()) -> str:
    """The flags that lay a run out so, whatever a recipe before them says; without those `given`
    anyway.
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


def recipe_for(model: str, shape: ModelShape) -> str:
    """The recipe of a named model; of a directory that of the model nearest in size."""
    name = model.lower().rpartition("/")[2].removesuffix("-instruct").replace("-", "_")
    if planned_gpus(name) is not None:
        return name
    misses = {
        other: abs(math.log(ModelShape.from_config(values).num_parameters / shape.num_parameters))
        for other, values in SHAPES.items()
    }
    return min(misses, key=misses.__getitem__).lower().replace("-", "_")


@dataclass(frozen=True)
class Run:
    """What is planned."""

    recipe: str
    words: Sequence[str]
    """Flags of training that come after the recipe's."""
    config: StarPOConfig
    """Without the layout of the recipe, where that is searched."""
    given: frozenset[str]
    """Settings that flags of the command line decide, which no search changes."""
    is_searched: bool

    def flags(self, chosen: StarPOConfig) -> str:
        """The flags of training under which it is `chosen`."""
        words = shlex.join(("--recipe", self.recipe, *self.words))
        return f"{words} {layout_flags(chosen, self.given)}".strip()


def read_run(arguments: argparse.Namespace, machine: Machine, shape: ModelShape | None) -> Run:
    """The recipe that is named, else that of the model, and the other flags over it. The layout of
    the model's recipe was made for other GPUs: it is searched, but for what flags say of it.
    """
    words, is_own = list(arguments.others), arguments.recipe is None and shape is not None
    recipe = recipe_for(arguments.model, shape) if is_own else arguments.recipe or "none"
    given = {name for section in read_settings(words).values() for name in section}
    if Path(arguments.model or "", "config.json").is_file() and "load" not in given:
        words = ["--load", arguments.model, *words]
    if is_own and not machine.hardware.fp8:
        words = ["--fp8", "none", *words]
    settings = read_settings(with_recipe(words, default=recipe))
    is_apart = settings.get("parallel", {}).get("placement") == "separate"
    if arguments.search and is_apart:
        raise ValueError(
            "--search knows placement colocated, not separate; drop --search, or --placement and"
            " --rollout-ranks"
        )
    sampled = settings.get("rollout", {})
    if given & {"rollout_engine"} and sampled["rollout_engine"] == "embedded":
        for name in set(LAYOUT["rollout"]) & sampled.keys() - given:  # of the recipe's server
            del sampled[name]
            words += [flag_of(name), str(getattr(RolloutConfig(), name))]
    is_searched = arguments.search or (is_own and not is_apart)
    if is_searched:
        for section in ("parallel", "train"):
            for name in set(LAYOUT[section]) - given:
                settings.get(section, {}).pop(name, None)
    config = StarPOConfig.from_dict(settings)
    return Run(recipe, words, config, frozenset(given), is_searched)


def searched(
    shape: ModelShape, run: Run, machine: Machine, num_gpus: int, capacity: float, play: Play
) -> tuple[dict[str, Any], str]:
    """The layouts that fit, with their seconds and what bounds them, and the list as text."""
    found, room = [], capacity * GIB
    for seconds, one in ranked(shape, run.config, num_gpus, room, machine, play, run.given):
        phases = plan_cost.step_seconds(machine, shape, one, num_gpus, play)
        setting = Setting.from_config(one, num_gpus, sharing=play.sharing)
        report = examine(shape, setting, capacity)
        found.append((seconds, report | {"bound_by": plan_cost.bound(phases)}))
    layouts = [report | {"predicted_seconds": seconds} for seconds, report in found]
    return {"layouts": layouts, "fits": bool(found)}, listed(found)


def priced(
    arguments: argparse.Namespace, machine: Machine, shape: ModelShape, config: StarPOConfig,
    num_gpus: int, capacity: float, play: Play, *, is_searched: bool,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """What a step costs under a layout, and in words; draws it if asked to."""
    price = arguments.dollars_per_gpu_hour
    dollars = machine.hardware.dollars if price is None else price
    interval = plan_validation.interval("rl, dense")  # the memory plan knows no mixtures
    result = plan_cost.cost(machine, shape, config, num_gpus, play, dollars, interval)
    helps = plan_cost.advice(machine, shape, config, num_gpus, capacity, play)
    if arguments.plot:
        title = f"{arguments.model or config.model.load} on {num_gpus} {machine.hardware.name}"
        plan_cost.timeline(result, title, arguments.plot)
    text = plan_cost.described(result, helps, is_searched=is_searched)
    return result | {"helps": helps}, text


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an impossible number, or a file that --hardware would not read."""
    if arguments.calibrate and arguments.calibrate.suffix != ".json":
        raise ValueError(
            f"--calibrate {arguments.calibrate} must end in .json, by which --hardware tells a file"
            " from a name; rename it"
        )
    for name, (least, rule) in NUMBERS.items():
        value = getattr(arguments, name)
        if value is not None and not least <= value < math.inf:
            flag_name = name.replace("_", "-")
            raise ValueError(f"--{flag_name} must be {rule} and finite, not {value:g}; correct it")


@command(__doc__, *FLAGS, takes_others=True)
def main(arguments: argparse.Namespace) -> int:
    check_flags(arguments)
    if arguments.validate or arguments.calibrate:
        if arguments.others:
            raise ValueError(
                f"--validate and --calibrate take no flags of training: {arguments.others[0]};"
                " drop them"
            )
        if arguments.validate:
            result = plan_validation.report(arguments.validate)
            print(plan_validation.markdown(result))
        else:
            result = plan_calibration.calibrate(arguments.calibrate, arguments.check_steps)
        if arguments.json:
            write_json(arguments.json, result)
        return 0
    machine = find_machine(arguments.hardware)
    hf = model_config(arguments.model) if arguments.model else None
    run = read_run(arguments, machine, hf and ModelShape.of(hf))
    hf = hf or model_config(run.config.model.load or "")
    shape = ModelShape.of(hf)
    num_gpus = arguments.num_gpus or planned_gpus(run.recipe) or 8
    capacity = arguments.gpu_memory_gb or machine.hardware.gpu_gib
    play = default_play(
        run.config,
        arguments.response_tokens,
        environment_seconds=arguments.environment_seconds,
        sharing=arguments.sharing,
    )
    lines = [plan_cost.workload_text(plan_cost.workload(run.config, play))]
    try:
        check_config(hf)
    except ValueError as error:
        lines.append(f"a plan only, the trainer refuses the model: {error}")
    result: dict[str, Any] = {"fits": True}
    chosen: StarPOConfig | None = run.config
    if arguments.search:
        result, text = searched(shape, run, machine, num_gpus, capacity, play)
        lines.append(text)
    if run.is_searched:
        room = capacity * GIB
        chosen = best(shape, run.config, num_gpus, room, machine, play, run.given)
        title = "best with room to spare"
        if not chosen and not arguments.search:
            chosen = smallest(shape, run.config, num_gpus, play.sharing, run.given) or run.config
            title = (
                f"no layout fits {FILL:.0%} of {capacity:g} GiB and {HOST_GIB:g} GiB of host memory"
                " a GPU; the one that needs least of the GPU"
            )
        if chosen:
            flags = run.flags(chosen)
            result["flags"] = flags
            lines.append(f"{title}: {flags}")
    if not arguments.search:
        trainers = chosen.parallel.num_trainers(num_gpus)
        setting = Setting.from_config(chosen, trainers, sharing=play.sharing)
        result |= examine(shape, setting, capacity)
        lines.append(described(result))
    if chosen:
        price, text = priced(
            arguments, machine, shape, chosen, num_gpus, capacity, play, is_searched=run.is_searched
        )
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
