"""The token objective of `objective.py` compiled for a processor: one pass over the tokens, where
torch takes fifty.

Kernels here call none of another file, and take its constants as arguments; see `compiled.py`.
"""

import math

from torch import Tensor

from ragen_kernels import reference
from ragen_kernels.compiled import REALS, Reals, in_parts, jit
from ragen_kernels.objective import MAX_LOG_RATIO, NUM_OUTPUTS, PolicyObjective, TokenTerms


def token_losses(
    logprobs: Tensor, entropy: Tensor, terms: TokenTerms, objective: PolicyObjective
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `reference.token_losses`."""
    if logprobs.dtype not in REALS:
        return reference.token_losses(logprobs, entropy, terms, objective)
    outputs = logprobs.new_empty(NUM_OUTPUTS, len(logprobs))
    d_logprobs = logprobs.new_empty(len(logprobs))
    terms = TokenTerms(*(logprobs if one is None else one.to(logprobs.dtype) for one in terms))
    arrays = (one.detach().contiguous().numpy() for one in (logprobs, entropy, *terms))
    in_parts(
        _lose_tokens, len(logprobs), *arrays, MAX_LOG_RATIO, *objective.arguments().values(),
        outputs.numpy(), d_logprobs.numpy(),
    )  # fmt: skip
    d_entropy = -objective.entropy_coef * terms.weights if objective.entropy_coef else None
    return outputs, d_logprobs, d_entropy


@jit(fastmath=())
def _within(x, low, high):
    """x, or the bound that it is beyond; a NaN is beyond none."""
    return low if x < low else high if x > high else x


@jit(fastmath=())
def _divergence(kind, difference, bound):
    """The KL estimate of a log-ratio, the reference's to the policy's, and its derivative in the
    policy's log-probability.
    """
    log_ratio = _within(difference, -bound, bound)
    if kind == 1:
        value, slope = -log_ratio, 1.0
    elif kind == 2:
        value, slope = log_ratio * log_ratio / 2, -log_ratio
    else:
        value, slope = math.expm1(log_ratio) - log_ratio, -math.expm1(log_ratio)
    return value, slope if log_ratio == difference else 0.0


@jit(fastmath=())
def _lose_tokens(
    first: int,
    last: int,
    logprobs: Reals,
    entropy: Reals,
    old_logprobs: Reals,
    advantages: Reals,
    weights: Reals,
    ref_logprobs: Reals,
    rollout_logprobs: Reals,
    max_log_ratio: float,
    lower: float,
    upper: float,
    dual_clip: float,
    importance_cap: float,
    importance_floor: float,
    kl_coef: float,
    entropy_coef: float,
    min_entropy: float,
    is_cispo: bool,
    has_dual_clip: bool,
    kl_kind: int,
    importance_mode: int,
    has_min_entropy: bool,
    outputs: Reals,
    d_logprobs: Reals,
) -> None:
    """Outputs [10, T] and the derivatives [T] of the weighted loss in the log-probabilities, of
    `PolicyObjective.arguments`. Which terms there are is as in `triton_token.token_objective`.
    """
    real = logprobs.dtype.type
    bound, zero, one = real(max_log_ratio), real(0), real(1)
    # bounds in the tokens' own precision, or one may be beyond what it is rounded to
    low, high, dual = real(lower), real(upper), real(dual_clip)
    cap, floor, least = real(importance_cap), real(importance_floor), real(min_entropy)
    for t in range(first, last):
        advantage, weight = advantages[t], weights[t]
        difference = logprobs[t] - old_logprobs[t]
        log_ratio = _within(difference, -bound, bound)
        ratio = math.exp(log_ratio)
        unclipped, clipped = -advantage * ratio, -advantage * _within(ratio, low, high)
        if is_cispo:
            surrogate, slope = clipped * logprobs[t], clipped
        elif unclipped >= clipped:
            surrogate, slope = unclipped, unclipped if log_ratio == difference else zero
        else:
            surrogate, slope = clipped, zero
        is_low = (is_cispo or advantage < 0) and ratio < low
        is_high = (is_cispo or advantage > 0) and ratio > high
        is_dual = has_dual_clip and advantage < 0 and ratio > dual
        if is_dual:
            surrogate, slope = -advantage * dual, zero
        if has_min_entropy and not entropy[t] >= least:
            surrogate, slope = zero, zero
        importance = one
        if importance_mode:
            drift = _within(old_logprobs[t] - rollout_logprobs[t], -bound, bound)
            importance = math.exp(drift)
            if importance_mode == 1:
                importance = _within(importance, zero, cap)
            elif not floor <= importance <= cap:
                importance = zero
        loss, d_loss = importance * surrogate - real(entropy_coef) * entropy[t], importance * slope
        ref_kl = zero
        if kl_kind:
            ref_kl, d_ref_kl = _divergence(kl_kind, ref_logprobs[t] - logprobs[t], bound)
            loss += real(kl_coef) * ref_kl
            d_loss += real(kl_coef) * d_ref_kl
        outputs[0, t] = weight * loss
        outputs[1, t], outputs[2, t], outputs[3, t] = logprobs[t], entropy[t], ratio
        outputs[4, t], outputs[5, t], outputs[6, t] = is_low, is_high, is_dual
        outputs[7, t] = ratio - one - log_ratio
        outputs[8, t], outputs[9, t] = importance, ref_kl
        d_logprobs[t] = weight * d_loss
