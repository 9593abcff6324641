"""The token objective of `objective.py` as Triton code: one definition for the row kernel and the
token kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragen_kernels.launch import PER_TOKEN
from ragen_kernels.objective import MAX_LOG_RATIO, NUM_OUTPUTS, PolicyObjective, TokenTerms
from ragen_kernels.triton_rows import LOG2E

BOUND = tl.constexpr(MAX_LOG_RATIO)

BLOCK = 256
NUM_WARPS = 4


@triton.jit
def clamped_difference(a, b):
    """a - b clamped to +-20, and whether it was inside, where the clamp's gradient is 1."""
    difference = a - b
    return tl.minimum(tl.maximum(difference, -BOUND), BOUND), (difference >= -BOUND) & (
        difference <= BOUND
    )


@triton.jit
def token_objective(
    logprob,
    entropy,
    old_logprob,
    advantage,
    ref_logprob,
    rollout_logprob,
    lower,
    upper,
    dual_clip,
    importance_cap,
    importance_floor,
    kl_coef,
    entropy_coef,
    min_entropy,
    CISPO: tl.constexpr,
    DUAL_CLIP: tl.constexpr,
    KL: tl.constexpr,
    IMPORTANCE: tl.constexpr,
    MIN_ENTROPY: tl.constexpr,
):
    """(token loss, its derivative in logprob, ratio, low, high, dual, kl, importance, ref_kl) of
    one token or many.
    """
    log_ratio, is_inside = clamped_difference(logprob, old_logprob)
    ratio = tl.exp2(log_ratio * LOG2E)
    unclipped = -advantage * ratio
    clipped = -advantage * tl.minimum(tl.maximum(ratio, lower), upper)
    is_low, is_high = ratio < lower, ratio > upper
    if CISPO:
        surrogate, slope = clipped * logprob, clipped
    else:
        surrogate = tl.maximum(unclipped, clipped)
        slope = tl.where((unclipped >= clipped) & is_inside, unclipped, 0.0)
        is_low, is_high = (advantage < 0) & is_low, (advantage > 0) & is_high
    is_dual = (advantage < 0) & (ratio > dual_clip)
    if DUAL_CLIP:
        surrogate = tl.where(is_dual, -advantage * dual_clip, surrogate)
        slope = tl.where(is_dual, 0.0, slope)
    if MIN_ENTROPY:
        surrogate = tl.where(entropy >= min_entropy, surrogate, 0.0)
        slope = tl.where(entropy >= min_entropy, slope, 0.0)
    importance = ratio * 0.0 + 1.0
    if IMPORTANCE:
        drift, _ = clamped_difference(old_logprob, rollout_logprob)
        importance = tl.exp2(drift * LOG2E)
        if IMPORTANCE == 1:
            importance = tl.minimum(importance, importance_cap)
        else:
            is_kept = (importance >= importance_floor) & (importance <= importance_cap)
            importance = tl.where(is_kept, importance, 0.0)
    loss = importance * surrogate - entropy_coef * entropy
    d_logprob = importance * slope
    ref_kl = ratio * 0.0
    if KL:
        log_ref_ratio, is_ref_inside = clamped_difference(ref_logprob, logprob)
        if KL == 1:
            ref_kl = -log_ref_ratio
            d_ref_kl = log_ref_ratio * 0.0 + 1.0
        elif KL == 2:
            ref_kl = 0.5 * log_ref_ratio * log_ref_ratio
            d_ref_kl = -log_ref_ratio
        else:
            ref_ratio = tl.exp2(log_ref_ratio * LOG2E)
            ref_kl = ref_ratio - 1.0 - log_ref_ratio
            d_ref_kl = 1.0 - ref_ratio
        loss += kl_coef * ref_kl
        d_logprob += tl.where(is_ref_inside, kl_coef * d_ref_kl, 0.0)
    low, high = is_low.to(tl.float32), is_high.to(tl.float32)
    dual = (is_dual & DUAL_CLIP).to(tl.float32)
    return loss, d_logprob, ratio, low, high, dual, ratio - 1.0 - log_ratio, importance, ref_kl


