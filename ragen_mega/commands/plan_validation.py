"""How far the predictor is from published steps: constants fitted on half of the rows, judged on
the other half.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ragen_mega.models.hardware import Constants, Machine, find_hardware
from ragen_mega.models.published import SHAPES
from ragen_mega.models.shape import ModelShape
from ragen_mega.models.time_plan import (
    BF16,
    Cut,
    Play,
    Sizes,
    Terms,
    decode_step,
    passes,
    rollout,
    training,
    untuned,
)
from ragen_mega.report.markdown import table

ROWS = Path(str(files("ragen_mega.models") / "published_steps.json"))
FITTED = {
    "training": (
        "product", "product_fp8", "memory", "launch", "link", "update", "expert", "untuned",
    ),
    "decode": ("decode_memory", "decode_layer", "decode_sequence", "decode_expert"),
    "rl": ("overhead",),
}  # fmt: skip
"""Kind of row -> the constants that its rows decide, in the order of fitting."""
USUAL = Constants(
    product=0.75, product_fp8=0.6, memory=0.8, launch=1.5e-3, link=0.7, update=0.2, expert=0.5,
    untuned=1.2, decode_memory=0.75, decode_layer=25e-6, decode_sequence=45e-6, decode_expert=0.7,
    overhead=0.25,
)  # fmt: skip
"""Where fitting starts and what it is regularised towards: usual values on NVIDIA's GPUs."""
BOUNDS = {"training": 0.20, "decode": 0.10, "rl": 0.35}
"""Kind -> the median absolute error that we want on the judged half; of decode on dense models."""
RATES = {"training": ("tokens_per_second", "tflops"), "decode": ("tokens_per_second",)}
"""Kind -> what may be measured in it; of reinforcement learning the phases, and mfu."""
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


def read_points(path: Path) -> list[Point]:
    """The rows of a file, in its order; every other number of a kind judges. Rows that cannot be
    predicted are left out. Raises ValueError for a file of another form.
    """
    points = []
    try:
        content = json.loads(path.read_text())
        models = {name: Sizes(**sizes) for name, sizes in content["models"].items()}
        models |= {name: Sizes.of(ModelShape.from_config(shape)) for name, shape in SHAPES.items()}
        for kind in FITTED:
            for row in content.get(kind, ()):
                itemgetter("id", "model")(row)  # every report names them
            numbers = (
                (row, quantity, value)
                for row in content.get(kind, ())
                if "unpredicted" not in row
                for quantity, value in row["measured"].items()
            )
            for position, (row, quantity, value) in enumerate(numbers):
                is_fitted, sizes = position % 2 == 0, models[row["model"]]
                points.append(Point(kind, row, quantity, value, is_fitted, sizes))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must have the form of {ROWS.name}, and {error} does not fit it; write rows as"
            " there"
        ) from None
    return points


