"""Measure what this machine reaches, in the terms of the predictor, and compare its prediction with
training runs that it was not fitted on.

As a program it is one rank of the measurement of collectives.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModel, PretrainedConfig

from ragen_mega.config import StarPOConfig, parse
from ragen_mega.models.huggingface import load_config, random_weights
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.hardware import HARDWARE, Constants, Hardware, Machine
from ragen_mega.planning.time import (
    FP32,
    PHASES,
    Play,
    Sizes,
    TrainingLayout,
    by_timer,
    decode_step,
    product,
    step_seconds,
    width_factor,
)
from ragen_mega.planning.validation import solve
from ragen_mega.ranks import collectives
from ragen_mega.ranks.launcher import PROGRAM, num_processors, run_ranks
from ragen_mega.report.markdown import table
from ragen_mega.report.metrics import METRICS_FILE, read_metrics, write_json
from ragen_mega.report.provenance import provenance
from ragen_mega.run.placement import host_memory
from ragen_mega.run.timers import seconds_of
from ragen_mega.storage.run_directory import FINAL_EXPORT

Reading = tuple[Any, float]
"""(Computation, its seconds.)"""
SHARE = 0.9
"""Share of the peak that the best measurement is taken to reach, where no data sheet has it."""
PRODUCTS = {
    "cpu": (
        (128, 128, 384),
        (512, 128, 512),
        (1024, 256, 1024),
        (2048, 512, 1536),
        (256, 96, 2048),
    ),
    "cuda": ((4096, 896, 4864), (4096, 4096, 4096), (8192, 2048, 11008), (16384, 5120, 13824)),
}
"""[rows, inner] x [inner, columns], of the sizes that are trained on such a machine."""
DECODED = [
    (layers, batch, context)
    for layers in (2, 6)
    for batch, context in ((4, 128), (32, 64), (32, 240), (128, 64), (128, 240))
]
"""(Layers, sequences, tokens of each) of decode steps of a small model."""
MESSAGES = (1 << 10, 1 << 23)
"""Elements of the all-reduces."""
BASE = """
    --recipe none --environments bandit --prompt-style compact --warm-start-steps 1
    --warm-start-first-turn-steps 1 --warm-start-trajectories 64
    --filter-strategy none --num-groups 8 --group-size 8
    --minibatch-size 16 --max-response-length 64 --max-context-length 1024 --num-steps 5
    --eval-interval 0 --eval-prompts 1 --eval-samples 1 --save-interval 0 --diagnose-interval 0
    --trace-groups 0 --hidden-size 128 --num-layers 4 --num-attention-heads 4 --ffn-hidden-size 384
""".split()
TINY = """
    --environments sokoban --max-turns 2 --hidden-size 32 --ffn-hidden-size 64 --num-layers 1
