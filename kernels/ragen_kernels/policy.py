"""Log-probabilities and the policy loss as autograd functions: from logits, and from hidden states
without ever holding the full logits.

The gradient of a token's loss needs only its own row of logits. So per chunk of rows one GEMM makes
logits, the row operations turn them into loss, statistics and, in place, d_logits, and two GEMMs
make d_hidden and accumulate d_weight in float32; `backward` merely scales them. Rows of weight 0
are dropped before the first GEMM. Chunks run over tokens, never over the vocabulary, so that
d_hidden of a row is one GEMM and is rounded once.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ragen_kernels.dispatch import logits_gradient, policy_rows_, row_statistics
from ragen_kernels.launch import CHUNK_BYTES, accumulate_matmul, logits_dtype, put_logits
from ragen_kernels.objective import (
    NUM_OUTPUTS,
    Likeliest,
    PolicyObjective,
    PolicyStats,
    TokenTerms,
)
from ragen_kernels.reference import compute_dtype, likeliest_tokens
from ragen_kernels.sequences import over_sequences
from ragen_kernels.vocab import (
    RowStatistics,
    VocabShard,
    check_rows,
    reduce_over_group,
    vocab_shard,
)

TILE_ROWS = 128
ROW_ALIGNMENT = 16
"""Rows of logits are a multiple of 16 elements apart, even for an odd vocabulary: the divisibility
that Triton can assume of a stride.
"""


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, shard, temperature):
        rows = reduce_over_group(row_statistics(logits, labels, shard, temperature), shard.group)
        ctx.save_for_backward(logits, labels, *rows)
        ctx.shard, ctx.temperature = shard, temperature
        ctx.set_materialize_grads(False)
        return rows.logprobs, rows.entropy

    @staticmethod
    def backward(ctx, d_logprobs, d_entropy):
        logits, labels, *statistics = ctx.saved_tensors
        rows = RowStatistics(*statistics)
        d_logprobs = torch.zeros_like(rows.lse) if d_logprobs is None else d_logprobs.contiguous()
        d_entropy = None if d_entropy is None else d_entropy.contiguous()
        d_logits = logits_gradient(
            logits,
            torch.empty_like(logits),
            labels,
            rows,
            d_logprobs,
            d_entropy,
            ctx.shard,
            ctx.temperature,
        )
        return d_logits, None, None, None


def logprob_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_valid: int | None = None,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label and entropy of each row, differentiable in `logits`.

    Args:
        logits: [T, V/tp], this rank's vocabulary shard.
        labels: [T] int64 global ids.
        temperature: divides the logits.
        vocab_start: global id of the shard's first column.
        vocab_valid: size of the whole vocabulary without padding; padded columns get probability 0.
        group: tensor-parallel group, for one all-gather of [3, T]. None: `logits` is the whole
            vocabulary.

    Returns:
        logprobs [T] and entropy [T], float64 for float64 logits and float32 for all others. On CUDA
        a label outside the vocabulary gives NaN: checking it would make the host wait.

    Raises:
        ValueError: bad shapes, temperature or vocabulary bounds, or on a CPU a label outside the
            vocabulary.
    """
    check_rows(logits, labels, temperature)
    shard = vocab_shard(logits.shape[1], vocab_start, vocab_valid, group)
    return _LogprobEntropy.apply(logits, labels.contiguous(), shard, temperature)


