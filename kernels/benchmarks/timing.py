"""Interleaved timing of several implementations of one job, with the ceilings that the hardware
sets in the same run.

Protocol: providers take turns inside every repetition, inputs rotate over sets that together exceed
L2, what an in-place operation destroys is restored outside the timed region, and medians are
reported with the 20 % quantiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ragen_kernels.launch import accumulate_matmul
from torch import Tensor

WARMUPS = 5
COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
FLUSH_BYTES = {
    "cuda": 4 << 30,
    "cpu": 0,
}  # evicts L2, and lets the host run ahead of the device by about 1 ms


@dataclass(frozen=True)
class Provider:
    """One implementation. `prepare` turns an input set into the state that the timed `run`
    consumes.
    """

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[Any], Any] = lambda inputs: inputs
    error: Callable[[Any, Any], float] | None = (
        None  # (inputs, output of run) -> relative error against float64
    )
    remark: str = ""


@dataclass(frozen=True)
class Case:
    """One job at one shape, and what it has to move and multiply at least."""

    name: str
    shape: dict[str, int | float]
    make_inputs: Callable[[int], Any]  # by seed
    providers: tuple[Provider, ...]
    min_bytes: float = 0.0
    flops: float = 0.0
    gemms: tuple[int, int, int] | None = (
        None  # (N, V, H), when the job contains the three GEMMs of an LM head
    )


@dataclass(frozen=True)
class Result:
    """Medians over repetitions; rates count the least possible bytes and FLOPs, not those that were
    spent.
    """

    case: str
    shape: dict[str, int | float]
    provider: str
    milliseconds: float
    p20: float
    p80: float
    first_call_seconds: float
    gigabytes_per_second: float | None
    percent_of_copy: float | None
    teraflops: float | None
    percent_of_gemms: float | None
    peak_extra_gib: float | None
    error: float | None
    remark: str


class Clock:
    """CUDA events on a GPU, a monotonic counter on a CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.flush_buffer = torch.empty(FLUSH_BYTES[device], dtype=torch.int8, device=device)

    def measure(self, run: Callable[[Any], Any], state: Any) -> Callable[[], float]:
        """Run once; the returned function gives the milliseconds, after `synchronize`."""
        self.flush_buffer.zero_()
        if self.device == "cpu":
            start = time.perf_counter()
            run(state)
            elapsed = (time.perf_counter() - start) * 1e3
            return lambda: elapsed
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(state)
        end.record()
        return lambda: begin.elapsed_time(end)

    def synchronize(self) -> None:
        """Wait for the device, after which the readings are valid."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def median_time(clock: Clock, run: Callable[[Any], Any], state: Any, repetitions: int) -> float:
    """Milliseconds of a job that leaves its state as it found it."""
    for _ in range(WARMUPS):
        run(state)
    readings = [clock.measure(run, state) for _ in range(repetitions)]
    clock.synchronize()
    return statistics.median(read() for read in readings)


def copy_bandwidth(clock: Clock, repetitions: int) -> float:
    """Bytes per second of a device copy, read plus write."""
    source = torch.zeros(COPY_BYTES[clock.device], dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    milliseconds = median_time(
        clock, lambda pair: pair[0].copy_(pair[1]), (target, source), repetitions
    )
    return 2 * source.numel() / milliseconds * 1e3


def gemm_milliseconds(
    clock: Clock, shape: tuple[int, int, int], dtype: torch.dtype, repetitions: int
) -> float:
    """The three GEMMs of an LM head, back to back: logits, d_hidden, and d_weight accumulated in
    float32.
    """
    num_rows, vocab, width = shape
    hidden = torch.randn(num_rows, width, device=clock.device).to(dtype)
    weight = torch.randn(vocab, width, device=clock.device).to(dtype)
    logits, d_hidden = hidden.new_empty(num_rows, vocab), torch.empty_like(hidden)
    d_weight = torch.zeros_like(weight, dtype=torch.float32)

    def run(_: None) -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight, out=d_hidden)
        accumulate_matmul(d_weight, logits.T, hidden)

    return median_time(clock, run, None, repetitions)


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the error over that of the truth."""
    return float((actual.double() - truth).norm() / truth.norm())


def first_call(
    clock: Clock, provider: Provider, inputs: Any
) -> tuple[float, float | None, float | None]:
    """(seconds with compilation, peak extra GiB, error): the checks, before any timing."""
    start = time.perf_counter()
    provider.run(provider.prepare(inputs))
    clock.synchronize()
    seconds = time.perf_counter() - start
    state, peak = provider.prepare(inputs), None
    if clock.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    output = provider.run(state)
    clock.synchronize()
    if clock.device == "cuda":
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return seconds, peak, None if provider.error is None else provider.error(inputs, output)


def run_case(
    case: Case,
    clock: Clock,
    copy_rate: float,
    gemm_ms: float | None,
    repetitions: int,
    num_sets: int,
) -> list[Result]:
    """Check every provider once, then time them in turns."""
    sets = [case.make_inputs(seed) for seed in range(num_sets)]
    checks = {provider.name: first_call(clock, provider, sets[0]) for provider in case.providers}
    readings: dict[str, list[Callable[[], float]]] = {
        provider.name: [] for provider in case.providers
    }
    for repetition in range(WARMUPS + repetitions):
        for provider in case.providers:
            state = provider.prepare(sets[repetition % num_sets])
            clock.synchronize()
            reading = clock.measure(provider.run, state)
            if repetition >= WARMUPS:
                readings[provider.name].append(reading)
    clock.synchronize()
    return [
        summarize(
            case,
            provider,
            [read() for read in readings[provider.name]],
            checks[provider.name],
            copy_rate,
            gemm_ms,
        )
        for provider in case.providers
    ]


def summarize(
    case: Case,
    provider: Provider,
    times: list[float],
    checks: tuple[float, float | None, float | None],
    copy_rate: float,
    gemm_ms: float | None,
) -> Result:
    """Medians, quantiles and rates of one provider in one case."""
    ordered, milliseconds = sorted(times), statistics.median(times)
    rate = case.min_bytes / milliseconds * 1e3 if case.min_bytes else None
    return Result(
        case=case.name,
        shape=case.shape,
        provider=provider.name,
        milliseconds=milliseconds,
        p20=ordered[len(ordered) // 5],
        p80=ordered[-1 - len(ordered) // 5],
        first_call_seconds=checks[0],
        gigabytes_per_second=None if rate is None else rate / 1e9,
        percent_of_copy=None if rate is None else 100 * rate / copy_rate,
        teraflops=case.flops / milliseconds / 1e9 if case.flops else None,
        percent_of_gemms=None if gemm_ms is None else 100 * gemm_ms / milliseconds,
        peak_extra_gib=checks[1],
        error=checks[2],
        remark=provider.remark,
    )
