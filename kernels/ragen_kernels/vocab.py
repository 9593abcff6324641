"""One softmax over a vocabulary that is split over tensor-parallel ranks.

Every rank reduces its shard to three numbers per row; one all-gather of [3, T] makes them global.
With shard log-sum-exps l_r and shard means m_r = E_{p_r}[x]: l = logsumexp_r(l_r), m = sum_r
exp(l_r - l) m_r, and the target logit is the sum over ranks, because every rank but its owner
contributes 0. The entropy is l - m.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class RowStatistics(NamedTuple):
    """Softmax statistics of rows x = logits / temperature: each [T] in the compute dtype."""

    lse: Tensor  # log(sum(exp(x)))
    mean: Tensor  # sum(softmax(x) * x)
    target: Tensor  # x at the label, 0 where the label is on another shard

    @property
    def logprobs(self) -> Tensor:
        return self.target - self.lse

    @property
    def entropy(self) -> Tensor:
        return self.lse - self.mean


def combine_shards(lse: Tensor, mean: Tensor, target: Tensor) -> RowStatistics:
    """[R, T] statistics of R vocabulary shards -> [T] statistics of the whole vocabulary.

    A shard of padding only has lse = -inf and mean = 0; at least one shard must hold a real entry.
    """
    total = torch.logsumexp(lse, dim=0)
    return RowStatistics(total, torch.sum(torch.exp(lse - total) * mean, dim=0), target.sum(dim=0))


def is_split(group: dist.ProcessGroup | None) -> bool:
    """Return whether the statistics of a row have to cross ranks."""
    return group is not None and dist.get_world_size(group) > 1


def gathered(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the tensors [R, ...] of the R ranks of a group, which have one shape."""
    found = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    dist.all_gather(list(found.unbind(0)), tensor.contiguous(), group=group)
    return found


def reduce_over_group(local: RowStatistics, group: dist.ProcessGroup | None) -> RowStatistics:
    """Make shard statistics global with one all-gather; the identity without rows, without a group,
    or alone in it.
    """
    if not is_split(group) or local.lse.numel() == 0:
        return local
    shards = gathered(torch.stack(tuple(local)), group)  # [R, 3, T]
    return combine_shards(shards[:, 0], shards[:, 1], shards[:, 2])


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The columns of the vocabulary that this rank holds.

    Attributes:
        start: global id of the first column.
        num_valid: leading columns that are real entries; those behind are padding with probability
            0.
        num_entries: real entries of the whole vocabulary.
        group: tensor-parallel group, None for an unsplit vocabulary.
    """

    start: int
    num_valid: int
    num_entries: int
    group: dist.ProcessGroup | None

    def check_labels(self, labels: Tensor) -> None:
        """Raise ValueError for a label outside the vocabulary. Reads the labels on the host."""
        if not labels.numel():
            return
        least, most = (int(bound) for bound in labels.aminmax())
        if least < 0 or most >= self.num_entries:
            raise ValueError(
                f"labels must be in [0, {self.num_entries}), got {least}..{most}; give masked rows"
                " weight 0, or a valid label"
            )


def vocab_shard(
    num_columns: int, vocab_start: int, vocab_valid: int | None, group: dist.ProcessGroup | None
) -> VocabShard:
    """Validate where a shard of `num_columns` columns lies; arguments: see `logprob_entropy`."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if vocab_start != rank * num_columns:
        raise ValueError(
            f"vocab_start must be rank * V/tp = {rank} * {num_columns}, got {vocab_start}; "
            "pass the tensor-parallel group together with this rank's shard"
        )
    num_entries = num_columns * size if vocab_valid is None else vocab_valid
    if not 1 <= num_entries <= num_columns * size:
        raise ValueError(
            f"vocab_valid must be in [1, {num_columns * size}], the columns of all {size} shards,"
            f" got {vocab_valid}; pass the size of the vocabulary without padding"
        )
    num_valid = min(max(num_entries - vocab_start, 0), num_columns)
    return VocabShard(vocab_start, num_valid, num_entries, group)


def check_rows(rows: Tensor, labels: Tensor, temperature: float) -> None:
    """Raise ValueError unless there is one label per row and the temperature is usable."""
    if rows.dim() != 2 or labels.shape != rows.shape[:1]:
        raise ValueError(
            f"need one label per row: rows [T, .] and labels [T], got {tuple(rows.shape)} and"
            f" {tuple(labels.shape)}; flatten batch and sequence first"
        )
    if not temperature > 0.0:
        raise ValueError(
            f"temperature must be > 0, got {temperature}; use 1.0, greedy decoding has no"
            " log-probability"
        )
