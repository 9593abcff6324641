"""Trajectories as a few arrays, for their way from rank to rank: what follows from the turns is
left out, and a token takes the bytes that the largest one needs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragen_mega.data.types import Trajectory


class CompactTrajectories(NamedTuple):
    """S trajectories of L_s tokens, of which A were sampled."""

    shells: list[Trajectory]
    """Everything else about them, with their turns."""
    lengths: NDArray[np.int64]  # [S]
    tokens: NDArray[np.uint8]  # [sum L, bytes of a token], the lowest byte first
    logprobs: NDArray[np.floating]  # [A]; float32 where that is what they were


def compact(trajectories: Sequence[Trajectory]) -> CompactTrajectories:
    """The trajectories in compact form. Their mask and the zeros among their log-probabilities
    follow from the turns (see `Trajectory.append_action`).
    """
    tokens = _joined((np.array(one.tokens, np.int64) for one in trajectories), np.int64)
    spans = ((one, turn) for one in trajectories for turn in one.turns)
    logprobs = _joined(
        (np.array(one.rollout_logprobs[turn.start : turn.end]) for one, turn in spans), np.float64
    )
    width = -(-int(tokens.max(initial=0)).bit_length() // 8)
    narrow = logprobs.astype(np.float32)
    return CompactTrajectories(
        [replace(one, tokens=[], loss_mask=[], rollout_logprobs=[]) for one in trajectories],
        np.array([len(one) for one in trajectories], np.int64),
        tokens.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width],
        narrow if np.array_equal(narrow, logprobs) else logprobs,
    )


def expand(packed: CompactTrajectories) -> list[Trajectory]:
    """Inverse of `compact`, to the bit."""
    wide = np.zeros((len(packed.tokens), 8), np.uint8)
    wide[:, : packed.tokens.shape[1]] = packed.tokens
    ids = wide.view("<i8")[:, 0]
    trajectories, token, logprob = [], 0, 0
    for shell, length in zip(packed.shells, packed.lengths.tolist(), strict=True):
        mask, logprobs = [False] * length, [0.0] * length
        for turn in shell.turns:
            size = turn.end - turn.start
            mask[turn.start : turn.end] = [True] * size
            logprobs[turn.start : turn.end] = packed.logprobs[logprob : logprob + size].tolist()
            logprob += size
        tokens = ids[token : token + length].tolist()
        token += length
        trajectories.append(
            replace(shell, tokens=tokens, loss_mask=mask, rollout_logprobs=logprobs)
        )
    return trajectories


def _joined(parts: Iterable[NDArray], dtype: type[np.generic]) -> NDArray:
    return np.concatenate([np.empty(0, dtype), *parts])
