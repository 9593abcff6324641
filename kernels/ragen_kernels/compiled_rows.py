"""Softmax statistics of rows of logits and their gradient on a processor, by the kernels of
`compiled.py`: what `reference.py` defines, in one pass each, where torch takes six.
"""

import torch
from torch import Tensor

from ragen_kernels import compiled, reference
from ragen_kernels.compiled import REALS, Integers, Reals, in_parts
from ragen_kernels.compiled_token import token_losses
from ragen_kernels.vocab import RowStatistics, VocabShard


def row_statistics(
    logits: Tensor, labels: Tensor, shard: VocabShard, temperature: float
) -> RowStatistics:
    """See `reference.row_statistics`."""
    if not _is_taken(logits, shard):
        return reference.row_statistics(logits, labels, shard, temperature)
    shard.check_labels(labels)
    rows = RowStatistics(*logits.new_empty(3, len(logits)))
    in_parts(
        compiled.row_statistics, len(logits), _flat(logits), logits.stride(0), shard.num_valid,
        1.0 / temperature, _columns(labels, shard), *(one.numpy() for one in rows),
    )  # fmt: skip
    return rows


def logits_gradient(
    logits: Tensor,
    out: Tensor,
    labels: Tensor,
    rows: RowStatistics,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    shard: VocabShard,
    temperature: float,
) -> Tensor:
    """See `reference.logits_gradient`."""
    if not (_is_taken(logits, shard) and _is_taken(out, shard) and out.dtype == logits.dtype):
        given = labels, rows, d_logprobs, d_entropy, shard, temperature
        return reference.logits_gradient(logits, out, *given)
    d_entropy = logits.new_empty(0) if d_entropy is None else d_entropy
    per_row = (one.contiguous().numpy() for one in (rows.lse, rows.mean, d_logprobs, d_entropy))
    in_parts(
        compiled.logits_gradient, len(logits), _flat(logits), logits.stride(0), shard.num_valid,
        1.0 / temperature, _columns(labels, shard), *per_row, _flat(out), out.stride(0),
        out.shape[1],
    )  # fmt: skip
    return out


def _is_taken(logits: Tensor, shard: VocabShard) -> bool:
    return (
        logits.dtype in REALS
        and logits.stride(1) == 1
        and len(logits) > 0
        and shard.num_valid > 0
        and type(logits) is Tensor
    )


def _flat(rows: Tensor) -> Reals:
    """Everything from the first row's first number to the last row's last."""
    rows = rows.detach()
    return rows.as_strided(((len(rows) - 1) * rows.stride(0) + rows.shape[1],), (1,)).numpy()


def _columns(labels: Tensor, shard: VocabShard) -> Integers:
    """Of each label in this shard, -1 where it has none. The labels are checked."""
    if shard.num_valid == shard.num_entries:
        return labels.contiguous().numpy()
    column = labels - shard.start
    return torch.where((column >= 0) & (column < shard.num_valid), column, -1).numpy()


policy_rows_ = reference.in_pieces(row_statistics, token_losses, logits_gradient)
