"""What the machine code of every kernel uses on sm_90, as rows for a report, as text and as
Markdown. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from .budgets import KernelConfig, all_configs

HEADER = (
    f"{'kernel':38s} {'regs':>5s} {'spill':>6s} {'smem':>7s} {'instr/elem':>11s} {'ex2/elem':>9s}"
)
COLUMNS = (
    "kernel", "configuration", "warps", "registers", "spills", "shared memory",
    "instructions / element", "exponentials / element", "asynchronous copies", "wgmma", "TMA",
)  # fmt: skip

PREAMBLE = """# Kernels on sm_90: what the machine code uses

{date}, triton {triton}, ptxas {ptxas}. Written by

    python tools/bench_kernels.py --compile-only --json docs/benchmarks/kernels_sm90_static.json \\
        --markdown docs/benchmarks/kernels_sm90_static.md

Nothing here was measured on a GPU: the kernels were compiled for sm_90 on a CPU and their machine
code was counted. On a GPU `bash tools/gpu_check.sh kernels bench` tests and measures them.

Registers are per thread, shared memory is in bytes per program; spills are instructions that access
local memory. Instructions and exponentials are per element of a row of logits, in the loops that
stream it; elsewhere there is no such loop. An H200 at 4.3 TB/s has time for 13.8 instructions and
1.7 exponentials per bf16 element that is read once (statistics), and for twice as many where it is
read and written (gradient, policy_row). wgmma and TMA are 0 because the matrix products are
cuBLAS's; asynchronous copies (cp.async) are what streams the rows. `tests/kernels/test_compile.py`
asserts a budget for each line.
"""


def static_row(config: KernelConfig, compiled: Any) -> dict[str, Any]:
    """One kernel in one configuration: counts, and `violations` of its budget in words."""
    report = config.analyse(compiled)
    return {
        "name": config.name,
        "kernel": config.kernel.fn.__name__,
        "num_warps": config.num_warps,
        "instructions_per_element": sum(loop.instructions for loop in report.streams),
        "exponentials_per_element": sum(loop.exponentials for loop in report.streams),
        "violations": config.budget.violations(report),
        **asdict(report),
    }


def static_rows() -> Iterator[dict[str, Any]]:
    """Every kernel in every configuration; one is disassembled while the next is compiled."""
    with ThreadPoolExecutor() as pool:
        rows = [pool.submit(static_row, config, config.compile()) for config in all_configs()]
        yield from (row.result() for row in rows)


def is_streaming(row: dict[str, Any]) -> bool:
    """Whether counts per element mean anything: the kernel has a loop that streams a row."""
    return row["instructions_per_element"] > 0


def text_line(row: dict[str, Any]) -> str:
    """A line under HEADER."""
    counts = f"{row['instructions_per_element']:11.2f} {row['exponentials_per_element']:9.2f}"
    streaming = counts if is_streaming(row) else f"{'-':>11s} {'-':>9s}"
    verdict = f"  OVER BUDGET: {'; '.join(row['violations'])}" if row["violations"] else ""
    resources = f"{row['registers']:5d} {row['spill_instructions']:6d} {row['shared_bytes']:7d}"
    return f"{row['name']:38s} {resources} {streaming}{verdict}"


def markdown(rows: list[dict[str, Any]], versions: dict[str, Any]) -> str:
    """A page with one table line per row. `versions` names the date, triton and ptxas."""
    page = PREAMBLE.format(**{name: versions[name] for name in ("date", "triton", "ptxas")})
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for row in rows:
        kernel, _, configuration = row["name"].partition(" ")
        counts = [row["instructions_per_element"], row["exponentials_per_element"]]
        resources = ("num_warps", "registers", "spill_instructions", "shared_bytes")
        lines.append(
            (
                kernel.rstrip(","),
                configuration or "-",
                *(row[key] for key in resources),
                *((f"{count:.2f}" for count in counts) if is_streaming(row) else "--"),
                *(row[key] for key in ("async_copies", "wgmma", "tma_copies")),
            )
        )
    return page + "\n" + "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"
