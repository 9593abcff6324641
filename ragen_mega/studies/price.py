"""Memory, time and cost of the runs of a study, predicted before any of them begins."""

from collections.abc import Mapping
from pathlib import Path

from ragen_mega.config import StarPOConfig, parse
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.hardware import Machine
from ragen_mega.planning.layouts import peak_bytes
from ragen_mega.planning.memory import GIB, Setting
from ragen_mega.planning.published import model_config
from ragen_mega.planning.time import Terms, by_timer, default_play, step_seconds
from ragen_mega.planning.validation import interval
from ragen_mega.report.markdown import table
from ragen_mega.studies.definitions import Study
from ragen_mega.studies.runs import flags_of


def predicted(machine: Machine, config: StarPOConfig, ranks: int) -> tuple[Terms, float]:
    """Predict (timer, or `other` -> seconds of a step, GiB of the GPU that needs most). Raises
    ValueError for a model whose sizes are not published.
    """
    shape = ModelShape.of(model_config(config.model.load or ""))
    phases = step_seconds(machine, shape, config, ranks, default_play(config))
    timed = by_timer(phases)
    step = sum(sum(terms.values()) for terms in phases.values())
    setting = Setting.from_config(config, config.parallel.num_trainers(ranks))
    return timed | {"other": step - sum(timed.values())}, peak_bytes(shape, setting) / GIB


def run_seconds(config: StarPOConfig, seconds: Mapping[str, float]) -> float:
    """Add up the seconds of all steps and evaluations of a run, the first before training; an
    evaluation's episodes count as those of a rollout, of which fewer run at a time.
    """
    first = config.evaluation.eval_prompts * len(config.environment.evaluated)
    episodes = first + sum(config.planned_evaluations(1).values())
    trajectories = config.rollout.num_groups * config.rollout.group_size
    evaluations = episodes / trajectories * seconds["rollout"]
    return config.train.num_steps * sum(seconds.values()) + evaluations


def write(
    study: Study, machine: Machine, output: Path, *, match: str, ranks: int, num_seeds: int
) -> None:
    """Write NAME_predicted.md: memory and seconds of a step of every arm, and the price of its
    runs.
    """
    low, high, basis = interval("rl, dense")
    price, rows, total = machine.hardware.dollars, [], 0.0

    def within(value: float) -> str:
        return f"{value:.3g} ({value * low:.3g} to {value * high:.3g})"

    for arm in study.arms:
        config = parse(flags_of(study, arm, match))
        num_ranks = arm.ranks or ranks
        seconds, peak = predicted(machine, config, num_ranks)
        hours = num_seeds * num_ranks * run_seconds(config, seconds) / 3600
        total += hours
        spent = (sum(seconds.values()), hours, price * hours)
        known = (f"{value:.3g}" for value in (peak, *seconds.values()))
        rows.append((arm.name, str(num_ranks), *known, *map(within, spent)))
    heads = (
        "arm",
        "ranks",
        "peak GiB",
        *(f"{timer} s" for timer in seconds),
        "step s",
        "GPU-hours",
        "$",
    )
    rows.append(("in all", *[""] * (len(seconds) + 3), *map(within, (total, price * total))))
    parts = (
        f"# {study.title}, predicted",
        f"Written by `ragen-mega study {study.name} --preset {study.preset} --hardware"
        f" {machine.hardware.name} --predict`. **Nothing here was measured.** The intervals are"
        f" from {low:.2g} to {high:.2g} times the prediction: {basis}.",
        f"Hours and money are those of {num_seeds} runs of an arm, with their evaluations,"
        f" at {price:.2f} $ a GPU-hour.",
        table(heads, rows),
        study.notes.strip(),
    )
    output.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(part for part in parts if part) + "\n"
    (output / f"{study.name}_predicted.md").write_text(text)
    print(text)
