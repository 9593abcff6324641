"""FrozenLake: cross slippery ice to the goal without falling into a hole; actions may slip
sideways.

Source: StarPO, arXiv:2504.20073, section 3.1; dynamics as in Gymnasium's FrozenLake-v1, generalised
to any success rate: the intended move happens with probability `success_rate`, each perpendicular
one with half of the rest.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from ragen_mega.environments.drawing import draw_grid
from ragen_mega.environments.protocol import (
    StepResult,
    canonical_action,
    check_seed,
    stable_seed,
)
from ragen_mega.environments.worlds.frozen_lake.lakes import (
    DIRECTIONS,
    Lake,
    generate_lake,
    parse_lake,
)
from ragen_mega.environments.worlds.frozen_lake.narrator import NARRATOR, neighbours
from ragen_mega.environments.worlds.frozen_lake.solver import SOLVER
from ragen_mega.environments.worlds.ways import Cell, way

Observation = Literal["grid", "cells", "coord", "grid_coord", "words"]
Untold = Literal["nothing", "cells", "kinds", "behind", "ahead"]

GOAL_REWARD = 1.0

_MEANINGS = {
    "P": "player",
    "_": "frozen",
    "O": "hole",
    "G": "goal",
    "X": "player in hole",
    "\u221a": "player on goal",
}


class FrozenLake:
    """Reaching the goal pays 1 and ends the episode; a hole ends it with nothing.

    `untold` is what the narrator leaves out: the cells that moves lead to, what they are, or of a
    move's pair what lies behind or ahead.
    """

    actions: tuple[str, ...] = tuple(DIRECTIONS)
    is_instant = True
    narrator = NARRATOR
    solver = SOLVER

    def __init__(
        self,
        *,
        size: int = 4,
        frozen_probability: float = 0.8,
        success_rate: float = 1.0 / 3.0,
        observation: Observation = "grid",
        untold: Untold = "nothing",
    ) -> None:
        if size < 2:
            raise ValueError(f"size must be at least 2, not {size}")
        for name, value in (
            ("frozen_probability", frozen_probability),
            ("success_rate", success_rate),
        ):
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must be in (0, 1], not {value}")
        self._size, self._frozen_probability = size, frozen_probability
        self._observation = observation
        self.success_rate = success_rate
        self.untold = untold
        self._lake: Lake | None = None
        self._player: Cell = (0, 0)
        self._rng = np.random.default_rng(0)
        self.instruction = self._write_instruction()

    @property
    def board_set(self) -> str:
        """Name of the set of packaged boards of this size and hole density."""
        return f"frozen_lake_{self._size}x{self._size}_p{self._frozen_probability:g}"

    def accepts_board(self, rows: Sequence[str]) -> bool:
        """Return whether a board is a lake of this size. Raises ValueError if it is malformed."""
        return not any("#" in row for row in rows) and parse_lake(rows).size == self._size

    def reset(
        self, seed: int, *, outcome_seed: int | None = None, board: Sequence[str] | None = None
    ) -> str:
        check_seed(seed)
        outcome = stable_seed(seed, "outcome") if outcome_seed is None else check_seed(outcome_seed)
        self._rng = np.random.default_rng(stable_seed(outcome, "frozen_lake/slip"))
        if board is None:
            self._lake = _drawn_lake(seed, self._size, self._frozen_probability)
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
        # One draw per action, so that equal actions under one outcome seed slip alike.
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

    def render(self) -> str:
        """Return the lake as SVG."""
        lake = self.lake
        things = [((r, c), "ice") for r in range(lake.size) for c in range(lake.size)]
        things += [(hole, "hole") for hole in lake.holes]
        return draw_grid(
            lake.size, lake.size, [*things, (lake.goal, "goal"), (self._player, "player")]
        )

    def facts(self) -> dict[str, Any]:
        """`size` (cells per side), `player`, `start`, `goal`, set of `holes`, `success_rate`."""
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
        if self._observation == "words":
            around = [f"{action}: {cell}." for action, cell in neighbours(self).items()]
            return " ".join([*around, f"Goal: {way(self._player, lake.goal)}."])
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
        if self._observation not in ("grid", "words"):
            parts.append(
                "Coordinates are (row, column), both counted from 0 at the top left; Up lowers the"
                " row and Left lowers the column."
            )
        if self._observation not in (
            "coord",
            "words",
        ):  # elsewhere symbols stand for what lies in a cell
            legend = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in _MEANINGS.items())
            parts.append("The meaning of each symbol in the state is:\n" + legend)
        parts.append("Your available actions are:\n" + ", ".join(self.actions))
        return "\n".join(parts)


@lru_cache(maxsize=1024)
def _drawn_lake(seed: int, size: int, frozen_probability: float) -> Lake:
    """Return the lake of a seed, which the trajectories of a group and readers of a run share."""
    generator = np.random.default_rng(stable_seed(seed, "frozen_lake/map"))
    return generate_lake(generator, size=size, frozen_probability=frozen_probability)
