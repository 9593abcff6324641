"""Keys and values of all running trajectories, one row each, and the attention over them.

On a CPU decoding is bound by reading the cache, so rows that begin with the same tokens read those
keys once: attention over the shared prefix is one product per class of rows (cf. Hydragen,
arXiv:2402.05099, section 3).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragen_mega.engines.embedded.decoder import Attend
from ragen_mega.models.shape import ModelShape

_MIN_SHARED = 16
"""Shorter prefixes are not worth the extra operations."""
_READ_COST = 8.0
"""Reading one key from memory takes about as long as computing this many scores with it."""
_FIRST_WIDTH, _WIDTH_STEP = 256, 64
"""Positions that a row of keys holds at first, and the step in which it grows."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first `length` tokens of rows [0, n), which form C classes of equal tokens, each padded
    to N rows.
    """

    length: int
    from_rows: Tensor  # [C * kv_heads * N] row * kv_heads + kv_head, for every place in a class
    to_rows: Tensor  # [n * kv_heads] the place of every row and kv_head
    keys: list[Tensor]  # per layer [C * kv_heads, d, length]
    values: list[Tensor]  # per layer [C * kv_heads, length, d]

    def multiply(self, rows: Tensor, by_class: Tensor) -> Tensor:
        """rows [n * kv_heads, group, x] times what their class shares, by_class [C * kv_heads, x,
        y] -> [n * kv_heads, group, y].
        """
        gathered = rows.index_select(0, self.from_rows)
        product = torch.bmm(gathered.view(len(by_class), -1, rows.shape[-1]), by_class)
        return product.view(-1, *rows.shape[1:-1], by_class.shape[-1]).index_select(0, self.to_rows)


@dataclass(frozen=True, slots=True)
class _Padding:
    """Packed queries [T] <-> padded to the longest of m rows [m, Lq]."""

    sources: Tensor  # [m * Lq] the packed query of every place; arbitrary where a place is padding
    places: Tensor  # [T] the place of every packed query
    mask: Tensor  # [m, 1, 1, Lq, Lk] -inf where a query must not look

    @classmethod
    def of(
        cls,
        counts: NDArray[np.int64],
        last_key: NDArray[np.int64],
        num_keys: int,
        dtype: torch.dtype,
    ) -> Self:
        """Row i has counts[i] queries; each sees the keys up to its last_key [T], out of
        `num_keys`.
        """
        num_rows, longest = len(counts), int(counts.max())
        row = np.repeat(np.arange(num_rows), counts)
        query = np.arange(len(row))
        places = row * longest + query - (counts.cumsum() - counts)[row]
        sources = np.zeros(num_rows * longest, dtype=np.int64)
        sources[places] = query
        is_hidden = torch.from_numpy(np.arange(num_keys) > last_key[sources, None])
        mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, -torch.inf)
        mask = mask.view(num_rows, 1, 1, longest, num_keys)
        return cls(torch.from_numpy(sources), torch.from_numpy(places), mask)

    def pad(self, q: Tensor) -> Tensor:
        """[T, kv_heads, group, d] -> [m, kv_heads, group, Lq, d]."""
        padded = q.index_select(0, self.sources).unflatten(0, (self.mask.shape[0], -1))
        return padded.permute(0, 2, 3, 1, 4).contiguous()

    def unpad(self, padded: Tensor) -> Tensor:
        """[m, kv_heads, group, Lq, d] -> [T, kv_heads * group * d]."""
        return (
            padded.permute(0, 3, 1, 2, 4)
            .reshape(self.sources.shape[0], -1)
            .index_select(0, self.places)
        )


class KVCache:
    """One row of keys and values per slot.

    Keys are stored transposed, which makes the scores twice as fast, in rows that are not much
    longer than what they hold: the d lines of a row are read together, and far apart they would
    cost a page each.
    """

    def __init__(
        self, shape: ModelShape, *, num_slots: int, max_context: int, dtype: torch.dtype
    ) -> None:
        self._shape = shape
        self._max_context = max_context
        self._dtype = dtype
        layers, rows = range(shape.num_layers), (num_slots, shape.num_kv_heads)
        width = min(_FIRST_WIDTH, max_context)
        # per layer [slots, kv_heads, d, width] and [slots, kv_heads, max_context, d]
        self._keys = [_lazy_zeros(*rows, shape.head_dim, width, dtype=dtype) for _ in layers]
        self._values = [
            _lazy_zeros(*rows, max_context, shape.head_dim, dtype=dtype) for _ in layers
        ]
        # 0 where a row has a key
        self._mask = torch.full((num_slots, 1, max_context), -torch.inf, dtype=dtype)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row."""
        for keys, values in zip(self._keys, self._values, strict=True):
            keys[target, :, :, :length] = keys[source, :, :, :length]
            values[target, :, :length] = values[source, :, :length]
        self._mask[target, :, :length] = 0.0
        self._mask[target, :, length:] = -torch.inf

    def _reserve(self, length: int) -> None:
        """Widen the rows of keys to hold `length` positions."""
        old = self._keys[0].shape[-1]
        if length <= old:
            return
        width = min(-(-max(length, old * 3 // 2) // _WIDTH_STEP) * _WIDTH_STEP, self._max_context)
        for layer, keys in enumerate(self._keys):
            self._keys[layer] = _lazy_zeros(*keys.shape[:3], width, dtype=self._dtype)
            self._keys[layer][..., :old] = keys

    def _write(self, layer: int, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v [T, kv_heads, d] where rows [T] and positions [T] say."""
        self._keys[layer].permute(0, 3, 1, 2).index_put_((rows, positions), k)
        self._values[layer].transpose(1, 2).index_put_((rows, positions), v)

    def prefill(
        self, rows: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> Attend:
        """Attention of packed new tokens: rows [m] gain counts [m] tokens after their first starts
        [m] positions.

        Queries may be those of all new tokens, or of the last one of every row.
        """
        ends = starts + counts
        end, seen = int(ends.max()), int(starts.min())  # every query sees the keys before `seen`
        self._reserve(end)
        # From place among the packed tokens to position.
        offsets = starts - (counts.cumsum() - counts)
        positions = np.arange(int(counts.sum())) + np.repeat(offsets, counts)
        every = _Padding.of(counts, positions - seen, end - seen, self._dtype)
        last = _Padding.of(np.ones_like(counts), ends - 1 - seen, end - seen, self._dtype)
        row_of_token = torch.from_numpy(np.repeat(rows, counts))
        position, index = torch.from_numpy(positions), torch.from_numpy(rows)
        has_key = np.arange(self._max_context) < ends[:, None]
        self._mask.numpy()[rows, 0] = np.where(has_key, 0.0, -np.inf)
        run = slice(int(rows[0]), int(rows[0]) + len(rows))
        # Consecutive rows need not be gathered into a copy.
        is_run = np.array_equal(rows, np.arange(run.start, run.stop))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._write(layer, row_of_token, position, k, v)
            keys, values = self._keys[layer][..., :end], self._values[layer][:, :, :end]
            keys, values = (x[run] if is_run else x.index_select(0, index) for x in (keys, values))
            padding = every if q.shape[0] == len(positions) else last
            # [m, kv_heads, group, Lq, d]
            queries = padding.pad(q.unflatten(1, (self._shape.num_kv_heads, -1)))
            scores = queries.flatten(2, 3) @ keys
            scores.view(*queries.shape[:4], end)[..., seen:].add_(padding.mask)
            weights = torch.softmax(scores, dim=-1, out=scores)  # in place: fresh pages cost more
            return padding.unpad((weights @ values).view_as(queries))

        return attend

    def decode(self, positions: NDArray[np.int64], prefix: SharedPrefix | None) -> Attend:
        """Attention of one new token in each of the rows [0, n), at its position [n]."""
        shape, num_rows = self._shape, len(positions)
        group = shape.num_heads // shape.num_kv_heads
        start = prefix.length if prefix else 0
        end = int(positions.max()) + 1
        self._reserve(end)
        rows, position = torch.arange(num_rows), torch.from_numpy(positions)
        self._mask.numpy()[:num_rows, 0][np.arange(num_rows), positions] = 0.0
        mask = self._mask[:num_rows, :, start:end]  # [n, 1, L]
        weights = torch.empty(num_rows * shape.num_kv_heads, group, end, dtype=self._dtype)
        # [n, heads, L], a view
        own_weights = weights[..., start:].unflatten(0, (num_rows, -1)).flatten(1, 2)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._write(layer, rows, position, k, v)
            keys = self._keys[layer][:num_rows].flatten(0, 1)[..., start:end]
            values = self._values[layer][:num_rows].flatten(0, 1)[:, start:end]
            queries = q.reshape(num_rows * shape.num_kv_heads, group, shape.head_dim)
            torch.add(torch.bmm(queries, keys).view_as(own_weights), mask, out=own_weights)
            if prefix is None:
                return torch.bmm(torch.softmax(weights, -1, out=weights), values).view(num_rows, -1)
            weights[..., :start] = prefix.multiply(queries, prefix.keys[layer])
            torch.softmax(weights, -1, out=weights)
            attended = prefix.multiply(weights[..., :start], prefix.values[layer])
            return attended.baddbmm_(weights[..., start:], values).view(num_rows, -1)

        return attend

    def share(self, token_ids: NDArray[np.int64], length: int) -> SharedPrefix | None:
        """The prefix worth reading once per class, or None. token_ids [n, >= length]; all rows are
        that long.
        """
        order, shared = _sorted_by_prefix(np.ascontiguousarray(token_ids[:, :length]))
        prefix_length = _best_prefix_length(shared)
        if prefix_length == 0:
            return None
        num_rows, kv_heads = len(order), self._shape.num_kv_heads
        class_of_sorted = np.concatenate([[0], np.cumsum(shared < prefix_length)])
        first = np.searchsorted(class_of_sorted, np.arange(class_of_sorted[-1] + 1))  # [C]
        place_of_sorted = np.arange(num_rows) - first[class_of_sorted]
        num_classes, width = len(first), int(place_of_sorted.max()) + 1
        members = np.zeros((num_classes, width), dtype=np.int64)  # unused places repeat row 0
        members[class_of_sorted, place_of_sorted] = order
        heads = np.arange(kv_heads)
        from_rows = members[:, None, :] * kv_heads + heads[:, None]  # [C, kv_heads, N]
        to_rows = np.empty((num_rows, kv_heads), dtype=np.int64)
        to_rows[order] = (class_of_sorted[:, None] * kv_heads + heads) * width + place_of_sorted[
            :, None
        ]
        leaders = torch.from_numpy(order[first])
        return SharedPrefix(
            length=prefix_length,
            from_rows=torch.from_numpy(from_rows).flatten(),
            to_rows=torch.from_numpy(to_rows).flatten(),
            keys=[keys[leaders, :, :, :prefix_length].flatten(0, 1) for keys in self._keys],
            values=[values[leaders, :, :prefix_length].flatten(0, 1) for values in self._values],
        )


def _lazy_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros, because masked positions take part in products; pages that are never written take no
    memory.

    Unlike `torch.zeros`, which writes them all.
    """
    return torch.from_numpy(
        np.zeros(shape, dtype=np.float64 if dtype == torch.float64 else np.float32)
    )


def shared_length(ids: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many leading tokens rows of ids [..., >= n] and of tokens [..., n] have in common:
    [...].
    """
    num_tokens = tokens.shape[-1]
    different = ids[..., :num_tokens] != tokens
    return np.where(different.any(axis=-1), different.argmax(axis=-1), num_tokens)


def _sorted_by_prefix(token_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """An order [n] that puts equal prefixes next to each other, and how much neighbours share [n -
    1].
    """
    raw = [row.tobytes() for row in token_ids]  # any total order on whole tokens will do
    order = np.array(sorted(range(len(raw)), key=raw.__getitem__), dtype=np.int64)
    return order, shared_length(token_ids[order[1:]], token_ids[order[:-1]])


def _best_prefix_length(shared: NDArray[np.int64]) -> int:
    """The length that saves most: reads saved by C classes instead of n rows, less the scores of
    padded places.
    """
    num_rows = len(shared) + 1
    best_length, best_gain = 0, 0.0
    for length in np.unique(shared[shared >= _MIN_SHARED]).tolist():
        starts = [0, *(np.flatnonzero(shared < length) + 1).tolist(), num_rows]
        width = max(end - start for start, end in pairwise(starts))
        num_classes = len(starts) - 1
        gain = length * (_READ_COST * (num_rows - num_classes) - (num_classes * width - num_rows))
        if gain > best_gain:
            best_length, best_gain = length, gain
    return best_length
