"""Kernels over rows of logits: softmax statistics with one read, and the gradient with one read and
one write.

Base-2 exponentials, temperature folded into the exponent's factor. The statistics are a grouped
online softmax: the elements of one 16-byte load share a running peak, so the rescaling costs one
exponential per group instead of one per element and no lane talks to another before the end of the
row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragen_kernels.launch import PER_TOKEN
from ragen_kernels.vocab import RowStatistics, VocabShard

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # finite, so that no running peak turns into inf - inf

BLOCK = 8192
NUM_WARPS = 8


@triton.jit
def accumulate(x, peak, total, moment, scale, IS_TAIL: tl.constexpr):
    """Add a tile x [groups, group] to the running peak of x * scale, sum of exponentials and sum of
    those times x.
    """
    new_peak = tl.maximum(peak, tl.max(x, 1) * scale)
    rescale = tl.exp2(peak - new_peak)
    e = tl.exp2(x * scale - new_peak[:, None])
    if IS_TAIL:  # a masked element is -inf: its exponential is 0, but 0 * -inf is not
        x = tl.where(x < LOWEST, 0.0, x)
    return new_peak, total * rescale + tl.sum(e, 1), moment * rescale + tl.sum(e * x, 1)


@triton.jit
def reduce_row(
    X, num_valid, scale, BLOCK: tl.constexpr, GROUP: tl.constexpr, EVICTION: tl.constexpr
):
    """Compute base-2 log-sum-exp and mean of x * scale over one row of logits."""
    NUM_GROUPS: tl.constexpr = BLOCK // GROUP
    peak = tl.full((NUM_GROUPS,), LOWEST, tl.float32)
    total = tl.zeros((NUM_GROUPS,), tl.float32)
    moment = tl.zeros((NUM_GROUPS,), tl.float32)
    columns = tl.arange(0, BLOCK)
    whole = (num_valid // BLOCK) * BLOCK
    for start in tl.range(0, whole, BLOCK, num_stages=3):
        x = tl.load(X + start + columns, eviction_policy=EVICTION).to(tl.float32)
        peak, total, moment = accumulate(
            tl.reshape(x, (NUM_GROUPS, GROUP)), peak, total, moment, scale, False
        )
    if whole < num_valid:
        mask = whole + columns < num_valid
        x = tl.load(
            X + whole + columns, mask=mask, other=-float("inf"), eviction_policy=EVICTION
        ).to(tl.float32)
        peak, total, moment = accumulate(
            tl.reshape(x, (NUM_GROUPS, GROUP)), peak, total, moment, scale, True
        )
    row_peak = tl.max(peak, 0)
    factor = tl.exp2(peak - row_peak)
    row_total = tl.sum(total * factor, 0)
    row_moment = tl.sum(moment * factor, 0)
    return row_peak + tl.log2(row_total), tl.where(
        row_total > 0, scale * row_moment / row_total, 0.0
    )


@triton.jit
def load_target(X, label, vocab_start, num_valid, num_entries):
    """(column of the label in this shard, is it here, its logit: 0 elsewhere and NaN for an
    impossible label).
    """
    is_local = (label >= vocab_start) & (label < vocab_start + num_valid)
    column = tl.where(is_local, label - vocab_start, 0).to(tl.int32)
    target = tl.load(X + column, mask=is_local, other=0.0).to(tl.float32)
    return column, is_local, tl.where((label >= 0) & (label < num_entries), target, float("nan"))


@triton.jit
def write_gradient(
    X,
    DX,
    target,
    column,
    is_local,
    num_valid,
    num_columns,
    scale,
    lse2,
    constant,
    slope,
    d_target,
    BLOCK: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
):
    """p * (constant + slope * x) over one row, plus d_target at the label, 0 in the padding. DX may
    be X.

    The label's element is computed again in float32 and stored last, so that no element pays for
    the comparison and the subtraction p - 1 is not rounded to the dtype of DX before it happens.
    """
    columns = tl.arange(0, BLOCK)
    whole = (num_valid // BLOCK) * BLOCK
    tl.debug_barrier()  # every thread holds `target` before any overwrites it
    for start in tl.range(0, whole, BLOCK, num_stages=3):
        x = tl.load(X + start + columns, eviction_policy="evict_first").to(tl.float32)
        p = tl.exp2(x * scale - lse2)
        d = p * ((constant + slope * x) if WITH_ENTROPY else constant)
        tl.store(DX + start + columns, d.to(DX.dtype.element_ty), eviction_policy="evict_first")
    if whole < num_columns:
        # The padding starts in the tail's block and may continue after it.
        for start in range(whole, num_columns, BLOCK):
            mask = start + columns < num_valid
            x_tail = tl.load(X + start + columns, mask=mask, other=0.0).to(tl.float32)
            p_tail = tl.where(mask, tl.exp2(x_tail * scale - lse2), 0.0)
            d_tail = p_tail * ((constant + slope * x_tail) if WITH_ENTROPY else constant)
            tl.store(
                DX + start + columns,
                d_tail.to(DX.dtype.element_ty),
                mask=start + columns < num_columns,
            )
    tl.debug_barrier()
    p_target = tl.exp2(target * scale - lse2)
    d_label = p_target * ((constant + slope * target) if WITH_ENTROPY else constant) + d_target
    tl.store(DX + column, d_label.to(DX.dtype.element_ty), mask=is_local)


@triton.jit(do_not_specialize_on_alignment=PER_TOKEN)
def statistics_kernel(
    X,
    LABELS,
    LSE,
    MEAN,
    TARGET,
    stride,
    num_valid,
    num_entries,
    vocab_start,
    scale,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute, with one program per row, log-sum-exp, mean and label of logits / temperature,
    natural units.
    """
    row = tl.program_id(0).to(tl.int64)
    X += row * stride
    lse2, mean2 = reduce_row(X, num_valid, scale, BLOCK, GROUP, "evict_first")
    _, _, target = load_target(X, tl.load(LABELS + row), vocab_start, num_valid, num_entries)
    tl.store(LSE + row, lse2 * LN2)
    tl.store(MEAN + row, mean2 * LN2)
    tl.store(TARGET + row, target * (scale * LN2))


