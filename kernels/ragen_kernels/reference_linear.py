"""The LM head fused with the policy loss, in plain torch: never more than a chunk of logits in
memory.

The gradient of a token's loss needs only its own row of logits, so a chunk is turned into d_hidden
and its share of d_weight while its logits are at hand, and `backward` merely scales them. Rows of
weight 0 are dropped before the GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ragen_kernels.objective import LINEAR_MODES, LinearMode, PolicyObjective, PolicyStats
from ragen_kernels.reference import (
    compute_dtype,
    logits_gradient_,
    policy_loss_from_logprobs,
    row_statistics,
)
from ragen_kernels.vocab import (
    RowStatistics,
    VocabShard,
    check_rows,
    reduce_over_group,
    vocab_shard,
)

CHUNK_BYTES = 4 << 20
"""Logits of one chunk: a few MiB stay in the cache of a CPU core over the passes of the softmax."""
MIN_CHUNK_TOKENS = 128
"""With fewer rows, re-reading the LM head for every chunk costs more than the smaller chunk saves.
"""


@dataclass(frozen=True, slots=True)
class VocabHead:
    """One vocabulary shard of the LM head: scaled logits x = (hidden / temperature) @ weight.T,
    exact or rounded.
    """

    weight: Tensor  # [V', H], valid rows only, in the compute dtype
    shard: VocabShard
    temperature: float
    logits_dtype: torch.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [C, H] -> logits [C, V'] in the compute dtype, rounded to `logits_dtype` on the
        way.
        """
        logits = hidden.to(self.weight.dtype) @ self.weight.T
        if self.logits_dtype != logits.dtype:
            logits = logits.to(self.logits_dtype).to(logits.dtype)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def add_gradients(
        self, d_logits: Tensor, hidden: Tensor, d_hidden: Tensor, d_weight: Tensor
    ) -> None:
        """Write d_hidden [C, H] of a chunk and add its share to d_weight [V', H]. Consumes
        `d_logits`.
        """
        if self.temperature != 1.0:
            d_logits /= self.temperature
        torch.mm(d_logits, self.weight, out=d_hidden)
        d_weight.addmm_(d_logits.T, hidden.to(d_weight.dtype))


def build_head(
    hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float, fp32_logits: bool
) -> VocabHead:
    """The shard's valid rows in the compute dtype of `hidden`."""
    dtype = compute_dtype(hidden)
    logits_dtype = dtype if fp32_logits else hidden.dtype
    return VocabHead(weight.detach()[: shard.num_valid].to(dtype), shard, temperature, logits_dtype)


def split_rows(num_rows: int, size: int) -> Iterator[slice]:
    """Slices of `size` rows; one empty slice for no rows, so that every rank takes part in the
    collectives.
    """
    for start in range(0, max(1, num_rows), size):
        yield slice(start, min(start + size, num_rows))


def default_chunk_tokens(head: VocabHead) -> int:
    """Rows whose logits fit into CHUNK_BYTES."""
    return max(MIN_CHUNK_TOKENS, CHUNK_BYTES // max(1, len(head.weight) * head.weight.itemsize))


def check_linear_arguments(
    hidden: Tensor, weight: Tensor, chunk_tokens: int | None, mode: LinearMode = "chunk"
) -> None:
    """Raise ValueError for operands that cannot be multiplied, a chunk without rows, or an unknown
    mode.
    """
    if mode not in LINEAR_MODES:
        raise ValueError(f"mode must be one of {LINEAR_MODES}, got {mode!r}")
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden and weight must have one dtype, got {hidden.dtype} and {weight.dtype};"
            " cast one"
        )
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"need hidden [T, H] and weight [V/tp, H], got {tuple(hidden.shape)} and"
            f" {tuple(weight.shape)}; flatten batch and sequence first"
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(
            f"chunk_tokens must be >= 1, got {chunk_tokens}; pass None for the default byte budget"
        )


