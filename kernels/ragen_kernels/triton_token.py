"""The token objective of `objective.py` as Triton code: one definition for the row kernel and the
token kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragen_kernels.arguments import PER_TOKEN
from ragen_kernels.objective import KL_KINDS, MAX_LOG_RATIO, PolicyObjective, PolicyStats

BOUND = tl.constexpr(MAX_LOG_RATIO)
LOG2E = tl.constexpr(1.4426950408889634)

BLOCK = 256
NUM_WARPS = 4

# Rows of the [10, T] float32 output buffer: the weighted loss, then the fields of PolicyStats in
# their order.
NUM_OUTPUTS = 10


@triton.jit
def clamped_difference(a, b):
    """a - b clamped to +-20, and whether it was inside, where the clamp has gradient 1."""
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
    kl_coef,
    entropy_coef,
    DUAL_CLIP: tl.constexpr,
    KL: tl.constexpr,
    IMPORTANCE: tl.constexpr,
):
    """(token loss, its derivative in logprob, ratio, low, high, dual, kl, importance, ref_kl) of
    one token or many.
    """
    log_ratio, is_inside = clamped_difference(logprob, old_logprob)
    ratio = tl.exp2(log_ratio * LOG2E)
    unclipped = -advantage * ratio
    clipped = -advantage * tl.minimum(tl.maximum(ratio, lower), upper)
    surrogate = tl.maximum(unclipped, clipped)
    has_gradient = (unclipped >= clipped) & is_inside
    is_dual = (advantage < 0) & (ratio > dual_clip)
    if DUAL_CLIP:
        surrogate = tl.where(is_dual, -advantage * dual_clip, surrogate)
        has_gradient = has_gradient & (is_dual == 0)
    importance = ratio * 0.0 + 1.0
    if IMPORTANCE:
        drift, _ = clamped_difference(old_logprob, rollout_logprob)
        importance = tl.minimum(tl.exp2(drift * LOG2E), importance_cap)
    loss = importance * surrogate - entropy_coef * entropy
    d_logprob = tl.where(has_gradient, importance * unclipped, 0.0)
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
    low = ((advantage < 0) & (ratio < lower)).to(tl.float32)
    high = ((advantage > 0) & (ratio > upper)).to(tl.float32)
    dual = (is_dual & DUAL_CLIP).to(tl.float32)
    return loss, d_logprob, ratio, low, high, dual, ratio - 1.0 - log_ratio, importance, ref_kl


@triton.jit
def store_outputs(
    OUT, size, token, mask, loss, logprob, entropy, ratio, low, high, dual, kl, importance, ref_kl
):
    """Write the [10, size] outputs of the tokens where `mask`."""
    tl.store(OUT + token, loss, mask=mask)
    tl.store(OUT + size + token, logprob, mask=mask)
    tl.store(OUT + 2 * size + token, entropy, mask=mask)
    tl.store(OUT + 3 * size + token, ratio, mask=mask)
    tl.store(OUT + 4 * size + token, low, mask=mask)
    tl.store(OUT + 5 * size + token, high, mask=mask)
    tl.store(OUT + 6 * size + token, dual, mask=mask)
    tl.store(OUT + 7 * size + token, kl, mask=mask)
    tl.store(OUT + 8 * size + token, importance, mask=mask)
    tl.store(OUT + 9 * size + token, ref_kl, mask=mask)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=PER_TOKEN)
def token_kernel(
    LOGPROBS,
    ENTROPY,
    OLD,
    ADVANTAGES,
    WEIGHTS,
    REF,
    ROLLOUT,
    OUT,
    D_LOGPROBS,
    D_ENTROPY,
    size,
    lower,
    upper,
    dual_clip,
    importance_cap,
    kl_coef,
    entropy_coef,
    DUAL_CLIP: tl.constexpr,
    KL: tl.constexpr,
    IMPORTANCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighted loss, statistics and gradients in (logprob, entropy) of BLOCK tokens; all 0 where
    the weight is 0.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = token < size
    weight = tl.load(WEIGHTS + token, mask=mask, other=0.0).to(tl.float32)
    active = mask & (weight != 0)
    logprob = tl.load(LOGPROBS + token, mask=active, other=0.0).to(tl.float32)
    entropy = tl.load(ENTROPY + token, mask=active, other=0.0).to(tl.float32)
    old_logprob = tl.load(OLD + token, mask=active, other=0.0).to(tl.float32)
    advantage = tl.load(ADVANTAGES + token, mask=active, other=0.0).to(tl.float32)
    ref_logprob = tl.load(REF + token, mask=active, other=0.0).to(tl.float32) if KL else logprob
    rollout_logprob = (
        tl.load(ROLLOUT + token, mask=active, other=0.0).to(tl.float32) if IMPORTANCE else logprob
    )
    loss, d_logprob, ratio, low, high, dual, kl, importance, ref_kl = token_objective(
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
        kl_coef,
        entropy_coef,
        DUAL_CLIP,
        KL,
        IMPORTANCE,
    )
    present = active.to(tl.float32)
    store_outputs(
        OUT,
        size,
        token,
        mask,
        weight * loss,
        logprob,
        entropy,
        ratio * present,
        low,
        high,
        dual,
        kl,
        importance * present,
        ref_kl,
    )
    tl.store(D_LOGPROBS + token, weight * d_logprob, mask=mask)
    tl.store(D_ENTROPY + token, -entropy_coef * weight, mask=mask)


def objective_arguments(objective: PolicyObjective) -> dict[str, float | bool | int]:
    """The objective as kernel arguments: numbers at run time, so that only its shape is compiled
    in.
    """
    return {
        "lower": 1.0 - objective.clip_ratio_low,
        "upper": 1.0 + objective.clip_ratio_high,
        "dual_clip": float(objective.dual_clip or 0.0),
        "importance_cap": float(objective.importance_cap or 0.0),
        "kl_coef": float(objective.kl_coef),
        "entropy_coef": float(objective.entropy_coef),
        "DUAL_CLIP": objective.dual_clip is not None,
        "KL": 0 if objective.kl_kind is None else 1 + KL_KINDS.index(objective.kl_kind),
        "IMPORTANCE": objective.importance_cap is not None,
    }


def unpack_outputs(outputs: Tensor, objective: PolicyObjective) -> PolicyStats:
    """[10, T] kernel outputs -> statistics (views)."""
    *stats, ref_kl = outputs[1:].unbind()
    return PolicyStats(*stats, ref_kl=None if objective.kl_kind is None else ref_kl)


def launch_tokens(
    logprobs: Tensor, entropy: Tensor, terms: dict[str, Tensor | None], objective: PolicyObjective
) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs [10, T], d_logprobs [T], d_entropy [T]) of the weighted loss."""
    size = len(logprobs)
    outputs = logprobs.new_empty((NUM_OUTPUTS, size), dtype=torch.float32)
    d_logprobs, d_entropy = logprobs.new_empty((2, size), dtype=torch.float32)
    if size:
        token_kernel[(triton.cdiv(size, BLOCK),)](
            logprobs,
            entropy,
            terms["old_logprobs"],
            terms["advantages"],
            terms["weights"],
            terms["ref_logprobs"],
            terms["rollout_logprobs"],
            outputs,
            d_logprobs,
            d_entropy,
            size,
            **objective_arguments(objective),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return outputs, d_logprobs, d_entropy


class _PolicyLossFromLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logprobs, entropy, terms, objective):
        outputs, d_logprobs, d_entropy = launch_tokens(logprobs, entropy, terms, objective)
        ctx.save_for_backward(d_logprobs, d_entropy)
        ctx.dtypes = logprobs.dtype, entropy.dtype
        ctx.mark_non_differentiable(outputs)
        return outputs[0].sum(), outputs

    @staticmethod
    def backward(ctx, d_loss, _):
        grads = (grad * d_loss for grad in ctx.saved_tensors)
        return *(grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)), None, None


def policy_loss_from_logprobs(
    logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    objective: PolicyObjective,
    *,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, PolicyStats]:
    """See `reference.policy_loss_from_logprobs`; arithmetic is float32, one launch for loss and
    gradients.
    """
    objective.check_inputs(ref_logprobs, rollout_logprobs)
    terms = contiguous_terms(old_logprobs, advantages, weights, ref_logprobs, rollout_logprobs)
    loss, outputs = _PolicyLossFromLogprobs.apply(
        logprobs.contiguous(), entropy.contiguous(), terms, objective
    )
    return loss, unpack_outputs(outputs, objective)


def contiguous_terms(
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
) -> dict[str, Tensor | None]:
    """The per-token constants by name, each laid out as the kernels read them."""
    terms = {
        "old_logprobs": old_logprobs,
        "advantages": advantages,
        "weights": weights,
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
    }
    return {
        name: None if term is None else term.detach().contiguous() for name, term in terms.items()
    }
