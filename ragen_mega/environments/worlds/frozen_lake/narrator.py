"""Thoughts about a lake: what lies around the player and where moves may lead, never which move is
best.
"""

from collections.abc import Sequence
from typing import Any

from ragen_mega.environments.protocol import Narrator
from ragen_mega.environments.worlds.frozen_lake.lakes import DIRECTIONS, Lake
from ragen_mega.environments.worlds.ways import Cell, distance


def describe(environment: Any, actions: Sequence[str]) -> str:
    """Describe the four neighbours, each move by the cells behind/ahead of the agent, and the
    chosen actions by the same pair.

    A move may slip to either side but never backwards, so it cannot lead to what lies behind. The
    pair is one word, because two words sampled separately might not belong to the same move. The
    facts that the environment calls `untold` are left out, to measure their worth.
    """
    facts, lake, untold = environment.facts(), environment.lake, environment.untold
    order, player = list(DIRECTIONS), facts["player"]
    cells = {action: lake.neighbour(player, action) for action in order}
    kinds = {action: _kind(facts, lake, cell) for action, cell in cells.items()}
    parts = [
        f" {action}"
        + (f" to{cell}" if cell != player and untold != "cells" else "")
        + (f" {kinds[action]}" if untold != "kinds" else "")
        for action, cell in cells.items()
    ]
    moves = {}
    for index, action in enumerate(order):
        behind, ahead = kinds[order[index - 2]].replace(" ", "-"), _AHEAD[kinds[action]]
        pair = {"behind": behind, "ahead": ahead}
        pair.pop(untold, None)
        moves[action] = f" {'/'.join(pair.values())} {action}"
    # The second of two moves has other odds than the first; its own marker lets a policy prefer
    # other words there.
    chosen = [
        f" {'then' if index else 'go'}{moves[action]}" for index, action in enumerate(actions)
    ]
    return "".join([*parts, *moves.values(), *chosen])


_NAMES = {"edge": "the edge", "hole": "a hole", "goal": "the goal"}


def neighbours(environment: Any) -> dict[str, str]:
    """Return the cell that each move leads to, in words."""
    facts, lake = environment.facts(), environment.lake
    kinds = {
        action: _kind(facts, lake, lake.neighbour(facts["player"], action)) for action in DIRECTIONS
    }
    return {action: _NAMES.get(kind, "ice") for action, kind in kinds.items()}


def explain(environment: Any, actions: Sequence[str]) -> str:
    """Return what the first of the chosen moves leads to, as short as a small model can keep."""
    return f"{actions[0]} is {neighbours(environment)[actions[0]]}."


_AHEAD = {
    "hole": "hole",
    "goal": "on",
    "closer": "on",
    "closer brink": "on",
    "edge": "off",
    "farther": "off",
    "farther brink": "off",
}
"""Words for a cell ahead. They distinguish less than the words for a cell behind, because the more
pairs there are, the rarer each pair is, and preferences are learned from many noisy returns.
"""


def _kind(facts: dict[str, Any], lake: Lake, cell: Cell) -> str:
    """Return a cell as seen from the player; `brink` is a cell beside a hole."""
    if cell == facts["player"]:
        return "edge"
    if cell in facts["holes"]:
        return "hole"
    if cell == facts["goal"]:
        return "goal"
    is_closer = distance(cell, facts["goal"]) < distance(facts["player"], facts["goal"])
    is_brink = any(lake.neighbour(cell, action) in facts["holes"] for action in DIRECTIONS)
    return ("closer" if is_closer else "farther") + is_brink * " brink"


NARRATOR = Narrator(
    describe,
    actions_per_turn=2,
    statement=r"(?:Left|Down|Right|Up)(?: to\(\d+, \d+\))?"
    r" (?:edge|hole|goal|(?:closer|farther)(?: brink)?)\b",
    explain=explain,
    sentence=r"(Left|Down|Right|Up) is [a-z ]+\.",
)