@torch.no_grad()
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_valid: int | None = None,
    group: ProcessGroup | None = None,
    active: Tensor | None = None,
    with_entropy: bool = False,
    fp32_logits: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (and entropies) of labels straight from hidden states, without gradient.

    Args:
        hidden: [T, H]. weight: [V/tp, H], this rank's rows of the LM head. labels: [T] int64 global
        ids. temperature, vocab_start, vocab_valid, group: see `logprob_entropy`. active: [T] bool,
        equal on all ranks of `group`; other rows are skipped and come back as 0. None: all rows.
        with_entropy: also return the entropy. fp32_logits: keep the float32 accumulators of the
        GEMM; else logits are rounded to the dtype of `hidden`. chunk_tokens: rows per chunk of
        logits; None takes a byte budget.

    Returns:
        logprobs [T] and entropy [T] or None; float64 for float64 inputs, else float32.

    Raises:
        ValueError: bad shapes, temperature, vocabulary bounds or chunk_tokens, or an active label
        out of range.
    """
    check_linear_arguments(hidden, weight, chunk_tokens)
    rows = None if active is None else active.nonzero().squeeze(1)
    hidden, labels = (
        (hidden, labels) if rows is None else (hidden.index_select(0, rows), labels[rows])
    )
    check_rows(hidden, labels, temperature)
    shard = vocab_shard(len(weight), vocab_start, vocab_valid, group)
    shard.check_labels(labels)
    head = build_head(hidden, weight, shard, temperature, fp32_logits)
    result = head.weight.new_empty((2, len(labels)))  # log-probabilities and entropies
    for part in split_rows(len(labels), chunk_tokens or default_chunk_tokens(head)):
        local, _, _ = row_statistics(head.logits(hidden[part]), labels[part], shard.start)
        statistics = reduce_over_group(local, group)
        result[0, part], result[1, part] = statistics.logprobs, statistics.entropy
    if rows is not None:
        result = result.new_zeros((2, len(active))).index_copy_(1, rows, result)
    return result[0], result[1] if with_entropy else None


def token_gradients(
    rows: RowStatistics, terms: dict[str, Tensor | None], objective: PolicyObjective
) -> tuple[Tensor, PolicyStats, Tensor, Tensor | None]:
    """Loss, statistics and the loss's gradients in (logprobs, entropy), by autograd on the [C]
    definition.
    """
    with torch.enable_grad():
        logprobs = rows.logprobs.detach().requires_grad_()
        entropy = rows.entropy.detach().requires_grad_()
        loss, stats = policy_loss_from_logprobs(logprobs, entropy, **terms, objective=objective)
        d_logprobs, d_entropy = torch.autograd.grad(loss, (logprobs, entropy))
    return loss.detach(), stats, d_logprobs, d_entropy if objective.entropy_coef else None


class _LinearPolicyLoss(torch.autograd.Function):
    """Active rows only. Kept for backward: `save` d_logits, `chunk` the gradients, `recompute` a
    few numbers a row.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, terms, objective, head, chunks, mode):
        needs_grad = any(ctx.needs_input_grad[:2])
        d_hidden = head.weight.new_empty(hidden.shape) if needs_grad and mode == "chunk" else None
        d_weight = torch.zeros_like(head.weight) if needs_grad and mode == "chunk" else None
        losses, stats, kept = [], [], []
        for part in chunks:
            logits = head.logits(hidden[part])
            local, exps, peak = row_statistics(logits, labels[part], head.shard.start)
            rows = reduce_over_group(local, head.shard.group)
            part_terms = {
                name: None if term is None else term[part] for name, term in terms.items()
            }
            loss, part_stats, d_logprobs, d_entropy = token_gradients(rows, part_terms, objective)
            losses.append(loss)
            stats.append([getattr(part_stats, field.name) for field in fields(PolicyStats)])
            if not needs_grad:
                continue
            if mode == "recompute":
                kept.append((rows, d_logprobs, d_entropy))
                continue
            d_logits = logits_gradient_(
                exps, peak, logits, labels[part], head.shard.start, rows, d_logprobs, d_entropy
            )
            if mode == "save":
                kept.append(d_logits)
            else:
                head.add_gradients(d_logits, hidden[part], d_hidden[part], d_weight)
        ctx.save_for_backward(hidden, labels, d_hidden, d_weight)
        ctx.kept, ctx.head, ctx.chunks, ctx.mode = kept, head, chunks, mode
        ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype
        outputs = [
            None if column[0] is None else torch.cat(column) for column in zip(*stats, strict=True)
        ]
        ctx.mark_non_differentiable(*(x for x in outputs if x is not None))
        return torch.stack(losses).sum(), *outputs

    @staticmethod
    def backward(ctx, d_loss, *_):
        hidden, labels, d_hidden, d_weight = ctx.saved_tensors
        head = ctx.head
        if ctx.mode != "chunk":
            d_hidden, d_weight = head.weight.new_empty(hidden.shape), torch.zeros_like(head.weight)
            for part, kept in zip(ctx.chunks, ctx.kept, strict=True):
                d_logits = (
                    kept.clone()
                    if ctx.mode == "save"
                    else _recomputed(head, hidden[part], labels[part], *kept)
                )
                head.add_gradients(d_logits, hidden[part], d_hidden[part], d_weight)
        full = d_weight.new_zeros(ctx.weight_shape, dtype=ctx.weight_dtype)
        full[: len(d_weight)] = d_weight * d_loss
        return (d_hidden * d_loss).to(hidden.dtype), full, None, None, None, None, None, None


