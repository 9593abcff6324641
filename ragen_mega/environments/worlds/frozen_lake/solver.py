"""Exact FrozenLake players: values of closed-loop, open-loop-per-turn and uniform-random play by
dynamic programming.

Value = probability of reaching the goal within the budget. A turn of the protocol commits to its
actions without seeing their outcomes, so its value is the maximum over action sequences of the
expected value of the final cell; the sequences are enumerated as value vectors over cells (alpha
vectors, Smallwood and Sondik 1973).
"""

from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragen_mega.environments.protocol import Budget, References, Solver
from ragen_mega.environments.worlds.frozen_lake.lakes import DIRECTIONS, Lake
from ragen_mega.environments.worlds.ways import Cell

_Array = NDArray[np.float64]
_TIE = 1e-12

MAX_UNSEEN_ACTIONS = 6
"""Longest turn that `LakeSolver.open_loop` solves; its cost grows as 4 to this power."""


class LakeSolver:
    """Values of one map at one success rate, for every cell that is not terminal."""

    def __init__(self, lake: Lake, success_rate: float) -> None:
        self._lake, self._success_rate = lake, success_rate
        every_cell = ((r, c) for r in range(lake.size) for c in range(lake.size))
        self._cells = [cell for cell in every_cell if cell != lake.goal and cell not in lake.holes]
        self._index = {cell: i for i, cell in enumerate(self._cells)}

    @cached_property
    def _dynamics(self) -> tuple[_Array, _Array]:
        """Transition probabilities between the n cells [A, n, n] and into the goal [A, n]."""
        names = list(DIRECTIONS)
        moves = np.zeros((len(names), len(self._cells), len(self._cells)))
        arrivals = np.zeros((len(names), len(self._cells)))
        side = (1.0 - self._success_rate) / 2.0
        for a in range(len(names)):
            for slip, probability in ((0, self._success_rate), (1, side), (-1, side)):
                direction = names[(a + slip) % len(names)]
                for i, cell in enumerate(self._cells):
                    landing = self._lake.neighbour(cell, direction)
                    if landing == self._lake.goal:
                        arrivals[a, i] += probability
                    elif landing in self._index:
                        moves[a, i, self._index[landing]] += probability
        return moves, arrivals

    def random(self, player: Cell, num_actions: int) -> float:
        """Return the success of `num_actions` uniformly random actions."""
        moves, arrivals = (part.mean(axis=0) for part in self._dynamics)
        value = np.zeros(len(self._cells))
        for _ in range(num_actions):
            value = arrivals + moves @ value
        return self._at(player, value)

    def closed_loop(self, player: Cell, num_actions: int) -> float:
        """Return the success of the best player who sees the outcome of every action."""
        return self._at(player, self._action_values(num_actions)[-1].max(axis=0))

    def best_action(self, player: Cell, num_actions: int) -> str:
        """Return the first action of that player; ties go to the action with the higher sum of
        values over all shorter budgets.
        """
        values = self._action_values(num_actions)[:, :, self._index[player]]  # [budgets, A]
        is_best = values[-1] >= values[-1].max() - _TIE
        return list(DIRECTIONS)[int(np.argmax(np.where(is_best, values.sum(axis=0), -1.0)))]

    def open_loop(
        self, player: Cell, *, max_turns: int, max_actions_per_turn: int, max_actions: int
    ) -> float | None:
        """Return the success of the best player who commits to at most `max_actions_per_turn`
        actions at a time.

        None if a turn holds more than `MAX_UNSEEN_ACTIONS` actions: the sequences would be too many
        to enumerate.
        """
        if self._success_rate == 1.0:  # nothing to see: the outcome of every action is known
            return self.closed_loop(player, min(max_actions, max_turns * max_actions_per_turn))
        if min(max_actions_per_turn, max_actions) > MAX_UNSEEN_ACTIONS:
            return None

        @cache
        def value(turns: int, budget: int) -> _Array:
            """[n] best value of the turns and actions that are left."""
            lengths = range(1, min(max_actions_per_turn, budget) + 1) if turns else range(0)
            afterwards = (
                sequences(turns - 1, budget - length, length).max(axis=0) for length in lengths
            )
            return np.maximum.reduce([np.zeros(len(self._cells)), *afterwards])

        @cache
        def sequences(turns: int, budget: int, length: int) -> _Array:
            """[number of sequences, n] values of `length` unseen actions, followed by the best play
            of the remaining actions.
            """
            usable = turns * max_actions_per_turn
            if budget > usable:
                return sequences(turns, usable, length)
            if length == 0:
                return value(turns, budget)[None]
            return self._prepend_every_action(sequences(turns, budget, length - 1))

        return self._at(player, value(max_turns, max_actions))

    def _prepend_every_action(self, vectors: _Array) -> _Array:
        moves, arrivals = self._dynamics
        # [A, number of sequences, n]
        extended = arrivals[:, None] + vectors @ moves.transpose(0, 2, 1)
        return extended.reshape(-1, len(self._cells))

    def _action_values(self, num_actions: int) -> _Array:
        """Q of the closed loop for 1 ... `num_actions` actions left, [num_actions, A, n]."""
        moves, arrivals = self._dynamics
        value = np.zeros(len(self._cells))
        values = np.zeros((max(num_actions, 1), *arrivals.shape))
        for b in range(num_actions):
            values[b] = arrivals + moves @ value
            value = values[b].max(axis=0)
        return values

    def _at(self, player: Cell, value: _Array) -> float:
        if player == self._lake.goal:
            return 1.0
        return 0.0 if player in self._lake.holes else float(value[self._index[player]])


def references(environment: Any, budget: Budget) -> References:
    """Return the success of the reference players from where the player stands."""
    facts = environment.facts()
    solver, player = LakeSolver(environment.lake, facts["success_rate"]), facts["player"]
    return References(
        random=solver.random(player, budget.action_budget),
        optimum=solver.open_loop(
            player,
            max_turns=budget.max_turns,
            max_actions_per_turn=budget.max_actions_per_turn,
            max_actions=budget.max_actions,
        ),
        optimum_closed_loop=solver.closed_loop(player, budget.max_actions),
    )


def optimal_actions(environment: Any, actions_left: int) -> list[str]:
    """Return the best next action alone, because the one after it depends on where this one slips;
    none if the episode is over. Where the goal is out of reach, it is the best of a longer episode:
    play that is imitated goes on towards the goal.
    """
    facts, lake = environment.facts(), environment.lake
    player = facts["player"]
    if player == lake.goal or player in lake.holes:
        return []
    solver = LakeSolver(lake, facts["success_rate"])
    can_help = solver.closed_loop(player, actions_left) > 0
    return [solver.best_action(player, actions_left if can_help else lake.size**2)]


SOLVER = Solver(references, optimal_actions)