""".split()
FITTED: Mapping[str, tuple[int, str]] = {
    "one layer": (1, ""),
    "six layers": (1, "--num-layers 6"),
    "many updates": (1, "--minibatch-size 4"),
    "many microbatches": (1, "--shared-prefixes off --max-tokens-per-microbatch 1024"),
    "wide": (1, "--hidden-size 96 --ffn-hidden-size 288 --num-layers 2"),
    "short": (1, "--num-layers 2 --max-response-length 16"),
    "two ranks": (2, "--tensor-model-parallel-size 2"),
}
"""Name -> ranks and flags, after TINY, of runs that compute little: their seconds are what layers,
passes, updates and turns cost besides.
"""
HOST = (
    "memory", "attention", "launch", "micro", "start", "update", "update_layer", "turn",
    "decode_layer", "decode_sequence", "latency",
)  # fmt: skip
"""The constants that these runs decide. Small passes over activations, and attention to short
trajectories, are far from what large ones reach. Of decode steps only what the engine's loop adds:
these runs have few keys and values, and say nothing of what those cost.
"""
CONFIGURATIONS: Mapping[str, tuple[int, str]] = {
    "base": (1, ""),
    "wider": (1, "--hidden-size 256 --ffn-hidden-size 768"),
    "deeper": (1, "--num-layers 8"),
    "recomputation": (1, "--recompute full"),
    "no critic": (1, "--advantage-estimator grpo"),
    "three turns": (1, "--environments frozen_lake --max-turns 3"),
    "TP 2": (2, "--tensor-model-parallel-size 2"),
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
    "DP 2": (2, "--use-distributed-optimizer"),
    "TP 2 PP 2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
"""Name -> ranks and flags of the runs that the constants were not fitted on."""
WARMUP = 2
"""First steps, which do not count."""


def shortest(work: Callable[..., object], *arguments: object, repetitions: int = 7) -> float:
    """Measure the seconds of `work` with these arguments, undisturbed by other load."""
    job = partial(work, *arguments)
    job()
    return min(seconds_of(job) for _ in range(repetitions))


def measure_products(device: str, dtype: torch.dtype) -> list[Reading]:
    """Measure matrix products by shape."""
    made = partial(torch.randn, device=device, dtype=dtype)
    return [
        ((rows, inner, columns), shortest(torch.matmul, made(rows, inner), made(inner, columns)))
        for rows, inner, columns in PRODUCTS[device]
    ]


def measure_attention(device: str, dtype: torch.dtype) -> float:
    """Measure the operations a second of causal attention, forward, those of the lower half
    counted, as if heads were 128 wide.
    """
    length, heads, width = (1024, 4, 32) if device == "cpu" else (4096, 32, 128)
    q, k, v = torch.randn(3, 1, heads, length, width, device=device, dtype=dtype)
    seconds = shortest(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    return 2 * length * length * heads * width / seconds / width_factor(width)


def measure_copies(device: str) -> float:
    """Measure the bytes a second of a pass that reads two large arrays and writes one."""
    size = 1 << (24 if device == "cpu" else 28)
    left, right = torch.ones(2, size, device=device)
    out = torch.empty_like(left)
    return 12 * size / shortest(lambda: torch.mul(left, right, out=out))


def measure_launch(device: str, dtype: torch.dtype) -> float:
    """Measure the seconds that the forward pass of a layer takes however small it is."""
    seconds = []
    for layers in (1, 5):
        model = AutoModel.from_config(small(layers)).to(device, dtype)
        tokens = torch.zeros(1, 8, dtype=torch.long, device=device)
        with torch.no_grad():
            seconds.append(shortest(model, tokens))
    return max(1e-5, (seconds[1] - seconds[0]) / 4)


def measure_decoding() -> list[Reading]:
    """Measure decode steps of the embedded engine, which computes on the processor."""
    # Only here, for they bring a compiler (numba).
    from ragen_mega.engines.embedded.decoder import Decoder
    from ragen_mega.engines.embedded.kv_cache import KVCache

    def decode(slots: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        hidden = decoder.forward(np.zeros_like(slots), slots, places, cache)
        torch.multinomial(torch.softmax(decoder.logits(hidden), -1), 1)

    readings = []
    for layers, batch, context in DECODED:
        hf = small(layers)
        shape = ModelShape.of(hf)
        decoder = Decoder(
            shape, random_weights(hf, 0).items(), max_context=256, dtype=torch.float32
        )
        cache = KVCache(shape, num_slots=batch, max_context=256, dtype=torch.float32)
        slots, places = np.arange(batch), np.full(batch, context)
        cache.reserve(slots, places + 1)
        readings.append(((layers, batch, context), shortest(decode, slots, places)))
    return readings


def measure_collectives(device: str) -> tuple[float, float]:
    """Measure (seconds of a small all-reduce, bytes a second of a large one in each direction)
    among up to four ranks of this machine; with one GPU return those of the H100's data sheet.
    """
    ranks = min(4, torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1)
    if ranks < 2:
        return Constants().latency, 450e9
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "collectives.json"
        run_ranks(ranks, __name__, out)
        small, large = map(float, out.read_text().split())
    return small, 2 * (ranks - 1) / ranks * 4 * MESSAGES[1] / large


def collectives_rank(out: Path) -> None:
    """Time the all-reduces of `measure_collectives` on this rank; the first rank writes the
    seconds.
    """
    collectives.start()
    device = collectives.device()
    seconds = []
    for size in MESSAGES:
        message = torch.ones(size, device=device)
        dist.all_reduce(message)
        readings = []
        for _ in range(10):
            dist.barrier()
            readings.append(seconds_of(partial(dist.all_reduce, message)))
        seconds.append(statistics.median(readings))
    if dist.get_rank() == 0:
        out.write_text(" ".join(map(str, seconds)))
    collectives.stop()


def solved(
    machine: Machine,
    names: Sequence[str],
    readings: Sequence[Reading],
    predict: Callable[[Machine, Any], float],
) -> Machine:
    """Fit these constants of `machine` to the readings."""

    def misses(constants: Constants) -> list[float]:
        changed = replace(machine, constants=constants)
        return [math.log(predict(changed, what) / time) for what, time in readings]

    return replace(machine, constants=solve(machine.constants, names, misses))


def with_sheet(hardware: Hardware, constants: Constants, device: str) -> tuple[Hardware, Constants]:
    """Complete a measured GPU by what one process on it cannot measure: other precisions, links to
    other nodes and to the host of the nearest row of the table, published seconds of the host's
    work.
    """
    known = [name for name in HARDWARE if name in device]
    row = HARDWARE[max(known, key=len) if known else "A100"]
    usual = Constants()
    return (
        replace(
            hardware,
            fp8=row.fp8, fp32=row.fp32, network=row.network, host_link=row.host_link, node=row.node,
            source=f"{hardware.source}; FP8, float32, network and host link as of {row.name}",
        ),
        replace(constants, sync=usual.sync, update=usual.update),
    )  # fmt: skip


def measured_machine() -> tuple[Machine, dict[str, Any]]:
    """Measure this machine; returns it and the readings."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, itemsize = (torch.bfloat16, 2) if device == "cuda" else (torch.float32, 4)
    cores = 0 if device == "cuda" else num_processors()
    if cores:  # a rank is a core
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    products = measure_products(device, dtype)
    peak = max(2 * math.prod(what) / time for what, time in products) / SHARE
    memory, attention = measure_copies(device) / SHARE, measure_attention(device, dtype)
    latency, link = measure_collectives(device)
    gib = torch.cuda.mem_get_info()[1] / 2**30 if device == "cuda" else host_memory() / 2**30
    source = "measured by ragen-mega plan --calibrate; the price is none"
    constants = Constants(
        memory=SHARE, link=SHARE, latency=latency, attention=min(0.8, attention / peak),
        launch=1e-3, update=0.0, untuned=1.0, overhead=0.0, sync=memory / 4,
    )  # fmt: skip
    hardware = Hardware(
        "this machine", peak, 0.0, peak, memory, gib, link / SHARE, link / SHARE, memory, 1.0,
        source, node=64, cores=cores,
    )  # fmt: skip
    if cores:  # which have no device to start work on: both are in what is measured
        constants = replace(constants, collective=0.0, decode_host=0.0)
    else:
        hardware, constants = with_sheet(hardware, constants, torch.cuda.get_device_name())
        constants = replace(constants, launch=measure_launch(device, dtype))
    machine = Machine(hardware, constants)
    cut = TrainingLayout(itemsize=itemsize)
    machine = solved(
        machine,
        ("product", "tile"),
        products,
        lambda machine, what: product(machine, what[0], what[1], what[2], cut),
    )
    decoding = measure_decoding() if device == "cpu" else []
    if decoding:

        def step(machine: Machine, what: tuple[float, ...]) -> float:
            sizes = Sizes.of(ModelShape.of(small(int(what[0]))))
            return sum(
                decode_step(machine, sizes, tp=1, batch=what[1], context=what[2], itemsize=FP32)
            )

        names = ("decode_memory", "decode_product", "decode_layer", "decode_sequence")
        machine = solved(machine, names, decoding, step)
    runs = {}
    if cores:
        tiny = [*BASE, *TINY]
        runs = {name: Steps.of(n, [*tiny, *words.split()]) for name, (n, words) in FITTED.items()}
        machine = with_host(machine, [*runs.values()])
    return machine, {
        "products": products,
        "decode_steps": decoding,
        "attention_flops": attention,
        "runs": {name: run.measured for name, run in runs.items()},
        "collective_seconds": latency,
        "link_bytes_per_second": link,
    }


