#!/usr/bin/env python
"""Roofline table of the fused kernels: time, share of the copy bandwidth or of the GEMM rate,
memory and error.

    python tools/benchmarks/bench_kernels.py --json kernels.json

Implementations of one job take turns, inputs rotate over sets that together exceed L2, and what an
in-place operation overwrites is restored outside the timed region. Rates count the minimum of
bytes and FLOPs, not those that were spent.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from harness import (
    JSON,
    interleave,
    long_copy_bytes,
    milliseconds_of,
    provenance,
    publish,
    seconds_of,
    table,
)

# isort: split
# `harness` puts the folder of these on the path
from benchmarks import peers
from benchmarks.cases import Case, Provider, hidden_cases, logits_cases, returns_cases
from ragen_kernels.launch import accumulate_matmul

from ragen_mega.commands.command_line import command, flag
from ragen_mega.report.hardware import PACKAGES, versions
from ragen_mega.report.metrics import write_json

WARMUPS = 5
CPU_COPY_BYTES = 64 << 20
FLAGS = (
    JSON,
    flag(
        "--device",
        "that measures",
        "cuda" if torch.cuda.is_available() else "cpu",
        choices=("cuda", "cpu"),
    ),
    flag("--small", "a CPU's shapes on any device, to try this program out", False),
    flag("--repetitions", "whose medians count", 30),
    flag("--input-sets", "sets that inputs rotate over", 3),
    flag("--no-compile", "leave torch.compile out", False),
    flag("--budget", "seconds after which no case starts", None, type=float),
    flag("--no-peers", "leave other projects' kernels out", False),
)
COLUMNS = {
    "milliseconds": ("ms", ".3f"),
    "p20": ("20 %", ".3f"),
    "p80": ("80 %", ".3f"),
    "percent_of_copy": ("% of copy", ".1f"),
    "teraflops": ("TF/s", ".0f"),
    "percent_of_gemms": ("% of GEMMs", ".1f"),
    "peak_extra_gib": ("GiB", ".2f"),
    "error": ("error", ".1e"),
}
"""Key of a result -> its column in the table, and the format of its numbers."""


def median_time(device: str, work: Callable[[], object], repetitions: int) -> float:
    """Return the milliseconds of a job that leaves its state as it found it."""
    job = {"": lambda: milliseconds_of(work, device)}
    return statistics.median(interleave(job, repetitions, warmups=WARMUPS)[""])


def copy_bandwidth(device: str, repetitions: int) -> float:
    """Return the bytes per second of a device copy, read plus write."""
    num_bytes = CPU_COPY_BYTES if device == "cpu" else long_copy_bytes()
    source = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    milliseconds = median_time(device, lambda: target.copy_(source), repetitions)
    return 2 * source.numel() / milliseconds * 1e3


def gemm_milliseconds(device: str, shape: tuple[int, int, int], repetitions: int) -> float:
    """Return the three GEMMs of an LM head, back to back: logits, d_hidden, and d_weight
    accumulated in float32.
    """
    num_rows, vocab, width = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(num_rows, width, device=device).to(dtype)
    weight = torch.randn(vocab, width, device=device).to(dtype)
    logits, d_hidden = hidden.new_empty(num_rows, vocab), torch.empty_like(hidden)
    d_weight = torch.zeros_like(weight, dtype=torch.float32)

    def run() -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight, out=d_hidden)
        accumulate_matmul(d_weight, logits.T, hidden)

    return median_time(device, run, repetitions)


def first_call(provider: Provider, inputs: Any, device: str) -> dict[str, float | None]:
    """Check before any timing: seconds with compilation, peak extra memory and error."""
    seconds = seconds_of(lambda: provider.run(provider.prepare(inputs)))
    state, is_cuda = provider.prepare(inputs), device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = provider.run(state)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if is_cuda else None
    error = provider.error(inputs, output) if provider.error else None
    return {"first_call_seconds": seconds, "peak_extra_gib": peak, "error": error}


def run_case(
    case: Case, arguments: argparse.Namespace, copy_rate: float, gemm_ms: float | None
) -> Iterator[dict[str, Any]]:
    """Check every implementation once, then time them in turns: medians, quantiles and rates."""
    device = arguments.device
    sets = [case.make_inputs(seed) for seed in range(arguments.input_sets)]
    checks = {provider.name: first_call(provider, sets[0], device) for provider in case.providers}

    def job(provider: Provider) -> Callable[[], float]:
        rotation = itertools.cycle(sets)

        def turn() -> float:
            state = provider.prepare(next(rotation))
            return milliseconds_of(lambda: provider.run(state), device)

        return turn

    jobs = {provider.name: job(provider) for provider in case.providers}
    readings = interleave(jobs, arguments.repetitions, warmups=WARMUPS)
    for provider in case.providers:
        ordered = sorted(readings[provider.name])
        milliseconds = statistics.median(ordered)
        rate = case.min_bytes / milliseconds * 1e3 if case.min_bytes else None
        yield checks[provider.name] | {
            "case": case.name,
            "shape": case.shape,
            "provider": provider.name,
            "milliseconds": milliseconds,
            "p20": ordered[len(ordered) // 5],
            "p80": ordered[-1 - len(ordered) // 5],
            "gigabytes_per_second": rate and rate / 1e9,
            "percent_of_copy": rate and 100 * rate / copy_rate,
            "teraflops": case.flops / milliseconds / 1e9 if case.flops else None,
            "percent_of_gemms": gemm_ms and 100 * gemm_ms / milliseconds,
            "remark": provider.remark,
        }


def all_cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases in order; with a budget first a shape of every job."""
    device = arguments.device
    compiled = None if arguments.no_compile else torch.compile
    sizes = "cpu" if arguments.small else device
    cases = [
        *logits_cases(device, sizes, compiled),
        *hidden_cases(device, sizes, compiled),
        *returns_cases(device, sizes),
    ]
    return cases if arguments.budget is None else by_turns(cases)


