"""The report of a scaling study: what a step of every model and layout takes, measured beside
predicted, and laws fitted to success over compute.

Columns are those of published scaling tables. Compute counts FLOPs of the model (arXiv:2104.04473):
a forward pass over all trajectories in the rollout; over the kept ones the updates of policy and
critic, the critic's values, and the old log-probabilities where they have a pass of their own.
Prefixes count as often as they occur, the policy's LM head for the tokens that it samples.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ragen_mega.config import StarPOConfig, parse
from ragen_mega.data.packing import count_minibatches
from ragen_mega.models.huggingface import load_config
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.calibration import PHASES, WARMUP, played
from ragen_mega.planning.cost import STEPS
from ragen_mega.planning.hardware import Machine
from ragen_mega.planning.memory import GIB, Setting, plan
from ragen_mega.planning.published import model_config
from ragen_mega.planning.time import Play, Sizes, computed_length, default_play, step_seconds
from ragen_mega.planning.validation import interval
from ragen_mega.report.markdown import table
from ragen_mega.report.metrics import write_json
from ragen_mega.report.plots import headless_pyplot
from ragen_mega.report.provenance import read_settings
from ragen_mega.storage.run_directory import FINAL_EXPORT
from ragen_mega.studies.definitions import Arm, Study, estimate, percent
from ragen_mega.studies.fits import (
    Constant,
    Curve,
    Fit,
    extrapolation_error,
    fit_power_law,
    fit_sigmoid,
    size_extrapolation_error,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Mapping[str, Mapping[int, dict[str, Any]]]
"""Arm -> seed -> what `tables.collect` found."""


@dataclass(frozen=True)
class Speed:
    """A step of one arm: what it works on, and its time and memory, measured or predicted."""

    shape: ModelShape
    config: StarPOConfig
    ranks: int
    """Of the job; with placement separate some of them only sample."""
    play: Play
    seconds: Mapping[str, float]
    """Phase (a key of PHASES, or other) -> seconds."""
    peak_gib: float
    kept: float
    """Trajectories that a step trains on: those that the filter keeps."""

    @property
    def trainers(self) -> int:
        """Ranks that train."""
        return self.config.parallel.num_trainers(self.ranks)

    @property
    def trajectories(self) -> int:
        """Trajectories that a step samples."""
        return self.config.rollout.num_groups * self.config.rollout.group_size

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def rate(self) -> float:
        """Tokens of trajectories a second and rank."""
        return self.trajectories * self.play.length / self.step / self.ranks

    @property
    def decode_rate(self) -> float:
        """Sampled tokens a second of rollout and rank; NaN where others sample and the rollout's
        seconds are those that trainers wait.
        """
        if self.config.parallel.placement == "separate":
            return math.nan
        sampled = self.trajectories * self.play.turns * self.play.response_tokens
        return sampled / self.seconds["rollout"] / self.ranks

    def flops(self, length: float, *, is_critic: bool = False) -> float:
        """FLOPs of a trajectory, forward and backward, of which `length` tokens are computed; the
        critic has no LM head.
        """
        labels = 0.0 if is_critic else self.play.sampled / length
        return length * Sizes.of(self.shape).flops(self.play.text_length, labels)

    @property
    def update_flops(self) -> float:
        """Operations a second of the updates and rank that trains, of the tokens that they
        compute.
        """
        length = computed_length(self.config, self.play)
        flops = self.flops(length)
        if self.config.advantage.uses_critic:
            flops += self.flops(length, is_critic=True)
        trained = self.kept * self.config.train.updates_per_rollout
        return trained * flops / self.seconds["update"] / self.trainers

    @property
    def step_flops(self) -> float:
        """Compute of a step."""
        config, passes = self.config, self.config.train.updates_per_rollout
        updates = passes * count_minibatches(round(self.kept), config.train.minibatch_size)
        has_pass = config.old_logprobs_from(updates) == "pass"
        forward = self.trajectories + self.kept * (has_pass + config.needs_reference)
        flops = (self.kept * passes + forward / 3) * self.flops(self.play.length)
        if config.advantage.uses_critic:  # its values are a pass too
            flops += self.kept * (passes + 1 / 3) * self.flops(self.play.length, is_critic=True)
        return flops


def predicted(machine: Machine, like: Speed) -> Speed:
    """The same step as the predictor has it."""
    config, ranks = like.config, like.ranks
    found = step_seconds(machine, like.shape, config, ranks, like.play)
    totals = {phase: sum(terms.values()) for phase, terms in found.items()}
    seconds = {
        phase: sum(totals.pop(part, 0.0) for part in parts) for phase, parts in PHASES.items()
    }
    setting = Setting.from_config(config, like.trainers, sharing=like.play.sharing)
    peak = max(sum(terms.values()) for terms in plan(like.shape, setting).values()) / GIB
    return replace(like, seconds=seconds | {"other": sum(totals.values())}, peak_gib=peak)


def measured(run: Mapping[str, Any], num_steps: int) -> Speed:
    """The median of a run's steps from WARMUP to `num_steps`. Raises ValueError if none of them
    trained.
    """
    settings, start = read_settings(run["directory"])
    config = StarPOConfig.from_dict(settings)
    rows = run["records"][WARMUP:num_steps]
    trained = [row for row in rows if "update/tokens_per_second" in row]
    if not trained:
        raise ValueError(
            f"{run['directory']} must have a step that trained among its steps {WARMUP} to"
            f" {num_steps - 1}, which are compared with those of the same model; train longer"
            " (--num-steps of every layout)"
        )
    hf = load_config(str(run["directory"] / FINAL_EXPORT))
    seconds = {
        phase: statistics.median([row.get(f"time/{phase}", 0.0) for row in rows])
        for phase in PHASES
    }
    step = statistics.median([row["time/step"] for row in rows])
    peak = max(
        value
        for row in rows
        for key, value in row.items()
        if key.startswith("memory/") and key.endswith(("resident_gib", "peak_gib"))  # CPU, GPU
    )
    return Speed(
        ModelShape.of(hf), config,
        start["world_size"] + config.parallel.rollout_ranks,  # those that train record it
        played(rows, config),
        seconds | {"other": max(0.0, step - sum(seconds.values()))}, peak,
        statistics.median([row["filter/kept_groups"] for row in trained])
        * config.rollout.group_size,
    )  # fmt: skip


def measured_speeds(study: Study, found: Runs) -> dict[str, Speed]:
    """Arm -> its step, in the first of its runs; arms of a model are compared over the same
    steps, because answers change while a policy learns.
    """
    speeds = {}
    for arm in study.arms:
        if runs := found[arm.name]:
            same = [other.name for other in study.arms if other.model == arm.model]
            shortest = min(len(run["records"]) for name in same for run in found[name].values())
            speeds[arm.name] = measured(next(iter(runs.values())), shortest)
    return speeds


def efficiency(study: Study, speeds: Mapping[str, Speed], arm: Arm) -> tuple[str, float] | None:
    """(strong or weak, tokens a second and rank over those of the model's first layout); None where
    ranks are the same, or work is neither the same nor the same on each rank.
    """
    first = next(other for other in study.arms if other.model == arm.model)
    if first.name not in speeds or arm.name not in speeds:
        return None
    base, one = speeds[first.name], speeds[arm.name]
    if one.ranks == base.ranks:
        return None
    kinds = {
        base.trajectories: "strong",
        base.trajectories * one.ranks / base.ranks: "weak",
    }
    kind = kinds.get(one.trajectories)
    return kind and (kind, one.rate / base.rate)


def compared(study: Study, found: Runs) -> list[Arm]:
    """The arms with runs under the first layout."""
    first = study.arms[0].layout
    return [arm for arm in study.arms if arm.layout == first and found[arm.name]]


def curves_of(study: Study, found: Runs, speeds: Mapping[str, Speed]) -> dict[str, list[Curve]]:
    """Model -> held-out success over FLOPs, a curve for every seed, under the first layout."""
    curves: dict[str, list[Curve]] = {}
    for arm in compared(study, found):
        speed = speeds[arm.name]
        for run in found[arm.name].values():
            rows = [row for row in run["records"] if "eval/success" in row]
            steps = np.array([row["step"] + 1.0 for row in rows])
            success = np.array([row["eval/success"] for row in rows])
            one = Curve(steps * speed.step_flops, success, speed.shape.num_parameters)
            curves.setdefault(arm.model, []).append(one)
    return curves


def as_losses(curves: Sequence[Curve], num_prompts: int) -> list[Curve]:
    """1 - success, of counts with half a failure and half a success more (Jeffreys' prior), so that
    a perfect evaluation has a logarithm too.
    """
    return [
        replace(one, value=((1 - one.value) * num_prompts + 0.5) / (num_prompts + 1))
        for one in curves
    ]


def seconds_to(target: float, run: Mapping[str, Any], ranks: int) -> float:
    """Rank-seconds of steps until an evaluation first found this success; infinite if none did."""
    seconds = ranks * np.cumsum([row["time/step"] for row in run["records"]])
    reached = [row.get("eval/success", 0.0) >= target for row in run["records"]]
    return float(seconds[reached.index(True)]) if any(reached) else math.inf


def attempt(work: Any, *arguments: Any, **options: Any) -> Any:
    """What `work` returns, or the sentence with which it refuses."""
    try:
        return work(*arguments, **options)
    except ValueError as error:
        return str(error)


def number(value: float) -> str:
    """Three digits, with a prefix of the SI; a dash for NaN."""
    if math.isnan(value):
        return "-"
    rounded = float(f"{value:.3g}")  # before the prefix: 999,600 is 1M, not 1,000k
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rounded >= size:
            return f"{rounded / size:.3g}{unit}"
    return f"{rounded:.3g}"


def within(one: Constant) -> str:
    """A constant with its interval."""
    return f"{number(one.value)} ({number(one.low)} to {number(one.high)})"


def speed_table(
    speeds: Mapping[str, Speed], beside: Mapping[str, Speed], machine: Machine | None
) -> str:
    """A row for every arm; `beside` has the predictions."""
    rows = []
    for name, one in speeds.items():
        layout, rollout = one.config.parallel, one.config.rollout
        tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        mfu = "-" if machine is None else f"{one.update_flops / machine.hardware.bf16:.0%}"
        rows.append(
            (
                name,
                number(one.shape.num_parameters),
                one.ranks,
                f"{tp} x {pp} x {one.trainers // tp // pp}, {rollout.rollout_tensor_parallel_size}",
                f"{rollout.num_groups} x {rollout.group_size}",
                f"{one.play.length:.0f} ({one.play.turns * one.play.response_tokens:.0f})",
                *(f"{one.seconds[phase]:.3g}" for phase in (*PHASES, "other")),
                f"{one.step:.3g}",
                *map(number, (one.rate, one.decode_rate, one.update_flops)),
                mfu,
                f"{one.peak_gib:.3g}",
                *([f"{beside[name].step:.3g}"] if beside else []),
            )
        )
    head = (
        "arm", "parameters", "ranks", "TP x PP x DP, rollout TP", "P x N", "tokens (sampled)",
        *(f"{phase} s" for phase in (*PHASES, "other")), "step s", "tokens/s/rank",
        "decode tokens/s/rank", "update FLOP/s/rank", "MFU", "peak GiB",
        *(["predicted step s"] if beside else []),
    )  # fmt: skip
    return table(head, rows)


def efficiency_table(
    study: Study, speeds: Mapping[str, Speed], beside: Mapping[str, Speed]
) -> str | None:
    """Tokens a second and rank beside those of the first layout; None if no layout has others."""
    rows = []
    for arm in study.arms:
        if found := efficiency(study, speeds, arm):
            guess = efficiency(study, beside, arm)
            said = [f"{guess[1]:.0%}"] if guess else []
            cells = (arm.model, arm.layout, speeds[arm.name].ranks, found[0], f"{found[1]:.0%}")
            rows.append((*cells, *said))
    head = ("model", "layout", "ranks", "scaling", "efficiency", *["predicted"][: len(beside)])
    return table(head, rows) if rows else None


def success_table(study: Study, found: Runs, speeds: Mapping[str, Speed]) -> str:
    """Success of every model under the first layout, and what the target costs."""
    rows = []
    for arm in compared(study, found):
        runs, ranks = list(found[arm.name].values()), speeds[arm.name].ranks
        spent = sorted(seconds_to(study.target, run, ranks) for run in runs)
        told = ", ".join(number(one) if math.isfinite(one) else "never" for one in spent)
        for name, one in runs[0]["sets"].items():
            rates = np.array([run["sets"][name]["prompt_success"] for run in runs])
            known = [one["random"], one["optimum"]]
            known = ["-" if rate is None else f"{rate:.1%}" for rate in known]
            cells = (arm.model, name, percent(estimate(rates)), len(runs), *known)
            rows.append((*cells, told))
    head = ("model", "set", "success (95% interval)", "seeds", "random", "optimum",
            f"rank-seconds to {study.target:.0%}, each seed")  # fmt: skip
    return table(head, rows)


def fits_text(
    curves: Mapping[str, Sequence[Curve]],
    laws: Mapping[str, Fit | str],
    starts: Mapping[str, float],
) -> str:
    """Constants of each model's sigmoid with their intervals, and its error beyond its data."""
    rows, refused = [], []
    for model, law in laws.items():
        if isinstance(law, str):
            refused.append(f"No sigmoid for {model}: {law}.")
            continue
        ahead = attempt(extrapolation_error, curves[model], start=starts[model])
        said = ahead if isinstance(ahead, str) else f"{100 * ahead:.1f} points"
        constants = map(within, law.constants.values())
        rows.append((model, f"{starts[model]:.1%}", *constants, f"{law.r_squared:.2f}", said))
    head = ("model", "R0", "A", "B", "C_mid", "R2", "second half from first")
    return "\n\n".join([*([table(head, rows)] if rows else []), *refused])


def law_text(curves: Mapping[str, Sequence[Curve]], num_prompts: int) -> tuple[str, Fit | str]:
    """The power law over sizes as text, and itself, or why there is none."""
    losses = as_losses([one for own in curves.values() for one in own], num_prompts)
    law = attempt(fit_power_law, losses)
    if isinstance(law, str):
        return f"No power law over sizes: {law}.", law
    rows = [(name, within(one)) for name, one in law.constants.items()]
    ahead = attempt(size_extrapolation_error, losses)
    said = ahead if isinstance(ahead, str) else (
        f"Fitted on the smaller sizes, it misses the larger ones' success by {100 * ahead[0]:.1f}"
        f" points on average; that they do as the largest of the smaller, by {100 * ahead[1]:.1f}."
    )  # fmt: skip
    return f"{table(('constant', 'value'), rows)}\n\nR2 {law.r_squared:.2f}. {said}", law


def plot(
    curves: Mapping[str, Sequence[Curve]], laws: Mapping[str, Fit | str], law: Fit | str,
    losses: Sequence[Curve], path: Path,
) -> None:  # fmt: skip
    """Success over compute with each model's sigmoid, and losses of all sizes with their law."""
    pyplot = headless_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for position, (model, own) in enumerate(curves.items()):
        color, size = f"C{position}", own[0].size
        shown = np.geomspace(
            min(one.compute[0] for one in own), max(one.compute[-1] for one in own)
        )
        for one in own:
            left.plot(one.compute, one.value, ".", color=color, alpha=0.6)
        if isinstance(laws[model], Fit):
            left.plot(shown, laws[model].predict(shown, size), color=color)
        for one in losses:
            if one.size == size:
                right.plot(one.compute, one.value, ".", color=color, alpha=0.6)
        if isinstance(law, Fit):
            right.plot(shown, law.predict(shown, size), color=color)
        left.plot([], [], color=color, label=model)
    left.set(xscale="log", xlabel="FLOPs of the model", ylabel="success", ylim=(0, 1.02))
    right.set(xscale="log", yscale="log", xlabel="FLOPs of the model", ylabel="1 - success")
    left.legend(fontsize="small")
    if isinstance(law, Fit):
        slopes(right.inset_axes((0.12, 0.14, 0.36, 0.34)), law, sorted({c.size for c in losses}))
    figure.savefig(path)
    pyplot.close(figure)


def slopes(axes: "Axes", law: Fit, sizes: Sequence[float]) -> None:
    """The law's slope k(N) over the sizes that it was fitted on."""
    shown = np.geomspace(sizes[0], sizes[-1])
    most, half = (law.constants[name].value for name in ("efficiency", "half_size"))
    axes.plot(shown, most / (1 + half / shown), color="black")
    axes.set(xscale="log", title="k(N)")
    axes.tick_params(labelsize="x-small")


def write(
    study: Study, found: Runs, output: Path, place: Mapping[str, Any], mixed: bool,
    machine: Machine | None,
) -> None:  # fmt: skip
    """NAME.md and NAME.json of the runs that have finished, and NAME.svg if any has the first
    layout; with a machine its predictions beside them.
    """
    speeds = measured_speeds(study, found)
    beside = {name: predicted(machine, one) for name, one in speeds.items()} if machine else {}
    curves = curves_of(study, found, speeds)
    starts = {
        arm.model: statistics.mean(
            run["records"][0]["eval/initial_success"] for run in found[arm.name].values()
        )
        for arm in compared(study, found)
    }
    config = next(iter(speeds.values())).config
    prompts = config.evaluation.eval_prompts * len(config.environment.evaluated)
    laws = {model: attempt(fit_sigmoid, own, start=starts[model]) for model, own in curves.items()}
    over_sizes, law = law_text(curves, prompts)
    ranks, first = efficiency_table(study, speeds, beside), study.arms[0].layout
    learned = [
        success_table(study, found, speeds),
        "## Success over compute",
        "R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B), R0 before the first step, C in FLOPs of the"
        " model; bootstrap intervals of 95% over seeds, of a lone run over its points.",
        fits_text(curves, laws, starts),
        "## Loss over sizes",
        "log(1 - success) = E(N) - k(N) log C with k(N) = K / (1 + N0 / N).",
        over_sizes,
        f"![success over compute, loss over sizes]({study.page}.svg)",
    ]
    if not curves:
        learned = [
            f"Models are compared under layout `{first}`, of which no run has finished; run it"
            f" (`--layouts {first}`)."
        ]
    parts = [
        f"# {study.title}",
        f"After {study.source}. Preset `{study.preset}`, recipe `{study.recipe}`.",
        f"{place['hardware']}; commit {place['commit']}; {place['date'][:10]}.",
        *(["**Runs of different code or of another version of this study are mixed.**"] * mixed),
        study.notes.strip(),
        "## A step",
        speed_table(speeds, beside, machine),
        *(["## More ranks", ranks] if ranks else []),
        "## Success",
        *learned,
    ]
    output.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(part for part in parts if part) + "\n"
    (output / f"{study.page}.md").write_text(text)
    if curves:
        losses = as_losses([one for own in curves.values() for one in own], prompts)
        plot(curves, laws, law, losses, output / f"{study.page}.svg")
    write_json(
        output / f"{study.page}.json", record(study, place, mixed, speeds, curves, laws, law)
    )
    print(text)


def record(
    study: Study, place: Mapping[str, Any], mixed: bool, speeds: Mapping[str, Speed],
    curves: Mapping[str, Sequence[Curve]], laws: Mapping[str, Fit | str], law: Fit | str,
) -> dict[str, Any]:  # fmt: skip
    """What the page says, as JSON values."""

    def fit(one: Fit | str) -> Any:
        if isinstance(one, str):
            return one
        constants = {name: asdict(value) for name, value in one.constants.items()}
        return constants | {"r_squared": one.r_squared}

    return {
        "study": asdict(study),
        "place": place,
        "is_mixed": mixed,
        "steps": {
            name: {"ranks": one.ranks, "parameters": one.shape.num_parameters,
                   "tokens": one.play.length, "seconds": one.seconds, "peak_gib": one.peak_gib}
            for name, one in speeds.items()
        },
        "curves": {
            model: [{"compute": [*one.compute], "success": [*one.value]} for one in own]
            for model, own in curves.items()
        },
        "sigmoids": {model: fit(one) for model, one in laws.items()},
        "power_law": fit(law),
    }  # fmt: skip


def whole_run(one: Speed) -> float:
    """Seconds of all steps and evaluations of a run, the first before training; an evaluation's
    episodes count as those of a rollout, of which fewer run at a time.
    """
    config = one.config
    first = config.evaluation.eval_prompts * len(config.environment.evaluated)
    episodes = first + sum(config.planned_evaluations(1).values())
    evaluations = episodes / one.trajectories * one.seconds["rollout"]
    return config.train.num_steps * one.step + evaluations


def price_table(
    speeds: Mapping[str, Speed], machine: Machine, seconds: Mapping[str, float], *, in_all: bool
) -> str:
    """What `seconds` of every arm cost, and all of them, with the interval of predictions."""
    low, high, _ = interval("rl, dense")

    def within_factor(value: float) -> str:
        return f"{value:.3g} ({value * low:.3g} to {value * high:.3g})"

    hours = {name: seconds[name] * one.ranks / 3600 for name, one in speeds.items()}
    rows = [
        (name, *map(within_factor, (one.step, hours[name], machine.hardware.dollars * hours[name])))
        for name, one in speeds.items()
    ]
    if in_all:
        total = sum(hours.values())
        spent = (total, machine.hardware.dollars * total)
        rows.append(("in all", "", *map(within_factor, spent)))
    return table(("arm", "seconds of a step", "GPU-hours", "$"), rows)


def write_predicted(
    study: Study, arms: Sequence[Arm], machine: Machine, output: Path, num_seeds: int
) -> None:
    """NAME_predicted.md: steps, efficiencies and prices of `arms`, given with all their flags and
    ranks, before anything runs; of a scaling study those of STEPS steps, of any other those of all
    runs. Raises ValueError for a model whose sizes are not published.
    """
    speeds = {}
    for arm in arms:
        config = parse(arm.flags)
        shape = ModelShape.of(model_config(config.model.load or ""))
        groups = config.rollout.num_groups
        kept = (config.filter.num_kept(groups) or groups) * config.rollout.group_size
        planned = Speed(shape, config, arm.ranks, default_play(config), {}, 0.0, kept)
        speeds[arm.name] = predicted(machine, planned)
    scales = study.target is not None
    seconds = {
        name: STEPS * one.step if scales else num_seeds * whole_run(one)
        for name, one in speeds.items()
    }
    what = f"{STEPS} steps" if scales else f"All runs, {num_seeds} seeds of each, with evaluations,"
    ranks, (low, high, basis) = efficiency_table(study, speeds, {}), interval("rl, dense")
    parts = (
        f"# {study.title}, predicted",
        f"Written by `ragen-mega study {study.name} --preset {study.preset} --hardware"
        f" {machine.hardware.name} --predict`. **Nothing here was measured.** The intervals are"
        f" from {low:.2g} to {high:.2g} times the prediction: {basis}."
        + (" Efficiencies compare predictions with each other." if ranks else ""),
        "## A step",
        speed_table(speeds, {}, machine),
        *(["## More ranks", ranks] if ranks else []),
        f"## {what} at {machine.hardware.dollars:.2f} $ a GPU-hour",
        price_table(speeds, machine, seconds, in_all=not scales),
        study.notes.strip(),
    )
    output.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(part for part in parts if part) + "\n"
    (output / f"{study.name}_predicted.md").write_text(text)
    print(text)
