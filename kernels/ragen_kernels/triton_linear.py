"""The LM head fused with the policy loss, on cuBLAS and Triton: masked rows never reach a GEMM,
logits never HBM twice.

Per chunk of rows: one GEMM makes logits, the row kernel turns them into loss, statistics and, in
place, d_logits, and two GEMMs make d_hidden and accumulate d_weight in float32. Chunks run over
tokens, never over the vocabulary, so that d_hidden of a row is one GEMM and is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ragen_kernels.device import accumulate_matmul, matmul_into
from ragen_kernels.objective import LinearMode, PolicyObjective, PolicyStats
from ragen_kernels.reference_linear import check_linear_arguments, split_rows
from ragen_kernels.triton_policy import is_split, launch_policy_rows
from ragen_kernels.triton_rows import launch_gradient, launch_statistics, scale_
from ragen_kernels.triton_token import NUM_OUTPUTS, contiguous_terms, launch_tokens, unpack_outputs
from ragen_kernels.vocab import VocabShard, check_rows, reduce_over_group, vocab_shard

CHUNK_BYTES = 600 << 20
"""bf16 logits of one chunk: 2048 rows of 151936. Fewer rows, and re-reading the LM head starts to
show.
"""
TILE_ROWS = 128
ROW_ALIGNMENT = 16
"""Rows of logits are a multiple of 16 elements apart, also for an odd vocabulary: what triton can
know of a stride.
"""


class LogitsBuffer:
    """One chunk's worth of logits, and of their gradient: the same memory unless only the logits
    are float32.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, num_rows: int, fp32_logits: bool, with_gradient: bool
    ) -> None:
        self.weight = weight
        self.logits = empty_rows(
            hidden, num_rows, len(weight), torch.float32 if fp32_logits else hidden.dtype
        )
        self.gradient = self.logits
        if with_gradient and self.logits.dtype != hidden.dtype:
            self.gradient = empty_rows(hidden, num_rows, len(weight), hidden.dtype)

    def fill(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [C, V/tp] of `hidden` [C, H], and the buffer [C, V/tp] for their gradient."""
        logits = self.logits[: len(hidden)]
        return matmul_into(logits, hidden, self.weight.T), self.gradient[: len(hidden)]


def empty_rows(like: Tensor, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """[num_rows, num_columns] with every row aligned."""
    padded = -(-num_columns // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return like.new_empty((num_rows, padded), dtype=dtype)[:, :num_columns]


def chunk_rows(
    num_rows: int, shard: VocabShard, itemsize: int, chunk_tokens: int | None
) -> list[slice]:
    """Equal chunks of whole GEMM tiles. The budget is for the whole vocabulary, so that a shard
    needs its share.
    """
    if chunk_tokens is None:
        most = max(
            TILE_ROWS, CHUNK_BYTES // (shard.num_entries * itemsize) // TILE_ROWS * TILE_ROWS
        )
        num_chunks = max(1, -(-num_rows // most))
        chunk_tokens = max(1, -(-num_rows // (num_chunks * TILE_ROWS))) * TILE_ROWS
    return list(split_rows(num_rows, chunk_tokens))


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
    """See `reference_linear.linear_logprobs`; results are float32. A label outside the vocabulary
    gives NaN.
    """
    check_linear_arguments(hidden, weight, chunk_tokens)
    check_rows(hidden, labels, temperature)
    shard = vocab_shard(len(weight), vocab_start, vocab_valid, group)
    num_tokens = len(labels)
    ids = None if active is None else active.nonzero().squeeze(1)
    if ids is not None:
        hidden, labels = hidden.index_select(0, ids), labels[ids]
    result = hidden.new_empty(
        (2, len(labels)), dtype=torch.float32
    )  # log-probabilities and entropies
    chunks = chunk_rows(len(labels), shard, hidden.itemsize, chunk_tokens)
    buffer = LogitsBuffer(hidden, weight, chunks[0].stop, fp32_logits, with_gradient=False)
    for part in chunks:
        logits, _ = buffer.fill(hidden[part])
        rows = reduce_over_group(launch_statistics(logits, labels[part], shard, temperature), group)
        result[0, part], result[1, part] = rows.logprobs, rows.entropy
    if ids is not None:
        result = result.new_zeros((2, num_tokens)).index_copy_(1, ids, result)
    return result[0], result[1] if with_entropy else None


class _LinearPolicyLoss(torch.autograd.Function):
    """Kept for backward: `save` d_logits, `chunk` d_hidden and d_weight, `recompute` a few numbers
    per row.
    """

    @staticmethod
    def forward(
        ctx, hidden, weight, labels, terms, objective, shard, temperature, fp32_logits, chunks, mode
    ):
        needs_grad = any(ctx.needs_input_grad[:2])
        ctx.kept, ctx.grads = [], None
        if needs_grad and mode == "chunk":
            ctx.grads = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        outputs = hidden.new_empty((NUM_OUTPUTS, len(labels)), dtype=torch.float32)
        writes_gradient = needs_grad and mode != "recompute"
        buffer = LogitsBuffer(hidden, weight, chunks[0].stop, fp32_logits, writes_gradient)
        for part in chunks:
            logits, d_logits = buffer.fill(hidden[part])
            part_terms = {
                name: None if term is None else term[part] for name, term in terms.items()
            }
            if writes_gradient and not is_split(shard):
                outputs[:, part] = launch_policy_rows(
                    logits, d_logits, labels[part], part_terms, objective, shard, temperature
                )
            else:
                rows = reduce_over_group(
                    launch_statistics(logits, labels[part], shard, temperature), shard.group
                )
                outputs[:, part], d_logprobs, d_entropy = launch_tokens(
                    rows.logprobs, rows.entropy, part_terms, objective
                )
                d_entropy = d_entropy if objective.entropy_coef else None
                if needs_grad and mode == "recompute":
                    ctx.kept.append((rows, d_logprobs, d_entropy))
                elif needs_grad:
                    launch_gradient(
                        logits,
                        d_logits,
                        labels[part],
                        rows,
                        d_logprobs,
                        d_entropy,
                        shard,
                        temperature,
                    )
            if needs_grad and mode == "save":
                ctx.kept.append(d_logits)
            elif needs_grad and mode == "chunk":
                add_gradients(d_logits, hidden[part], weight, ctx.grads[0][part], ctx.grads[1])
        ctx.save_for_backward(hidden, weight, labels)
        ctx.settings = shard, temperature, fp32_logits, chunks, mode
        ctx.mark_non_differentiable(outputs)
        return outputs[0].sum(), outputs

    @staticmethod
    def backward(ctx, d_loss, _):
        hidden, weight, labels = ctx.saved_tensors
        shard, temperature, fp32_logits, chunks, mode = ctx.settings
        if mode != "recompute" and ctx.grads is None and ctx.kept is None:
            raise RuntimeError(
                "the gradient of linear_policy_loss was handed out already: evaluate the loss again"
            )
        d_hidden, d_weight = ctx.grads or (
            torch.empty_like(hidden),
            torch.zeros_like(weight, dtype=torch.float32),
        )
        if mode != "chunk":
            buffer = (
                None
                if mode == "save"
                else LogitsBuffer(hidden, weight, chunks[0].stop, fp32_logits, True)
            )
            for part, kept in zip(chunks, ctx.kept, strict=True):
                d_logits = kept
                if buffer is not None:
                    logits, d_logits = buffer.fill(hidden[part])
                    launch_gradient(logits, d_logits, labels[part], *kept, shard, temperature)
                add_gradients(d_logits, hidden[part], weight, d_hidden[part], d_weight)
        if mode != "recompute":
            ctx.grads = ctx.kept = None
        d_hidden, d_weight = scale_(d_hidden, d_loss), scale_(d_weight, d_loss).to(weight.dtype)
        return d_hidden, d_weight, *[None] * 8


def add_gradients(
    d_logits: Tensor, hidden: Tensor, weight: Tensor, d_hidden: Tensor, d_weight: Tensor
) -> None:
    """Write d_hidden [C, H] and add the chunk's share to d_weight [V/tp, H]."""
    matmul_into(d_hidden, d_logits, weight)
    accumulate_matmul(d_weight, d_logits.T, hidden)


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
    """See `reference_linear.linear_policy_loss`. An active label outside the vocabulary gives a NaN
    loss.

    One wait of the host for the device, to learn how many rows are active.
    """
    check_linear_arguments(hidden, weight, chunk_tokens, mode)
    check_rows(hidden, labels, temperature)
    objective.check_inputs(ref_logprobs, rollout_logprobs)
    shard = vocab_shard(len(weight), vocab_start, vocab_valid, group)
    num_tokens = len(labels)
    ids = weights.nonzero().squeeze(1)
    terms = contiguous_terms(old_logprobs, advantages, weights, ref_logprobs, rollout_logprobs)
    hidden, labels = hidden.index_select(0, ids), labels[ids]
    terms = {name: None if term is None else term[ids] for name, term in terms.items()}
    chunk_tokens = max(1, len(ids)) if mode == "save" else chunk_tokens
    chunks = chunk_rows(len(ids), shard, hidden.itemsize, chunk_tokens)
    loss, outputs = _LinearPolicyLoss.apply(
        hidden, weight, labels, terms, objective, shard, temperature, fp32_logits, chunks, mode
    )
    full = outputs.new_zeros((NUM_OUTPUTS, num_tokens)).index_copy_(1, ids, outputs)
    return loss, unpack_outputs(full, objective)
