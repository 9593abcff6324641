"""The critic's clipped loss against float64 autograd of the usual formula."""

from statistics import pvariance

import pytest
import torch

from ragen_mega.algorithm.value_loss import explained_variance, value_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_loss_and_gradient(clip, dtype):
    random = torch.Generator().manual_seed(7)
    values, old_values, returns = torch.randn(3, 150, generator=random).to(dtype)
    values[:5] = old_values[:5]
    weights = torch.rand(150, generator=random) * (torch.arange(150) % 4 > 0)
    v, old, r = (x.double() for x in (values, old_values, returns))
    v.requires_grad_()
    losses = (v - r) ** 2
    if clip is not None:
        losses = torch.maximum(losses, (old + (v - old).clamp(-clip, clip) - r) ** 2)
    loss = 0.5 * (weights * losses).sum()
    (gradient,) = torch.autograd.grad(loss, v)
    poisoned = torch.where(weights == 0, torch.nan, values).requires_grad_()
    actual, is_clipped = value_loss(poisoned, old_values, returns, weights, clip=clip)
    (3 * actual).backward()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(actual.detach().double(), loss.detach(), **close)
    torch.testing.assert_close(poisoned.grad.double() / 3, gradient, **close)
    assert is_clipped.any() == (clip is not None) and not is_clipped[weights == 0].any()


def test_an_unchanged_value_is_unclipped():
    values = torch.tensor([0.1, 0.2], requires_grad=True)
    returns = torch.tensor([1.0, -1.0])
    loss, is_clipped = value_loss(
        values, values.detach(), returns, torch.ones_like(returns), clip=1e-6
    )
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, torch.tensor([-0.9, 1.2]))
    assert not is_clipped.any()


def test_explained_variance() -> None:
    values, returns = torch.randn(2, 300, generator=torch.Generator().manual_seed(3))
    returns = 1e-3 * returns + 5  # in float32 the squares of such numbers hide their spread
    left, all_of_it = ([float(x) for x in y.double()] for y in (returns.double() - values, returns))
    expected = 1 - pvariance(left) / pvariance(all_of_it)
    assert explained_variance(values, returns) == pytest.approx(expected, rel=1e-9)
    assert explained_variance(returns, returns) == 1.0


@pytest.mark.parametrize("reward", [0.0, 0.1, -0.1, 7.3])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 7, 37, 1000])
def test_equal_returns_have_no_variance_to_explain(reward: float, num_tokens: int) -> None:
    random = torch.Generator().manual_seed(num_tokens)
    values = torch.randn(num_tokens, generator=random)
    returns = torch.full((num_tokens,), reward)
    assert explained_variance(values, returns) == 0.0
    advantages = returns - values  # the same returns with the rounding of their sum
    assert explained_variance(values, values + advantages) == 0.0
