"""Inverse-CDF sampling with one counter-based random stream per completion.

The k-th token of a completion uses the k-th number of the Philox stream (Salmon et al., SC 2011)
that its seed names, so a sample does not depend on what else is in the batch. Nucleus: Holtzman et
al., arXiv:1904.09751, Eq. 2 and 3.
"""

import math

import numpy as np
from numpy.typing import NDArray

from ragen_mega.compiled.jit import Integers, Reals, in_parts
from ragen_mega.engines.embedded import kernels
from ragen_mega.engines.embedded.kernels import VOCABULARY_BLOCK


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """Return the first `count` numbers in [0, 1) of the stream that `seed` names, [count]."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def sample(
    logits: Reals,
    uniform: NDArray[np.float64],
    *,
    inverse_temperature: Reals,
    top_p: NDArray[np.float64],
    greedy: NDArray[np.bool_],
) -> tuple[Integers, Reals]:
    """Draw one token per row: tokens [n] and their log-probabilities [n], after temperature and
    before `top_p`.

    logits [n, V] are overwritten; the others [n]. `greedy` rows take the most likely token whatever
    their uniform is.
    """
    num_rows, vocab = logits.shape
    tokens = np.empty(num_rows, dtype=np.int64)
    masses = np.empty((num_rows, -(-vocab // VOCABULARY_BLOCK)))
    in_parts(kernels.exponentiate, num_rows, logits, inverse_temperature, masses)
    total = masses.sum(axis=-1)
    if not math.isfinite(total.sum()):
        raise FloatingPointError(
            "the rollout engine computed non-finite logits: the weights have diverged"
        )
    drawn_from = logits
    if (top_p < 1.0).any():
        drawn_from = _nucleus(logits, total, top_p)
        starts = np.arange(0, vocab, VOCABULARY_BLOCK)
        masses = np.add.reduceat(drawn_from, starts, axis=-1, dtype=np.float64)
    kernels.draw(drawn_from, masses, uniform, greedy, tokens)
    weights = logits[np.arange(num_rows), tokens]
    return tokens, np.log(weights / total).astype(logits.dtype)


def _nucleus(weights: Reals, total: NDArray[np.float64], top_p: NDArray[np.float64]) -> Reals:
    """Zero everything but the smallest set of most likely tokens whose mass reaches top_p [n] of
    the total [n] of weights [n, V]; order is kept.
    """
    kept = np.zeros_like(weights)
    for row, nucleus, mass, share in zip(weights, kept, total, top_p, strict=True):
        # Weights below the floor have less mass than the nucleus leaves out: do not sort them.
        floor = mass * (1.0 - share) / len(row)
        candidates = np.flatnonzero(row >= floor)
        order = candidates[np.argsort(-row[candidates], kind="stable")]
        ordered = row[order].astype(np.float64)
        inside = order[(ordered.cumsum() - ordered < share * mass) | (share >= 1.0)]
        nucleus[inside] = row[inside]
    return kept
