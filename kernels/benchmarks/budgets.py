"""Every kernel in every configuration that is launched, and what its machine code may cost at most.

The limits on instructions and exponentials per element are those below which an H200 (4.3 TB/s, 132
multiprocessors at 1.755 GHz) waits for memory, not for arithmetic: 13.8 instructions and 1.7
exponentials for 2 bytes of HBM traffic per element; the budgets leave a margin for what a loop does
not show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ragen_kernels import triton_policy, triton_returns, triton_rows, triton_token

from .static_analysis import KernelReport, analyse, compile_kernel

MAX_SHARED_BYTES = 232448  # of one program on sm_90
ALIGNED = frozenset(
    {"stride", "dx_stride", "num_valid", "num_columns", "num_entries", "vocab_start"}
)
TYPES = {
    **dict.fromkeys(("X", "DX"), "*bf16"),
    **dict.fromkeys(("LABELS", "GROUPS"), "*i64"),
    **dict.fromkeys(("MASK", "TURN_ENDS"), "*i8"),
    "OFFSETS": "*i32",
}


def argument_type(name: str) -> str:
    """Types by the naming of the kernels: pointers in capitals, float32 unless listed; counts and
    strides int32.
    """
    if name in TYPES:
        return TYPES[name]
    if name.isupper():
        return "*fp32"
    return "i32" if name in ALIGNED or name in ("num_rows", "size") else "fp32"


@dataclass(frozen=True)
class Budget:
    """Upper bounds; `instructions` and `exponentials` are per element, summed over the streaming
    loops.
    """

    registers: int
    shared_bytes: int = 0
    streams: int = 0
    instructions: float = 0.0
    exponentials: float = 0.0
    is_wide: bool = True  # rows are read by 16-byte loads, without a lane talking to another

    def violations(self, report: KernelReport) -> list[str]:
        """What a kernel exceeds, in words; empty when it is within the budget."""
        shuffles = sum(loop.shuffles for loop in report.streams)
        checks = {
            "registers": (report.registers, self.registers),
            "spill instructions": (report.spill_instructions, 0),
            "stack bytes": (report.stack_bytes, 0),
            "shared bytes": (report.shared_bytes, min(self.shared_bytes, MAX_SHARED_BYTES)),
            "shuffles in streaming loops": (shuffles if self.is_wide else 0, 0),
            "instructions per element": (
                sum(loop.instructions for loop in report.streams),
                self.instructions,
            ),
            "exponentials per element": (
                sum(loop.exponentials for loop in report.streams),
                self.exponentials,
            ),
        }
        found = [
            f"{name} {value:g} > {limit:g}"
            for name, (value, limit) in checks.items()
            if value > limit
        ]
        if len(report.streams) != self.streams:
            found.append(f"{len(report.streams)} streaming loops instead of {self.streams}")
        if self.streams and self.is_wide and not report.wide_loads:
            found.append("no 128-bit load")
        return found


@dataclass(frozen=True)
class KernelConfig:
    """One kernel as it is launched."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int
    budget: Budget
    types: dict[str, str] = field(default_factory=dict)
    aligned: frozenset[str] = ALIGNED

    def compile(self, max_registers: int | None = None) -> Any:
        """Triton's compiled kernel for sm_90, with all stages in `asm`."""
        signature = {
            name: self.types.get(name, argument_type(name)) for name in self.kernel.arg_names
        }
        return compile_kernel(
            self.kernel, signature, self.constants, self.num_warps, self.aligned, max_registers
        )

    def analyse(self, compiled: Any) -> KernelReport:
        """Disassemble what `compile` returned and count."""
        return analyse(compiled, self.constants["BLOCK"] / (32 * self.num_warps))


PLAIN = {"DUAL_CLIP": False, "KL": 0, "IMPORTANCE": False, "REF": None, "ROLLOUT": None}
EVERYTHING = {"DUAL_CLIP": True, "KL": 3, "IMPORTANCE": True}
FP32 = {"X": "*fp32", "DX": "*fp32"}


