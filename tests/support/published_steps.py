"""Errors of the predictor against published steps: constants are fitted on every other row and
judged on the rest.

    python -m tests.support.published_steps      # every published number beside the predicted one
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    Terms,
    TrainingLayout,
    decode_step,
    passes,
    rollout,
    training,
)
from ragen_mega.report.markdown import table

ROWS = Path(__file__).with_suffix(".json")
FITTED = {
    "training": ("product", "product_fp8", "memory", "launch", "link", "update", "permute"),
    "decode": (
        "decode_memory", "decode_layer", "decode_sequence", "decode_expert", "routing",
    ),
    "rl": ("overhead", "sync"),
}  # fmt: skip
"""Kind of row -> the constants that its rows decide, in the order of fitting."""
SHARES = ("product", "product_fp8", "memory", "link", "decode_memory", "routing")
"""Constants that cannot be above 0.95."""
USUAL = Constants(
    product=0.75, product_fp8=0.6, memory=0.8, link=0.7, launch=1.5e-3, update=0.05, permute=10,
    decode_memory=0.8, decode_layer=60e-6, decode_sequence=35e-6, decode_expert=0.7, routing=0.9,
    sync=2.5e9, overhead=3e-6,
)  # fmt: skip
"""Start of the fit: usual values on NVIDIA's GPUs."""
WEIGHT = 0.2
"""Pull of a constant towards its usual value: one that is e times as large weighs as a row does
whose error is a fifth.
"""
COVERED = 0.8
"""Share of the judged numbers that an interval holds."""
ENGINE_SHARE = {"colocated": 0.6, "separate": 0.8}
"""Placement -> share of a GPU that an engine takes, as in NeMo-RL's recipes."""
PAGEABLE = 2.5e9
"""Assumed: bytes a second to and from the host in published systems, which do not pin memory."""


@dataclass(frozen=True)
class Point:
    """One published number and its source."""

    kind: str
    row: Mapping[str, Any]
    quantity: str
    measured: float
    is_fitted: bool
    """Whether constants may be fitted on it; else it judges them."""
    shape: ModelShape

    @property
    def group(self) -> str:
        """Name its kind, and the kind of model."""
        return f"{self.kind}, {'mixture' if self.shape.num_experts else 'dense'}"


def read_points() -> list[Point]:
    """Read the published numbers. Every other row of a kind judges, and those that say so."""
    content = json.loads(ROWS.read_text())
    models = SHAPES | content["models"]
    shapes = {name: ModelShape.from_config(values) for name, values in models.items()}
    return [
        Point(
            kind, row, quantity, value,
            position % 2 == 0 and not row.get("judges"), shapes[row["model"]],
        )
        for kind in FITTED
        for position, row in enumerate(content[kind])
        for quantity, value in row["measured"].items()
    ]  # fmt: skip


