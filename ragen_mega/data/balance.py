"""What trajectories cost to compute, and even shares of that work for ranks and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SLACK = 1.01
"""What staying where they were sampled may cost: the largest share grows by this factor at most."""


class Cost(NamedTuple):
    """FLOPs of what a model computes, forward and backward."""

    per_token: int
    """The layers' matrices."""
    per_pair: int
    """Attention of one token to another or to itself."""
    per_label: int
    """The LM head, for a token that is trained on."""

    @classmethod
    def of_model(cls, matrices: int, channels: int, head: int) -> Cost:
        """The cost of a model whose layers have so many elements of matrices and channels of
        queries in all, and whose LM head has so many elements: a product takes two operations an
        element forward and four backward, attention two such products for each channel.
        """
        return cls(6 * matrices, 12 * channels, 6 * head)

    def of(self, length: int, labels: int = 0) -> int:
        """Of a text of `length` tokens, each of which attends to all before it."""
        pairs = length * (length + 1) // 2
        return self.per_token * length + self.per_pair * pairs + self.per_label * labels


TOKENS = Cost(1, 0, 0)
"""Counts tokens."""


def balanced_split(
    costs: Sequence[int], num_parts: int, homes: Sequence[int] | None = None
) -> list[list[int]]:
    """Split items so that the costs of the parts are near equal: the most expensive first, each to
    the part with the least (Graham 1969: at most 4/3 - 1/(3 num_parts) of the optimum).
    Deterministic.

    `homes` are parts in which items stay as far as that makes the most expensive part at most 1%
    more expensive. Every part gets an item as long as there are `num_parts` items; within a part
    items keep their order.
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
    """The parts, and the cost of the most expensive one. Where an item fits in its home within the
    bound, it goes there.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0] * num_parts
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        target = min(range(num_parts), key=lambda part: (totals[part], len(parts[part]), part))
        if homes and totals[homes[item]] + costs[item] <= bound:
            target = homes[item]
        parts[target].append(item)
        totals[target] += costs[item]
    return parts, max(totals)
