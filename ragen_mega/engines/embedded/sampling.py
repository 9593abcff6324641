"""Inverse-CDF sampling with one counter-based random stream per completion.

The k-th token of a completion uses the k-th number of the Philox stream (Salmon et al., SC 2011)
that its seed names, so a sample does not depend on what else is in the batch. Nucleus: Holtzman et
al., arXiv:1904.09751, Eq. 2 and 3.
"""

import numpy as np
import torch
from torch import Tensor


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
    probabilities = torch.softmax(logits, dim=-1)  # [n, V]
    drawn_from = probabilities if top_p is None else _nucleus(probabilities, top_p[:, None])
    cdf = drawn_from.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    if not np.isfinite(total.numpy()).all():
        raise FloatingPointError(
            "the rollout engine computed non-finite logits: the weights have diverged"
        )
    # uniform < 1, so uniform * total < total: the result is a token, and never one of probability
    # zero.
    tokens = torch.searchsorted(cdf, uniform[:, None] * total, right=True)  # [n, 1]
    if greedy is not None:
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], probabilities.gather(-1, tokens)[:, 0].log_()


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Zero everything but the smallest set of most likely tokens whose mass reaches top_p [n, 1];
    order is kept.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    kept = (mass_before < top_p) | (top_p >= 1.0)
    return probabilities * torch.zeros_like(kept).scatter_(-1, order, kept)
