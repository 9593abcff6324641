"""The policy loss in plain torch: the specification of every kernel, and what CPU tensors run.

Differentiable in any float dtype; arithmetic is float64 for float64 inputs and float32 for all
others. Definitions of the terms: `objective.py`; of the split softmax: `vocab.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ragen_kernels.objective import MAX_LOG_RATIO, PolicyObjective, PolicyStats
from ragen_kernels.vocab import RowStatistics, check_rows, reduce_over_group, vocab_shard


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, float32 for every other float dtype."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


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
    """sum(weights * token_loss), differentiable in `logprobs` and `entropy`.

    Args:
        logprobs, entropy: [T], of the current weights. old_logprobs, advantages: [T], constants.
        weights: [T]; mask, aggregation and global normaliser in one factor. 0 takes the token out:
        nothing of it, not
            even a NaN, reaches the loss, the gradients or the statistics.
        objective: the token objective.
        ref_logprobs: [T], needed with `objective.kl_kind`.
        rollout_logprobs: [T], needed with `objective.importance_cap`.

    Returns:
        The scalar loss and the per-token statistics.

    Raises:
        ValueError: a term of the objective lacks its log-probabilities.
    """
    objective.check_inputs(ref_logprobs, rollout_logprobs)
    dtype = compute_dtype(logprobs)
    active = weights != 0

    def select(x: Tensor) -> Tensor:
        return torch.where(active, x, 0).to(dtype)

    logprobs, entropy, old_logprobs = select(logprobs), select(entropy), select(old_logprobs)
    advantages, weights = select(advantages), select(weights)

    log_ratio = torch.clamp(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(
        ratio, 1 - objective.clip_ratio_low, 1 + objective.clip_ratio_high
    )
    surrogate = torch.where(unclipped >= clipped, unclipped, clipped)

    is_dual_clipped = torch.zeros_like(active)
    if objective.dual_clip is not None:
        is_dual_clipped = (advantages < 0) & (ratio > objective.dual_clip)
        surrogate = torch.where(is_dual_clipped, -advantages * objective.dual_clip, surrogate)

    importance = torch.ones_like(surrogate)
    if objective.importance_cap is not None:
        drift = torch.clamp(old_logprobs - select(rollout_logprobs), -MAX_LOG_RATIO, MAX_LOG_RATIO)
        importance = torch.exp(drift).clamp(max=objective.importance_cap)

    token_loss = importance * surrogate - objective.entropy_coef * entropy
    ref_kl = None
    if objective.kl_kind is not None:
        ref_kl = kl_estimate(logprobs, select(ref_logprobs), objective.kl_kind)
        token_loss = token_loss + objective.kl_coef * ref_kl

    def report(x: Tensor) -> Tensor:
        return torch.where(active, x.detach(), 0).float()

    stats = PolicyStats(
        logprobs=report(logprobs),
        entropy=report(entropy),
        ratio=report(ratio),
        is_clipped_low=report((advantages < 0) & (ratio < 1 - objective.clip_ratio_low)),
        is_clipped_high=report((advantages > 0) & (ratio > 1 + objective.clip_ratio_high)),
        is_dual_clipped=report(is_dual_clipped),
        kl=report(ratio - 1 - log_ratio),
        importance=report(importance),
        ref_kl=None if ref_kl is None else report(ref_kl),
    )
    return torch.sum(weights * token_loss), stats


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens of the policy, log-ratio clamped to
    +-20.
    """
    log_ratio = torch.clamp(ref_logprobs - logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


def row_statistics(
    logits: Tensor, labels: Tensor, vocab_start: int
) -> tuple[RowStatistics, Tensor, Tensor]:
    """Reduce one vocabulary shard to its statistics.

    Args:
        logits: [T, V/tp], already divided by the temperature and cut to the valid columns.
        labels: [T] global ids; a label of another shard has target 0.
        vocab_start: global id of the first column.

    Returns:
        The shard's statistics, exp(logits - peak) [T, V/tp] and peak [T], the largest logit of each
        row.
    """
    if logits.shape[1] == 0:
        zeros = logits.new_zeros(logits.shape[0])
        return (
            RowStatistics(torch.full_like(zeros, -torch.inf), zeros, zeros),
            logits.clone(),
            zeros,
        )
    peak = logits.amax(dim=1)
    exps = torch.exp_(logits - peak[:, None])
    total = exps.sum(dim=1)
    mean = torch.linalg.vecdot(exps, logits) / total
    local, is_local = local_labels(labels, vocab_start, logits.shape[1])
    target = torch.where(is_local, logits.gather(1, local[:, None]).squeeze(1), 0)
    return RowStatistics(peak + total.log(), mean, target), exps, peak


def local_labels(labels: Tensor, vocab_start: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Column of each label in this shard (0 where it has none) and whether it has one: [T] int64
    and bool.
    """
    local = labels - vocab_start
    is_local = (local >= 0) & (local < num_columns)
    return torch.where(is_local, local, 0), is_local


def logits_gradient_(
    exps: Tensor,
    peak: Tensor,
    logits: Tensor,
    labels: Tensor,
    vocab_start: int,
    rows: RowStatistics,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
) -> Tensor:
    """d loss / d logits, written over `exps` = exp(logits - peak); shapes as in `row_statistics`.

    d = d_logprob * (onehot - p) - d_entropy * p * (logits - mean), with p = exp(logits - lse) over
    the whole vocabulary. The one-hot is added in the compute dtype: rounding to a narrower dtype
    comes after the subtraction.
    """
    if exps.shape[1] == 0:
        return exps
    norm = torch.exp(peak - rows.lse)
    if d_entropy is None:
        exps *= (-d_logprobs * norm)[:, None]
    else:
        constant, slope = (d_entropy * rows.mean - d_logprobs) * norm, -d_entropy * norm
        exps *= torch.addcmul(constant[:, None], slope[:, None], logits)
    local, is_local = local_labels(labels, vocab_start, exps.shape[1])
    return exps.scatter_add_(1, local[:, None], torch.where(is_local, d_logprobs, 0)[:, None])


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, temperature, shard, inplace_backward):
        scaled = logits[:, : shard.num_valid].to(compute_dtype(logits)) / temperature
        local, exps, peak = row_statistics(scaled, labels, shard.start)
        rows = reduce_over_group(local, shard.group)
        ctx.save_for_backward(logits, scaled, exps, peak, labels, *rows)
        ctx.temperature, ctx.vocab_start, ctx.inplace = temperature, shard.start, inplace_backward
        return rows.logprobs, rows.entropy

    @staticmethod
    def backward(ctx, d_logprobs, d_entropy):
        logits, scaled, exps, peak, labels, *rows = ctx.saved_tensors
        d_scaled = logits_gradient_(
            exps.clone(),
            peak,
            scaled,
            labels,
            ctx.vocab_start,
            RowStatistics(*rows),
            d_logprobs,
            d_entropy,
        )
        d_logits = logits.detach() if ctx.inplace else torch.empty_like(logits)
        d_logits[:, : d_scaled.shape[1]] = d_scaled / ctx.temperature
        d_logits[:, d_scaled.shape[1] :] = 0
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
    """Log-probability of each label and entropy of each row, differentiable in `logits`.

    Args:
        logits: [T, V/tp], this rank's vocabulary shard. labels: [T] int64 global ids. temperature:
        divides the logits. vocab_start: global id of the shard's first column. vocab_valid: size of
        the whole vocabulary without padding; padded columns get probability 0. group:
        tensor-parallel group, for one all-gather of [3, T]. None: `logits` is the whole vocabulary.
        inplace_backward: write the gradient over `logits`. Saves [T, V/tp]; for logits that nothing
        else will read.

    Returns:
        logprobs [T] and entropy [T], float64 for float64 logits and float32 for all others.

    Raises:
        ValueError: bad shapes, temperature or vocabulary bounds, or a label outside the vocabulary.
    """
    check_rows(logits, labels, temperature)
    shard = vocab_shard(logits.shape[1], vocab_start, vocab_valid, group)
    shard.check_labels(labels)
    return _LogprobEntropy.apply(logits, labels, temperature, shard, inplace_backward)


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
    """`policy_loss_from_logprobs` of `logprob_entropy`, differentiable in `logits`, which it may
    overwrite.

    On CUDA the gradient is written over `logits` while the loss is computed: use it on logits that
    nothing else reads.

    Args:
        logits, labels, temperature, vocab_start, vocab_valid, group: see `logprob_entropy`. The
        labels of rows with
            weight 0 are ignored.
        old_logprobs, advantages, weights, objective, ref_logprobs, rollout_logprobs: see
        `policy_loss_from_logprobs`.

    Raises:
        ValueError: see both functions.
    """
    logprobs, entropy = logprob_entropy(
        logits,
        torch.where(weights != 0, labels, 0),
        temperature=temperature,
        vocab_start=vocab_start,
        vocab_valid=vocab_valid,
        group=group,
    )
    return policy_loss_from_logprobs(
        logprobs,
        entropy,
        old_logprobs,
        advantages,
        weights,
        objective,
        ref_logprobs=ref_logprobs,
        rollout_logprobs=rollout_logprobs,
    )
