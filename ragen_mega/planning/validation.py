"""Errors of the predictor against published steps: constants are fitted on half of the rows and
judged on the other half.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.hardware import Constants, Machine, find_machine
from ragen_mega.planning.published import SHAPES
from ragen_mega.planning.time import (
    BF16,
    FP32,
    Play,
    Sizes,
    Terms,
    TrainingLayout,
    decode_step,
    passes,
    prompt_token,
    rollout,
    training,
    untuned,
)
from ragen_mega.report.markdown import table

ROWS = Path(str(files("ragen_mega.planning") / "published_steps.json"))
FITTED = {
    "training": (
        "product", "product_fp8", "memory", "launch", "adapter", "collective", "link", "update",
        "permute", "route",
    ),
    "decode": (
        "decode_memory", "decode_host", "decode_layer", "decode_reduce", "decode_sequence",
        "decode_expert", "decode_routed", "routing",
    ),
    "rl": ("untuned", "overhead", "sync"),
}  # fmt: skip
"""Kind of row -> the constants that its rows decide, in the order of fitting."""
USUAL = Constants(
    product=0.75, product_fp8=0.6, memory=0.8, launch=1.5e-3, adapter=3e-3, collective=1e-4,
    link=0.7, update=0.05, permute=10, route=1.5e-3, untuned=1.2, decode_memory=0.8,
    decode_host=2e-3, decode_layer=20e-6, decode_reduce=10e-6, decode_sequence=35e-6,
    decode_expert=0.7, decode_routed=0.06, routing=0.9, overhead=3e-6, sync=2.5e9,
)  # fmt: skip
"""Start of the fit and target of its regularisation: usual values on NVIDIA's GPUs."""
BOUNDS = {"training": 0.20, "decode": 0.10, "rl": 0.35}
"""Kind -> the median absolute error that we want on the judged half, but for UNBOUND classes."""
UNBOUND = ("decode, mixture",)
COVERED, FEW = 0.8, 10
"""Share of the judged numbers of a class that its interval holds, and how many are needed."""
RATES = ("tokens_per_second", "tflops", "mfu")
"""Measured quantities that are large where seconds are few."""
MEASURED = {
    "training": ("tokens_per_second", "tflops"),
    "decode": ("tokens_per_second",),
    "rl": ("rollout", "forward", "update", "sync", "step", "mfu"),
}
"""Kind -> quantities that its rows may have measured."""
SIZES: Mapping[str, Mapping[str, float]] = {
    "training": {"gpus": 1, "sequence": 1, "sequences_per_microbatch": 1, "batch": 1},
    "decode": {"tp": 1, "batch": 1, "prompt_tokens": 1.0, "output_tokens": 1.0},
    "rl": {
        "gpus": 1, "samples": 1, "mean_tokens": 1.0, "max_tokens": 1.0, "prompt_tokens": 1.0,
        "engine_tp": 1, "batch": 1, "forward_passes": 1.0, "packed_tokens": 1.0,
    },
}  # fmt: skip
"""Kind -> numbers that its rows must have: whole ones (1) and others (1.0)."""
OPTIONS: Mapping[str, Mapping[str, float]] = {
    "training": {"judges": False, "tuned": True, "backward": 2.0, "trained": 1.0},
    "decode": {"judges": False, "ep": 1},
    "rl": {
        "judges": False,
        "rollout_gpus": 0, "staleness": 1, "engine_fp8": False, "engine_ep": 1, "turns": 1,
        "environment_seconds": 0.0, "padding": 0.0,
    },
}  # fmt: skip
"""Kind -> further entries of its rows, with the value that their absence means."""
LEAST = {
    "forward_passes": 0.0, "prompt_tokens": 0.0, "backward": 1.0, "environment_seconds": 0.0,
    "padding": 0.0,
}  # fmt: skip
"""Numbers with a least value; others are above 0."""
RECOMPUTE = ("none", "attention", "selective", "full")
MODEL = {field.name: field.default for field in fields(Sizes)}
CUT = {field.name: field.default for field in fields(TrainingLayout) if field.name != "dp"}
"""Entries of a model, and of the cut of a row, with the value that their absence means."""
UNITS = {
    "training": "tokens/s or TFLOP/s of a GPU",
    "decode": "tokens/s of an engine",
    "rl": "seconds of a step or a phase; mfu of the bfloat16 peak",
}
ENGINE_SHARE = {"colocated": 0.6, "separate": 0.8}
"""Placement -> share of a GPU that an engine takes, as in NeMo-RL's recipes."""
PAGEABLE = 2.5e9
"""Assumed: bytes a second to and from the host in published systems, which do not pin memory."""
WEIGHT = 0.2
"""Weight of the regularisation: a constant a whole range away weighs as 5 points would."""


