"""Trajectories that begin with the same tokens, as a forest in which every distinct position exists
once.

A position is what the model computes for a token behind all tokens before it, so it is the same in
every trajectory that begins with the same tokens. Sorted by their tokens, each trajectory shares
with the one before it as much as with any before it: it adds a chain of nodes below a path that is
already there. Nodes are numbered in that order, which is depth first.

Context parallelism divides the nodes among ranks, in runs of that order. The only nodes of other
ranks that the nodes of a run attend to are the path above its first node, whose keys and values
travel to the run's rank.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ragen_mega.data.balance import TOKENS, Cost


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    """Trajectories in the order of their tokens."""

    ids: list[int]
    lengths: list[int]
    """Number of positions of each trajectory."""
    shared: list[int]
    """Number of first positions that each trajectory has in common with the one before it."""
    costs: list[int]
    """Cost of each trajectory computed by itself."""
    saved: list[int]
    """Cost that each trajectory saves behind the one before it."""

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        cu_seqlens: Tensor,
        ids: Sequence[int] | None = None,
        *,
        routes: Tensor | None = None,
        cost: Cost = TOKENS,
        costs: Sequence[int] | None = None,
    ) -> "PrefixOrder":
        """Sort the trajectories `ids` (None: all) among those packed in `tokens` [T] with offsets
        `cu_seqlens` [S + 1], on the host. `costs` [S]: the cost of each trajectory alone (None:
        `cost` gives it). If `routes` [T, ...] uint8 are given, positions are the same only where
        those agree too.
        """
        values = tokens.numpy().astype(">u4")  # whose bytes sort as the numbers do
        if routes is not None:
            rows = values[:, None].view(np.uint8)  # [T, 4]
            values = np.concatenate([rows, routes.flatten(1).numpy()], axis=1)
        texts = [values[start:end] for start, end in pairwise(cu_seqlens.tolist())]
        ids = sorted(range(len(texts)) if ids is None else ids, key=lambda i: texts[i].tobytes())
        lengths = [len(texts[i]) for i in ids]
        shared = [0, *(common_prefix(texts[left], texts[right]) for left, right in pairwise(ids))]
        whole = [costs[i] if costs else cost.of(len(texts[i])) for i in ids]
        # a prefix of several segments is cheaper than one text of its length
        saved = [min(cost.of(size), least) for size, least in zip(shared, whole)]
        return cls(ids, lengths, shared, whole, saved)

    @property
    def num_nodes(self) -> int:
        """Number of distinct positions."""
        return sum(self.lengths) - sum(self.shared)

    def cut(self, num_parts: int, max_nodes: int, multiple: int = 1) -> list["PrefixOrder"]:
        """Cut into `num_parts` runs, or into the next `multiple` of what it takes to have at most
        `max_nodes` distinct positions in each, so that the most expensive costs as little as
        possible.

        Positions that the two sides of a cut share are in both. A trajectory longer than
        `max_nodes` is a run by itself; there are fewer runs where there are not enough different
        trajectories.
        """
        low, high = 1, sum(self.costs)
        most = max(len(self._starts(max_nodes, high)), num_parts)
        most += -most % multiple
        if most == 1:
            return [self]
        while low < high:
            middle = (low + high) // 2
            if len(self._starts(max_nodes, middle)) <= most:
                high = middle
            else:
                low = middle + 1
        starts = self._starts(max_nodes, low)
        return [
            PrefixOrder(
                self.ids[a:b],
                self.lengths[a:b],
                [0, *self.shared[a + 1 : b]],
                self.costs[a:b],
                [0, *self.saved[a + 1 : b]],
            )
            for a, b in pairwise([*starts, len(self.ids)])
        ]

    def _starts(self, max_nodes: int, max_cost: int) -> list[int]:
        """Return the first places of runs that hold as much as `max_nodes` and `max_cost` allow."""
        starts, nodes, spent = [], 0, 0
        for place, (length, shared) in enumerate(zip(self.lengths, self.shared)):
            nodes += length - shared
            spent += self.costs[place] - self.saved[place]
            is_full = nodes > max_nodes or spent > max_cost
            if place == 0 or (is_full and length > shared):
                starts.append(place)
                nodes, spent = length, self.costs[place]
        return starts


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Return the length of the longest common prefix of [L, ...] and [M, ...]."""
    shortest = min(len(first), len(second))
    if shortest == 0:
        return 0
    differs = (first[:shortest] != second[:shortest]).reshape(shortest, -1).any(1)
    place = int(differs.argmax())
    return place if differs[place] else shortest


