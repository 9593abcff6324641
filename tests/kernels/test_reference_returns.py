"""Advantages, normalisation and value loss against loops, identities and autograd."""

import itertools

import pytest
import torch
from ragen_kernels.reference_returns import gae, group_normalize, value_loss, whiten

from tests.kernels.returns_cases import gae_truth, make_trajectories, value_loss_truth


@pytest.mark.parametrize("bi_level", [False, True])
def test_gae_equals_the_loop(bi_level):
    case = make_trajectories(lengths=(40, 0, 7, 1, 23), seed=2)
    settings = {"gamma": 0.97, "lam": 0.9}
    if bi_level:
        settings |= {"turn_ends": case.turn_ends, "turn_gamma": 0.95, "turn_lam": 0.8}
    estimate = gae(case.rewards, case.values, case.loss_mask, case.cu_seqlens, **settings)
    advantages, returns = gae_truth(case, **settings)
    torch.testing.assert_close(estimate.advantages.double(), advantages, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(estimate.returns.double(), returns, rtol=1e-6, atol=1e-6)
    offsets = case.cu_seqlens.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(offsets)):
        own = advantages[start:end][case.loss_mask[start:end]]
        moments = torch.stack(
            [torch.tensor(float(len(own))).double(), own.sum(), own.square().sum()]
        )
        torch.testing.assert_close(estimate.moments[row].double(), moments, rtol=1e-5, atol=1e-5)


def test_undiscounted_gae_is_reward_to_go_minus_value():
    case = make_trajectories(lengths=(30,), seed=4)
    estimate = gae(case.rewards, case.values, case.loss_mask, case.cu_seqlens, gamma=1.0, lam=1.0)
    rewards = torch.where(case.loss_mask, case.rewards, 0)
    to_go = rewards.flip(0).cumsum(0).flip(0)
    expected = torch.where(case.loss_mask, to_go - case.values, 0)
    torch.testing.assert_close(estimate.advantages[:30], expected[:30], rtol=1e-5, atol=1e-5)


def test_zero_reward_turn_stays_a_turn():
    """The boundary of a turn is where it is said to be, not where a reward happens to be non-zero."""
    rewards, values = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0.5, 0.4, 0.3, 0.2])
    mask, ends = torch.ones(4, dtype=torch.bool), torch.tensor([False, True, False, True])
    estimate = gae(
        rewards,
        values,
        mask,
        torch.tensor([0, 4], dtype=torch.int32),
        gamma=1.0,
        lam=1.0,
        turn_ends=ends,
        turn_gamma=0.5,
    )
    last = 1.0 - 0.2
    first = 0.0 + 0.5 * 0.2 - 0.4 + 0.5 * last
    expected = torch.tensor([0.4 - 0.5 + first, first, 0.2 - 0.3 + last, last])
    torch.testing.assert_close(estimate.advantages, expected)


def test_gae_ignores_what_was_not_sampled():
    case = make_trajectories(lengths=(25, 14), seed=5)
    clean = gae(case.rewards, case.values, case.loss_mask, case.cu_seqlens, gamma=0.9, lam=0.8)
    values = torch.where(case.loss_mask, case.values, torch.nan)
    rewards = torch.where(case.loss_mask, case.rewards, torch.nan)
    poisoned = gae(rewards, values, case.loss_mask, case.cu_seqlens, gamma=0.9, lam=0.8)
    assert torch.equal(clean.advantages, poisoned.advantages) and torch.equal(
        clean.returns, poisoned.returns
    )
    assert not clean.advantages[~case.loss_mask].any()


def test_a_broken_trajectory_leaves_the_others_alone():
    case = make_trajectories(lengths=(25, 14, 30), seed=5)
    settings = {"gamma": 0.9, "lam": 0.8, "turn_ends": case.turn_ends, "turn_gamma": 0.9}
    clean = gae(case.rewards, case.values, case.loss_mask, case.cu_seqlens, **settings)
    values = case.values.clone()
    values[25:39] = torch.nan
    broken = gae(case.rewards, values, case.loss_mask, case.cu_seqlens, **settings)
    for part in (slice(0, 25), slice(39, 69)):
        assert torch.equal(clean.advantages[part], broken.advantages[part])
    assert torch.equal(clean.moments[[0, 2]], broken.moments[[0, 2]])
    assert broken.advantages[25:39].isnan().any()