@dataclass(frozen=True)
class Point:
    """One published number and its source."""

    kind: str
    row: Mapping[str, Any]
    quantity: str
    measured: float
    is_fitted: bool
    """Whether constants may be fitted on it; else it judges them."""
    sizes: Sizes

    @property
    def name(self) -> str:
        return f"{self.row['id']} {self.quantity}"


def check_keys(
    what: str, given: object, required: Collection[str], others: Collection[str]
) -> Mapping[str, Any]:
    """Return `given` if it is an object with these entries. Raises ValueError otherwise."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} must be an object, not {given!r}; write it as one")
    known = (*required, *others)
    if unknown := [name for name in given if name not in known]:
        raise ValueError(
            f"{what} must have no entry but {', '.join(known)}, not {unknown[0]}; drop it, or put"
            ' what it says in "note"'
        )
    if missing := [name for name in required if name not in given]:
        raise ValueError(f"{what} must have {', '.join(required)}, and lacks {missing[0]}; add it")
    return given


def check_value(name: str, value: object, usual: object, *, least: float | None = None) -> None:
    """Raise ValueError unless `value` is of the kind of `usual`, and at least `least` (default:
    above 0) if it is a number.
    """
    number = value if isinstance(value, (int, float)) and value < math.inf else -math.inf
    number = -math.inf if isinstance(value, bool) else number
    rule, is_met = "true or false", isinstance(value, bool)
    if isinstance(usual, float):
        rule = "a positive finite number" if least is None else f"a finite number from {least:g}"
        is_met = number > 0 if least is None else number >= least
    elif isinstance(usual, int) and not isinstance(usual, bool):
        rule, is_met = "a whole number from 1", number >= 1 and number == int(number)
    elif isinstance(usual, str):
        rule, is_met = f"one of {', '.join(RECOMPUTE)}", value in RECOMPUTE
        rule += ", where selective is the feed-forward part and attention Megatron's selective"
    if not is_met:
        raise ValueError(f"{name} must be {rule}, not {value!r}; correct it")


def check_row(kind: str, row: Mapping[str, Any], models: Mapping[str, Sizes]) -> None:
    """Raise ValueError for a row that cannot be predicted."""
    cut = () if kind == "decode" else ("cut",)
    optional = ("hardware", "source", "note", *OPTIONS[kind])
    check_keys("a row", row, ("id", "model", *SIZES[kind], *cut, "measured"), optional)
    if row["model"] not in models:
        raise ValueError(
            f"model must be one of {', '.join(models)}, not {row['model']!r}; add its sizes to"
            ' "models"'
        )
    find_machine(row.get("hardware", "H100"))
    for name, usual in {**SIZES[kind], **OPTIONS[kind]}.items():
        if name in row:
            check_value(name, row[name], usual, least=LEAST.get(name))
    for name, value in check_keys("measured", row["measured"], (), MEASURED[kind]).items():
        check_value(f"measured.{name}", value, 1.0)
    engine = "" if kind == "decode" else "engine_"
    if row.get(f"{engine}tp", 1) % row.get(f"{engine}ep", 1):
        raise ValueError(f"{engine}ep must divide {engine}tp, the GPUs of an engine; correct one")
    if kind == "decode":
        return
    if isinstance(row["cut"], Mapping) and "dp" in row["cut"]:
        raise ValueError("cut.dp fills the GPUs of the row and must not be given; drop it")
    for name, value in check_keys("cut", row["cut"], (), CUT).items():
        check_value(f"cut.{name}", value, CUT[name])
    sizes, apart = TrainingLayout(**row["cut"]).num_gpus, row.get("rollout_gpus", 0)
    if "staleness" in row and not apart:
        raise ValueError("staleness does nothing without rollout_gpus; give both or none")
    if row["gpus"] <= apart or (row["gpus"] - apart) % sizes:
        without = f" without rollout_gpus ({apart})" * bool(apart)
        raise ValueError(
            f"gpus ({row['gpus']}){without} must be a multiple of the {sizes} of its cut, tp x pp x"
            " cp; correct one"
        )
    micro = row.get("sequences_per_microbatch")
    if micro and row["batch"] % (micro * row["gpus"] // sizes):
        ranks = row["gpus"] // sizes
        raise ValueError(
            f"batch ({row['batch']}) must be a multiple of sequences_per_microbatch ({micro}) x"
            f" data-parallel ranks ({ranks}), or a rank would have {row['batch'] / micro / ranks:g}"
            " microbatches; correct one"
        )


def read_rows(path: Path) -> tuple[dict[str, list[Mapping[str, Any]]], dict[str, Sizes]]:
    """Read kind -> the rows of a file, checked, and its models. Raises ValueError, which names the
    row and the entry, for a file of another form.
    """
    where, models = "the file", dict[str, Sizes]()
    required = [name for name, usual in MODEL.items() if usual is MISSING]
    try:
        content = check_keys(where, json.loads(path.read_text()), ("models",), ("about", *FITTED))
        for name, values in check_keys("models", content["models"], (), content["models"]).items():
            where = f"model {name}"
            for size, value in check_keys("it", values, required, MODEL).items():
                check_value(size, value, False if size == "is_tied" else 1)
            models[name] = Sizes(**values)
        models |= {name: Sizes.of(ModelShape.from_config(shape)) for name, shape in SHAPES.items()}
        rows = {kind: list(content.get(kind, ())) for kind in FITTED}
        for kind, of_kind in rows.items():
            for position, row in enumerate(of_kind, start=1):
                where = f"row {position} of {kind}"
                if "unpredicted" in check_keys("it", row, ("id", "model"), row):
                    continue
                where = f"row {row['id']} of {kind}"
                check_row(kind, row, models)
    except OSError as error:
        raise ValueError(
            f"--validate {path} must be a file in the form of {ROWS.name} that can be read"
            f" ({error.strerror}); name such a file, or none for our own rows"
        ) from None
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must have the form of {ROWS.name}, and {where} has not: {error}"
        ) from None
    return rows, models


def read_points(path: Path) -> list[Point]:
    """Read the rows of a file, in its order; every other number of a kind judges, and all of rows
    that say so. Rows that cannot be predicted are left out. Raises ValueError for a file of another
    form.
    """
    points, (rows, models) = [], read_rows(path)
    for kind, of_kind in rows.items():
        turns = itertools.cycle((True, False))
        for row in of_kind:
            for quantity, value in {} if "unpredicted" in row else row["measured"].items():
                is_fitted, sizes = not row.get("judges") and next(turns), models[row["model"]]
                points.append(Point(kind, row, quantity, value, is_fitted, sizes))
    return points


def predicted(point: Point, constants: Constants) -> float:
    """Predict a number, in its unit."""
    row = point.row
    machine = find_machine(row.get("hardware", "H100"), constants)
    if point.kind == "decode":
        context = row["prompt_tokens"] + row["output_tokens"] / 2
        tp, batch, ep = row["tp"], row["batch"], row.get("ep", 1)
        step = sum(decode_step(machine, point.sizes, tp=tp, ep=ep, batch=batch, context=context))
        # while a sequence is answered, the prompts of the others are read
        others = (batch - 1) * row["prompt_tokens"] / row["output_tokens"]
        return batch / (step + others * prompt_token(machine, point.sizes, tp=tp))
    cut = TrainingLayout(**row["cut"])
    cut = replace(cut, dp=(row["gpus"] - row.get("rollout_gpus", 0)) // cut.num_gpus)
    if point.kind == "rl":
        phases = rl_phases(machine, point, cut)
        if point.quantity == "mfu":
            tokens = row["batch"] * (row["mean_tokens"] + row["prompt_tokens"])
            flops = tokens * point.sizes.flops(row["mean_tokens"]) / row["gpus"]
            return flops / machine.hardware.bf16 / phases["update"] * row["samples"] / row["batch"]
        return phases[point.quantity]
    micro = row["sequences_per_microbatch"]
    terms = training(
        machine,
        point.sizes,
        cut,
        tokens=micro * row["sequence"],
        length=row["sequence"],
        micros=row["batch"] / micro / cut.dp,
        backward=row.get("backward", 2.0),
        trained=row.get("trained", 1.0),
    )
    terms = terms if row.get("tuned", True) else untuned(machine, terms)
    rate = row["batch"] * row["sequence"] / row["gpus"] / sum(terms.values())
    return rate * (point.sizes.flops(row["sequence"]) / 1e12 if point.quantity == "tflops" else 1)


def sampling(machine: Machine, point: Point) -> float:
    """Predict the seconds in which the engines of a published step play its trajectories. GPUs that
    only sample may play those of several steps at once, each followed by another one: then what as
    many more trajectories add is the time of as many steps, without their first and last moments.
    """
    row, tp, apart = point.row, point.row["engine_tp"], point.row.get("rollout_gpus", 0)
    is_fp8, ahead = row.get("engine_fp8", False), row.get("staleness", 1)
    turns = row.get("turns", 1)
    prompt, sampled, most = (
        row[name] / turns for name in ("prompt_tokens", "mean_tokens", "max_tokens")
    )
    waits = row.get("environment_seconds", 0.0)
    play = Play(turns, prompt, sampled, most, environment_seconds=waits)
    share = ENGINE_SHARE["separate" if apart else "colocated"]
    # tokens whose keys and values fit beside the weights
    sizes = point.sizes
    held = 2 * sizes.attending * max(tp, sizes.num_kv_heads) * sizes.head_dim * BF16
    space = share * tp * machine.hardware.gpu_gib * 2**30
    room = (space - sizes.total * (1 if is_fp8 else BF16)) / held
    sessions = math.ceil(ahead * row["samples"] * tp / (apart or row["gpus"]))

    def seconds(count: int) -> float:
        most = min(room, (sessions + 0.5) * play.text_length)
        layout = {"tp": tp, "ep": row.get("engine_ep", 1), "fp8": is_fp8, "room": most}
        return sum(t for _, t in rollout(machine, sizes, play, sessions=count, **layout))

    if ahead == 1:
        return seconds(sessions)
    return (seconds(3 * sessions) - seconds(2 * sessions)) / ahead


def rl_phases(machine: Machine, point: Point, cut: TrainingLayout) -> Terms:
    """Predict phase -> seconds of a published step of reinforcement learning. Where some GPUs only
    sample it takes as long as the slower side, and the weights' way between them.
    """
    row, sizes, tp = point.row, point.sizes, point.row["engine_tp"]
    length = row["mean_tokens"] + row["prompt_tokens"]

    def micros(samples: float) -> dict[str, float]:
        computed = samples * length / cut.dp * (1 + row.get("padding", 0.0))
        count = max(1, math.ceil(computed / row["packed_tokens"]))
        return {"tokens": computed / count, "length": length, "micros": count}

    updates = max(1, row["samples"] // row["batch"])
    update = untuned(machine, training(machine, sizes, cut, **micros(row["batch"])))
    forward = passes(machine, sizes, cut, **micros(row["samples"]), backward=0.0)
    # every rank gets the weights that others hold, bucket by bucket, while an engine loads
    ranks = max(cut.tp * cut.pp, cut.ep)
    gathered = BF16 * sizes.total / machine.link(ranks) if ranks > 1 else 0.0
    phases = {
        "rollout": sampling(machine, point),
        "forward": row["forward_passes"] * sum(untuned(machine, forward).values()),
        "update": updates * sum(update.values()),
        "sync": max(gathered, BF16 * sizes.total / tp / machine.constants.sync),
    }
    trained = phases["forward"] + phases["update"]
    trained += machine.constants.overhead * row["samples"] * length
    if row.get("rollout_gpus"):
        return phases | {"step": max(trained, phases["rollout"]) + phases["sync"]}
    # weights, gradients and optimizer give way to the engine and come back
    moved = 2 * (2 * BF16 + 3 * FP32) * sizes.total / row["gpus"] / PAGEABLE
    return phases | {"step": phases["rollout"] + trained + moved + phases["sync"]}


def solve(
    start: Constants,
    names: Sequence[str],
    misses: Callable[[Constants], list[float]],
    *,
    weight: float = 0.0,
) -> Constants:
    """Fit those constants of `start` that these names list, within their ranges, so that `misses`,
    logarithms of predicted over published, are nearest to 0; outliers have little influence.
    `weight` pulls the constants towards `start`.
    """
    from scipy.optimize import least_squares  # an optional package

    ranges = [field.metadata for name in names for field in fields(Constants) if field.name == name]
    high = np.log([limits["high"] for limits in ranges])
    low = np.log([max(1e-6 * limits["high"], limits["low"]) for limits in ranges])
    usual = np.clip(np.log([max(1e-12, getattr(start, name)) for name in names]), low, high)

    def changed(logarithms: NDArray[np.float64]) -> Constants:
        values = np.exp(np.clip(logarithms, low, high))
        values = np.clip(
            values, [limits["low"] for limits in ranges], [limits["high"] for limits in ranges]
        )
        return replace(start, **dict(zip(names, map(float, values))))

    def cost(values: NDArray[np.float64]) -> list[float]:
        return [*misses(changed(values)), *(weight * (values - usual))]

    found = least_squares(cost, usual, bounds=(low, high), loss="cauchy", f_scale=0.1)
    return changed(found.x)


def fit(points: Sequence[Point], start: Constants = USUAL) -> Constants:
    """Fit the constants to the points that may be fitted, to two digits."""
    for kind, names in FITTED.items():
        chosen = [point for point in points if point.kind == kind and point.is_fitted]

        def misses(constants: Constants, chosen: Sequence[Point] = chosen) -> list[float]:
            return [math.log(predicted(point, constants) / point.measured) for point in chosen]

        found = solve(start, names, misses, weight=WEIGHT)
        start = replace(start, **{name: float(f"{getattr(found, name):.2g}") for name in names})
    return start


def class_of(point: Point) -> str:
    """Name the class of a point: its kind, the kind of model, and in training the precision of its
    products.
    """
    model = "mixture" if point.sizes.num_experts else "dense"
    precision = "FP8" if point.row.get("cut", {}).get("fp8") else "bfloat16"
    return f"{point.kind}, {model}" + (f", {precision}" if point.kind == "training" else "")


def scored(points: Sequence[Point], constants: Constants) -> list[dict[str, Any]]:
    """List predicted beside published. `times` is how many times the predicted seconds it took."""
    rows = []
    for point in points:
        value, seen = predicted(point, constants), point.measured
        rows.append(
            {
                "kind": point.kind,
                "class": class_of(point),
                "name": point.name,
                "model": point.row["model"],
                "use": "fit" if point.is_fitted else "judge",
                "published": seen,
                "predicted": value,
                "error": value / seen - 1,
                "times": value / seen if point.quantity in RATES else seen / value,
                "note": point.row.get("note", ""),
            }
        )
    return rows


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarize rows that judge: medians of |predicted / published - 1| and with its sign, and the
    interval of `times` that holds COVERED of them.
    """
    times = sorted(row["times"] for row in rows)
    out = math.floor((1 - COVERED) / 2 * len(rows) + 1e-9)  # at each end
    return {
        "judged": statistics.median(abs(row["error"]) for row in rows),
        "signed": statistics.median(row["error"] for row in rows),
        "num_judged": len(rows),
        "interval": [times[out], times[-1 - out]],
        "covered": 1 - 2 * out / len(rows),
    }


