"""Sokoban: push every box onto a target; irreversible moves make planning necessary.

Source: StarPO, arXiv:2504.20073, section 3.1; rewards as in gym-sokoban: -0.1 a step, +1 (-1) when
the number of boxes on targets rises (falls), +10 when all are on target, so that a solution of n
actions with one box returns 11 - 0.1 n.
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
from ragen_mega.environments.worlds.sokoban.narrator import NARRATOR, neighbours, ways
from ragen_mega.environments.worlds.sokoban.rooms import (
    BOX,
    DIRECTIONS,
    PLAYER,
    SYMBOLS,
    TARGET,
    WALL,
    Room,
    generate_room,
    parse_room,
)
from ragen_mega.environments.worlds.sokoban.solver import SOLVER, shortest_plan

Observation = Literal["grid", "cells", "coord", "grid_coord", "words"]
Vocabulary = Literal["standard", "new"]
Untold = Literal["nothing", "standing", "cells", "effects", "ahead"]

STEP_REWARD = -0.1
BOX_REWARD = 1.0
DONE_REWARD = 10.0

_VOCABULARIES: dict[Vocabulary, str] = {"standard": SYMBOLS, "new": "W.GCBA@"}
_MEANINGS = ("wall", "empty", "target", "box on target", "box", "player", "player on target")
_CURRICULUM_ATTEMPTS = 1000


class Sokoban:
    """Rooms of `dim` x `dim` cells, with walls as the outer ring. Deterministic after the reset.

    `max_shortest` is a curriculum: only rooms that can be solved in that many actions are drawn. It
    does not apply to boards passed to `reset`. `untold` is what the narrator leaves out: where to
    stand, the cells that moves lead to, their effects, or what follows the first move of a turn.
    """

    actions: tuple[str, ...] = tuple(DIRECTIONS)
    is_instant = True
    narrator = NARRATOR
    solver = SOLVER

    def __init__(
        self,
        *,
        dim: int = 6,
        num_boxes: int = 1,
        search_depth: int = 300,
        observation: Observation = "grid",
        vocabulary: Vocabulary = "standard",
        max_shortest: int | None = None,
        untold: Untold = "nothing",
    ) -> None:
        if dim < 5:
            raise ValueError(
                f"dim counts the walls around the room and must be at least 5, not {dim}"
            )
        if num_boxes < 1 or search_depth < 1 or (max_shortest is not None and max_shortest < 1):
            raise ValueError(
                "num_boxes, search_depth and max_shortest must be at least 1, not "
                f"{num_boxes}, {search_depth}, {max_shortest}"
            )
        self._dim, self._num_boxes, self._search_depth = dim, num_boxes, search_depth
        self._max_shortest = max_shortest
        self.untold = untold
        self._observation = observation
        self._symbols = _VOCABULARIES[vocabulary]
        self._room: Room | None = None
        self.instruction = self._write_instruction()

    @property
    def board_set(self) -> str:
        """Name of the set of packaged boards of this size."""
        return f"sokoban_{self._dim}x{self._dim}_{self._num_boxes}box"

    def accepts_board(self, rows: Sequence[str]) -> bool:
        """Return whether a board is a room of this size. Raises ValueError if it is malformed."""
        if not any("#" in row for row in rows):
            return False
        room = parse_room(rows)
        return room.size == (self._dim, self._dim) and len(room.boxes) == self._num_boxes

    def reset(
        self, seed: int, *, outcome_seed: int | None = None, board: Sequence[str] | None = None
    ) -> str:
        check_seed(seed)
        if outcome_seed is not None:
            check_seed(outcome_seed)
        drawn = (self._dim, self._num_boxes, self._search_depth, self._max_shortest)
        self._room = _drawn_room(seed, *drawn) if board is None else parse_room(board)
        return self._describe(self._room)

    def step(self, action: str) -> StepResult:
        name = canonical_action(action, self.actions)
        before = self.room
        if before.is_solved:
            raise RuntimeError("the room is solved; call reset before the next step")
        after = before.after(name)
        gained = len(after.boxes & after.targets) - len(before.boxes & before.targets)
        reward = STEP_REWARD + BOX_REWARD * gained + (DONE_REWARD if after.is_solved else 0.0)
        self._room = after
        info = {"success": after.is_solved, "is_action_effective": after is not before}
        return StepResult(self._describe(after), reward, after.is_solved, False, info)

    @property
    def room(self) -> Room:
        """The current position."""
        if self._room is None:
            raise RuntimeError("no room yet; call reset first")
        return self._room

    def render(self) -> str:
        """Return the room as SVG."""
        room, (rows, columns) = self.room, self.room.size
        cells = ((r, c) for r in range(rows) for c in range(columns))
        things = [(cell, "wall" if cell in room.walls else "floor") for cell in cells]
        things += [(cell, "target") for cell in room.targets]
        things += [
            (cell, "box on target" if cell in room.targets else "box") for cell in room.boxes
        ]
        return draw_grid(rows, columns, [*things, (room.player, "player")])

    def facts(self) -> dict[str, Any]:
        """`size` (rows, columns), `player`, sorted `boxes` and `targets`, sets `walls` and `free`
        (not a wall).
        """
        room = self.room
        rows, columns = room.size
        cells = frozenset((r, c) for r in range(rows) for c in range(columns))
        return {
            "size": room.size,
            "player": room.player,
            "boxes": tuple(sorted(room.boxes)),
            "targets": tuple(sorted(room.targets)),
            "walls": room.walls,
            "free": cells - room.walls,
        }

    def _describe(self, room: Room) -> str:
        if self._observation == "words":
            cells = [f"{action}: {cell}." for action, cell in neighbours(self).items()]
            return " ".join([*cells, ways(self)])
        grid = "\n".join(room.rows(self._symbols))
        if self._observation == "grid":
            return grid
        rows, columns = room.size
        inner = {(r, c) for r, c in room.walls if 0 < r < rows - 1 and 0 < c < columns - 1}
        if self._observation == "cells":
            kinds = (
                (PLAYER, [room.player]),
                (BOX, room.boxes),
                (TARGET, room.targets),
                (WALL, inner),
            )
            return " ".join(
                f"{self._symbols[kind]}{cell}" for kind, cells in kinds for cell in sorted(cells)
            )
        coordinates = (
            f"Player: {room.player}\nBoxes: {_cells(room.boxes)}\nTargets: {_cells(room.targets)}"
        )
        if self._observation == "grid_coord":
            return f"{coordinates}\n{grid}"
        # Without the grid, the inner walls must be listed to make the state complete; the
        # instruction states the outer ring.
        return f"{coordinates}\nWalls: {_cells(inner)}\nSize: {rows} rows, {columns} columns"

    def _write_instruction(self) -> str:
        parts = [
            (
                "You are solving the Sokoban puzzle. You are the player and you need to push every"
                " box onto a target."
            ),
            (
                "You can push a box by walking into it if the cell behind it is free. You cannot"
                " pull a box, push two boxes at once or walk through walls, so a box in a corner is"
                " stuck: think ahead before you push."
            ),
        ]
        if self._observation not in ("grid", "words"):
            parts.append(
                "Coordinates are (row, column), both counted from 0 at the top left; Up lowers the"
                " row and Left lowers the column. The outermost rows and columns are walls."
            )
        if self._observation not in ("coord", "words"):
            legend = ", ".join(
                f"{symbol}: {meaning}"
                for symbol, meaning in zip(self._symbols, _MEANINGS, strict=True)
            )
            parts.append("The meaning of each symbol in the state is:\n" + legend)
        parts.append("Your available actions are:\n" + ", ".join(self.actions))
        return "\n".join(parts)


def _cells(cells: frozenset[tuple[int, int]] | set[tuple[int, int]]) -> str:
    return ", ".join(map(str, sorted(cells))) or "none"


@lru_cache(maxsize=1024)
def _drawn_room(
    seed: int, dim: int, num_boxes: int, search_depth: int, max_shortest: int | None
) -> Room:
    """Return the room of a seed, which the trajectories of a group and readers of a run share."""
    rng = np.random.default_rng(stable_seed(seed, "sokoban/room"))
    shape = {"dim": dim, "num_boxes": num_boxes, "search_depth": search_depth}
    if max_shortest is None:
        return generate_room(rng, **shape)
    for _ in range(_CURRICULUM_ATTEMPTS):
        room = generate_room(rng, **shape)
        if shortest_plan(room, max_shortest) is not None:
            return room
    raise ValueError(
        f"none of {_CURRICULUM_ATTEMPTS} rooms of {dim}x{dim} cells with {num_boxes} boxes has a"
        f" solution of at most {max_shortest} actions; raise max_shortest"
    )
