"""Keys and values of all running trajectories, and the experts that their tokens went through, in
blocks that rows with the same beginning share.

Source: PagedAttention (arXiv:2309.06180, section 4). On a CPU decoding is bound by reading the
cache: a block that several rows share comes from memory once, and from the nearest caches after
that (cf. Hydragen, arXiv:2402.05099, section 3).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from ragen_mega.engines.embedded.kernels import BLOCK
from ragen_mega.models.shape import ModelShape


class KVCache:
    """One row of `table` per slot: the block of its first BLOCK positions, and so on.

    A block is written by one row only. Full blocks are shared by counting references; of a block
    that is not full a row gets a copy.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_slots: int,
        max_context: int,
        dtype: torch.dtype,
        records_routes: bool = False,
    ) -> None:
        per_slot = -(-max_context // BLOCK)
        num_blocks = num_slots * per_slot
        size = (num_blocks, shape.num_kv_heads, 2, shape.head_dim * BLOCK)
        numbers = torch.empty(0, dtype=dtype)
        if dtype == torch.bfloat16:
            numbers = numbers.view(torch.uint16)  # its bits
        # Per layer [blocks, kv_heads, 2, d * BLOCK]: keys [d, BLOCK] and values [BLOCK, d] stand as
        # products with queries and with weights read them. Pages never written take no memory.
        self.layers = [np.zeros(size, dtype=numbers.numpy().dtype) for _ in range(shape.num_layers)]
        self.records_routes = records_routes
        # [blocks, BLOCK, layers, k]; nothing if they are not recorded
        route = (shape.num_layers, shape.experts_per_token if records_routes else 0)
        self._routes = np.zeros((num_blocks, BLOCK, *route), np.uint8)
        self.table = np.zeros((num_slots, per_slot), dtype=np.int64)
        self._num_held = np.zeros(num_slots, dtype=np.int64)  # blocks of each slot
        self._references = np.zeros(num_blocks, dtype=np.int64)
        self._free = list(range(num_blocks))[::-1]

    def reserve(self, slots: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Let slots [m] hold their first lengths [m] positions."""
        needed = -(-lengths // BLOCK)
        lacking = needed > self._num_held[slots]
        for slot, count in zip(slots[lacking].tolist(), needed[lacking].tolist()):
            for place in range(self._num_held[slot], count):
                self.table[slot, place] = self._take()
            self._num_held[slot] = count

    def cut(self, slot: int, length: int) -> None:
        """Keep no more than the first `length` positions; what follows them may be written."""
        count = min(-(-length // BLOCK), int(self._num_held[slot]))
        for block in self.table[slot, count : self._num_held[slot]].tolist():
            self._drop(block)
        self._num_held[slot] = count
        if count * BLOCK > length and self._references[self.table[slot, count - 1]] > 1:
            shared = int(self.table[slot, count - 1])
            self.table[slot, count - 1] = self._copy(shared)
            self._drop(shared)

    def share(self, source: int, target: int, length: int) -> None:
        """Let an empty slot begin with the first `length` positions of another."""
        full, rest = divmod(length, BLOCK)
        blocks = self.table[source, :full]
        self.table[target, :full] = blocks
        self._references[blocks] += 1
        if rest:
            self.table[target, full] = self._copy(int(self.table[source, full]))
        self._num_held[target] = full + (rest > 0)

    def put_routes(
        self,
        layer: int,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        experts: NDArray[np.int64],
    ) -> None:
        """Record the experts [T, k] of a layer that tokens at positions [T] of slots [T] go
        through.
        """
        self._routes[self.table[slots, positions // BLOCK], positions % BLOCK, layer] = experts

    def routes_of(self, slot: int, start: int, end: int) -> NDArray[np.uint8]:
        """Return the experts [end - start, layers, k] of the positions [start, end) of a slot."""
        positions = np.arange(start, end)
        return self._routes[self.table[slot, positions // BLOCK], positions % BLOCK]

    def _take(self) -> int:
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _copy(self, block: int) -> int:
        copy = self._take()
        for values in (*self.layers, self._routes):
            values[copy] = values[block]
        return copy

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)


def shared_length(ids: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the leading tokens that rows of ids [..., >= n] and of tokens [..., n] have in common:
    [...].
    """
    num_tokens = tokens.shape[-1]
    different = ids[..., :num_tokens] != tokens
    return np.where(different.any(axis=-1), different.argmax(axis=-1), num_tokens)