def test_float64_stays_float64():
    case = make_trajectories(lengths=(40, 7), seed=2)
    settings = {"gamma": 0.97, "lam": 0.9}
    arguments = (case.rewards.double(), case.values.double(), case.loss_mask, case.cu_seqlens)
    estimate = gae(*arguments, **settings)
    advantages, returns = gae_truth(case, **settings)
    torch.testing.assert_close(estimate.advantages, advantages, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(estimate.returns, returns, rtol=1e-12, atol=1e-12)
    white = whiten(estimate.advantages, case.loss_mask, estimate.moments.sum(0), epsilon=0.0)
    own = advantages[case.loss_mask]
    torch.testing.assert_close(
        white[case.loss_mask], (own - own.mean()) / own.std(), rtol=1e-12, atol=1e-12
    )


def test_gae_refuses_bad_arguments():
    case = make_trajectories(lengths=(5,), seed=0)
    with pytest.raises(ValueError, match="gamma"):
        gae(case.rewards, case.values, case.loss_mask, case.cu_seqlens, gamma=1.1, lam=1.0)
    with pytest.raises(ValueError, match="one shape"):
        gae(case.rewards, case.values[1:], case.loss_mask, case.cu_seqlens, gamma=1.0, lam=1.0)


def test_whitened_advantages_have_mean_zero_and_variance_one():
    case = make_trajectories(lengths=(50, 31), seed=6)
    estimate = gae(case.rewards, case.values, case.loss_mask, case.cu_seqlens, gamma=1.0, lam=0.9)
    white = whiten(estimate.advantages, case.loss_mask, estimate.moments.sum(0))
    own = white[case.loss_mask].double()
    assert abs(own.mean()) < 1e-6 and abs(own.var() - 1) < 1e-5
    assert not white[~case.loss_mask].any()


def test_group_normalize_is_per_group():
    scores, groups = torch.tensor([1.0, 5.0, 2.0, 7.0, 3.0]), torch.tensor([9, -4, 9, 6, 9])
    expected = torch.tensor([-1.0, 0.0, 0.0, 0.0, 1.0])
    torch.testing.assert_close(group_normalize(scores, groups), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        group_normalize(2 * scores, groups, scale_by_std=False), 2 * expected
    )
    equal = group_normalize(torch.full((4,), 0.3), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(equal, torch.zeros(4))
    small = group_normalize(torch.tensor([1e-4, 3e-4, 2e-4]), torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(
        small, torch.tensor([-1.0, 1.0, 0.0]), rtol=1e-5, atol=1e-5
    )  # no epsilon shrinks it
    assert group_normalize(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_gradient(clip):
    values, old_values, returns = torch.randn(
        3, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    weights = torch.rand(200, dtype=torch.float64) * (torch.arange(200) % 3 > 0)
    loss, is_clipped = value_loss(values.requires_grad_(), old_values, returns, weights, clip=clip)
    (grad,) = torch.autograd.grad(loss, values)
    expected, expected_grad = value_loss_truth(values.detach(), old_values, returns, weights, clip)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad)
    assert is_clipped.any() == (clip is not None) and not is_clipped[weights == 0].any()


def test_value_loss_of_an_unchanged_value_is_unclipped():
    values = torch.tensor([0.1, 0.2], requires_grad=True)
    loss, is_clipped = value_loss(
        values, values.detach(), torch.tensor([1.0, -1.0]), torch.ones(2), clip=1e-6
    )
    (grad,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(grad, torch.tensor([-0.9, 1.2]))
    assert not is_clipped.any()
    with pytest.raises(ValueError, match="clip"):
        value_loss(values, values, values, values, clip=0.0)