def predicted(point: Point, constants: Constants) -> float:
    """Predict a number, in its unit."""
    row, shape = point.row, point.shape
    machine = replace(find_machine(row.get("hardware", "H100")), constants=constants)
    if point.kind == "decode":
        prompt, answer, batch, tp = (
            row[name] for name in ("prompt_tokens", "output_tokens", "batch", "tp")
        )
        step = decode_step(machine, shape, tp=tp, batch=batch, context=prompt + answer / 2)
        # while a sequence is answered, the prompts of the others are read
        read = (batch - 1) * prompt / answer * 2 * shape.num_layers * shape.active_size / tp
        read /= machine.constants.product * machine.hardware.bf16
        return batch / (sum(step.values()) + read)
    cut = TrainingLayout(**row["cut"])
    cut = replace(cut, dp=(row["gpus"] - row.get("rollout_gpus", 0)) // cut.num_gpus)
    if point.kind == "rl":
        return rl_phases(machine, point, cut)[point.quantity]
    micro, length = row["sequences_per_microbatch"], row["sequence"]
    micros = row["batch"] / micro / cut.dp
    terms = training(machine, shape, cut, tokens=micro * length, length=length, micros=micros)
    rate = row["batch"] * length / row["gpus"] / sum(terms.values())
    return rate * (shape.cost.flops(length) / 1e12 if point.quantity == "tflops" else 1)


def sampling(machine: Machine, point: Point) -> float:
    """Predict the seconds in which the engines of a published step play its trajectories. Engines
    that play trajectories of several steps at once have no end at which only the longest are left.
    """
    row, shape, tp = point.row, point.shape, point.row["engine_tp"]
    apart, ahead, turns = row.get("rollout_gpus", 0), row.get("staleness", 1), row.get("turns", 1)
    prompt, sampled, most = (
        row[name] / turns for name in ("prompt_tokens", "mean_tokens", "max_tokens")
    )
    play = Play(turns, prompt, sampled, most, environment_seconds=0.0)
    play = play if ahead == 1 else replace(play, spread=0.0)
    is_fp8, share = row.get("engine_fp8", False), ENGINE_SHARE["separate" if apart else "colocated"]
    # tokens whose keys and values fit beside the weights
    held = 2 * shape.num_layers * max(tp, shape.num_kv_heads) * shape.head_dim * BF16
    space = share * tp * machine.hardware.gpu_gib * 2**30
    room = (space - shape.num_parameters * (1 if is_fp8 else BF16)) / held
    sessions = math.ceil(ahead * row["samples"] * tp / (apart or row["gpus"]))
    terms = rollout(machine, shape, play, sessions=sessions, tp=tp, fp8=is_fp8, room=room)
    return sum(terms.values()) / ahead


def rl_phases(machine: Machine, point: Point, cut: TrainingLayout) -> Terms:
    """Predict phase -> seconds of a published step of reinforcement learning. Where some GPUs only
    sample it takes as long as the slower side, and the weights' way between them.
    """
    row, shape, tp = point.row, point.shape, point.row["engine_tp"]
    length = row["mean_tokens"] + row["prompt_tokens"]

    def micros(samples: float) -> dict[str, float]:
        computed = samples * length / cut.dp
        count = max(1, math.ceil(computed / row["packed_tokens"]))
        return {"tokens": computed / count, "length": length, "micros": count}

    updates = max(1, row["samples"] // row["batch"])
    update = training(machine, shape, cut, **micros(row["batch"]))
    forward = passes(machine, shape, cut, **micros(row["samples"]), is_trained=False)
    phases = {
        "rollout": sampling(machine, point),
        "forward": row["forward_passes"] * sum(forward.values()),
        "update": updates * sum(update.values()),
        "sync": BF16 * shape.num_parameters / tp / machine.constants.sync,
    }
    trained = phases["forward"] + phases["update"]
    trained += machine.constants.overhead * row["samples"] * length
    if row.get("rollout_gpus"):
        return phases | {"step": max(trained, phases["rollout"]) + phases["sync"]}
    # weights, gradients and optimizer give way to the engine and come back
    moved = 2 * (2 * BF16 + 3 * FP32) * shape.num_parameters / row["gpus"] / PAGEABLE
    return phases | {"step": phases["rollout"] + trained + moved + phases["sync"]}


def times(point: Point, constants: Constants) -> float:
    """Return how many times the predicted seconds were published."""
    ratio = point.measured / predicted(point, constants)
    return 1 / ratio if point.quantity in ("tokens_per_second", "tflops") else ratio


def fit(points: Sequence[Point]) -> Constants:
    """Fit the constants to the points that may be fitted, in logarithms, to two digits; outliers
    have little influence, and what the points do not decide stays near USUAL.
    """
    from scipy.optimize import least_squares  # an optional package

    found = USUAL
    for kind, names in FITTED.items():
        chosen = [point for point in points if point.kind == kind and point.is_fitted]
        origin = np.log([getattr(USUAL, name) for name in names])
        highest = [math.log(0.95) if name in SHARES else math.inf for name in names]

        def changed(logarithms: NDArray[np.float64], names=names, found=found) -> Constants:
            return replace(found, **dict(zip(names, map(float, np.exp(logarithms)))))

        def misses(logarithms: NDArray[np.float64], chosen=chosen, origin=origin) -> list[float]:
            constants = changed(logarithms)
            errors = [math.log(times(point, constants)) for point in chosen]
            return [*errors, *(WEIGHT * (logarithms - origin))]

        solution = least_squares(
            misses,
            np.minimum(origin, highest),
            bounds=(-np.inf, highest),
            loss="cauchy",
            f_scale=0.1,
        )
        values = {name: float(f"{math.exp(x):.2g}") for name, x in zip(names, solution.x)}
        found = replace(found, **values)
    return found


def spread(points: Sequence[Point], constants: Constants) -> dict[str, Any]:
    """Summarize points: the median error of the seconds, and the interval of `times` that holds a
    share COVERED of the rows.
    """
    found = sorted(times(point, constants) for point in points)
    out = math.floor((1 - COVERED) / 2 * len(found) + 1e-9)  # at each end
    return {
        "num": len(found),
        "median_error": statistics.median(abs(1 - 1 / ratio) for ratio in found),
        "interval": (found[out], found[-1 - out]),
    }


def interval() -> tuple[float, float]:
    """Return the factors of a prediction between which COVERED of the judged numbers of published
    reinforcement learning lie.
    """
    points = [point for point in read_points() if point.kind == "rl" and not point.is_fitted]
    low, high = spread(points, Constants())["interval"]
    return low, high


def report() -> dict[str, Any]:
    """Compare predicted with published, row by row and by kind of row and model."""
    constants, points = Constants(), read_points()
    judges = [point for point in points if not point.is_fitted]
    groups = dict.fromkeys(point.group for point in points)
    return {
        "constants": asdict(constants),
        "groups": {
            group: spread([point for point in judges if point.group == group], constants)
            for group in groups
        },
        "rows": [
            {
                "group": point.group,
                "id": point.row["id"],
                "model": point.row["model"],
                "quantity": point.quantity,
                "use": "fit" if point.is_fitted else "judge",
                "published": point.measured,
                "predicted": predicted(point, constants),
                "source": point.row["source"],
            }
            for point in points
        ],
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Write the report as text."""
    head = ("kind", "judged numbers", "median error", "published over predicted seconds, 80%")
    groups = (
        (
            name,
            found["num"],
            f"{found['median_error']:.0%}",
            "{:.2f} to {:.2f}".format(*found["interval"]),
        )
        for name, found in result["groups"].items()
    )
    rows = (
        (
            row["group"], row["id"], row["model"], row["quantity"], row["use"],
            f"{row['published']:.4g}", f"{row['predicted']:.4g}",
        )
        for row in result["rows"]
    )  # fmt: skip
    names = ("kind", "row", "model", "quantity", "use", "published", "predicted")
    return f"{table(head, groups)}\n\n{table(names, rows)}"


if __name__ == "__main__":
    print(markdown(report()))
