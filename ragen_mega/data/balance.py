"""The cost of computing trajectories, and even shares of that work for ranks and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple

SLACK = 1.01
"""Largest factor by which the largest share may grow so that trajectories stay on their ranks."""


class Cost(NamedTuple):
    """FLOPs of what a model computes, forward and backward."""

    per_token: int
    """FLOPs of the layers' matrices for one token."""
    per_pair: int
    """FLOPs of the attention of one token to another or to itself."""
    per_label: int
    """FLOPs of the LM head for a token that is trained on."""

    def of(self, length: int, labels: int = 0) -> int:
        """Return the cost of a text of `length` tokens, each of which attends to all before it."""
        pairs = length * (length + 1) // 2
        return self.per_token * length + self.per_pair * pairs + self.per_label * labels

    def flops(self, length: float, labels: float = 1.0) -> float:
        """Count the FLOPs per token of texts of `length` (causal attention), of whose tokens a
        share are labels.
        """
        return self.per_token + labels * self.per_label + self.per_pair * length / 2


TOKENS = Cost(1, 0, 0)
"""Cost that counts tokens."""


def balanced_split(
    costs: Sequence[int], num_parts: int, homes: Sequence[int] | None = None
) -> list[list[int]]:
    """Split items so that the costs of the parts are near equal: the most expensive first, each to
    the part with the least (Graham 1969: at most 4/3 - 1/(3 num_parts) of the optimum).
    Deterministic.

    `homes` are parts in which items stay as far as that makes the most expensive part at most 1%
    more expensive. Without `homes` every part gets an item as long as there are `num_parts` items.
    Within a part items keep their order.
    """
    parts, most = _split(costs, num_parts)
    if homes is not None:
        staying, with_homes = _split(costs, num_parts, homes, most)
        if with_homes <= SLACK * most:
            parts = staying
    return [sorted(part) for part in parts]


def _split(
    costs: Sequence[int], num_parts: int, homes: Sequence[int] = (), bound: int = 0
) -> tuple[list[list[int]], int]:
    """Return the parts, and the cost of the most expensive one. An item goes to its home if it fits
    there within the bound, else to the part with the least cost, and of these with fewest items.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0] * num_parts
    heap = [(0, 0, part) for part in range(num_parts)]  # (cost, items, part), now or before
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        target = heap[0][2]
        while heap[0] != (now := (totals[target], len(parts[target]), target)):
            heapreplace(heap, now)
            target = heap[0][2]
        if homes and totals[homes[item]] + costs[item] <= bound:
            target = homes[item]
        parts[target].append(item)
        totals[target] += costs[item]
    return parts, max(totals)