def interval(name: str) -> tuple[float, float, str]:
    """Return the factors of a prediction between which our rows that judge a class (kind, model)
    lie, as far as COVERED, and the name of these rows: of the whole kind where fewer than FEW judge
    the class.
    """
    kind = name.partition(",")[0]
    points = [point for point in read_points(ROWS) if point.kind == kind and not point.is_fitted]
    of_class, basis = (
        [point for point in points if class_of(point) == name],
        f"judged numbers of {name}",
    )
    if len(of_class) < FEW:
        basis = f"judged numbers of {kind}, for there are only {len(of_class)} of {name}"
        of_class = points
    errors = errors_of(scored(of_class, Constants()))
    return *errors["interval"], f"{errors['covered']:.0%} of {len(of_class)} {basis}"


def report(path: Path) -> dict[str, Any]:
    """Compare predicted with published, row by row, and list the medians of each kind and class.
    The constants are fitted on half of our own rows; rows of another file all judge.
    """
    constants = fit(read_points(ROWS))
    is_own = path.resolve() == ROWS.resolve()
    points = [point if is_own else replace(point, is_fitted=False) for point in read_points(path)]
    rows, medians = scored(points, constants), {}
    judging = [row for row in rows if row["use"] == "judge"]
    classes = {
        name: [row for row in judging if row["class"] == name]
        for name in dict.fromkeys(row["class"] for row in judging)
    }
    for kind, bound in BOUNDS.items():
        of_kind = [row for row in judging if row["kind"] == kind and row["class"] not in UNBOUND]
        errors = [abs(row["error"]) for row in rows if (row["kind"], row["use"]) == (kind, "fit")]
        if of_kind:
            fitted = statistics.median(errors) if errors else None
            medians[kind] = errors_of(of_kind) | {"fitted": fitted, "bound": bound}
    return {
        "constants": asdict(constants),
        "medians": medians,
        "classes": {name: errors_of(of_class) for name, of_class in classes.items()},
        "rows": rows,
        "unpredicted": [
            {"kind": kind, "name": row["id"], "model": row["model"], "reason": row["unpredicted"]}
            for kind, of_kind in read_rows(path)[0].items()
            for row in of_kind
            if "unpredicted" in row
        ],
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Write the report as text."""
    heads = (
        (
            kind, f"{found['judged']:.0%} of {found['num_judged']}",
            "none" if found["fitted"] is None else f"{found['fitted']:.0%}",
            f"{found['bound']:.0%}", "yes" if found["judged"] <= found["bound"] else "no",
        )
        for kind, found in result["medians"].items()
    )  # fmt: skip
    columns = ("kind", "median error, judged", "fitted", "wanted", "met")
    classes = (
        (
            name, f"{found['judged']:.0%} of {found['num_judged']}", f"{found['signed']:+.0%}",
            "{:.2f} to {:.2f}".format(*found["interval"]), f"{found['covered']:.0%}",
        )
        for name, found in result["classes"].items()
    )  # fmt: skip
    head = ("class", "median error", "with its sign", "seconds, times predicted", "of the rows")
    lines = [table(columns, heads), "", table(head, classes), ""]
    for kind in BOUNDS:
        rows = [row for row in result["rows"] if row["kind"] == kind]
        if rows:
            cells = (
                (
                    row["name"], row["model"], row["use"], f"{row['published']:.4g}",
                    f"{row['predicted']:.4g}", f"{row['error']:+.0%}", row["note"],
                )
                for row in rows
            )  # fmt: skip
            names = ("row", "model", "use", "published", "predicted", "error", "note")
            lines += [f"{kind} ({UNITS[kind]}):", "", table(names, cells), ""]
    if result["unpredicted"]:
        reasons = ((row["name"], row["model"], row["reason"]) for row in result["unpredicted"])
        lines += ["Not predicted:", "", table(("row", "model", "reason"), reasons), ""]
    fitted = {name for names in FITTED.values() for name in names}
    values = (
        (field.name, f"{result['constants'][field.name]:.3g}",
         f"{field.metadata['low']:g} to {field.metadata['high']:g}",
         "fitted" if field.name in fitted else "usual")
        for field in fields(Constants)
    )  # fmt: skip
    lines += ["Constants:", "", table(("constant", "value", "range", "origin"), values)]
    return "\n".join(lines)