def empty_rows(hidden: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """[num_rows, num_columns] logits of hidden states, with every row aligned. The padding between
    rows is zero, because a product may read it (oneDNN's in bfloat16 do on processors with AMX),
    and NaN times zero is NaN.
    """
    padded = -(-num_columns // ROW_ALIGNMENT) * ROW_ALIGNMENT
    rows = hidden.new_empty((num_rows, padded), dtype=logits_dtype(hidden))
    rows[:, num_columns:] = 0
    return rows[:, :num_columns]


def chunk_rows(num_rows: int, row_bytes: int, budget: int, chunk_tokens: int | None) -> list[slice]:
    """Return the slices of `chunk_tokens` rows, or equal chunks of whole GEMM tiles within `budget`
    bytes; one empty slice for no rows, so that every rank takes part in the collectives.
    """
    if chunk_tokens is None:
        most = max(TILE_ROWS, budget // row_bytes // TILE_ROWS * TILE_ROWS)
        num_chunks = max(1, -(-num_rows // most))
        chunk_tokens = max(1, -(-num_rows // (num_chunks * TILE_ROWS))) * TILE_ROWS
    starts = range(0, max(1, num_rows), chunk_tokens)
    return [slice(start, min(start + chunk_tokens, num_rows)) for start in starts]


def _active_rows(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ids: Tensor | None,
    temperature: float,
    vocabulary: tuple[int, int | None, ProcessGroup | None],
    chunk_tokens: int | None,
) -> tuple[Tensor, Tensor, VocabShard, list[slice]]:
    """Return the hidden states and labels of the active rows (None: all), the shard, and the chunks
    of the rows. Raises ValueError as `linear_policy_loss` says.
    """
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
    check_rows(hidden, labels, temperature)
    shard = vocab_shard(len(weight), *vocabulary)
    if ids is not None:
        hidden, labels = hidden.index_select(0, ids), labels[ids]
    row_bytes = shard.num_entries * logits_dtype(hidden).itemsize
    chunks = chunk_rows(len(labels), row_bytes, CHUNK_BYTES[hidden.device.type], chunk_tokens)
    return hidden, labels, shard, chunks


@torch.no_grad()
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    rows: Tensor,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_valid: int | None = None,
    group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
    top_k: int = 0,
    top_below: int | None = None,
) -> tuple[Tensor, ...]:
    """Return log-probabilities and entropies of labels straight from hidden states, without
    gradient.

    Args:
        hidden: [T, H].
        weight: [V/tp, H], this rank's rows of the LM head.
        labels: [T] int64 global ids.
        rows: [M] int64 indices of the active rows, equal on all ranks of `group`; other rows are
            skipped and come back as 0.
        temperature, vocab_start, vocab_valid, group: see `logprob_entropy`.
        chunk_tokens: rows per chunk of logits; None takes a byte budget.
        top_k: number of likeliest tokens that are returned too.
        top_below: bound of their ids; None: the vocabulary's.

    Returns:
        logprobs [T] and entropy [T]; see `logprob_entropy`. On CUDA logits are rounded to the
        dtype of `hidden`. Then, `top_k` [T] each, log-probabilities of the likeliest tokens, and
        their ids, in the same dtype, which holds ids up to 2^24 exactly.

    Raises:
        ValueError: bad shapes, temperature, vocabulary bounds or chunk_tokens, more likeliest
            tokens than the vocabulary has, or on a CPU an active label out of range.
    """
    result = hidden.new_zeros((2 + 2 * top_k, len(hidden)), dtype=compute_dtype(hidden))
    hidden, labels, shard, chunks = _active_rows(
        hidden,
        weight,
        labels,
        rows,
        temperature,
        (vocab_start, vocab_valid, group),
        chunk_tokens,
    )
    below = shard.num_entries if top_below is None else min(top_below, shard.num_entries)
    if top_k > below:
        raise ValueError(f"top_k ({top_k}) must be at most the {below} tokens; lower it")
    top = top_k, below
    found = _logprobs_of_rows(hidden, weight, labels, shard, temperature, chunks, top)
    return result.index_copy_(1, rows, found).unbind()


@torch.no_grad()
def _logprobs_of_rows(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    shard: VocabShard,
    temperature: float,
    chunks: list[slice],
    top: tuple[int, int] = (0, 0),
) -> Tensor:
    """Return log-probabilities and entropies [2, M] of the active rows, chunk by chunk, with the
    log-probabilities and ids of the likeliest tokens [2 + 2 K, M]. `top`: K, the bound of the ids.
    """
    result = hidden.new_empty((2 + 2 * top[0], len(hidden)), dtype=compute_dtype(hidden))
    buffer = empty_rows(hidden, chunks[0].stop, len(weight))
    for part in chunks:
        logits = buffer[: part.stop - part.start]
        put_logits(logits, hidden[part], weight)
        local = row_statistics(logits, labels[part], shard, temperature)
        rows = reduce_over_group(local, shard.group)
        result[:2, part] = torch.stack([rows.logprobs, rows.entropy])
        if top[0]:
            ids, logprobs = likeliest_tokens(logits, rows.lse, *top, shard, temperature)
            result[2:, part] = torch.cat([logprobs, ids.to(logprobs.dtype)], 1).T
    return result


class _LinearPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, labels, terms, objective, shard, temperature, chunks, repeats, teacher
    ):
        d_hidden = torch.empty_like(hidden)
        wide = compute_dtype(weight)
        is_trained = ctx.needs_input_grad[1]
        d_weight = torch.zeros_like(weight, dtype=wide) if is_trained else None
        num_outputs = NUM_OUTPUTS + (teacher is not None)
        outputs = hidden.new_empty((num_outputs, len(terms.weights)), dtype=wide)
        buffer = empty_rows(hidden, chunks[0].stop, len(weight))
        for part in chunks:
            rows = buffer[: part.stop - part.start]  # [C, V/tp] logits, then their gradient
            put_logits(rows, hidden[part], weight)
            tokens, row_of = part, None
            if repeats is not None:
                tokens = slice(int(repeats[: part.start].sum()), int(repeats[: part.stop].sum()))
                row_of = _sharing(repeats[part], rows.device)
            outputs[:, tokens] = policy_rows_(
                rows,
                labels[part],
                terms.at(tokens),
                objective,
                shard,
                temperature,
                row_of,
                None if teacher is None else teacher.at(tokens),
            )
            seen, d_seen = hidden[part], d_hidden[part]
            rows = rows.to(weight.dtype)
            # Most rows have no gradient where only forking tokens are taught. Leaving them out is
            # worth a wait for their number on the CPU alone.
            if objective.min_entropy and rows.device.type == "cpu":
                taught = rows.any(dim=1).nonzero().squeeze(1)
                seen, rows = seen[taught], rows[taught]
                d_seen.zero_()[taught] = rows @ weight
            else:
                torch.mm(rows, weight, out=d_seen)
            if d_weight is not None:
                accumulate_matmul(d_weight, rows.T, seen)
        ctx.wide = wide
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.mark_non_differentiable(outputs)
        return outputs[0].sum(), outputs

    @staticmethod
    def backward(ctx, d_loss, _):
        d_hidden, d_weight = ctx.saved_tensors
        scaled = None
        if d_weight is not None:
            # One pass, without a float32 product of the size of the weight.
            scaled = d_weight.new_empty(d_weight.shape, dtype=d_hidden.dtype)
            torch.mul(d_weight, d_loss, out=scaled)
        # torch would round a bfloat16 factor before multiplying.
        d_hidden = (d_hidden.to(ctx.wide) * d_loss).to(d_hidden.dtype)
        return d_hidden, scaled, *[None] * 8


def _sharing(repeats: Tensor, device: torch.device) -> Tensor:
    """[sum of `repeats`] the row that each token shares, on `device`."""
    row_of = torch.arange(len(repeats)).repeat_interleave(repeats)
    if device.type == "cuda":  # through pinned memory, so that the host does not wait
        row_of = row_of.pin_memory().to(device, non_blocking=True)
    return row_of


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    objective: PolicyObjective,
    *,
    rows: Tensor | None = None,
    repeats: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    teacher: Likeliest | None = None,
    cu_seqlens: Tensor | None = None,
    context_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_valid: int | None = None,
    group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, PolicyStats]:
    """sum(weights * token_loss) straight from hidden states, differentiable in both operands.

    Under tensor parallelism d_hidden is this rank's partial sum: the caller reduces it over
    `group`, as the backward of Megatron's copy-to / gather-from region mappings does. Gradients are
    made with the loss, but for a frozen weight's. Objectives over sequences may take another GEMM.

    Args:
        hidden: [T, H].
        weight: [V/tp, H], this rank's rows of the LM head.
        labels: [T] int64 global ids.
        old_logprobs: [T], constants; None: the log-probabilities of this evaluation, ratio 1.
        advantages: [T], constants.
        weights: [T]; mask, aggregation and global normaliser in one factor, equal on all ranks of
            `group`. 0 takes the token out: it costs nothing, and none of its values, not even a
            NaN, reaches the loss, the gradients or the statistics.
        objective: the token objective.
        rows: [M] int64, where `weights` is not 0; None: the host waits for the device to learn it.
        repeats: [E] int64 in host memory, for tokens that share their hidden state and label.
            Then `hidden` is [E, H], `labels` [E], and the first `repeats[0]` rows are of the first.
        ref_logprobs: [T], needed with `objective.kl_kind`.
        rollout_logprobs: [T], needed with `objective.importance_cap`.
        teacher: [T, K], needed with `objective.teacher_coef`, else without effect.
        cu_seqlens: [S + 1] int offsets, needed by an objective over sequences, which must be whole;
            they consist of their tokens of nonzero weight.
        context_group: ranks that have tokens of the S sequences (None: all tokens are here).
        temperature, vocab_start, vocab_valid, group: see `logprob_entropy`.
        chunk_tokens: rows per chunk of logits; None takes a byte budget.

    Returns:
        The scalar loss and the per-token statistics. The gradient of the logits is rounded to the
        dtype of `hidden`, and on CUDA the logits are.

    Raises:
        ValueError: bad shapes or bounds, log-probabilities that a term lacks, a label out of range
            on a CPU.
    """
    objective.check_inputs(ref_logprobs, rollout_logprobs, cu_seqlens, teacher)
    rows = weights.nonzero().squeeze(1) if rows is None else rows
    active, vocabulary = rows if repeats is None else None, (vocab_start, vocab_valid, group)
    hidden, labels, shard, chunks = _active_rows(
        hidden, weight, labels, active, temperature, vocabulary, chunk_tokens
    )
    terms = TokenTerms(old_logprobs, advantages, weights, ref_logprobs, rollout_logprobs).at(rows)
    if objective.is_over_sequences:

        def current() -> Tensor:
            now = _logprobs_of_rows(hidden, weight, labels, shard, temperature, chunks)[0]
            return now if repeats is None else now[_sharing(repeats, now.device)]

        assert cu_seqlens is not None  # `check_inputs`
        terms = over_sequences(terms, current, rows, cu_seqlens, objective, context_group)
    teacher = teacher.at(rows) if teacher is not None and objective.teacher_coef else None
    loss, outputs = _LinearPolicyLoss.apply(
        hidden, weight, labels, terms, objective, shard, temperature, chunks, repeats, teacher
    )
    found = hidden.new_zeros((len(outputs), len(weights)), dtype=torch.float32)
    stats = PolicyStats(*found.index_copy_(1, rows, outputs.float())[1:].unbind())
    return loss, stats if objective.kl_kind else replace(stats, ref_kl=None)
