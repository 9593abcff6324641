"""Compile a Triton kernel for sm_90 without a GPU and count what its machine code uses.

A row kernel at the limit of HBM has 13.8 instructions and 1.7 exponentials per bf16 element before
arithmetic, not memory, becomes the bottleneck of an H200; these counts check that without the
device.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MIN_LOOP_INSTRUCTIONS = 20


@dataclass(frozen=True)
class LoopCount:
    """One innermost loop of the machine code, its counts per element of the row."""

    instructions: float
    exponentials: float
    shuffles: int
    async_copies: int


@dataclass(frozen=True)
class KernelReport:
    """Resources of one compiled kernel."""

    registers: int
    stack_bytes: int
    spill_instructions: int
    shared_bytes: int
    wide_loads: int
    wide_stores: int
    async_copies: int  # cp.async
    tma_copies: int
    wgmma: int
    loops: tuple[LoopCount, ...]

    @property
    def streams(self) -> tuple[LoopCount, ...]:
        """The loops that walk a row through asynchronous copies; tails and zero fills are not among
        them.
        """
        return tuple(loop for loop in self.loops if loop.async_copies)


def analyse(compiled: Any, elements_per_thread: float) -> KernelReport:
    """Disassemble a compiled kernel. `elements_per_thread`: row elements that one pass of an inner
    loop covers.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = run_tool("cuobjdump", "-res-usage", file.name)
        assembly = run_tool("nvdisasm", "-c", file.name)
    return KernelReport(
        registers=int(_found(r"REG:(\d+)", usage)),
        stack_bytes=int(_found(r"STACK:(\d+)", usage)),
        spill_instructions=len(re.findall(r"\b(?:LDL|STL)\b", assembly)),
        shared_bytes=compiled.metadata.shared,
        wide_loads=len(re.findall(r"\bLDG\.E[.A-Z0-9_]*\.128|LDGSTS\.E[.A-Z0-9_]*\.128", assembly)),
        wide_stores=len(re.findall(r"\bSTG\.E[.A-Z0-9_]*\.128", assembly)),
        async_copies=len(re.findall(r"\bLDGSTS\b", assembly)),
        tma_copies=len(re.findall(r"\bU(?:TMA|BLK)[A-Z]+", assembly)),
        wgmma=len(re.findall(r"\bHGMMA\b", assembly)),
        loops=tuple(inner_loops(assembly, elements_per_thread)),
    )


def run_tool(name: str, *arguments: str) -> str:
    """Return the standard output of a CUDA binary utility that Triton ships."""
    return subprocess.run(
        [TOOLS / name, *arguments], capture_output=True, text=True, check=True
    ).stdout


def _found(pattern: str, text: str) -> str:
    """Return the first group of a pattern in the output of a tool. Raises ValueError without it."""
    if match := re.search(pattern, text):
        return match.group(1)
    raise ValueError(f"the output of a CUDA tool has no {pattern}: {text!r:.200}")


def inner_loops(assembly: str, elements_per_thread: float) -> list[LoopCount]:
    """Return the backward branches that enclose no other, in program order."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction.group(1))
    spans = []
    for end, line in enumerate(instructions):
        branch = re.search(r"BRA(?:\.\w+)*\s+.*?`\((\.L_x_\d+)\)", line)
        start = labels.get(branch.group(1), end + 1) if branch else end + 1
        if end - start >= MIN_LOOP_INSTRUCTIONS:
            spans.append((start, end))
    bodies = [
        instructions[a : b + 1]
        for a, b in spans
        if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in spans)
    ]
    return [
        LoopCount(
            instructions=len(body) / elements_per_thread,
            exponentials=sum("MUFU.EX2" in x for x in body) / elements_per_thread,
            shuffles=sum("SHFL" in x for x in body),
            async_copies=sum("LDGSTS" in x for x in body),
        )
        for body in bodies
    ]
