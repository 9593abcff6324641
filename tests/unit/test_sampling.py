"""Draws of the embedded engine from logits: their distribution against float64, the whole CDF's
tokens, and that no row depends on the others.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ragen_mega.engines.embedded.kernels import VOCABULARY_BLOCK as BLOCK
from ragen_mega.engines.embedded.sampling import sample

# One token, one block, two, a last block of one token, and the vocabulary of Qwen2.5.
SIZES = [1, 500, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 151_936]


def make_logits(num_rows: int, vocab: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * 3


def make_uniforms(count: int) -> Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def draw(logits: Tensor, uniform: Tensor, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    rows = len(logits)
    drawn = sample(
        logits.clone().numpy(),
        uniform.numpy(),
        inverse_temperature=np.ones(rows, dtype=np.float32),
        top_p=np.full(rows, top_p),
        greedy=np.zeros(rows, dtype=np.bool_),
    )
    return tuple(map(torch.from_numpy, drawn))


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The distribution of one row [V] after `top_p`, by its definition."""
    ordered, order = probabilities.sort(descending=True)
    kept = order[: int((ordered.cumsum(0) < top_p).sum()) + 1]
    return torch.zeros_like(probabilities).scatter(0, kept, probabilities[kept])


def chi_squared(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom, tokens that are rarer than 5 draws as one."""
    is_rare = expected < 5
    counts, expected = (
        torch.cat([x[~is_rare], x[is_rare].sum()[None]]) for x in (counts.double(), expected)
    )
    there = expected > 0
    return float(((counts - expected)[there] ** 2 / expected[there]).sum()), int(there.sum()) - 1


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("vocab", [500, 2 * BLOCK + 1])
def test_draws_follow_the_softmax(vocab: int, top_p: float) -> None:
    logits, draws, part = make_logits(1, vocab), 8000, 250
    exact = logits[0].double().softmax(0)
    expected = nucleus(exact, top_p) if top_p < 1.0 else exact
    uniform = make_uniforms(draws)
    counts = torch.zeros(vocab)
    for some in uniform.split(part):
        tokens, logprobs = draw(logits.expand(part, -1), some, top_p)
        counts += tokens.bincount(minlength=vocab)
        error = (logprobs - exact[tokens].log().float()).abs().max()
        assert error < 64 * torch.finfo(torch.float32).eps
    assert (counts[expected == 0] == 0).all()
    statistic, freedom = chi_squared(counts, expected / expected.sum() * draws)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("vocab", SIZES)
def test_tokens_are_those_of_the_whole_cdf(vocab: int) -> None:
    """A draw falls where the CDF of all tokens in float64 passes the uniform, up to the rounding of
    probabilities in float32.
    """
    logits, uniform = make_logits(8, vocab), make_uniforms(8)
    cdf = torch.softmax(logits.double(), -1).cumsum(-1)
    tokens, _ = draw(logits, uniform)
    rounding = 4 * torch.finfo(torch.float32).eps
    places = tokens[:, None]
    before = torch.where(places > 0, cdf.gather(-1, (places - 1).clamp(min=0)), 0.0)[:, 0]
    assert (before <= uniform + rounding).all()
    assert (uniform < cdf.gather(-1, places)[:, 0] + rounding).all()


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_row_does_not_depend_on_the_others(vocab: int, top_p: float) -> None:
    logits, uniform = make_logits(7, vocab), make_uniforms(7)
    together = draw(logits, uniform, top_p)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    for some in (order, order[:2], *order.split(1)):
        alone = draw(logits[some], uniform[some], top_p)
        assert all(torch.equal(x[some], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("last", [1, 7])
@pytest.mark.parametrize("vocab", [600, 2 * BLOCK + 600])
def test_no_draw_is_of_probability_zero(vocab: int, last: int) -> None:
    """At the ends of the unit interval, of the vocabulary, and of blocks, however light."""
    possible = torch.tensor([5, vocab // 2, vocab - last])
    for weight in range(40):
        logits = torch.full((1, vocab), -math.inf)
        logits[0, possible] = torch.tensor([0.0, 0.1 * weight - 36.0, 1.0])
        edges = torch.softmax(logits, -1)[0, possible].cumsum(0, dtype=torch.float64)
        uniform = torch.cat([torch.zeros(1), edges / edges[-1]]).double()
        uniform = torch.stack([uniform + ulps * 2**-53 for ulps in range(-6, 7)]).flatten()
        tokens, _ = draw(logits.expand(len(uniform), -1), uniform.clamp(0.0, 1.0 - 2**-53))
        assert set(tokens.tolist()) <= set(possible.tolist())


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_logits_that_are_no_numbers_end_the_rollout(top_p: float) -> None:
    logits = make_logits(2, 3 * BLOCK)
    logits[1, 7] = math.nan
    with pytest.raises(FloatingPointError, match="non-finite logits"):
        draw(logits, make_uniforms(2), top_p)
