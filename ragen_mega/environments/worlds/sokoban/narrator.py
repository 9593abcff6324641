"""Thoughts about a room: where to stand for a push and what moves do, never which move is best."""

from collections.abc import Sequence
from typing import Any

from ragen_mega.environments.protocol import Narrator
from ragen_mega.environments.worlds.sokoban.rooms import DIRECTIONS, Room
from ragen_mega.environments.worlds.ways import Cell, distance, way


def describe(environment: Any, actions: Sequence[str]) -> str:
    """Describe the place for a push toward the target, the effect of each move, and the chosen
    action, by its effect first; after `then` describe the state that it leads to in the same way,
    for a further action.

    A move leads into a wall, is stuck (the box cannot move), pushes the box closer to or away from
    the nearest target, or takes the player nearer to or farther from a place to stand. The facts
    that the environment calls `untold` are left out, to measure their worth.
    """
    room, untold, parts = environment.room, environment.untold, list[str]()
    for index, action in enumerate(actions or [None]):
        if index:
            room = room.after(actions[index - 1])
            if room.is_solved:
                return "".join([*parts, " solved"])
            parts.append(" then")
        is_blind = index > 0 and untold == "ahead"
        standing = _standing_cells(room)
        effects = {name: _effect(room, move, standing) for name, move in DIRECTIONS.items()}
        if not is_blind:
            parts += [f" stand{cell}" for cell in standing if untold != "standing"]
            parts += [f" {name}{_narrate_move(effects[name], untold)}" for name in effects]
        if action:
            word = "" if is_blind or untold == "effects" else f" {effects[action][2]}"
            parts.append(f" go{word} {action}")
    return "".join(parts)


_NAMES = {"wall": "a wall", "stuck": "a box that is stuck", "closer": "a box", "away": "a box"}


def neighbours(environment: Any) -> dict[str, str]:
    """Return the cell that each move leads to, in words."""
    room = environment.room
    effects = {name: _effect(room, move, ())[2] for name, move in DIRECTIONS.items()}
    return {name: _NAMES.get(effect, "free") for name, effect in effects.items()}


def ways(environment: Any) -> str:
    """Return, for each box, the way from the player to it and from it to its nearest target."""
    room = environment.room
    targets = {
        box: min(sorted(room.targets), key=lambda cell: distance(box, cell))
        for box in sorted(room.boxes)
    }
    return " ".join(
        f"Box: {way(room.player, box)}. Its target: {way(box, target)}."
        for box, target in targets.items()
    )


def explain(environment: Any, actions: Sequence[str]) -> str:
    """Return what the first of the chosen moves leads to, as short as a small model can keep."""
    return f"{actions[0]} is {neighbours(environment)[actions[0]]}."


def _narrate_move(effect: tuple[Cell, Cell | None, str], untold: str) -> str:
    to, pushed, word = effect
    cells = f" to{to}" + (f" push{pushed}" if pushed else "")
    return ("" if untold == "cells" else cells) + ("" if untold == "effects" else f" {word}")


def _standing_cells(room: Room) -> list[Cell]:
    """Return the cells behind a box as seen from its nearest target, ignoring walls."""
    return [
        (box[0] - move[0], box[1] - move[1])
        for box in sorted(room.boxes)
        for move in DIRECTIONS.values()
        if _to_target(room, _add(box, move)) < _to_target(room, box)
    ]


def _effect(room: Room, move: Cell, standing: Sequence[Cell]) -> tuple[Cell, Cell | None, str]:
    """Return the cell that a move leads to, cell that a box is pushed to, and the word for the
    effect.
    """
    to = _add(room.player, move)
    if to in room.boxes:
        pushed = _add(to, move)
        if pushed in room.walls or pushed in room.boxes:
            return to, pushed, "stuck"
        return to, pushed, "closer" if _to_target(room, pushed) < _to_target(room, to) else "away"
    if to in room.walls:
        return to, None, "wall"
    nearest = min((distance(room.player, cell) for cell in standing), default=0)
    return to, None, "near" if any(distance(to, cell) < nearest for cell in standing) else "far"


def _to_target(room: Room, cell: Cell) -> int:
    return min(distance(cell, target) for target in room.targets)


def _add(cell: Cell, move: Cell) -> Cell:
    return cell[0] + move[0], cell[1] + move[1]


NARRATOR = Narrator(
    describe,
    actions_per_turn=5,
    statement=r"(?:Up|Down|Left|Right) to\(\d+, \d+\)(?: push\(\d+, \d+\))? [a-z]+",
    announcement=r" go (?:[a-z]+ )?(Up|Down|Left|Right)",
    explain=explain,
    sentence=r"(Up|Down|Left|Right) is [a-z ]+\.",
)