@triton.jit(do_not_specialize_on_alignment=PER_TOKEN)
def gradient_kernel(
    X,
    DX,
    LABELS,
    LSE,
    MEAN,
    D_LOGPROBS,
    D_ENTROPY,
    D_OTHERS,
    stride,
    dx_stride,
    num_valid,
    num_columns,
    num_entries,
    vocab_start,
    scale,
    BLOCK: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
):
    """Compute, with one program per row, d loss / d logits from the global statistics and the
    gradients of (logprob, entropy).
    """
    row = tl.program_id(0).to(tl.int64)
    X += row * stride
    inverse_temperature = scale * LN2
    column, is_local, target = load_target(
        X, tl.load(LABELS + row), vocab_start, num_valid, num_entries
    )
    d_target = tl.load(D_LOGPROBS + row).to(tl.float32) * inverse_temperature
    constant, slope = -d_target, 0.0
    if D_OTHERS is not None:
        constant -= tl.load(D_OTHERS + row).to(tl.float32) * inverse_temperature
    if WITH_ENTROPY:
        d_entropy = tl.load(D_ENTROPY + row).to(tl.float32) * inverse_temperature
        constant += d_entropy * tl.load(MEAN + row)
        slope = -d_entropy * inverse_temperature
    lse2 = tl.load(LSE + row) * LOG2E
    write_gradient(
        X,
        DX + row * dx_stride,
        target,
        column,
        is_local,
        num_valid,
        num_columns,
        scale,
        lse2,
        constant,
        slope,
        d_target,
        BLOCK,
        WITH_ENTROPY,
    )


def group_size(dtype: torch.dtype) -> int:
    """Return the elements of a 16-byte load."""
    return 16 // dtype.itemsize


def row_statistics(
    logits: Tensor, labels: Tensor, shard: VocabShard, temperature: float
) -> RowStatistics:
    """See `reference.row_statistics`; float32, of logits with unit column stride. A label outside
    the vocabulary gives NaN.
    """
    assert logits.stride(1) == 1, "the kernel walks rows of contiguous columns"
    statistics = RowStatistics(*logits.new_empty((3, logits.shape[0]), dtype=torch.float32))
    if len(labels):
        statistics_kernel[(len(labels),)](
            logits,
            labels,
            *statistics,
            logits.stride(0),
            shard.num_valid,
            shard.num_entries,
            shard.start,
            LOG2E.value / temperature,
            BLOCK=BLOCK,
            GROUP=group_size(logits.dtype),
            num_warps=NUM_WARPS,
        )
    return statistics


def logits_gradient(
    logits: Tensor,
    out: Tensor,
    labels: Tensor,
    rows: RowStatistics,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    shard: VocabShard,
    temperature: float,
    d_others: Tensor | None = None,
) -> Tensor:
    """See `reference.logits_gradient`."""
    assert logits.stride(1) == 1 and out.stride(1) == 1, (
        "the kernel walks rows of contiguous columns"
    )
    if len(labels):
        gradient_kernel[(len(labels),)](
            logits,
            out,
            labels,
            rows.lse,
            rows.mean,
            d_logprobs,
            d_entropy,
            d_others,
            logits.stride(0),
            out.stride(0),
            shard.num_valid,
            logits.shape[1],
            shard.num_entries,
            shard.start,
            LOG2E.value / temperature,
            BLOCK=BLOCK,
            WITH_ENTROPY=d_entropy is not None,
            num_warps=NUM_WARPS,
        )
    return out
