"""Scripted players: true thoughts about the state, and actions that are uniformly random unless
`skill` says otherwise.

A thought states facts and relations that the state implies, and ends with what the chosen actions
may lead to; it never says which action is best. What to make of the facts is left to reinforcement
learning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ragen_mega.environments.episode import Episode
from ragen_mega.environments.protocol import Environment
from ragen_mega.environments.reference_players import optimal_actions
from ragen_mega.environments.worlds.bandit.world import Bandit
from ragen_mega.environments.worlds.frozen_lake.world import DIRECTIONS, FrozenLake
from ragen_mega.environments.worlds.sokoban.rooms import DIRECTIONS as SOKOBAN_DIRECTIONS
from ragen_mega.environments.worlds.sokoban.world import Sokoban

Cell = tuple[int, int]
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScriptedPlayer:
    """How one kind of environment is narrated."""

    describe: Callable[[Any, Sequence[str]], str]
    """(environment, the actions about to be taken) -> thought."""
    actions_per_turn: int


def scripted_response(
    episode: Episode, generator: np.random.Generator, *, skill: float = 0.0
) -> str:
    """What the scripted player says in this turn, after a forced `<think>` where the episode asks
    for thoughts.

    Each action is the optimal one with probability `skill`, else uniformly random. Raises
    ValueError for an environment without a scripted player.
    """
    environment, config = episode.environment, episode.config
    player = _player(environment)
    count = min(player.actions_per_turn, config.max_actions_per_turn, episode.actions_left)
    plan = optimal_actions(environment)[:count] if skill > 0 else []
    actions = [
        (
            plan[index]
            if index < len(plan) and generator.random() < skill
            else str(generator.choice(environment.actions))
        )
        for index in range(count)
    ]
    answer = "<answer> " + " || ".join(actions) + "</answer>"
    return f"{player.describe(environment, actions)}</think>{answer}" if config.think else answer


def _player(environment: Environment) -> ScriptedPlayer:
    for kind, player in _PLAYERS.items():
        if isinstance(environment, kind):
            return player
    raise ValueError(
        f"there is no scripted player for {type(environment).__name__}; add one to"
        " warm_start/scripted.py or start from a pretrained checkpoint with --load"
    )


def describe_bandit(environment: Bandit, actions: Sequence[str]) -> str:
    """Which arms there are, in the order shown."""
    first, second = environment.facts()["arms"]
    return f" arms {first} {second}"


def describe_frozen_lake(environment: FrozenLake, actions: Sequence[str]) -> str:
    """The four neighbours, each move as what lies behind/ahead of it, and that of the chosen
    actions.

    A move may slip to either side but never backwards, so what lies behind is what it cannot lead
    to. The pair is one word: chosen one after the other, its halves would not always belong to the
    same move.
    """
    facts, lake = environment.facts(), environment.lake
    order, player = list(DIRECTIONS), facts["player"]
    parts, kinds = [], {}
    for action in order:
        cell = lake.neighbour(player, action)
        kinds[action] = _lake_cell(facts, cell)
        parts.append(
            f" {action} {kinds[action]}"
            if cell == player
            else f" {action} to{cell} {kinds[action]}"
        )
    moves = {
        action: f" {kinds[order[index - 2]]}/{kinds[action]} {action}"
        for index, action in enumerate(order)
    }
    # The second of two moves is made under other odds; a mark of its own lets a policy prefer other
    # words there.
    chosen = [
        f" {'then' if index else 'go'}{moves[action]}" for index, action in enumerate(actions)
    ]
    return "".join([*parts, *moves.values(), *chosen])


def _lake_cell(facts: Facts, cell: Cell) -> str:
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


def describe_sokoban(environment: Sokoban, actions: Sequence[str]) -> str:
    """Where to stand for a push toward the target, what each move does, and that of the chosen
    actions.

    Moves lead into a wall, are stuck (the box cannot move), push the box closer to or away from the
    nearest target, or take the player near to or far from a place to stand.
    """
    facts = environment.facts()
    standing = _standing_cells(facts)
    parts = [f" stand{cell}" for cell in standing]
    effects = {}
    for action, move in SOKOBAN_DIRECTIONS.items():
        to, pushed, effects[action] = _effect(facts, move, standing)
        parts.append(
            f" {action} to{to}" + (f" push{pushed}" if pushed else "") + f" {effects[action]}"
        )
    parts += [f" go {effects[action]}" for action in actions]
    return "".join(parts)


def _standing_cells(facts: Facts) -> list[Cell]:
    """Cells behind a box as seen from its nearest target, walls not considered."""
    cells = []
    for box in facts["boxes"]:
        for move in SOKOBAN_DIRECTIONS.values():
            if _to_target(facts, _add(box, move)) < _to_target(facts, box):
                cells.append((box[0] - move[0], box[1] - move[1]))
    return cells


def _effect(facts: Facts, move: Cell, standing: Sequence[Cell]) -> tuple[Cell, Cell | None, str]:
    """Cell that a move leads to, cell that a box is pushed to, and what that does."""
    player, free, boxes = facts["player"], facts["free"], facts["boxes"]
    to = _add(player, move)
    if to in boxes:
        pushed = _add(to, move)
        if pushed not in free or pushed in boxes:
            return to, pushed, "stuck"
        return to, pushed, "closer" if _to_target(facts, pushed) < _to_target(facts, to) else "away"
    if to not in free:
        return to, None, "wall"
    nearest = min((_distance(player, cell) for cell in standing), default=0)
    return to, None, "near" if any(_distance(to, cell) < nearest for cell in standing) else "far"


def _to_target(facts: Facts, cell: Cell) -> int:
    return min(_distance(cell, target) for target in facts["targets"])


def _add(cell: Cell, move: Cell) -> Cell:
    return cell[0] + move[0], cell[1] + move[1]


def _distance(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


_PLAYERS: dict[type, ScriptedPlayer] = {
    Bandit: ScriptedPlayer(describe_bandit, actions_per_turn=1),
    FrozenLake: ScriptedPlayer(describe_frozen_lake, actions_per_turn=2),
    Sokoban: ScriptedPlayer(describe_sokoban, actions_per_turn=1),
}