def played(rows: Sequence[Mapping[str, float]], config: StarPOConfig) -> Play:
    """Describe the trajectories of a run's steps by the medians of its metrics."""
    rows = [row for row in rows if "update/tokens_per_second" in row]  # those that trained

    def median(value: Callable[[Mapping[str, float]], float]) -> float:
        return statistics.median(map(value, rows))

    def length(row: Mapping[str, float]) -> float:
        seconds = row["time/advantages"] + row["time/update"]
        kept = row["filter/kept_groups"] * config.rollout.group_size
        trained = kept * config.train.updates_per_rollout
        return row["update/tokens_per_second"] * seconds / trained

    turns = max(1, round(median(lambda row: row["rollout/num_turns"])))
    sampled = median(lambda row: row["rollout/sampled_tokens"] / row["rollout/num_trajectories"])
    play = Play(
        turns,
        0.0,
        sampled / turns,
        environment_seconds=0.0,
        sharing=1 / median(lambda row: row.get("actor/computed_share", 1.0)),
        window=config.rollout.context_window,
    )
    prompt = max(1.0, median(length) - play.length) / (play.texts * play.seen)
    play = replace(play, prompt_tokens=prompt)
    # the engine is asked for all that the policy sees at every turn
    computed = play.asked * (1 - median(lambda row: row.get("engine/cached_share", 0.0)))
    return replace(play, prefilled=min(1.0, computed / play.read))


