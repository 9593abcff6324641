"""Resources of the machine code of every kernel on sm_90: a report and its page. Needs no GPU."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from .budgets import KernelConfig, all_configs
from .static_analysis import ptxas_version

COLUMNS = (
    "kernel", "configuration", "warps", "registers", "spills", "shared memory",
    "instructions / element", "exponentials / element", "asynchronous copies", "wgmma", "TMA",
)  # fmt: skip

PREAMBLE = """# Kernels on sm_90: what the machine code uses

{date}, triton {triton}, ptxas {ptxas}. Written by

    python tools/benchmarks/bench_kernels.py --compile-only \\
        --json docs/benchmarks/kernels_sm90_static.json \\
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
    """Return one kernel in one configuration: counts, and `violations` of its budget in words."""
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


def report() -> dict[str, Any]:
    """Report every kernel in every configuration; one is disassembled while the next compiles."""
    with ThreadPoolExecutor() as pool:
        under_way = [pool.submit(static_row, config, config.compile()) for config in all_configs()]
    kernels = [row.result() for row in under_way]
    return {"target": "sm_90", "ptxas": ptxas_version(), "kernels": kernels}


def preamble(report: Mapping[str, Any]) -> str:
    """Write the text above the table; `report` has date and versions too."""
    versions = {"triton": report["versions"]["triton"], "ptxas": report["ptxas"]}
    return PREAMBLE.format(date=report["date"][:10], **versions)


def rows(report: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """Yield the table's rows, under COLUMNS."""
    for row in report["kernels"]:
        kernel, _, configuration = row["name"].partition(" ")
        per_element = [row[f"{name}_per_element"] for name in ("instructions", "exponentials")]
        yield (
            kernel.rstrip(","),
            configuration or "-",
            *(row[key] for key in ("num_warps", "registers", "spill_instructions", "shared_bytes")),
            # counts per element mean nothing without a loop that streams a row
            *((f"{count:.2f}" for count in per_element) if any(per_element) else "--"),
            *(row[key] for key in ("async_copies", "wgmma", "tma_copies")),
        )
