"""Trajectories as a few arrays, for their way from rank to rank: what follows from the turns is
left out, a token takes the bytes that the largest one needs, and what a trajectory has in common
with the one before it is not repeated.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragen_mega.data.forest import common_prefix
from ragen_mega.data.types import Elsewhere, Packed, Trajectory, Turn


class Contents(NamedTuple):
    """The tokens of S trajectories of L_s tokens, of which A were sampled, and how likely these
    were. Their mask and the zeros among their log-probabilities follow from the turns (see
    `Trajectory.append_action`).
    """

    shared: NDArray[np.int32]  # [S] first tokens that are those of the one before, n_s
    tokens: NDArray[np.uint8]  # [sum (L - n), bytes of a token], the lowest byte first
    logprobs: NDArray[np.floating]  # [A]; float32 where that is what they were


class CompactTrajectories(NamedTuple):
    """S trajectories."""

    shells: list[Trajectory]
    """Everything else about them, with their turns."""
    contents: Contents


class Outlines(NamedTuple):
    """What is known everywhere of S trajectories with K turns in all: not tokens, infos of turns
    and what follows from these.
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
    "rank",
)
"""Fields of a trajectory in its row of `Outlines.facts`, before environment, number of tokens, of
turns and of breaks.
"""


def contents_of(trajectories: Sequence[Trajectory]) -> Contents:
    """The tokens of trajectories that this rank holds."""
    texts = [np.asarray(one.tokens, np.int64) for one in trajectories]
    shared = [common_prefix(one, other) for one, other in pairwise([np.empty(0), *texts])]
    tokens = _joined((text[size:] for text, size in zip(texts, shared)), np.int64)
    spans = ((one, turn) for one in trajectories for turn in one.turns)
    logprobs = _joined(
        (np.asarray(one.rollout_logprobs[turn.start : turn.end]) for one, turn in spans), np.float64
    )
    width = -(-int(tokens.max(initial=0)).bit_length() // 8)
    narrow = logprobs.astype(np.float32)
    return Contents(
        np.array(shared, np.int32),
        np.ascontiguousarray(tokens.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]),
        narrow if np.array_equal(narrow, logprobs) else logprobs,
    )


def fill(trajectories: Sequence[Trajectory], contents: Contents) -> None:
    """Give them, in the same order, tokens, masks and log-probabilities, equal to the bit."""
    wide = np.zeros((len(contents.tokens), 8), np.uint8)
    wide[:, : contents.tokens.shape[1]] = contents.tokens
    ids = wide.view("<i8")[:, 0].astype(np.int32)
    before, token, logprob = ids[:0], 0, 0
    for one, shared in zip(trajectories, contents.shared.tolist(), strict=True):
        length = len(one)
        own = ids[token : token + length - shared]
        before = np.concatenate([before[:shared], own]) if shared else own
        token += len(own)
        mask, logprobs = np.zeros(length, np.bool_), np.zeros(length)
        for turn in one.turns:
            size = turn.end - turn.start
            mask[turn.start : turn.end] = True
            logprobs[turn.start : turn.end] = contents.logprobs[logprob : logprob + size]
            logprob += size
        one.tokens, one.loss_mask, one.rollout_logprobs = map(Packed, (before, mask, logprobs))


def compact(trajectories: Sequence[Trajectory]) -> CompactTrajectories:
    """The trajectories in compact form."""
    shells = [replace(one) for one in trajectories]
    for shell in shells:
        shell.release()
    return CompactTrajectories(shells, contents_of(trajectories))


def expand(packed: CompactTrajectories) -> list[Trajectory]:
    """Inverse of `compact`, to the bit."""
    trajectories = [replace(shell) for shell in packed.shells]
    fill(trajectories, packed.contents)
    return trajectories


def outlines_of(trajectories: Sequence[Trajectory]) -> Outlines:
    """What is known everywhere of the trajectories."""
    environments = sorted({one.environment for one in trajectories})
    turns = [turn for one in trajectories for turn in one.turns]
    facts = [
        [getattr(one, name) for name in _FACTS]
        + [environments.index(one.environment), len(one), len(one.turns), len(one.breaks)]
        for one in trajectories
    ]
    return Outlines(
        environments,
        np.array(facts, np.int64).reshape(-1, len(_FACTS) + 4),
        np.array([(turn.start, turn.end) for turn in turns], np.int32).reshape(-1, 2),
        np.array([turn.reward for turn in turns], np.float64),
        np.array([place for one in trajectories for place in one.breaks], np.int32),
    )


def outlined(outlines: Outlines) -> list[Trajectory]:
    """Trajectories whose tokens are elsewhere; the infos of their turns are empty."""
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
    named = dict(zip(_FACTS, facts, strict=True))
    named |= {name: bool(named[name]) for name in ("terminated", "truncated")}
    absent = Elsewhere(length)
    return Trajectory(
        **named,
        environment=environments[environment],
        tokens=absent,
        loss_mask=absent,
        rollout_logprobs=absent,
        turns=[Turn(*at, reward) for _, (at, reward) in zip(range(num_turns), turns)],
        breaks=[place for _, place in zip(range(num_breaks), breaks)],
    )


def _joined(parts: Iterable[NDArray], dtype: type[np.generic]) -> NDArray:
    return np.concatenate([np.empty(0, dtype), *parts])
