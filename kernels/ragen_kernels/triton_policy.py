"""Logits to log-probabilities or to the policy loss, on Triton.

`policy_loss` needs one read of the logits from HBM: a program reduces a row, evaluates the token
objective in registers, and writes the gradient over the row while that is still in L2. One
persistent program per multiprocessor keeps the rows in flight (132 x 304 KB at V = 151936) below
the capacity of L2. Under tensor parallelism the statistics of a row cross ranks in between, so
there it is two kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup, get_world_size

from ragen_kernels.arguments import PER_TOKEN
from ragen_kernels.device import num_persistent_programs
from ragen_kernels.objective import PolicyObjective, PolicyStats
from ragen_kernels.triton_rows import (
    LN2,
    LOG2E,
    group_size,
    launch_gradient,
    launch_statistics,
    load_target,
    row_statistics,
    scale_,
    write_gradient,
)
from ragen_kernels.triton_token import (
    NUM_OUTPUTS,
    contiguous_terms,
    launch_tokens,
    objective_arguments,
    store_outputs,
    token_objective,
    unpack_outputs,
)
from ragen_kernels.vocab import (
    RowStatistics,
    VocabShard,
    check_rows,
    reduce_over_group,
    vocab_shard,
)

# One program per multiprocessor has to keep enough bytes in flight alone: wider than the kernels of
# one row each.
BLOCK = 16384
NUM_WARPS = 16
# Every odd size costs registers, of which half as many threads have twice as many: in vocabularies
# of which the last block has an odd rest, and in rows that start anywhere, which are loaded element
# by element.
ODD_VOCABULARY_BLOCK = 8192
ODD_ROWS_BLOCK = 4096
ODD_WARPS = 8


@triton.jit
def zero_row(DX, num_columns, BLOCK: tl.constexpr):
    """Zeros over one row."""
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(DX + columns, tl.zeros((BLOCK,), DX.dtype.element_ty), mask=columns < num_columns)


# fmt: off
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PER_TOKEN)
def policy_row_kernel(
    X, DX, LABELS, OLD, ADVANTAGES, WEIGHTS, REF, ROLLOUT, OUT,
    num_rows, stride, dx_stride, num_valid, num_columns, num_entries, scale,
    lower, upper, dual_clip, importance_cap, kl_coef, entropy_coef,
    DUAL_CLIP: tl.constexpr, KL: tl.constexpr, IMPORTANCE: tl.constexpr,
    ENTROPY_GRADIENT: tl.constexpr, WRITE_GRADIENT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):
    """Rows of logits -> outputs [10, T] and, over DX, the gradient of the weighted loss; weight 0
    gives zeros.
    """
    inverse_temperature = scale * LN2
    first = tl.program_id(0).to(tl.int64)
    for turn in range(0, tl.cdiv(num_rows - tl.program_id(0), tl.num_programs(0))):
        row = first + turn * tl.num_programs(0)
        weight = tl.load(WEIGHTS + row).to(tl.float32)
        if weight != 0:
            x_row = X + row * stride
            lse2, mean2 = row_statistics(x_row, num_valid, scale, BLOCK, GROUP, "evict_last")
            column, is_local, target = load_target(x_row, tl.load(LABELS + row), 0, num_valid, num_entries)
            logprob = target * inverse_temperature - lse2 * LN2
            entropy = (lse2 - mean2) * LN2
            old_logprob = tl.load(OLD + row).to(tl.float32)
            advantage = tl.load(ADVANTAGES + row).to(tl.float32)
            ref_logprob = tl.load(REF + row).to(tl.float32) if KL else logprob
            rollout_logprob = tl.load(ROLLOUT + row).to(tl.float32) if IMPORTANCE else logprob
            loss, d_logprob, ratio, low, high, dual, kl, importance, ref_kl = token_objective(
                logprob, entropy, old_logprob, advantage, ref_logprob, rollout_logprob,
                lower, upper, dual_clip, importance_cap, kl_coef, entropy_coef, DUAL_CLIP, KL, IMPORTANCE,
            )
            store_outputs(
                OUT, num_rows, row, True,
                weight * loss, logprob, entropy, ratio, low, high, dual, kl, importance, ref_kl,
            )
            if WRITE_GRADIENT:
                d_target = weight * d_logprob * inverse_temperature
                constant, slope = -d_target, 0.0
                if ENTROPY_GRADIENT:
                    d_entropy = -entropy_coef * weight * inverse_temperature
                    constant += d_entropy * mean2 * LN2
                    slope = -d_entropy * inverse_temperature
                write_gradient(
                    x_row, DX + row * dx_stride, target, column, is_local, num_valid, num_columns, scale, lse2,
                    constant, slope, d_target, BLOCK, ENTROPY_GRADIENT,
                )
        else:
            store_outputs(OUT, num_rows, row, True, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
            if WRITE_GRADIENT:
                zero_row(DX + row * dx_stride, num_columns, BLOCK)
# fmt: on


def launch_policy_rows(
    logits: Tensor,
    out: Tensor | None,
    labels: Tensor,
    terms: dict[str, Tensor | None],
    objective: PolicyObjective,
    shard: VocabShard,
    temperature: float,
) -> Tensor:
    """Outputs [10, T] of an unsplit vocabulary; the gradient goes to `out` (`logits`, another
    buffer, or None).
    """
    assert shard.start == 0, "a split vocabulary needs its statistics reduced first"
    assert logits.stride(1) == 1 and (out is None or out.stride(1) == 1), (
        "rows must have contiguous columns"
    )
    num_rows = len(labels)
    outputs = logits.new_empty((NUM_OUTPUTS, num_rows), dtype=torch.float32)
    if num_rows:
        target = logits if out is None else out
        block, num_warps = block_of_rows(logits, target)
        policy_row_kernel[(min(num_rows, num_persistent_programs(logits.device)),)](
            logits,
            target,
            labels,
            terms["old_logprobs"],
            terms["advantages"],
            terms["weights"],
            terms["ref_logprobs"],
            terms["rollout_logprobs"],
            outputs,
            num_rows,
            logits.stride(0),
            target.stride(0),
            shard.num_valid,
            logits.shape[1],
            shard.num_entries,
            LOG2E.value / temperature,
            **objective_arguments(objective),
            ENTROPY_GRADIENT=objective.entropy_coef != 0,
            WRITE_GRADIENT=out is not None,
            BLOCK=block,
            GROUP=group_size(logits.dtype),
            num_warps=num_warps,
        )
    return outputs


def block_of_rows(*rows: Tensor) -> tuple[int, int]:
    """(block, warps) for rows [T, N], of which the kernel reads one and writes the other."""
    if not all(map(has_aligned_rows, rows)):
        return min(BLOCK, ODD_ROWS_BLOCK), ODD_WARPS
    if rows[0].shape[1] % 16:
        return min(BLOCK, ODD_VOCABULARY_BLOCK), ODD_WARPS
    return BLOCK, NUM_WARPS


def has_aligned_rows(x: Tensor) -> bool:
    """Whether triton will know that every row [T, N] can be read by 16-byte loads."""
    return x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, temperature, shard, inplace_backward):
        rows = reduce_over_group(launch_statistics(logits, labels, shard, temperature), shard.group)
        ctx.save_for_backward(logits, labels, *rows)
        ctx.temperature, ctx.shard, ctx.inplace = temperature, shard, inplace_backward
        ctx.set_materialize_grads(False)
        return rows.logprobs, rows.entropy

    @staticmethod
    def backward(ctx, d_logprobs, d_entropy):
        logits, labels, *statistics = ctx.saved_tensors
        rows = RowStatistics(*statistics)
        d_logprobs = torch.zeros_like(rows.lse) if d_logprobs is None else d_logprobs.contiguous()
        d_entropy = None if d_entropy is None else d_entropy.contiguous()
        out = torch.empty_like(logits)
        if ctx.inplace:
            out = logits.detach()
            torch.autograd.graph.increment_version(logits)
        d_logits = launch_gradient(
            logits, out, labels, rows, d_logprobs, d_entropy, ctx.shard, ctx.temperature
        )
        return d_logits, None, None, None, None


def logprob_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_valid: int | None = None,
    group: ProcessGroup | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `reference.logprob_entropy`; results are float32. A label outside the vocabulary gives
    NaN.

    Checking the labels here would make the host wait for the device.
    """
    check_rows(logits, labels, temperature)
    shard = vocab_shard(logits.shape[1], vocab_start, vocab_valid, group)
    return _LogprobEntropy.apply(logits, labels.contiguous(), temperature, shard, inplace_backward)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, terms, objective, shard, temperature):
        d_logits = logits.detach() if ctx.needs_input_grad[0] else None
        if is_split(shard):
            rows = reduce_over_group(
                launch_statistics(logits, labels, shard, temperature), shard.group
            )
            outputs, d_logprobs, d_entropy = launch_tokens(
                rows.logprobs, rows.entropy, terms, objective
            )
            if d_logits is not None:
                d_entropy = d_entropy if objective.entropy_coef else None
                launch_gradient(
                    logits, d_logits, labels, rows, d_logprobs, d_entropy, shard, temperature
                )
        else:
            outputs = launch_policy_rows(
                logits, d_logits, labels, terms, objective, shard, temperature
            )
        if d_logits is not None:
            torch.autograd.graph.increment_version(logits)
        ctx.d_logits = d_logits
        ctx.mark_non_differentiable(outputs)
        return outputs[0].sum(), outputs

    @staticmethod
    def backward(ctx, d_loss, _):
        if ctx.d_logits is None:
            raise RuntimeError(
                "the gradient of policy_loss was handed out already: evaluate the loss again"
            )
        d_logits, ctx.d_logits = ctx.d_logits, None
        return scale_(d_logits, d_loss), None, None, None, None, None


def is_split(shard: VocabShard) -> bool:
    """Whether the statistics of a row have to cross ranks."""
    return shard.group is not None and get_world_size(shard.group) > 1


def policy_loss(
    logits: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    objective: PolicyObjective,
    *,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_valid: int | None = None,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, PolicyStats]:
    """See `reference.policy_loss`. The gradient overwrites `logits`; an active label out of range
    gives NaN.
    """
    check_rows(logits, labels, temperature)
    objective.check_inputs(ref_logprobs, rollout_logprobs)
    shard = vocab_shard(logits.shape[1], vocab_start, vocab_valid, group)
    terms = contiguous_terms(old_logprobs, advantages, weights, ref_logprobs, rollout_logprobs)
    loss, outputs = _PolicyLoss.apply(
        logits, labels.contiguous(), terms, objective, shard, temperature
    )
    return loss, unpack_outputs(outputs, objective)