def predicted(point: Point, constants: Constants) -> float:
    """The prediction of a number, in its unit."""
    row = point.row
    if point.quantity not in RATES.get(point.kind, (point.quantity,)):
        raise ValueError(f"{point.quantity} must be one of {', '.join(RATES[point.kind])}")
    if not 0 < point.measured < math.inf:
        raise ValueError(f"{point.quantity} must be positive and finite, not {point.measured}")
    machine = Machine(find_hardware(row.get("hardware", "H100")), constants)
    if point.kind == "decode":
        context = row["prompt_tokens"] + row["output_tokens"] / 2
        step = decode_step(machine, point.sizes, tp=row["tp"], batch=row["batch"], context=context)
        return row["batch"] / sum(step)
    cut = Cut(**row["cut"])
    if row["gpus"] % cut.num_gpus:
        raise ValueError(f"{row['gpus']} GPUs are no multiple of the {cut.num_gpus} of its cut")
    cut = replace(cut, dp=row["gpus"] // cut.num_gpus)
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


def rl_phases(machine: Machine, point: Point, cut: Cut) -> Terms:
    """Phase -> seconds of a published step of reinforcement learning."""
    row, sizes = point.row, point.sizes
    tp = row["engine_tp"]
    play = Play(1, row["prompt_tokens"], row["mean_tokens"], row["max_tokens"])
    sessions = math.ceil(row["samples"] * tp / row["gpus"])
    sampled = rollout(machine, sizes, play, sessions=sessions, tp=tp)
    length = row["mean_tokens"] + row["prompt_tokens"]

    def micros(samples: float) -> dict[str, float]:
        count = max(1, math.ceil(samples * length / cut.dp / row["packed_tokens"]))
        return {"tokens": samples * length / cut.dp / count, "length": length, "micros": count}

    updates = max(1, row["samples"] // row["batch"])
    update = untuned(machine, training(machine, sizes, cut, **micros(row["batch"])))
    forward = passes(machine, sizes, cut, **micros(row["samples"]), backward=0.0)
    phases = {
        "rollout": sum(seconds for _, seconds in sampled),
        "forward": row["forward_passes"] * sum(untuned(machine, forward).values()),
        "update": updates * sum(update.values()),
        "sync": BF16 * sizes.total / tp / machine.constants.sync,
    }
    return phases | {"step": (1 + machine.constants.overhead) * sum(phases.values())}


def solve(
    start: Constants,
    names: Sequence[str],
    misses: Callable[[Constants], list[float]],
    *,
    weight: float = 0.0,
) -> Constants:
    """`start` with those constants of these names, within their ranges, under which `misses`,
    logarithms of predicted over published, are nearest to 0; outliers have little
    influence. `weight` pulls the constants towards `start`.
    """
    ranges = [one.metadata for name in names for one in fields(Constants) if one.name == name]
    high = np.log([one["high"] for one in ranges])
    low = np.log([max(1e-6 * one["high"], one["low"]) for one in ranges])
    usual = np.clip(np.log([max(1e-12, getattr(start, name)) for name in names]), low, high)

    def changed(logarithms: NDArray[np.float64]) -> Constants:
        values = np.exp(np.clip(logarithms, low, high))
        values = np.clip(values, [one["low"] for one in ranges], [one["high"] for one in ranges])
        return replace(start, **dict(zip(names, map(float, values))))

    def cost(values: NDArray[np.float64]) -> list[float]:
        return [*misses(changed(values)), *(weight * (values - usual))]

    found = least_squares(cost, usual, bounds=(low, high), loss="cauchy", f_scale=0.1)
    return changed(found.x)


def fit(points: Sequence[Point], start: Constants = USUAL) -> Constants:
    """Constants that come nearest to the points that may be fitted, to two digits."""
    for kind, names in FITTED.items():
        chosen = [point for point in points if point.kind == kind and point.is_fitted]

        def misses(constants: Constants, chosen: Sequence[Point] = chosen) -> list[float]:
            return [math.log(predicted(one, constants) / one.measured) for one in chosen]

        found = solve(start, names, misses, weight=WEIGHT)
        start = replace(start, **{name: float(f"{getattr(found, name):.2g}") for name in names})
    return start


def median_error(points: Sequence[Point], constants: Constants) -> float:
    """Median of |predicted / published - 1|; NaN without points."""
    errors = [abs(predicted(point, constants) / point.measured - 1) for point in points]
    return statistics.median(errors) if errors else math.nan


def uncertainty() -> float:
    """Factor within which half of the judged published steps of reinforcement learning lie."""
    constants = Constants()
    points = [one for one in read_points(ROWS) if one.kind == "rl" and not one.is_fitted]
    misses = (abs(math.log(predicted(point, constants) / point.measured)) for point in points)
    return math.exp(statistics.median(misses))


def judged(points: Sequence[Point], kind: str) -> list[Point]:
    """The points that judge a kind; of decoding, the dense models."""
    return [
        point
        for point in points
        if point.kind == kind
        and not point.is_fitted
        and not (kind == "decode" and point.sizes.num_experts)
    ]


def report(path: Path) -> dict[str, Any]:
    """Predicted beside published, row by row, and the medians of each kind. The constants are
    fitted on half of our own rows; rows of another file all judge.
    """
    constants = fit(read_points(ROWS))
    is_own = path.resolve() == ROWS.resolve()
    points = [point if is_own else replace(point, is_fitted=False) for point in read_points(path)]
    rows = []
    for point in points:
        try:
            value = predicted(point, constants)
            error = value / point.measured - 1
        except (ArithmeticError, KeyError, TypeError, ValueError) as wrong:
            raise ValueError(
                f"{path}: row {point.row['id']} cannot be predicted ({wrong!r}); write it as those"
                f' of {ROWS.name}, or say why in an entry "unpredicted"'
            ) from None
        rows.append(
            {
                "kind": point.kind,
                "name": point.name,
                "model": point.row["model"],
                "use": "fit" if point.is_fitted else "judge",
                "published": point.measured,
                "predicted": value,
                "error": error,
                "note": point.row.get("note", ""),
            }
        )
    unpredicted = [
        {"kind": kind, "name": row["id"], "model": row["model"], "reason": row["unpredicted"]}
        for kind in FITTED
        for row in json.loads(path.read_text()).get(kind, ())
        if "unpredicted" in row
    ]
    medians = {}
    for kind, bound in BOUNDS.items():
        judging, fitted = (
            judged(points, kind),
            [p for p in points if p.kind == kind and p.is_fitted],
        )
        medians[kind] = {
            "judged": median_error(judging, constants),
            "num_judged": len(judging),
            "fitted": median_error(fitted, constants),
            "bound": bound,
        }
    return {
        "constants": asdict(constants),
        "medians": medians,
        "rows": rows,
        "unpredicted": unpredicted,
    }


def markdown(result: Mapping[str, Any]) -> str:
    """The report as text."""
    heads = [
        f"| {kind} | {one['judged']:.0%} of {one['num_judged']} | {one['fitted']:.0%} |"
        f" {one['bound']:.0%} | {'yes' if one['judged'] <= one['bound'] else 'no'} |"
        for kind, one in result["medians"].items()
        if one["num_judged"]
    ]
    lines = [
        "| kind | median error, judged half | fitted half | wanted | met |",
        "| --- | --- | --- | --- | --- |",
        *heads,
        "",
    ]
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
            head = ("row", "model", "use", "published", "predicted", "error", "note")
            lines += [f"{kind}:", "", table(head, cells), ""]
    if result["unpredicted"]:
        cells = ((row["name"], row["model"], row["reason"]) for row in result["unpredicted"])
        lines += ["Not predicted:", "", table(("row", "model", "reason"), cells), ""]
    fitted = {name for names in FITTED.values() for name in names}
    values = (
        (one.name, f"{result['constants'][one.name]:.3g}",
         f"{one.metadata['low']:g} to {one.metadata['high']:g}",
         "fitted" if one.name in fitted else "usual")
        for one in fields(Constants)
    )  # fmt: skip
    lines += ["Constants:", "", table(("constant", "value", "range", "origin"), values)]
    return "\n".join(lines)
