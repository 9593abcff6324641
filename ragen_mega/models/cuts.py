"""Cuts of a parameter over tensor-parallel ranks, in the trainer and in SGLang: one class for each
way, from which loader, exporter, resharding, checkpoints, plans and the optimizer are derived.

Megatron's layout: q, k and v are fused per key-value group ([q of the group, k, v], group by
group), gate and up per rank ([gate_r; up_r]); everything else is a plain slice. SGLang's layout:
[q_r; k_r; v_r] and [gate_r; up_r]. Read in SGLang 0.5.17: layers/linear.py (QKVParallelLinear,
MergedColumnParallelLinear), layers/vocab_parallel_embedding.py. Nothing of SGLang is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

Group = Literal["dense", "expert"]
"""The ranks that divide a parameter: tensor-parallel or expert-parallel ones."""
_VOCAB_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes of a model that a cut depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


def engine_vocab_size(vocab_size: int, size: int) -> int:
    """Return the rows of SGLang's embedding over all `size` ranks: a multiple of 64, and of 64 *
    `size` where `size` does not divide that.
    """
    padded = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    if padded % size == 0:
        return padded
    multiple = _VOCAB_MULTIPLE * size  # on a CPU; SGLang's GPU build refuses such a size
    return -(-vocab_size // multiple) * multiple


def trainer_vocab_size(vocab_size: int, size: int) -> int:
    """Return the rows of the trainer's embedding over all `size` ranks: as many as SGLang's, so
    that the shards are equal; one rank needs no padding.

    Qwen's own sizes are multiples of 128 and stay as they are.
    """
    return vocab_size if size == 1 else engine_vocab_size(vocab_size, size)


def head_rows(sizes: HeadSizes, rank: int, size: int) -> tuple[slice, slice]:
    """Return the rows of the full q, and of the full k or v, that rank `rank` of `size` of SGLang
    holds; with more ranks than key-value heads, these repeat.

    Raises ValueError where SGLang asserts.
    """
    heads, groups, dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    if heads % size or (groups % size and size % groups):
        raise ValueError(
            f"rollout_tensor_parallel_size ({size}) must divide the model's attention heads"
            f" ({heads}) and divide or be a multiple of its key-value heads ({groups}); choose"
            " another size"
        )
    copies = max(1, size // groups)  # consecutive ranks that hold the same key-value head
    q_rows, kv_rows = heads // size * dim, max(1, groups // size) * dim
    return slice(rank * q_rows, (rank + 1) * q_rows), slice(
        rank // copies * kv_rows, (rank // copies + 1) * kv_rows
    )


@dataclass(frozen=True)
class Cut:
    """Each tensor of a parameter is divided evenly along `axis`; a rank holds its parts of them one
    after the other. SGLang holds the same.
    """

    axis: int | None
    """Dimension of Megatron's tensor, None where every rank holds the parameter whole."""
    num_blocks: int = 1
    """Tensors of the parameter that are divided one by one."""
    group: ClassVar[Group] = "dense"
    is_padded: ClassVar[bool] = False
    """Whether the trainer adds rows of zeros, so that the ranks' parts are equal."""

    def num_parts(self, size: int) -> int:
        """Return the number of different parts that `size` ranks of the trainer hold."""
        return 1 if self.axis is None else size

    def padded(self, whole: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Return the shape of `size` ranks' parts together, from the shape on one rank."""
        return whole

    def boxes(self, whole: tuple[int, ...], size: int) -> Iterator[tuple[int, tuple[slice, ...]]]:
        """(rank, box) of each part that `size` ranks hold of a parameter of the shape `whole` on
        one rank, as checkpoints store it.
        """
        box = [slice(0, length) for length in self.padded(whole, size)]
        if self.axis is None:
            yield 0, tuple(box)
            return
        num_boxes = self.num_blocks * size
        length = box[self.axis].stop // num_boxes
        for number in range(num_boxes):
            box[self.axis] = slice(number * length, (number + 1) * length)
            yield number % size, tuple(box)

    def shard(self, tensors: Sequence[Tensor], sizes: HeadSizes, rank: int, size: int) -> Tensor:
        """Return the trainer's part of rank `rank` of `size`, from full Hugging Face tensors; a
        view of them where possible.
        """
        if self.axis is None:
            return _joined(tensors, 0) if len(tensors) > 1 else tensors[0]
        parts = [tensor.chunk(size, self.axis)[rank] for tensor in tensors]
        return _joined(parts, self.axis) if len(parts) > 1 else parts[0]

    def unshard(self, shards: Sequence[Tensor], sizes: HeadSizes) -> list[Tensor]:
        """Invert `shard`: return the full Hugging Face tensors from the parts of all ranks."""
        if self.axis is None:
            return list(shards[0].chunk(self.num_blocks))
        blocks = zip(*(shard.chunk(self.num_blocks, self.axis) for shard in shards), strict=True)
        return [_joined(parts, self.axis) for parts in blocks]

    def to_server(
        self, tensors: Sequence[Tensor], sizes: HeadSizes, rank: int, size: int
    ) -> Tensor:
        """SGLang's part of rank `rank` of `size`, from full Hugging Face tensors; a view of them
        where possible. Where SGLang cannot be divided so, `shape.server_error` says it.
        """
        return self.shard_to_server(self.shard(tensors, sizes, rank, size), sizes, rank, size)

    def shard_to_server(self, shard: Tensor, sizes: HeadSizes, rank: int, size: int) -> Tensor:
        """SGLang's part of rank `rank` of `size`, from the part of the trainer's rank of the same
        number and size.
        """
        return shard

    def server_size(self, size: int, ep: int) -> int:
        """Return over how many of SGLang's `size` ranks the parameter is divided, if `ep` of these
        ranks share the experts.
        """
        return size

    def stack(self, parts: Sequence[Tensor]) -> Tensor:
        """Return SGLang's parameter of a rank, from its parts of all slots that belong to it."""
        return parts[0]


class QueryKeyValueCut(Cut):
    """q, k and v are divided by key-value groups."""

    def shard(self, tensors: Sequence[Tensor], sizes: HeadSizes, rank: int, size: int) -> Tensor:
        groups = [tensor.unflatten(0, (sizes.num_kv_heads, -1)) for tensor in tensors]
        return super().shard([_joined(groups, 1).flatten(0, 1)], sizes, rank, size)

    def unshard(self, shards: Sequence[Tensor], sizes: HeadSizes) -> list[Tensor]:
        (fused,) = super().unshard(shards, sizes)
        return _split_groups(fused, sizes.head_dim, sizes.num_kv_heads)

    def to_server(
        self, tensors: Sequence[Tensor], sizes: HeadSizes, rank: int, size: int
    ) -> Tensor:
        queries, keys = head_rows(sizes, rank, size)
        rows = (queries, keys, keys)
        return _joined([tensor[part] for tensor, part in zip(tensors, rows, strict=True)], 0)

    def shard_to_server(self, shard: Tensor, sizes: HeadSizes, rank: int, size: int) -> Tensor:
        return _joined(_split_groups(shard, sizes.head_dim, sizes.num_kv_heads // size), 0)


class VocabularyCut(Cut):
    """Rows of the vocabulary are divided evenly, after rows of zeros were added to it. A rank of
    SGLang has such rows even where it is the only one.
    """

    is_padded = True

    def padded(self, whole: tuple[int, ...], size: int) -> tuple[int, ...]:
        return trainer_vocab_size(whole[0], size), *whole[1:]

    def shard(self, tensors: Sequence[Tensor], sizes: HeadSizes, rank: int, size: int) -> Tensor:
        return _rows(tensors[0], trainer_vocab_size(sizes.vocab_size, size) // size, rank)

    def unshard(self, shards: Sequence[Tensor], sizes: HeadSizes) -> list[Tensor]:
        return [super().unshard(shards, sizes)[0][: sizes.vocab_size]]

    def shard_to_server(self, shard: Tensor, sizes: HeadSizes, rank: int, size: int) -> Tensor:
        return _rows(shard, engine_vocab_size(sizes.vocab_size, size) // size, 0)


class ExpertCut(Cut):
    """A rank of the trainer holds whole experts, whatever its tensor parallelism. SGLang divides
    each of them over its tensor-parallel ranks.
    """

    axis: int  # no rank holds all experts whole
    group = "expert"

    def num_parts(self, size: int) -> int:
        return 1

    def boxes(self, whole: tuple[int, ...], size: int) -> Iterator[tuple[int, tuple[slice, ...]]]:
        return super().boxes(whole, 1)

    def shard(self, tensors: Sequence[Tensor], sizes: HeadSizes, rank: int, size: int) -> Tensor:
        return super().shard(tensors, sizes, 0, 1)

    def unshard(self, shards: Sequence[Tensor], sizes: HeadSizes) -> list[Tensor]:
        return super().unshard(shards[:1], sizes)

    def shard_to_server(self, shard: Tensor, sizes: HeadSizes, rank: int, size: int) -> Tensor:
        if size == 1:
            return shard
        return super().shard(shard.chunk(self.num_blocks, self.axis), sizes, rank, size)

    def server_size(self, size: int, ep: int) -> int:
        return size // ep

    def stack(self, parts: Sequence[Tensor]) -> Tensor:
        import torch

        return torch.stack(list(parts))


REPLICATED = Cut(None)
ROW = Cut(1)
"""Columns are divided: Megatron's row-parallel layers."""
GATE_UP = Cut(0, num_blocks=2)
QKV = QueryKeyValueCut(0)
VOCAB = VocabularyCut(0)
EXPERT_GATE_UP = ExpertCut(0, num_blocks=2)
EXPERT_DOWN = ExpertCut(1)


def _split_groups(fused: Tensor, head_dim: int, num_groups: int) -> list[Tensor]:
    """[q, k, v of every key-value group] -> q, k, v, each with its heads one after the other."""
    groups = fused.unflatten(0, (num_groups, -1))
    lengths = (groups.shape[1] - 2 * head_dim, head_dim, head_dim)
    return [part.flatten(0, 1) for part in groups.split(lengths, dim=1)]


def _rows(tensor: Tensor, num_rows: int, rank: int) -> Tensor:
    """Return the `num_rows` rows of a rank, filled up with zeros where the tensor has fewer."""
    rows = tensor[rank * num_rows : (rank + 1) * num_rows]
    missing = num_rows - len(rows)
    return _joined([rows, rows.new_zeros(missing, *rows.shape[1:])], 0) if missing else rows


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    import torch  # not above: the launcher knows the families without it

    return torch.cat(list(parts), dim=axis)
