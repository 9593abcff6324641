"""Thoughts about a lake: what lies around the player and where moves may lead, never which move is
best.
"""

from collections.abc import Sequence
from typing import Any

from ragen_mega.environments.protocol import Narrator
from ragen_mega.environments.worlds.frozen_lake.lakes import DIRECTIONS, Cell


def describe(environment: Any, actions: Sequence[str]) -> str:
    """The four neighbours, each move as what lies behind/ahead of it, and the same pair for the
    chosen actions.

    A move may slip to either side but never backwards, so it cannot lead to what lies behind. The
    pair is one word, because two words sampled separately might not belong to the same move.
    """
    facts, lake = environment.facts(), environment.lake
    order, player = list(DIRECTIONS), facts["player"]
    cells = {action: lake.neighbour(player, action) for action in order}
    kinds = {action: _lake_cell(facts, cell) for action, cell in cells.items()}
    parts = [
        f" {action} {kinds[action]}" if cell == player else f" {action} to{cell} {kinds[action]}"
        for action, cell in cells.items()
    ]
    moves = {
        action: f" {kinds[order[index - 2]]}/{kinds[action]} {action}"
        for index, action in enumerate(order)
    }
    # The second of two moves has other odds than the first; its own marker lets a policy prefer
    # other words there.
    chosen = [
        f" {'then' if index else 'go'}{moves[action]}" for index, action in enumerate(actions)
    ]
    return "".join([*parts, *moves.values(), *chosen])


def _lake_cell(facts: dict[str, Any], cell: Cell) -> str:
    """One word for a cell as seen from the player."""
    if cell == facts["player"]:
        return "edge"
    if cell in facts["holes"]:
        return "hole"
    if cell == facts["goal"]:
        return "goal"
    return (
        "closer"
        if _distance(cell, facts["goal"]) < _distance(facts["player"], facts["goal"])
        else "farther"
    )


def _distance(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


NARRATOR = Narrator(
    describe,
    actions_per_turn=2,
    statement=r"(?:Left|Down|Right|Up)(?: to\(\d+, \d+\))? (?:edge|hole|goal|closer|farther)\b",
)
