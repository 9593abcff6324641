"""Every kernel in every configuration that is launched, and upper bounds on the cost of its machine
code.

The limits on instructions and exponentials per element are those below which an H200 (4.3 TB/s, 132
multiprocessors at 1.755 GHz) waits for memory, not for arithmetic: 13.8 instructions and 1.7
exponentials for 2 bytes of HBM traffic per element; the budgets leave a margin for what is outside
the loops.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import triton
from ragen_kernels import triton_policy, triton_returns, triton_rows, triton_token
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.machine_code import KernelReport, analyse

HOPPER = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 232448  # limit of one program on sm_90
ALIGNED = frozenset(
    {"stride", "dx_stride", "num_valid", "num_columns", "num_entries", "vocab_start"}
)
TYPES = {
    **dict.fromkeys(("X", "DX"), "*bf16"),
    "LABELS": "*i64",
    **dict.fromkeys(("MASK", "TURN_ENDS"), "*i8"),
    "OFFSETS": "*i32",
}


def argument_type(name: str) -> str:
    """Return the type of an argument, by the kernels' naming: pointers in capitals, float32 unless
    listed; counts and strides int32.
    """
    scalar = "i32" if name in ALIGNED | {"num_rows", "size"} else "fp32"
    return TYPES.get(name, "*fp32" if name.isupper() else scalar)


@dataclass(frozen=True)
class KernelBudget:
    """Upper bounds; `instructions` and `exponentials` are per element, summed over the streaming
    loops.
    """

    registers: int
    shared_bytes: int = 0
    streams: int = 0
    instructions: float = 0.0
    exponentials: float = 0.0
    is_wide: bool = True  # rows are read by 16-byte loads, without exchange between lanes

    def violations(self, report: KernelReport) -> list[str]:
        """List the limits that a kernel exceeds, in words; empty when it is within the budget."""
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
    budget: KernelBudget
    types: dict[str, str] = field(default_factory=dict)
    aligned: frozenset[str] = ALIGNED

    def compile(self, max_registers: int | None = None) -> Any:
        """Return Triton's compiled kernel for sm_90 with all stages in `asm`, as for a launch whose
        pointers, and whose integers in `aligned`, are divisible by 16.
        """
        names = self.kernel.arg_names
        types = {name: self.types.get(name, argument_type(name)) for name in names}
        types |= dict.fromkeys(self.constants, "constexpr")
        divisible = {
            (index,): [["tt.divisibility", 16]]
            for index, (name, kind) in enumerate(types.items())
            if kind != "constexpr" and (kind.startswith("*") or name in self.aligned)
            if not self.kernel.params[index].do_not_specialize_on_alignment
        }
        constants = {(names.index(name),): value for name, value in self.constants.items()}
        source = ASTSource(self.kernel, types, constants, divisible)
        options = {"num_warps": self.num_warps}
        if max_registers is not None:
            options["maxnreg"] = max_registers
        return triton.compile(source, target=HOPPER, options=options)

    def analyse(self, compiled: Any) -> KernelReport:
        """Disassemble what `compile` returned and count."""
        return analyse(compiled, self.constants["BLOCK"] / (32 * self.num_warps))


PLAIN = {
    "CISPO": False, "DUAL_CLIP": False, "KL": 0, "IMPORTANCE": 0, "MIN_ENTROPY": False,
    "REF": None, "ROLLOUT": None,
}  # fmt: skip
EVERYTHING = {"CISPO": False, "DUAL_CLIP": True, "KL": 3, "IMPORTANCE": 1, "MIN_ENTROPY": True}
MASKED_CISPO = {"CISPO": True, "DUAL_CLIP": False, "KL": 3, "IMPORTANCE": 2, "MIN_ENTROPY": False}
FP32 = {"X": "*fp32", "DX": "*fp32"}


def _statistics_and_gradients() -> list[KernelConfig]:
    block, warps = triton_rows.BLOCK, triton_rows.NUM_WARPS
    statistics = KernelConfig(
        "statistics bf16",
        triton_rows.statistics_kernel,
        {"BLOCK": block, "GROUP": 8},
        warps,
        KernelBudget(64, 32768, 1, 10.0, 1.25),
    )
    gradient = KernelConfig(
        "gradient bf16, entropy",
        triton_rows.gradient_kernel,
        {"BLOCK": block, "WITH_ENTROPY": True},
        warps,
        KernelBudget(64, 32768, 1, 10.0, 1.1),
    )
    return [
        statistics,
        replace(
            statistics,
            name="statistics fp32",
            constants={"BLOCK": block, "GROUP": 4},
            types=FP32,
            budget=KernelBudget(96, 65536, 1, 11.0, 1.35),
        ),
        replace(
            statistics,
            name="statistics bf16, odd rows",
            aligned=frozenset(),
            budget=KernelBudget(224, 64),
        ),
        replace(
            gradient,
            name="gradient bf16",
            constants={
                "BLOCK": block,
                "WITH_ENTROPY": False,
                **dict.fromkeys(("MEAN", "D_ENTROPY", "D_OTHERS")),
            },
            budget=KernelBudget(64, 32768, 1, 9.0, 1.1),
        ),
        gradient,
        replace(
            gradient,
            name="gradient fp32, entropy",
            types=FP32,
            budget=KernelBudget(96, 65536, 1, 11.0, 1.1),
        ),
        replace(
            gradient,
            name="gradient bf16, odd rows",
            aligned=frozenset(),
            budget=KernelBudget(128, 64),
        ),
    ]


def _policy_rows() -> list[KernelConfig]:
    shape = {"BLOCK": triton_policy.BLOCK, "GROUP": 8}
    policy = KernelConfig(
        "policy_row bf16",
        triton_policy.policy_row_kernel,
        {**shape, **PLAIN, "ENTROPY_GRADIENT": False},
        triton_policy.NUM_WARPS,
        KernelBudget(128, 65536, 2, 18.0, 2.3),
    )
    full = {**shape, **EVERYTHING, "ENTROPY_GRADIENT": True}
    return [
        policy,
        replace(
            policy,
            name="policy_row bf16, everything",
            constants=full,
            budget=KernelBudget(128, 65536, 2, 20.0, 2.3),
        ),
        replace(
            policy,
            name="policy_row bf16, masked cispo",
            constants=full | MASKED_CISPO,
            budget=KernelBudget(128, 65536, 2, 20.0, 2.3),
        ),
        replace(
            policy,
            name="policy_row fp32, everything",
            constants=full | {"GROUP": 4},
            types=FP32,
            budget=KernelBudget(128, 131072, 2, 21.0, 2.4),
        ),
        replace(
            policy,
            name="policy_row bf16, everything, odd vocabulary",
            constants=full | {"BLOCK": triton_policy.ODD_VOCABULARY_BLOCK},
            num_warps=triton_policy.ODD_WARPS,
            aligned=frozenset({"stride", "dx_stride"}),  # as the LM head lays out an odd vocabulary
            budget=KernelBudget(255, 32768, 2, 21.0, 2.4),
        ),
    ]


def _tokens_and_returns() -> list[KernelConfig]:
    tokens = KernelConfig(
        "policy_tokens",
        triton_token.token_kernel,
        {"BLOCK": triton_token.BLOCK, **PLAIN},
        triton_token.NUM_WARPS,
        KernelBudget(64, 1024),
    )
    scan = {"BLOCK": triton_returns.SCAN_BLOCK}
    gae = KernelConfig(
        "gae",
        triton_returns.gae_kernel,
        {**scan, "BI_LEVEL": False, "TURN_ENDS": None},
        triton_returns.SCAN_WARPS,
        KernelBudget(128, 16384),
    )
    return [
        tokens,
        replace(
            tokens,
            name="policy_tokens, everything",
            constants={"BLOCK": triton_token.BLOCK, **EVERYTHING},
        ),
        replace(
            tokens,
            name="policy_tokens, masked cispo",
            constants={"BLOCK": triton_token.BLOCK, **MASKED_CISPO},
        ),
        gae,
        replace(
            gae,
            name="gae bi-level",
            constants={**scan, "BI_LEVEL": True},
            budget=KernelBudget(168, 16384),
        ),
    ]


def all_configs() -> list[KernelConfig]:
    """Return every kernel in every configuration; rows and vocabularies of odd sizes too."""
    return [*_statistics_and_gradients(), *_policy_rows(), *_tokens_and_returns()]
