"""FrozenLake: cross slippery ice to the goal without falling into a hole; actions may slip
sideways.

Source: StarPO, arXiv:2504.20073, section 3.1; dynamics as in Gymnasium's FrozenLake-v1, generalised
to any success rate: the intended move happens with probability `success_rate`, each perpendicular
one with half of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from ragen_mega.environments.protocol import (
    StepResult,
    canonical_action,
    check_seed,
    stable_seed,
)

Observation = Literal["grid", "cells", "coord", "grid_coord"]
Cell = tuple[int, int]  # (row, column), both from 0 at the top left

# In an order where the perpendicular moves are the cyclic neighbours.
DIRECTIONS: dict[str, Cell] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
GOAL_REWARD = 1.0

BOARD_LETTERS = "SFHG"
"""Start, frozen, hole, goal, as boards files write them."""
_MEANINGS = {
    "P": "player",
    "_": "frozen",
    "O": "hole",
    "G": "goal",
    "X": "player in hole",
    "\u221a": "player on goal",
}
_MAX_ATTEMPTS = 10_000


@dataclass(frozen=True, slots=True)
class Lake:
    """A map of `size` x `size` cells; the goal can be reached from the start."""

    size: int
    start: Cell
    goal: Cell
    holes: frozenset[Cell]

    def neighbour(self, cell: Cell, action: str) -> Cell:
        """Where a move that does not slip leads; the edge of the map holds the player."""
        dr, dc = DIRECTIONS[action]
        return min(max(cell[0] + dr, 0), self.size - 1), min(max(cell[1] + dc, 0), self.size - 1)

    def rows(self) -> tuple[str, ...]:
        """The board in the letters S F H G; inverse of `parse_lake`."""
        letters = {**dict.fromkeys(self.holes, "H"), self.start: "S", self.goal: "G"}
        return tuple(
            "".join(letters.get((r, c), "F") for c in range(self.size)) for r in range(self.size)
        )

    def is_crossable(self) -> bool:
        """Whether some path avoids the holes."""
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
    """Read a board in the letters S F H G. ValueError names the rule that it breaks."""
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


class FrozenLake:
    """Reaching the goal pays 1 and ends the episode; a hole ends it with nothing."""

    actions: tuple[str, ...] = tuple(DIRECTIONS)

    def __init__(
        self,
        *,
        size: int = 4,
        frozen_probability: float = 0.8,
        success_rate: float = 1.0 / 3.0,
        observation: Observation = "grid",
    ) -> None:
        if size < 2:
            raise ValueError(f"size must be at least 2, not {size}")
        for name, value in (
            ("frozen_probability", frozen_probability),
            ("success_rate", success_rate),
        ):
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must be in (0, 1], not {value}")
        if observation not in get_args(Observation):
            raise ValueError(
                f"observation must be one of {', '.join(get_args(Observation))}, not"
                f" {observation!r}"
            )
        self._size, self._frozen_probability = size, frozen_probability
        self._observation = observation
        self.success_rate = success_rate
        self._lake: Lake | None = None
        self._player: Cell = (0, 0)
        self._rng = np.random.default_rng(0)
        self.instruction = self._write_instruction()

    @property
    def board_set(self) -> str:
        """Name of the set of packaged boards of this size and hole density."""
        return f"frozen_lake_{self._size}x{self._size}_p{self._frozen_probability:g}"

    def accepts_board(self, rows: Sequence[str]) -> bool:
        """Whether a well-formed board has this environment's kind and size."""
        return not any("#" in row for row in rows) and len(rows) == len(rows[0]) == self._size

    def reset(
        self, seed: int, *, outcome_seed: int | None = None, board: Sequence[str] | None = None
    ) -> str:
        check_seed(seed)
        outcome = stable_seed(seed, "outcome") if outcome_seed is None else check_seed(outcome_seed)
        self._rng = np.random.default_rng(stable_seed(outcome, "frozen_lake/slip"))
        if board is None:
            map_rng = np.random.default_rng(stable_seed(seed, "frozen_lake/map"))
            self._lake = generate_lake(
                map_rng, size=self._size, frozen_probability=self._frozen_probability
            )
        else:
            self._lake = parse_lake(board)
        self._player = self._lake.start
        return self._describe(self._lake)

    def step(self, action: str) -> StepResult:
        name = canonical_action(action, self.actions)
        lake, before = self.lake, self._player
        if before == lake.goal or before in lake.holes:
            raise RuntimeError(
                "the player reached the goal or fell into a hole; call reset before the next step"
            )
        # One draw per action whatever the outcome, so that equal actions under one outcome seed
        # slip alike.
        draw = self._rng.random()
        slip = (
            0 if draw < self.success_rate else (1 if draw < (1.0 + self.success_rate) / 2.0 else -1)
        )
        direction = self.actions[(self.actions.index(name) + slip) % len(self.actions)]
        self._player = lake.neighbour(before, direction)
        success = self._player == lake.goal
        terminated = success or self._player in lake.holes
        info = {"success": success, "is_action_effective": self._player != before}
        return StepResult(
            self._describe(lake), GOAL_REWARD if success else 0.0, terminated, False, info
        )

    @property
    def lake(self) -> Lake:
        """The map of this episode."""
        if self._lake is None:
            raise RuntimeError("no lake yet; call reset first")
        return self._lake

    def facts(self) -> dict[str, Any]:
        """`size` (cells a side), `player`, `start`, `goal`, set of `holes`, `success_rate`."""
        lake = self.lake
        return {
            "size": lake.size,
            "player": self._player,
            "start": lake.start,
            "goal": lake.goal,
            "holes": lake.holes,
            "success_rate": self.success_rate,
        }

    def _describe(self, lake: Lake) -> str:
        cells = {**dict.fromkeys(lake.holes, "O"), lake.goal: "G"}
        under_player = cells.get(self._player, "_")
        cells[self._player] = {"_": "P", "O": "X", "G": "\u221a"}[under_player]
        grid = "\n".join(
            "".join(cells.get((r, c), "_") for c in range(lake.size)) for r in range(lake.size)
        )
        if self._observation == "grid":
            return grid
        if self._observation == "cells":
            return " ".join(
                [f"P{self._player}", f"G{lake.goal}", *(f"O{hole}" for hole in sorted(lake.holes))]
            )
        holes = ", ".join(map(str, sorted(lake.holes))) or "none"
        last = lake.size - 1
        coordinates = (
            f"Player: {self._player}\nGoal: {lake.goal}\nHoles: {holes}\nCorners: (0, 0) to"
            f" ({last}, {last})"
        )
        return coordinates if self._observation == "coord" else f"{coordinates}\n{grid}"

    def _write_instruction(self) -> str:
        parts = [
            "You are solving the FrozenLake puzzle. You are the player on a frozen lake and you"
            " need to reach the goal without falling into a hole."
        ]
        if self.success_rate < 1.0:
            side = (1.0 - self.success_rate) / 2.0
            parts.append(
                "The ice is slippery: a move goes the way you choose with probability "
                f"{self.success_rate:.2g} and to each side of it with probability {side:.2g}."
            )
        if self._observation != "grid":
            parts.append(
                "Coordinates are (row, column), both counted from 0 at the top left; Up lowers the"
                " row and Left lowers the column."
            )
        if self._observation != "coord":  # elsewhere symbols stand for what lies in a cell
            legend = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in _MEANINGS.items())
            parts.append("The meaning of each symbol in the state is:\n" + legend)
        parts.append("Your available actions are:\n" + ", ".join(self.actions))
        return "\n".join(parts)