def even_runs(costs: np.ndarray, num_runs: int, most: int) -> list[int]:
    """Return the bounds [num_runs + 1] of consecutive runs of items, which cost [N], about the same
    in every run. No run has more than `most` items, as far as so many runs can hold all items.
    """
    total, most = np.cumsum(costs), max(most, -(-len(costs) // num_runs))
    bounds = [0]
    for run in range(1, num_runs):
        even = int(np.searchsorted(total - costs / 2, total[-1] * run / num_runs))
        least = len(costs) - (num_runs - run) * most
        bounds.append(max(min(even, bounds[-1] + most), least, bounds[-1]))
    return [*bounds, len(costs)]


class Chain(NamedTuple):
    """The nodes `start` to `start + length` - 1, each the child of the one before. Where a forest
    is cut among ranks, a path numbers the keys of the rank: the keys of other ranks' nodes first.
    """

    start: int
    length: int
    path: np.ndarray
    """[depth of the last + 1] nodes from the root to the last one."""

    @property
    def shared(self) -> int:
        """Number of nodes of its path that belong to chains before it."""
        return len(self.path) - self.length


@dataclass(frozen=True, slots=True)
class Forest:
    """N distinct positions of T positions of trajectories, depth first. In host memory.

    Under context parallelism these are the nodes of one rank, which attend to M keys: first those
    received, of nodes of other ranks above, then the keys of these nodes.
    """

    chains: list[Chain]
    sources: np.ndarray
    """[T] node of each position."""
    ends: np.ndarray
    """[M] the key behind all descendants: i attends to j if j <= i < ends[j]."""
    padding: int = 0
    """Number of last nodes, which stand for no position."""
    received: Sequence[int] = ()
    """Number of keys that come from each context-parallel rank; empty where none sends any."""
    sent: Sequence[np.ndarray] = ()
    """Nodes whose keys go to each context-parallel rank."""

    @classmethod
    def of(cls, lengths: Sequence[int], shared: Sequence[int], *, multiple: int = 1) -> "Forest":
        """Build the forest of trajectories in the order of a `PrefixOrder`, with padding as a
        further tree up to a multiple of nodes.
        """
        sources = np.empty(sum(lengths), np.int64)
        ends = np.empty(sum(lengths) - sum(shared), np.int64)
        chains: list[Chain] = []
        path, offset, start = sources[:0], 0, 0
        for length, common in zip(lengths, shared):
            ends[path[common:]] = start
            before, path = path, sources[offset : offset + length]
            path[:common] = before[:common]
            path[common:] = np.arange(start, start + length - common)
            if length > common:
                chains.append(Chain(start, length - common, path))
            offset, start = offset + length, start + length - common
        ends[path] = start
        return cls(chains, sources, ends).padded(multiple)

    def padded(self, multiple: int) -> "Forest":
        """Return the forest with a further tree of padding up to a multiple of nodes, at least one
        node.
        """
        start, num_keys = self.num_nodes, len(self.ends)
        padding = -start % multiple or (0 if start else multiple)
        if not padding:
            return self
        path = np.arange(num_keys, num_keys + padding)
        ends = np.append(self.ends, [num_keys + padding] * padding)
        tree = Chain(start, padding, path)
        return replace(self, chains=[*self.chains, tree], ends=ends, padding=padding)

    def cut(self, bounds: Sequence[int], rank: int) -> "Forest":
        """Return the part of a context-parallel rank, whose nodes are `bounds[rank]` to
        `bounds[rank + 1]` - 1 of a forest without padding. Parts may be empty.
        """
        above = [self._above(*run) for run in pairwise(bounds)]
        (first, end), given = bounds[rank : rank + 2], above[rank]

        def keys(nodes: np.ndarray) -> np.ndarray:
            return np.where(nodes < first, np.arange(len(nodes)), nodes - first + len(given))

        chains = []
        for chain in self.chains:
            start, stop = max(chain.start, first), min(chain.start + chain.length, end)
            if start < stop:
                path = keys(chain.path[: chain.shared + stop - chain.start])
                chains.append(Chain(start - first, stop - start, path))
        nodes = np.concatenate([given, np.arange(first, end)])
        ends = np.minimum(self.ends[nodes], end) - first + len(given)
        sources = self.sources[(first <= self.sources) & (self.sources < end)] - first
        if not sum(map(len, above)):
            return Forest(chains, sources, ends)
        sent = [path[(first <= path) & (path < end)] - first for path in above]
        received = [int(((a <= given) & (given < b)).sum()) for a, b in pairwise(bounds)]
        return Forest(chains, sources, ends, received=received, sent=sent)

    def _above(self, first: int, end: int) -> np.ndarray:
        """Return the nodes above the first of a run, from the root on."""
        if first == end:
            return self.sources[:0]
        chain = self.chains[bisect_right(self.chains, first, key=lambda chain: chain.start) - 1]
        return chain.path[: chain.shared + first - chain.start]

    @property
    def num_nodes(self) -> int:
        return len(self.ends) - sum(self.received)

    @property
    def is_shared(self) -> bool:
        """Whether any node stands for several positions."""
        return len(self.sources) > self.num_nodes - self.padding

    def depths(self) -> Tensor:
        """Return the number [N] int64 of nodes above each node."""
        return torch.from_numpy(
            np.concatenate([np.arange(chain.shared, len(chain.path)) for chain in self.chains])
        )

    def per_node(self, values: Tensor) -> Tensor:
        """Return the values [N, ...] of nodes for values [T, ...] of positions: the value of each
        node's first position, 0 for padding.
        """
        _, first = np.unique(self.sources, return_index=True)
        result = values.new_zeros(self.num_nodes, *values.shape[1:])
        result[: len(first)] = values[torch.from_numpy(first)]
        return result
