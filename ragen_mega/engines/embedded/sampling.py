"""Inverse-CDF sampling with one counter-based random stream per completion.

The k-th token of a completion uses the k-th number of the Philox stream (Salmon et al., SC 2011)
that its seed names, so a sample does not depend on what else is in the batch. Nucleus: Holtzman et
al., arXiv:1904.09751, Eq. 2 and 3.
"""

import math

import numpy as np
import torch
from torch import Tensor

BLOCK = 1024
"""Tokens whose probabilities are scanned for one draw. A smaller vocabulary is one block."""


def uniforms(seed: int, count: int) -> Tensor:
    """The first `count` numbers in [0, 1) of the stream that `seed` names, [count] float64."""
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=seed)).random(count))


def sample(
    logits: Tensor,
    uniform: Tensor,
    *,
    inverse_temperature: Tensor | None,
    top_p: Tensor | None,
    greedy: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: tokens [n] and their log-probabilities [n], after temperature and
    before `top_p`.

    logits [n, V] are overwritten; the others [n]. `greedy` rows take the most likely token whatever
    their uniform is.
    """
    if inverse_temperature is not None:
        logits.mul_(inverse_temperature[:, None])
    best = None if greedy is None else logits.argmax(-1)
    probabilities = torch.softmax(logits, -1, out=logits)  # in place: fresh pages cost more
    drawn_from = probabilities if top_p is None else _nucleus(probabilities, top_p)
    tokens = _draw(drawn_from, uniform)
    if greedy is not None:
        tokens = torch.where(greedy, best, tokens)
    return tokens, probabilities.gather(-1, tokens[:, None])[:, 0].log_()


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Invert the CDF of each row [n, V] at `uniform` [n]: over the masses of blocks, then within
    one of them. In float64 and whole, the CDF of a large vocabulary costs as much as its logits.
    """
    vocab = probabilities.shape[-1]
    if vocab < BLOCK:
        return _draw_inside(probabilities, uniform[:, None])[:, 0]
    whole = vocab // BLOCK
    body = probabilities[:, : whole * BLOCK].unflatten(-1, (whole, BLOCK))
    tail = probabilities[:, whole * BLOCK :].sum(-1, keepdim=True)
    mass = torch.cat([body.sum(-1), tail], dim=-1).double()  # [n, blocks]
    cdf = mass.cumsum(-1)
    total = cdf[:, -1:]
    _check_mass(total)
    # uniform < 1, so uniform * total < total: there is such a block, and it is not empty.
    reached = uniform[:, None] * total
    block = torch.searchsorted(cdf, reached, right=True)  # [n, 1]
    share = (reached - (cdf - mass).gather(-1, block)) / mass.gather(-1, block)
    places = block * BLOCK + torch.arange(BLOCK)  # [n, BLOCK]
    inside = probabilities.gather(-1, places.clamp(max=vocab - 1))
    return (block * BLOCK + _draw_inside(inside.masked_fill_(places >= vocab, 0.0), share))[:, 0]


def _draw_inside(probabilities: Tensor, share: Tensor) -> Tensor:
    """[n, 1] places at which the CDF of each row [n, BLOCK] reaches a `share` [n, 1] of its
    total.
    """
    cdf = probabilities.cumsum(-1, dtype=torch.float64)
    # Rounding must not lead to the ends of the block, where tokens of probability zero may be.
    zero, total = torch.zeros_like(cdf[:, -1:]), cdf[:, -1:]
    _check_mass(total)
    reached = (share * total).clamp_(zero, total.nextafter(zero))
    return torch.searchsorted(cdf, reached, right=True)


def _check_mass(total: Tensor) -> None:
    """Raise FloatingPointError unless every row has a finite, positive mass."""
    least, most = total.aminmax()
    if not 0 < least <= most < math.inf:
        raise FloatingPointError(
            "the rollout engine computed non-finite logits: the weights have diverged"
        )


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Zero everything but the smallest set of most likely tokens whose mass reaches top_p [n];
    order is kept.
    """
    kept = torch.zeros_like(probabilities)
    for row, nucleus, share in zip(probabilities, kept, top_p.tolist(), strict=True):
        # What is below this has less mass than what the nucleus leaves out, and need not be sorted.
        floor = (float(row.sum(dtype=torch.float64)) - share) / len(row) if share < 1.0 else 0.0
        candidates = (row >= floor).nonzero()[:, 0]
        ordered, order = row[candidates].sort(descending=True, stable=True)
        mass_before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        inside = candidates[order[(mass_before < share) | (share >= 1.0)]]
        nucleus[inside] = row[inside]
    return kept
