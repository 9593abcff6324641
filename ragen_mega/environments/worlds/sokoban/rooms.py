"""Sokoban rooms: reading, writing and generating them.

Generation follows the recipe of RAGEN's Sokoban (arXiv:2504.20073, section 3.1, after Racaniere et
al. 2017, arXiv:1707.06203): dig a room by a random walk, start from the solved position, play
backwards by pulling boxes and keep the position that is farthest from solved, so that every room is
solvable by construction.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ragen_mega.environments.worlds.ways import Cell, distance

DIRECTIONS: dict[str, Cell] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
_STEPS = tuple(DIRECTIONS.values())

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
SYMBOLS = "#_O\u221aXPS"
"""Standard symbols in the order of the constants above; boards files use these."""

_TURN_PROBABILITY = 0.35
# Cells, relative to the walker, that each stamp of the walk opens.
_STAMPS: tuple[tuple[Cell, ...], ...] = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
_MAX_ATTEMPTS = 1000
_MAX_POSITIONS = 20_000  # backward positions examined per attempt


@dataclass(frozen=True, slots=True)
class Room:
    """A position of the game. The outermost rows and columns are walls, so a step never leaves the
    board.
    """

    size: Cell  # rows, columns
    walls: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def is_solved(self) -> bool:
        return self.boxes == self.targets

    def cell_kind(self, cell: Cell) -> int:
        """Return one of the constants WALL ... PLAYER_ON_TARGET."""
        if cell in self.walls:
            return WALL
        on_target = cell in self.targets
        if cell == self.player:
            return PLAYER_ON_TARGET if on_target else PLAYER
        if cell in self.boxes:
            return BOX_ON_TARGET if on_target else BOX
        return TARGET if on_target else FLOOR

    def after(self, action: str) -> "Room":
        """Return the position after one action; the same object if nothing can move."""
        dr, dc = DIRECTIONS[action]
        ahead = (self.player[0] + dr, self.player[1] + dc)
        if ahead in self.walls:
            return self
        if ahead not in self.boxes:
            return replace(self, player=ahead)
        beyond = (ahead[0] + dr, ahead[1] + dc)
        if beyond in self.walls or beyond in self.boxes:
            return self
        return replace(self, player=ahead, boxes=self.boxes - {ahead} | {beyond})

    def rows(self, symbols: str = SYMBOLS) -> tuple[str, ...]:
        """Return the board as text, one string per row."""
        height, width = self.size
        return tuple(
            "".join(symbols[self.cell_kind((r, c))] for c in range(width)) for r in range(height)
        )


def parse_room(rows: Sequence[str]) -> Room:
    """Read a board in the standard symbols. Raises ValueError that names the broken rule."""
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(
            f"a Sokoban board needs rows of one length, not lengths {[len(row) for row in rows]}"
        )
    cells: dict[int, list[Cell]] = {kind: [] for kind in range(len(SYMBOLS))}
    for r, row in enumerate(rows):
        for c, symbol in enumerate(row):
            if symbol not in SYMBOLS:
                raise ValueError(
                    f"a Sokoban board is written in {' '.join(SYMBOLS)}, not {symbol!r} (row {r}:"
                    f" {row!r})"
                )
            cells[SYMBOLS.index(symbol)].append((r, c))
    size = (len(rows), len(rows[0]))
    walls = frozenset(cells[WALL])
    border = {
        (r, c)
        for r in range(size[0])
        for c in range(size[1])
        if r in (0, size[0] - 1) or c in (0, size[1] - 1)
    }
    if not border <= walls:
        raise ValueError(f"a Sokoban board is enclosed by walls (#); {min(border - walls)} is open")
    players = cells[PLAYER] + cells[PLAYER_ON_TARGET]
    if len(players) != 1:
        raise ValueError(f"a Sokoban board has exactly one player (P or S), not {len(players)}")
    boxes = frozenset(cells[BOX] + cells[BOX_ON_TARGET])
    targets = frozenset(cells[TARGET] + cells[BOX_ON_TARGET] + cells[PLAYER_ON_TARGET])
    if not boxes or len(boxes) != len(targets):
        raise ValueError(
            f"a Sokoban board has as many boxes as targets, at least one: {len(boxes)} and"
            f" {len(targets)}"
        )
    if boxes == targets:
        raise ValueError("a Sokoban board must not be solved already: move a box off its target")
    return Room(size, walls, targets, boxes, players[0])


def generate_room(rng: np.random.Generator, *, dim: int, num_boxes: int, search_depth: int) -> Room:
    """Draw a solvable room of `dim` x `dim` cells.

    `search_depth` bounds the moves of the backward play. Raises ValueError if no attempt gives
    a solvable room.
    """
    for _ in range(_MAX_ATTEMPTS):
        floor = _carve_floor(rng, dim)
        if len(floor) < 2 * num_boxes + 1:
            continue
        places = [floor[i] for i in rng.permutation(len(floor))[: num_boxes + 1].tolist()]
        room = _play_backwards(
            rng, dim, frozenset(floor), tuple(places[1:]), places[0], search_depth
        )
        if room is not None:
            return room
    raise ValueError(
        f"no solvable Sokoban room of {dim}x{dim} cells with {num_boxes} boxes in {_MAX_ATTEMPTS}"
        " attempts; use a larger dim or search_depth, or fewer boxes"
    )


def _carve_floor(rng: np.random.Generator, dim: int) -> list[Cell]:
    """Return the floor cells opened by a random walk of int(1.7 * (rows + columns)) stamps, in
    reading order.
    """
    num_stamps = int(1.7 * (dim + dim))
    turns = (rng.random(num_stamps) < _TURN_PROBABILITY).tolist()
    headings = rng.integers(len(_STEPS), size=num_stamps + 1).tolist()
    stamps = rng.integers(len(_STAMPS), size=num_stamps).tolist()
    row, column = rng.integers(1, dim - 1, size=2).tolist()
    heading = headings[0]
    floor: set[Cell] = set()
    for turn, new_heading, stamp in zip(turns, headings[1:], stamps, strict=True):
        if turn:
            heading = new_heading
        row = min(max(row + _STEPS[heading][0], 1), dim - 2)
        column = min(max(column + _STEPS[heading][1], 1), dim - 2)
        floor.update((row + dr, column + dc) for dr, dc in _STAMPS[stamp])
    return sorted((r, c) for r, c in floor if 0 < r < dim - 1 and 0 < c < dim - 1)


def _play_backwards(
    rng: np.random.Generator,
    dim: int,
    floor: frozenset[Cell],
    targets: tuple[Cell, ...],
    player: Cell,
    depth: int,
) -> Room | None:
    """Pull boxes off their targets and keep a position of the highest score; None if a box never
    leaves its target.

    The score is RAGEN's: box changes times total Manhattan displacement, zero while any box is on
    any target.
    """
    best_score = 0
    best: list[tuple[Cell, tuple[Cell, ...]]] = []
    seen = {(player, targets)}
    # Player, boxes, box pulled last, box changes, moves.
    queue = deque([(player, targets, -1, 0, 0)])
    while queue and len(seen) < _MAX_POSITIONS:
        player, boxes, last, changes, moves = queue.popleft()
        if moves == depth:
            continue
        for dr, dc in _STEPS:
            ahead = (player[0] + dr, player[1] + dc)
            if ahead not in floor or ahead in boxes:
                continue
            successors = [(boxes, last, changes)]
            behind = (player[0] - dr, player[1] - dc)
            if behind in boxes:
                pulled = boxes.index(behind)
                moved = (*boxes[:pulled], player, *boxes[pulled + 1 :])
                successors.append((moved, pulled, changes + (pulled != last)))
            for next_boxes, next_last, next_changes in successors:
                if (ahead, next_boxes) in seen:
                    continue
                seen.add((ahead, next_boxes))
                queue.append((ahead, next_boxes, next_last, next_changes, moves + 1))
                if next_boxes is boxes:
                    continue
                score = next_changes * _displacement(next_boxes, targets)
                if score > best_score:
                    best_score, best = score, []
                if score == best_score > 0:
                    best.append((ahead, next_boxes))
    if not best:
        return None
    player, boxes = best[int(rng.integers(len(best)))]
    player = _walk_away(
        rng, floor - set(boxes), player, probability=0.8 if best_score == 1 else 0.5
    )
    size = (dim, dim)
    walls = frozenset((r, c) for r in range(dim) for c in range(dim)) - floor
    return Room(size, walls, frozenset(targets), frozenset(boxes), player)


def _displacement(boxes: tuple[Cell, ...], targets: tuple[Cell, ...]) -> int:
    if any(box in targets for box in boxes):
        return 0
    return sum(distance(box, target) for box, target in zip(boxes, targets, strict=True))


def _walk_away(
    rng: np.random.Generator, free: frozenset[Cell] | set[Cell], player: Cell, probability: float
) -> Cell:
    """Walk the player one to three cells away with the given probability, so that its position
    does not reveal the first push.
    """
    if rng.random() >= probability:
        return player
    for _ in range(int(rng.integers(1, 4))):
        options = [cell for dr, dc in _STEPS if (cell := (player[0] + dr, player[1] + dc)) in free]
        if options:
            player = options[int(rng.integers(len(options)))]
    return player