def by_turns(cases: Sequence[Case]) -> list[Case]:
    """Order the jobs: first one shape of every job, then a second one, so that a budget leaves no
    job out.
    """
    jobs: dict[str, list[Case]] = {}
    for case in cases:
        jobs.setdefault(case.name, []).append(case)
    turns = itertools.zip_longest(*jobs.values())
    return [case for turn in turns for case in turn if case is not None]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time every case on the device; a line about each as soon as it is done, and the JSON file
    written anew.
    """
    end = time.monotonic() + (float("inf") if arguments.budget is None else arguments.budget)
    device, repetitions = arguments.device, arguments.repetitions
    cases = all_cases(arguments)
    copy_rate = copy_bandwidth(device, repetitions)
    gemms_ms: dict[str, float] = {}
    results: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    report = provenance() | {
        "versions": versions((*PACKAGES, *peers.PACKAGES)),
        "threads": torch.get_num_threads(),
        "ceilings": {"copy_bytes_per_second": copy_rate, "gemms_ms": gemms_ms},
        "results": results,
        "refused": refused,
        "not_reached": [name_of(case) for case in cases],
    }
    for case in cases:
        if time.monotonic() > end:
            break
        gemm_ms = None
        if case.gemms:
            gemm_ms = gemm_milliseconds(device, case.gemms, repetitions)
            gemms_ms["x".join(map(str, case.gemms))] = gemm_ms
        if not arguments.no_peers:
            case, reasons = peers.add_peers(case)
            refused |= {f"{name_of(case)}: {peer}": reason for peer, reason in reasons.items()}
        found = [*run_case(case, arguments, copy_rate, gemm_ms)]
        times = (f"{row['provider']} {row['milliseconds']:.3f} ms" for row in found)
        print(f"{name_of(case)}: {', '.join(times)}", flush=True)
        results += found
        report["not_reached"].remove(name_of(case))
        if arguments.json:  # whatever ends this program, what is done stays
            write_json(arguments.json, report)
        torch.cuda.empty_cache()
    return report


def name_of(case: Case) -> str:
    """Return the job and shape."""
    return f"{case.name} {shape_of(case.shape)}"


def shape_of(shape: Mapping[str, float]) -> str:
    """E.g. N=8192 V=32768."""
    return " ".join(f"{key}={value}" for key, value in shape.items())


def tables(report: Mapping[str, Any]) -> str:
    """Return the report as text."""
    rows = [
        (
            row["case"],
            shape_of(row["shape"]),
            row["provider"],
            *(
                "-" if row[key] is None else f"{row[key]:{form}}"
                for key, (_, form) in COLUMNS.items()
            ),
            row["remark"],
        )
        for row in report["results"]
    ]
    head = ("job", "shape", "by", *(title for title, _ in COLUMNS.values()), "remark")
    ceilings = report["ceilings"]
    return "\n\n".join(
        (
            f"{report['hardware']}; device copy {ceilings['copy_bytes_per_second'] / 1e9:.0f} GB/s",
            *(f"three GEMMs {shape}: {ms:.3f} ms" for shape, ms in ceilings["gemms_ms"].items()),
            table(head, rows),
            *(f"not measured: {name}: {reason}" for name, reason in report["refused"].items()),
            *(f"not reached: {name}" for name in report["not_reached"]),
        )
    )


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    if arguments.repetitions < 1 or arguments.input_sets < 1:
        raise ValueError(
            f"--repetitions and --input-sets must be >= 1, got {arguments.repetitions} and"
            f" {arguments.input_sets}"
        )
    report = measure(arguments)
    publish(arguments, report, tables(report))


if __name__ == "__main__":
    main()
