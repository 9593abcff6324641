"""Thoughts about a lake: what lies around the player and where moves may lead, never which move is
best.
"""

from collections.abc import Sequence
from typing import Any

from ragen_mega.environments.protocol import Narrator
from ragen_mega.environments.worlds.frozen_lake.lakes import DIRECTIONS, Cell, Lake, distances


def describe(environment: Any, actions: Sequence[str]) -> str:
    """The four neighbours, each move as what lies behind/ahead of it, and the same pair for the
    chosen actions.

    A move may slip to either side but never backwards, so it cannot lead to what lies behind. The
    pair is one word, because two words sampled separately might not belong to the same move.
    """
    lake, player = environment.lake, environment.facts()["player"]
    order = list(DIRECTIONS)
    cells = {action: lake.neighbour(player, action) for action in order}
    kinds = {action: _lake_cell(lake, player, cell) for action, cell in cells.items()}
    parts = [
        f" {action} {kinds[action]}" if cell == player else f" {action} to{cell} {kinds[action]}"
        for action, cell in cells.items()
    ]
    moves = {
        action: f"{kinds[order[index - 2]]}/{kinds[action]} {action}"
        for index, action in enumerate(order)
    }
    # The second of two moves has other odds than the first: its words are other tokens, so that a
    # policy can prefer others.
    chosen = [
        f"{'then' if index else 'go'}/{moves[action]}" for index, action in enumerate(actions)
    ]
    return "".join([*parts, *(f" {words}" for words in (*moves.values(), *chosen))])


def _lake_cell(lake: Lake, player: Cell, cell: Cell) -> str:
    """One word for a neighbouring cell as seen from the player; `closer` and `farther` by the way
    to the goal around the holes.
    """
    if cell == player:
        return "edge"
    if cell in lake.holes:
        return "hole"
    if cell == lake.goal:
        return "goal"
    moves = distances(lake)
    return "closer" if moves[cell] < moves[player] else "farther"


NARRATOR = Narrator(
    describe,
    actions_per_turn=2,
    statement=r"(?:Left|Down|Right|Up)(?: to\(\d+, \d+\))? (?:edge|hole|goal|closer|farther)\b",
)
