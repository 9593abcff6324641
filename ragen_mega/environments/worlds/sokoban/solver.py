"""Exact Sokoban players: shortest solution by breadth-first search, uniform-random player by
propagation.

The search is over (player, boxes) positions; boxes never enter cells from which no target can be
reached.
"""

import math
from collections import defaultdict, deque
from typing import Any

from ragen_mega.environments.protocol import Budget, References, Solver
from ragen_mega.environments.worlds.sokoban.rooms import DIRECTIONS, Room
from ragen_mega.environments.worlds.ways import Cell

_State = tuple[int, frozenset[int]]  # player, boxes; a cell is row * columns + column


def shortest_plan(room: Room, max_length: int | None = None) -> list[str] | None:
    """Return the action names of a shortest solution; None if there is none, or none of at most
    `max_length` actions.
    """
    walls, targets, start = _flatten(room)
    width = room.size[1]
    steps = {name: dr * width + dc for name, (dr, dc) in DIRECTIONS.items()}
    live = _live_cells(walls, targets, tuple(steps.values()))
    if start[1] == targets:
        return []
    parents: dict[_State, tuple[_State, str] | None] = {start: None}
    queue = deque([(start, 0)])
    while queue:
        state, length = queue.popleft()
        if length == max_length:
            return None
        for name, step in steps.items():
            successor = _after(state, step, walls, live)
            if successor in parents:
                continue
            parents[successor] = (state, name)
            if successor[1] == targets:
                return _plan_to(successor, parents)
            queue.append((successor, length + 1))
    return None


def random_success(room: Room, num_actions: int) -> float:
    """Return the probability that `num_actions` uniformly random actions solve the room, exact."""
    walls, targets, start = _flatten(room)
    steps = [dr * room.size[1] + dc for dr, dc in DIRECTIONS.values()]
    floor = set(range(math.prod(room.size))) - walls
    share = 1.0 / len(steps)
    solved = 0.0
    distribution: dict[_State, float] = {start: 1.0}
    for _ in range(num_actions):
        successors: defaultdict[_State, float] = defaultdict(float)
        for state, mass in distribution.items():
            for step in steps:
                successor = _after(state, step, walls, floor)
                if successor[1] == targets:
                    solved += mass * share
                else:
                    successors[successor] += mass * share
        distribution = successors
    return solved


def _after(state: _State, step: int, walls: frozenset[int], for_boxes: set[int]) -> _State:
    """Return the position after a step; the same if nothing can move. Boxes stay in cells
    `for_boxes`.
    """
    player, boxes = state
    ahead, beyond = player + step, player + 2 * step
    if ahead in walls:
        return state
    if ahead not in boxes:
        return ahead, boxes
    if beyond in boxes or beyond not in for_boxes:
        return state
    return ahead, boxes - {ahead} | {beyond}


def _flatten(room: Room) -> tuple[frozenset[int], frozenset[int], _State]:
    width = room.size[1]

    def index(cell: Cell) -> int:
        return cell[0] * width + cell[1]

    walls = frozenset(map(index, room.walls))
    return (
        walls,
        frozenset(map(index, room.targets)),
        (index(room.player), frozenset(map(index, room.boxes))),
    )


def _live_cells(walls: frozenset[int], targets: frozenset[int], steps: tuple[int, ...]) -> set[int]:
    """Return the cells from which a box alone on the board can be pushed to a target: pull one
    backwards from every target.
    """
    live = set(targets)
    frontier = list(targets)
    while frontier:
        cell = frontier.pop()
        for step in steps:
            # Pushing `source` by `step` from `pusher` lands on `cell`.
            source, pusher = cell - step, cell - 2 * step
            if source not in live and source not in walls and pusher not in walls:
                live.add(source)
                frontier.append(source)
    return live


def _plan_to(state: _State, parents: dict[_State, tuple[_State, str] | None]) -> list[str]:
    plan: list[str] = []
    while (parent := parents[state]) is not None:
        state, name = parent
        plan.append(name)
    return plan[::-1]


def references(environment: Any, budget: Budget) -> References:
    """Return the success of the reference players from this position."""
    plan = shortest_plan(environment.room, budget.max_actions)
    return References(
        random=random_success(environment.room, budget.action_budget),
        optimum=float(plan is not None and len(plan) <= budget.action_budget),
        optimum_closed_loop=float(plan is not None),
    )


def optimal_actions(environment: Any, actions_left: int) -> list[str]:
    """Return a shortest solution from here, cut off at the budget; empty if there is none."""
    return (shortest_plan(environment.room) or [])[:actions_left]


SOLVER = Solver(references, optimal_actions)