# fmt: off
@triton.jit
def token_loss_rows(
    OUT, size, token, mask, logprob, entropy, OLD, ADVANTAGES, WEIGHTS, REF, ROLLOUT,
    lower, upper, dual_clip, importance_cap, importance_floor, kl_coef, entropy_coef, min_entropy,
    CISPO: tl.constexpr, DUAL_CLIP: tl.constexpr, KL: tl.constexpr, IMPORTANCE: tl.constexpr,
    MIN_ENTROPY: tl.constexpr,
):
    """Compute the weights of one token or many, and the unweighted derivatives of their loss in
    logprob.

    Stores their part of the [10, size] outputs where `mask`: the weighted loss, then the fields of
    PolicyStats in their order.
    """
    weight = tl.load(WEIGHTS + token, mask=mask).to(tl.float32)
    old_logprob = logprob if OLD is None else tl.load(OLD + token, mask=mask).to(tl.float32)
    advantage = tl.load(ADVANTAGES + token, mask=mask).to(tl.float32)
    ref_logprob = tl.load(REF + token, mask=mask).to(tl.float32) if KL else logprob
    rollout_logprob = tl.load(ROLLOUT + token, mask=mask).to(tl.float32) if IMPORTANCE else logprob
    loss, d_logprob, ratio, low, high, dual, kl, importance, ref_kl = token_objective(
        logprob, entropy, old_logprob, advantage, ref_logprob, rollout_logprob,
        lower, upper, dual_clip, importance_cap, importance_floor,
        kl_coef, entropy_coef, min_entropy,
        CISPO, DUAL_CLIP, KL, IMPORTANCE, MIN_ENTROPY,
    )
    outputs = (
        weight * loss, logprob, entropy, ratio, low, high, dual, kl, importance, ref_kl,
    )
    for row in tl.static_range(len(outputs)):
        tl.store(OUT + row * size + token, outputs[row], mask=mask)
    return weight, d_logprob


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=PER_TOKEN)
def token_kernel(
    LOGPROBS, ENTROPY, OLD, ADVANTAGES, WEIGHTS, REF, ROLLOUT, OUT, D_LOGPROBS, D_ENTROPY, size,
    lower, upper, dual_clip, importance_cap, importance_floor, kl_coef, entropy_coef, min_entropy,
    CISPO: tl.constexpr, DUAL_CLIP: tl.constexpr, KL: tl.constexpr, IMPORTANCE: tl.constexpr,
    MIN_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute weighted loss, statistics and gradients in (logprob, entropy) of BLOCK tokens."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = token < size
    logprob = tl.load(LOGPROBS + token, mask=mask)
    entropy = tl.load(ENTROPY + token, mask=mask)
    weight, d_logprob = token_loss_rows(
        OUT, size, token, mask, logprob, entropy, OLD, ADVANTAGES, WEIGHTS, REF, ROLLOUT,
        lower, upper, dual_clip, importance_cap, importance_floor,
        kl_coef, entropy_coef, min_entropy,
        CISPO, DUAL_CLIP, KL, IMPORTANCE, MIN_ENTROPY,
    )
    tl.store(D_LOGPROBS + token, weight * d_logprob, mask=mask)
    tl.store(D_ENTROPY + token, -entropy_coef * weight, mask=mask)
# fmt: on


def token_losses(
    logprobs: Tensor, entropy: Tensor, terms: TokenTerms, objective: PolicyObjective
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `reference.token_losses`; one launch for loss, statistics and gradients, float32."""
    size = len(logprobs)
    outputs = logprobs.new_empty((NUM_OUTPUTS, size), dtype=torch.float32)
    d_logprobs, d_entropy = logprobs.new_empty((2, size), dtype=torch.float32)
    if size:
        token_kernel[(triton.cdiv(size, BLOCK),)](
            logprobs,
            entropy,
            *terms,
            outputs,
            d_logprobs,
            d_entropy,
            size,
            **objective.arguments(),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return outputs, d_logprobs, d_entropy if objective.entropy_coef else None