def _recomputed(
    head: VocabHead,
    hidden: Tensor,
    labels: Tensor,
    rows: RowStatistics,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
) -> Tensor:
    """d loss / d logits of a chunk, from its hidden states and the statistics of the forward pass."""
    logits = head.logits(hidden)
    exps = torch.exp(logits - rows.lse[:, None])
    return logits_gradient_(
        exps, rows.lse, logits, labels, head.shard.start, rows, d_logprobs, d_entropy
    )


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
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
    fp32_logits: bool = False,
    chunk_tokens: int | None = None,
    mode: LinearMode = "chunk",
) -> tuple[Tensor, PolicyStats]:
    """The policy loss of `policy_loss_from_logprobs` straight from hidden states, differentiable in
    both operands.

    Under tensor parallelism d_hidden is this rank's partial sum: the caller reduces it over
    `group`, as the backward of Megatron's copy-to / gather-from region mappings does.

    Args:
        hidden: [T, H]. weight: [V/tp, H], this rank's rows of the LM head. labels: [T] int64 global
        ids. old_logprobs, advantages, weights, objective, ref_logprobs, rollout_logprobs: see
        `policy_loss_from_logprobs`.
            Rows with weight 0 cost nothing; `weights` must be equal on all ranks of `group`.
        temperature, vocab_start, vocab_valid, group: see `logprob_entropy`. fp32_logits: keep the
        float32 accumulators of the GEMM; else logits are rounded to the dtype of `hidden`.
        chunk_tokens: rows per chunk of logits; None takes a byte budget. mode: what is kept from
        forward to backward. "save": the logits' gradient [T, V/tp]; "chunk": d_hidden and
            d_weight; "recompute": a few numbers per row, at the price of a second logits GEMM.

    Returns:
        The scalar loss and the per-token statistics.

    Raises:
        ValueError: bad shapes, mode, temperature, vocabulary bounds, chunk_tokens, or an active
        label out of range.
    """
    check_linear_arguments(hidden, weight, chunk_tokens, mode)
    objective.check_inputs(ref_logprobs, rollout_logprobs)
    num_tokens = len(hidden)
    rows = weights.nonzero().squeeze(1)
    check_rows(hidden, labels, temperature)
    hidden, labels = hidden.index_select(0, rows), labels[rows]
    shard = vocab_shard(len(weight), vocab_start, vocab_valid, group)
    shard.check_labels(labels)
    terms = {
        "old_logprobs": old_logprobs[rows],
        "advantages": advantages[rows],
        "weights": weights[rows],
        "ref_logprobs": None if ref_logprobs is None else ref_logprobs[rows],
        "rollout_logprobs": None if rollout_logprobs is None else rollout_logprobs[rows],
    }
    head = build_head(hidden, weight, shard, temperature, fp32_logits)
    chunks = list(split_rows(len(rows), chunk_tokens or default_chunk_tokens(head)))
    loss, *stats = _LinearPolicyLoss.apply(
        hidden, weight, labels, terms, objective, head, chunks, mode
    )
    full = [None if x is None else x.new_zeros(num_tokens).index_copy_(0, rows, x) for x in stats]
    return loss, PolicyStats(*full)