def row_configs() -> Iterator[KernelConfig]:
    """The kernels that stream rows of logits; rows and vocabularies of odd sizes too."""
    block, warps = triton_rows.BLOCK, triton_rows.NUM_WARPS
    statistics = KernelConfig(
        "statistics bf16",
        triton_rows.statistics_kernel,
        {"BLOCK": block, "GROUP": 8},
        warps,
        Budget(64, 32768, 1, 10.0, 1.25),
    )
    yield statistics
    yield replace(
        statistics,
        name="statistics fp32",
        constants={"BLOCK": block, "GROUP": 4},
        types=FP32,
        budget=Budget(96, 65536, 1, 11.0, 1.35),
    )
    yield replace(
        statistics, name="statistics bf16, odd rows", aligned=frozenset(), budget=Budget(224, 64)
    )
    gradient = KernelConfig(
        "gradient bf16, entropy",
        triton_rows.gradient_kernel,
        {"BLOCK": block, "WITH_ENTROPY": True},
        warps,
        Budget(64, 32768, 1, 10.0, 1.1),
    )
    yield replace(
        gradient,
        name="gradient bf16",
        constants={"BLOCK": block, "WITH_ENTROPY": False, "MEAN": None, "D_ENTROPY": None},
        budget=Budget(64, 32768, 1, 9.0, 1.1),
    )
    yield gradient
    yield replace(
        gradient, name="gradient fp32, entropy", types=FP32, budget=Budget(96, 65536, 1, 11.0, 1.1)
    )
    yield replace(
        gradient, name="gradient bf16, odd rows", aligned=frozenset(), budget=Budget(128, 64)
    )
    shape = {"BLOCK": triton_policy.BLOCK, "GROUP": 8}
    policy = KernelConfig(
        "policy_row bf16",
        triton_policy.policy_row_kernel,
        {**shape, **PLAIN, "ENTROPY_GRADIENT": False},
        triton_policy.NUM_WARPS,
        Budget(128, 65536, 2, 18.0, 2.3),
    )
    yield policy
    full = {**shape, **EVERYTHING, "ENTROPY_GRADIENT": True}
    yield replace(
        policy,
        name="policy_row bf16, everything",
        constants=full,
        budget=Budget(128, 65536, 2, 20.0, 2.3),
    )
    yield replace(
        policy,
        name="policy_row fp32, everything",
        constants=full | {"GROUP": 4},
        types=FP32,
        budget=Budget(128, 131072, 2, 21.0, 2.4),
    )
    yield replace(
        policy,
        name="policy_row bf16, everything, odd vocabulary",
        constants=full | {"BLOCK": triton_policy.ODD_VOCABULARY_BLOCK},
        num_warps=triton_policy.ODD_WARPS,
        aligned=frozenset({"stride", "dx_stride"}),  # as the LM head lays out an odd vocabulary
        budget=Budget(255, 32768, 2, 21.0, 2.4),
    )


def token_configs() -> Iterator[KernelConfig]:
    """The kernels over tokens, trajectories and gradients."""
    token = {"BLOCK": triton_token.BLOCK}
    for name, objective in (("policy_tokens", PLAIN), ("policy_tokens, everything", EVERYTHING)):
        yield KernelConfig(
            name,
            triton_token.token_kernel,
            {**token, **objective},
            triton_token.NUM_WARPS,
            Budget(64, 1024),
        )
    scan, warps = {"BLOCK": triton_returns.SCAN_BLOCK}, triton_returns.SCAN_WARPS
    yield KernelConfig(
        "gae",
        triton_returns.gae_kernel,
        {**scan, "BI_LEVEL": False, "TURN_ENDS": None},
        warps,
        Budget(128, 16384),
    )
    yield KernelConfig(
        "gae bi-level",
        triton_returns.gae_kernel,
        {**scan, "BI_LEVEL": True},
        warps,
        Budget(168, 16384),
    )
    block, warps = {"BLOCK": triton_returns.TOKEN_BLOCK}, triton_returns.TOKEN_WARPS
    yield KernelConfig("whiten", triton_returns.whiten_kernel, block, warps, Budget(64))
    yield KernelConfig(
        "group_normalize",
        triton_returns.group_normalize_kernel,
        {**block, "SCALE": True},
        warps,
        Budget(64, 1024),
    )
    yield KernelConfig(
        "value_loss", triton_returns.value_loss_kernel, {**block, "CLIP": True}, warps, Budget(64)
    )


def all_configs() -> Iterator[KernelConfig]:
    """Every kernel in every configuration."""
    yield from row_configs()
    yield from token_configs()
