"""The critic's clipped loss against float64 autograd of the usual formula."""

import pytest
import torch

from ragen_mega.algorithm.value_loss import value_loss


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
