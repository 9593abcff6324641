"""The policy loss of rows of logits on Triton, with its gradient over them.

One read of the logits from HBM: a program reduces a row, evaluates the token objective in
registers, and writes the gradient over the row while that is still in L2. One persistent program
per multiprocessor keeps the rows in flight (132 x 304 KB at V = 151936) below the capacity of L2.
Under tensor parallelism the statistics of a row cross ranks in between, and a row that several
tokens share or a teacher's tokens have sums in between, so there it is three kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragen_kernels.launch import PER_TOKEN, num_persistent_programs
from ragen_kernels.objective import NUM_OUTPUTS, Likeliest, PolicyObjective, TokenTerms
from ragen_kernels.reference import in_pieces
from ragen_kernels.triton_rows import (
    LN2,
    LOG2E,
    group_size,
    load_target,
    logits_gradient,
    reduce_row,
    row_statistics,
    write_gradient,
)
from ragen_kernels.triton_token import token_loss_rows, token_losses
from ragen_kernels.vocab import VocabShard, is_split

# One program per multiprocessor has to keep enough bytes in flight on its own: wider than the
# kernels with one row per program.
BLOCK = 16384
NUM_WARPS = 16
# If the last block of a vocabulary has an odd remainder, every thread needs more registers; with
# half as many threads each can have twice as many.
ODD_VOCABULARY_BLOCK = 8192
ODD_WARPS = 8


# fmt: off
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PER_TOKEN)
def policy_row_kernel(
    X, DX, LABELS, OLD, ADVANTAGES, WEIGHTS, REF, ROLLOUT, OUT,
    num_rows, stride, dx_stride, num_valid, num_columns, num_entries, scale,
    lower, upper, dual_clip, importance_cap, importance_floor, kl_coef, entropy_coef, min_entropy,
    CISPO: tl.constexpr, DUAL_CLIP: tl.constexpr, KL: tl.constexpr, IMPORTANCE: tl.constexpr,
    MIN_ENTROPY: tl.constexpr, ENTROPY_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):
    """Rows of logits -> outputs [10, T] and, over DX, the gradient of the weighted loss.

    DX may be X. It is a separate pointer, because registers spill when the compiler knows that they
    are the same.
    """
    inverse_temperature = scale * LN2
    first = tl.program_id(0).to(tl.int64)
    for turn in range(0, tl.cdiv(num_rows - tl.program_id(0), tl.num_programs(0))):
        row = first + turn * tl.num_programs(0)
        x_row = X + row * stride
        lse2, mean2 = reduce_row(x_row, num_valid, scale, BLOCK, GROUP, "evict_last")
        label = tl.load(LABELS + row)
        column, is_local, target = load_target(x_row, label, 0, num_valid, num_entries)
        logprob = target * inverse_temperature - lse2 * LN2
        entropy = (lse2 - mean2) * LN2
        weight, d_logprob = token_loss_rows(
            OUT, num_rows, row, True, logprob, entropy, OLD, ADVANTAGES, WEIGHTS, REF, ROLLOUT,
            lower, upper, dual_clip, importance_cap, importance_floor,
            kl_coef, entropy_coef, min_entropy,
            CISPO, DUAL_CLIP, KL, IMPORTANCE, MIN_ENTROPY,
        )
        d_target = weight * d_logprob * inverse_temperature
        constant, slope = -d_target, 0.0
        if ENTROPY_GRADIENT:
            d_entropy = -entropy_coef * weight * inverse_temperature
            constant += d_entropy * mean2 * LN2
            slope = -d_entropy * inverse_temperature
        write_gradient(
            x_row, DX + row * dx_stride, target, column, is_local, num_valid, num_columns, scale,
            lse2, constant, slope, d_target, BLOCK, ENTROPY_GRADIENT,
        )
# fmt: on


def policy_rows_(
    logits: Tensor,
    labels: Tensor,
    terms: TokenTerms,
    objective: PolicyObjective,
    shard: VocabShard,
    temperature: float,
    row_of: Tensor | None = None,
    teacher: Likeliest | None = None,
) -> Tensor:
    """See `reference.policy_rows_`; float32, of logits with unit column stride. A label outside the
    vocabulary gives NaN.
    """
    if is_split(shard.group) or row_of is not None or teacher is not None:
        return in_pieces(row_statistics, token_losses, logits_gradient)(
            logits, labels, terms, objective, shard, temperature, row_of, teacher
        )
    assert logits.stride(1) == 1, "the kernel walks rows of contiguous columns"
    num_rows, num_columns = logits.shape
    outputs = logits.new_empty((NUM_OUTPUTS, num_rows), dtype=torch.float32)
    if num_rows:
        is_odd = num_columns % 16 != 0
        policy_row_kernel[(min(num_rows, num_persistent_programs(logits.device)),)](
            logits,
            logits,
            labels,
            *terms,
            outputs,
            num_rows,
            logits.stride(0),
            logits.stride(0),
            shard.num_valid,
            num_columns,
            shard.num_entries,
            LOG2E.value / temperature,
            **objective.arguments(),
            ENTROPY_GRADIENT=objective.entropy_coef != 0,
            BLOCK=min(BLOCK, ODD_VOCABULARY_BLOCK) if is_odd else BLOCK,
            GROUP=group_size(logits.dtype),
            num_warps=ODD_WARPS if is_odd else NUM_WARPS,
        )
    return outputs