@dataclass(frozen=True)
class Steps:
    """Seconds and trajectories of the steps of a training run, WARMUP left out."""

    config: StarPOConfig
    shape: ModelShape
    ranks: int
    play: Play
    measured: Mapping[str, float]
    """Phase (a key of PHASES) -> seconds, the median."""

    @classmethod
    def of(cls, ranks: int, flags: Sequence[str]) -> Self:
        """Train like this, on one core for each rank as far as there are cores."""
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(ranks, PROGRAM, "train", *flags, "--output", folder, "--name", "run")
            rows = read_metrics(Path(folder, "run", METRICS_FILE))[WARMUP:]
            shape = ModelShape.of(load_config(str(Path(folder, "run", FINAL_EXPORT))))
        config = parse(flags)
        measured = {
            phase: statistics.median([row.get(f"time/{phase}", 0.0) for row in rows])
            for phase in PHASES
        }
        return cls(config, shape, ranks, played(rows, config), measured)

    def predicted(self, machine: Machine) -> dict[str, float]:
        """Predict the same seconds; the tokens of a turn are those that were sampled."""
        return by_timer(step_seconds(machine, self.shape, self.config, self.ranks, self.play))


def with_host(machine: Machine, runs: Sequence[Steps]) -> Machine:
    """Fit the constants of the processor's work besides arithmetic to the phases of runs."""
    readings = [
        ((run, phase), run.measured[phase])
        for run in runs
        for phase in ("rollout", "advantages", "update")
    ]
    guess = replace(
        machine.constants, micro=1e-3, start=5e-3, update=5e-3, update_layer=1e-3, turn=1e-3
    )

    return solved(
        replace(machine, constants=guess), HOST, readings,
        lambda machine, what: what[0].predicted(machine)[what[1]],
    )  # fmt: skip


def compare(machine: Machine, name: str) -> list[dict[str, Any]]:
    """Train one of CONFIGURATIONS; list predicted beside measured seconds, phase by phase."""
    ranks, words = CONFIGURATIONS[name]
    run = Steps.of(ranks, [*BASE, *words.split()])
    guess = run.predicted(machine)
    rows = [(phase, guess[phase], seen) for phase, seen in run.measured.items()]
    rows.append(("step", sum(guess.values()), sum(run.measured.values())))
    return [{"run": name, "phase": a, "predicted": b, "measured": c} for a, b, c in rows]


def calibrate(path: Path, check_steps: bool) -> dict[str, Any]:
    """Measure, write the file that `--hardware` reads, and print it; compare with runs if asked."""
    started, load = time.monotonic(), os.getloadavg()[0]
    machine, readings = measured_machine()
    report: dict[str, Any] = {
        "provenance": provenance(),
        "load": load,
        "seconds": time.monotonic() - started,
        "hardware": asdict(machine.hardware),
        "constants": asdict(machine.constants),
        "readings": readings,
    }
    write_json(path, report)
    values = [(name, f"{value:.3g}") for name, value in report["constants"].items()]
    print(table(("constant", "value"), values))
    print(f"measured in {report['seconds']:.0f} s at load {load:.1f}; written to {path}")
    if load > 0.5 * (os.cpu_count() or 1):
        print("others used this machine: repeat it when it is idle")
    if check_steps:
        compared = [row for name in CONFIGURATIONS for row in compare(machine, name)]
        report["steps"] = compared
        report["median_error"] = median_errors(compared)
        write_json(path, report)
        cells = (
            (row["run"], row["phase"], f"{row['predicted']:.3f}", f"{row['measured']:.3f}")
            for row in compared
        )
        print(table(("run", "phase", "predicted s", "measured s"), cells))
        errors = [f"{phase} {error:.0%}" for phase, error in report["median_error"].items()]
        print(f"median error: {', '.join(errors)} (wanted: 20%)")
    return report


def median_errors(compared: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute for each phase, and `step`, the median relative error over the runs. Syncs of these
    models take milliseconds and are left out.
    """
    misses = [(row["phase"], abs(row["predicted"] / row["measured"] - 1)) for row in compared]
    return {
        phase: statistics.median(miss for name, miss in misses if name == phase)
        for phase in dict.fromkeys(name for name, _ in misses if name != "sync")
    }


def small(layers: int) -> PretrainedConfig:
    """Configure the model whose decode steps are measured."""
    return AutoConfig.for_model(
        "qwen2", hidden_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=384, vocab_size=512,
    )  # fmt: skip


if __name__ == "__main__":
    import sys

    collectives_rank(Path(sys.argv[1]))
