"""FrozenLake maps: reading, writing and drawing them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ragen_mega.environments.worlds.ways import Cell

# The cyclic neighbours of a move in this order are the moves perpendicular to it.
DIRECTIONS: dict[str, Cell] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
BOARD_LETTERS = "SFHG"
"""Start, frozen, hole, goal, as boards files write them."""
_MAX_ATTEMPTS = 10_000


@dataclass(frozen=True, slots=True)
class Lake:
    """A map of `size` x `size` cells; the goal can be reached from the start."""

    size: int
    start: Cell
    goal: Cell
    holes: frozenset[Cell]

    def neighbour(self, cell: Cell, action: str) -> Cell:
        """Return the cell that a move leads to if it does not slip; at the edge of the map the
        player stays.
        """
        dr, dc = DIRECTIONS[action]
        return min(max(cell[0] + dr, 0), self.size - 1), min(max(cell[1] + dc, 0), self.size - 1)

    def rows(self) -> tuple[str, ...]:
        """Return the board in the letters S F H G; inverse of `parse_lake`."""
        letters = {**dict.fromkeys(self.holes, "H"), self.start: "S", self.goal: "G"}
        return tuple(
            "".join(letters.get((r, c), "F") for c in range(self.size)) for r in range(self.size)
        )

    def is_crossable(self) -> bool:
        """Return whether some path avoids the holes."""
        frontier, seen = [self.start], {self.start}
        while frontier:
            cell = frontier.pop()
            for action in DIRECTIONS:
                successor = self.neighbour(cell, action)
                if successor not in seen and successor not in self.holes:
                    seen.add(successor)
                    frontier.append(successor)
        return self.goal in seen


def parse_lake(rows: Sequence[str]) -> Lake:
    """Read a board in the letters S F H G. Raises ValueError that names the broken rule."""
    if len(rows) < 2 or any(len(row) != len(rows) for row in rows):
        raise ValueError(
            f"a FrozenLake board is square: {len(rows)} rows of lengths"
            f" {[len(row) for row in rows]}"
        )
    cells: dict[str, list[Cell]] = {letter: [] for letter in BOARD_LETTERS}
    for r, row in enumerate(rows):
        for c, letter in enumerate(row):
            if letter not in cells:
                raise ValueError(
                    f"a FrozenLake board is written in S F H G, not {letter!r} (row {r}: {row!r})"
                )
            cells[letter].append((r, c))
    if len(cells["S"]) != 1 or len(cells["G"]) != 1:
        raise ValueError(
            f"a FrozenLake board has one start (S) and one goal (G), not {len(cells['S'])} and"
            f" {len(cells['G'])}"
        )
    lake = Lake(len(rows), cells["S"][0], cells["G"][0], frozenset(cells["H"]))
    if not lake.is_crossable():
        raise ValueError(
            "the goal of a FrozenLake board can be reached from its start; remove a hole (H)"
        )
    return lake


def generate_lake(rng: np.random.Generator, *, size: int, frozen_probability: float) -> Lake:
    """Draw start and goal anywhere and holes with probability 1 - `frozen_probability`, until the
    goal is reachable.
    """
    for _ in range(_MAX_ATTEMPTS):
        is_hole = rng.random((size, size)) >= frozen_probability
        start, goal = (divmod(int(i), size) for i in rng.choice(size * size, size=2, replace=False))
        holes = frozenset((r, c) for r, c in np.argwhere(is_hole).tolist()) - {start, goal}
        lake = Lake(size, start, goal, holes)
        if lake.is_crossable():
            return lake
    raise ValueError(
        f"no crossable lake of {size}x{size} cells with frozen_probability {frozen_probability} in"
        f" {_MAX_ATTEMPTS} attempts; raise frozen_probability or lower size"
    )
