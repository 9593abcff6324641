"""Trajectories as a few arrays, for their way from rank to rank: what follows from the turns is
left out, bytes that all values of a field have in common travel once, and what a trajectory has in
common with the one before it is not repeated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragen_mega.data.fields import TokenField, recorded_fields
from ragen_mega.data.forest import common_prefix
from ragen_mega.data.types import Packed, Trajectory, Turn


class FieldValues(NamedTuple):
    """The values of one recorded field in S trajectories: V values of B bytes are sent.

    If only sampled tokens have the field, their values are sent, whatever trajectories begin with.
    """

    shared: NDArray[np.int32]  # [S] first values that equal the trajectory before
    dtype: str  # type of the values, float32 instead of float64 where that loses nothing
    first: NDArray[np.uint8]  # [1, B] the first value
    varies: NDArray[np.bool_]  # [B] bytes in which any value differs from the first
    differing: NDArray[np.uint8]  # [V, bytes that vary]

    @classmethod
    def of(cls, row: TokenField, name: str, trajectories: Sequence[Trajectory]) -> "FieldValues":
        """Return the column of a field of trajectories that this rank holds."""
        texts = [row.array(trajectory.token_fields[name]) for trajectory in trajectories]
        if row.is_sampled_only:
            shared = [0] * len(texts)
            turns = (
                (text, turn)
                for trajectory, text in zip(trajectories, texts)
                for turn in trajectory.turns
            )
            parts = [text[turn.start : turn.end] for text, turn in turns]
        else:
            pairs = pairwise(map(_bytes, [row.defaults(0), *texts]))
            shared = [common_prefix(*pair) for pair in pairs]
            parts = [text[size:] for text, size in zip(texts, shared)]
        values = np.concatenate([row.defaults(0), *parts])
        if values.dtype == np.float64 and np.array_equal(values.astype(np.float32), values):
            values = values.astype(np.float32)
        rows = _bytes(values)
        varies = (rows != rows[:1]).any(0)
        return cls(
            np.array(shared, np.int32), values.dtype.str, rows[:1].copy(), varies, rows[:, varies]
        )

    def values(self, row: TokenField, trajectories: Sequence[Trajectory]) -> Iterator[NDArray]:
        """Yield the values [L, ...] of each of the trajectories, equal to the bit."""
        rows = np.repeat(self.first, len(self.differing), 0)
        rows[:, self.varies] = self.differing
        sent = rows.view(self.dtype).reshape(-1, *row.shape).astype(row.recorded)
        found, start = sent[:0], 0
        for trajectory, shared in zip(trajectories, self.shared.tolist(), strict=True):
            if row.is_sampled_only:
                found = row.defaults(len(trajectory))
                for turn in trajectory.turns:
                    end = start + turn.end - turn.start
                    found[turn.start : turn.end] = sent[start:end]
                    start = end
            else:
                own = sent[start : start + len(trajectory) - shared]
                found = np.concatenate([found[:shared], own]) if shared else own
                start += len(own)
            yield found


def _bytes(values: NDArray) -> NDArray[np.uint8]:
    """Return values [V, ...] as their bytes [V, B]."""
    size = values.itemsize * int(np.prod(values.shape[1:]))
    return np.frombuffer(values.tobytes(), np.uint8).reshape(len(values), size)


Contents = dict[str, FieldValues]
"""Recorded field -> its values in S trajectories."""


class CompactTrajectories(NamedTuple):
    """S trajectories."""

    shells: list[Trajectory]
    """Trajectories with their turns, but without what was recorded for their tokens."""
    contents: Contents


class Outlines(NamedTuple):
    """The facts of S trajectories with K turns that every rank knows: not tokens, infos of turns
    and the values that follow from these.
    """

    environments: list[str]  # names that `facts` counts
    facts: NDArray[np.int64]  # [S, len(_FACTS)]
    turns: NDArray[np.int32]  # [K, 2] start and end
    rewards: NDArray[np.float64]  # [K]
    breaks: NDArray[np.int32]


_FACTS = (
    "group_id",
    "seed",
    "outcome_seed",
    "weight_version",
    "terminated",
    "truncated",
    "is_tree",
    "rank",
)
"""Fields of a trajectory in its row of `Outlines.facts`, before environment, number of tokens, of
turns and of breaks.
"""


def contents_of(trajectories: Sequence[Trajectory]) -> Contents:
    """Return what was recorded for the tokens of trajectories that this rank holds."""
    return {
        name: FieldValues.of(row, name, trajectories) for name, row in recorded_fields().items()
    }


def fill(trajectories: Sequence[Trajectory], contents: Contents) -> None:
    """Give trajectories, in the same order, the recorded values of their tokens."""
    columns = [contents[name].values(row, trajectories) for name, row in recorded_fields().items()]
    for trajectory, *values in zip(trajectories, *columns, strict=True):
        trajectory.token_fields = dict(zip(recorded_fields(), map(Packed, values), strict=True))


def compact(trajectories: Sequence[Trajectory]) -> CompactTrajectories:
    """Return the trajectories in compact form."""
    shells = [replace(trajectory) for trajectory in trajectories]
    for shell in shells:
        shell.release()
    return CompactTrajectories(shells, contents_of(trajectories))


def expand(packed: CompactTrajectories) -> list[Trajectory]:
    """Return the trajectories that `compact` was given, equal to the bit."""
    trajectories = [replace(shell) for shell in packed.shells]
    fill(trajectories, packed.contents)
    return trajectories


def outlines_of(trajectories: Sequence[Trajectory]) -> Outlines:
    """Return the facts of the trajectories that every rank gets to know."""
    environments = sorted({trajectory.environment for trajectory in trajectories})
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    facts = [
        [getattr(trajectory, name) for name in _FACTS]
        + [
            environments.index(trajectory.environment),
            len(trajectory),
            len(trajectory.turns),
            len(trajectory.breaks),
        ]
        for trajectory in trajectories
    ]
    return Outlines(
        environments,
        np.array(facts, np.int64).reshape(-1, len(_FACTS) + 4),
        np.array([(turn.start, turn.end) for turn in turns], np.int32).reshape(-1, 2),
        np.array([turn.reward for turn in turns], np.float64),
        np.array([place for trajectory in trajectories for place in trajectory.breaks], np.int32),
    )


def outlined(outlines: Outlines) -> list[Trajectory]:
    """Return trajectories whose tokens are elsewhere; the infos of their turns are empty."""
    turns = zip(outlines.turns.tolist(), outlines.rewards.tolist(), strict=True)
    breaks = iter(outlines.breaks.tolist())
    return [_outlined(outlines.environments, row, turns, breaks) for row in outlines.facts.tolist()]


def _outlined(
    environments: Sequence[str],
    row: Sequence[int],
    turns: Iterator[tuple[list[int], float]],
    breaks: Iterator[int],
) -> Trajectory:
    *facts, environment, length, num_turns, num_breaks = row
    named: dict[str, Any] = dict(zip(_FACTS, facts, strict=True))
    named |= {name: bool(named[name]) for name in ("terminated", "truncated", "is_tree")}
    found = Trajectory(
        **named,
        environment=environments[environment],
        turns=[
            Turn(start, end, reward) for _, ((start, end), reward) in zip(range(num_turns), turns)
        ],
        breaks=[place for _, place in zip(range(num_breaks), breaks)],
    )
    found.release(length)
    return found
