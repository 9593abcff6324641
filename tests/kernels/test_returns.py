"""Advantages, normalisation and value loss, in plain torch and on Triton, against float64 loops,
identities and autograd.
"""

from dataclasses import replace

import pytest
import torch
from ragen_kernels import gae, group_normalize, value_loss, whiten

from tests.kernels.returns_cases import Trajectories, gae_truth, make_trajectories, value_loss_truth


def on(device: str, case: Trajectories) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(device) for x in (case.rewards, case.values, case.loss_mask, case.cu_seqlens))


def assert_gae(device, case, settings, tolerance=1e-5):
    """Against the loops, with values, rewards and turn ends of unsampled tokens to be ignored."""
    expected = gae_truth(case, **settings)
    poison = ~case.loss_mask
    case.values[poison], case.rewards[poison] = torch.nan, torch.nan
    if "turn_ends" in settings:
        unsampled_ends = poison & (torch.arange(len(poison)) % 3 == 0)
        settings = settings | {"turn_ends": (case.turn_ends | unsampled_ends).to(device)}
    for ours, truth in zip(gae(*on(device, case), **settings), expected, strict=True):
        assert ours.dtype == case.rewards.dtype
        torch.testing.assert_close(ours.cpu().double(), truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bi_level", [False, True])
def test_gae_equals_the_loop(backend, bi_level):
    case = make_trajectories(lengths=(70, 0, 32, 1, 33, 31), seed=3)
    settings = {"gamma": 0.97, "lam": 0.9}
    if bi_level:
        settings |= {"turn_ends": case.turn_ends, "turn_gamma": 0.95, "turn_lam": 0.8}
    assert_gae(backend.device, case, settings)


def test_sampled_tokens_a_whole_block_apart(backend):
    """The carries of value and advantage cross blocks in which nothing was sampled."""
    case = make_trajectories(lengths=(140,), seed=4)
    case.loss_mask[:] = False
    case.loss_mask[[2, 3, 100, 131]] = True
    case.turn_ends[:] = False
    case.turn_ends[[3, 131]] = True
    settings = {"gamma": 0.9, "lam": 0.8, "turn_gamma": 0.7, "turn_lam": 0.6}
    assert_gae(backend.device, case, settings | {"turn_ends": case.turn_ends})


def test_undiscounted_gae_is_reward_to_go_minus_value(backend):
    case = make_trajectories(lengths=(30,), seed=4)
    advantages, _ = gae(*on(backend.device, case), gamma=1.0, lam=1.0)
    rewards = torch.where(case.loss_mask, case.rewards, 0)
    to_go = rewards.flip(0).cumsum(0).flip(0)
    expected = torch.where(case.loss_mask, to_go - case.values, 0)
    torch.testing.assert_close(advantages.cpu()[:30], expected[:30], rtol=1e-5, atol=1e-5)


def test_zero_reward_turn_stays_a_turn(backend):
    """The boundary of a turn is where it is said to be, not where a reward is non-zero."""
    case = Trajectories(
        torch.tensor([0.0, 0.0, 0.0, 1.0]),
        torch.tensor([0.5, 0.4, 0.3, 0.2]),
        torch.ones(4, dtype=torch.bool),
        torch.tensor([False, True, False, True]),
        torch.tensor([0, 4], dtype=torch.int32),
    )
    ends = case.turn_ends.to(backend.device)
    settings = {"gamma": 1.0, "lam": 1.0, "turn_ends": ends, "turn_gamma": 0.5}
    advantages, _ = gae(*on(backend.device, case), **settings)
    last = 1.0 - 0.2
    first = 0.0 + 0.5 * 0.2 - 0.4 + 0.5 * last
    expected = torch.tensor([0.4 - 0.5 + first, first, 0.2 - 0.3 + last, last])
    torch.testing.assert_close(advantages.cpu(), expected)


def test_a_broken_trajectory_leaves_the_others_alone(backend):
    case = make_trajectories(lengths=(25, 14, 30), seed=5)
    rewards, values, *layout = on(backend.device, case)
    settings = {"gamma": 0.9, "lam": 0.8, "turn_gamma": 0.9}
    settings["turn_ends"] = case.turn_ends.to(backend.device)
    clean, _ = gae(rewards, values, *layout, **settings)
    values = values.clone()
    values[25:39] = torch.nan
    broken, _ = gae(rewards, values, *layout, **settings)
    for part in (slice(0, 25), slice(39, 69)):
        assert torch.equal(clean[part], broken[part])
    assert broken[25:39].isnan().any()


def test_float64_stays_float64():
    case = make_trajectories(lengths=(40, 7), seed=2)
    case = replace(case, rewards=case.rewards.double(), values=case.values.double())
    assert_gae("cpu", case, {"gamma": 0.97, "lam": 0.9}, tolerance=1e-12)
    random = torch.Generator().manual_seed(8)
    advantages = torch.randn(len(case.loss_mask), generator=random, dtype=torch.float64)
    own = advantages[case.loss_mask]
    moments = torch.stack([torch.tensor(len(own)).double(), own.sum(), own.square().sum()])
    white = whiten(advantages, case.loss_mask, moments, epsilon=0.0)
    expected = (own - own.mean()) / own.std()
    torch.testing.assert_close(white[case.loss_mask], expected, rtol=1e-12, atol=1e-12)


def test_gae_refuses_bad_arguments(backend):
    rewards, values, *layout = on(backend.device, make_trajectories(lengths=(5,), seed=0))
    with pytest.raises(ValueError, match="gamma"):
        gae(rewards, values, *layout, gamma=1.1, lam=1.0)
    with pytest.raises(ValueError, match="one shape"):
        gae(rewards, values[1:], *layout, gamma=1.0, lam=1.0)


def test_whiten(backend):
    case = make_trajectories(lengths=(90, 43), seed=5)
    advantages = torch.where(case.loss_mask, 100 + case.values, torch.nan)
    own = advantages[case.loss_mask].double()
    moments = torch.stack([torch.tensor(float(len(own))).double(), own.sum(), own.square().sum()])
    arguments = (x.to(backend.device) for x in (advantages, case.loss_mask, moments))
    white = whiten(*arguments).cpu()
    expected = (own - own.mean()) / own.std()
    torch.testing.assert_close(white[case.loss_mask].double(), expected, rtol=1e-5, atol=1e-5)
    assert not white[~case.loss_mask].any()


@pytest.mark.parametrize(
    ("moments", "epsilon", "expected"),
    [
        ((1.0, 2.0, 4.0), 0.0, 3.0),  # the variance of one token counts as 1
        ((0.0, 0.0, 0.0), 0.0, 5.0),
        ((4.0, 4.0, 10.0), 0.25, 4 / (2 + 0.25) ** 0.5),
        ((2.0, 6.0, 18.0), 4.0, 1.0),  # no variance
    ],
)
def test_whiten_by_given_moments(backend, moments, epsilon, expected):
    arguments = torch.tensor([5.0]), torch.tensor([True]), torch.tensor(moments)
    actual = whiten(*(x.to(backend.device) for x in arguments), epsilon=epsilon)
    assert actual.item() == pytest.approx(expected)


def test_scores_that_differ_by_rounding_count_as_equal(backend):
    scores = torch.tensor([1.0, 1.0 + 2**-22, 1.0, 0.0, 1.0], device=backend.device)
    groups = torch.tensor([0, 0, 0, 1, 1], device=backend.device)
    actual = group_normalize(scores, groups).tolist()
    assert actual == pytest.approx([0, 0, 0, -(0.5**0.5), 0.5**0.5])
    assert actual[:3] == [0, 0, 0]


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_group_normalize_is_per_group(backend, scale_by_std):
    random = torch.Generator().manual_seed(6)
    scores = torch.randn(75, generator=random)
    groups = torch.randint(-3, 9, (75,), generator=random)
    groups[10] = 77  # alone in its group
    groups[20:37], scores[20:37] = 78, 10.9  # all equal, by a value whose float32 sums round
    groups[40:43], scores[40:43] = 79, torch.tensor([1e-4, 3e-4, 2e-4])  # no epsilon shrinks it
    expected = torch.zeros(75)
    for group in groups.unique():
        own = scores[groups == group].double()
        centred = own - own.mean()
        if scale_by_std and len(own) > 1 and own.std() > 1e-6:
            centred = centred / own.std()
        expected[groups == group] = (centred if own.unique().numel() > 1 else own * 0).float()
    actual = group_normalize(
        scores.to(backend.device), groups.to(backend.device), scale_by_std=scale_by_std
    )
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-6)
    assert actual[10] == 0 and not (scale_by_std and actual[20:37].any())
    nothing = torch.zeros(0, device=backend.device)
    assert group_normalize(nothing, nothing.long()).shape == (0,)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_gradient(backend, clip):
    random = torch.Generator().manual_seed(7)
    values, old_values, returns = torch.randn(3, 150, generator=random).to(backend.dtype)
    values[:5] = old_values[:5]
    weights = torch.rand(150, generator=random) * (torch.arange(150) % 4 > 0)
    loss, grad = value_loss_truth(values, old_values, returns, weights, clip)
    poisoned = torch.where(weights == 0, torch.nan, values).to(backend.device).requires_grad_()
    actual, is_clipped = value_loss(
        poisoned, *(x.to(backend.device) for x in (old_values, returns, weights)), clip=clip
    )
    (3 * actual).backward()
    close = {"rtol": backend.tolerance, "atol": backend.tolerance}
    torch.testing.assert_close(actual.detach().cpu().double(), loss, **close)
    torch.testing.assert_close(poisoned.grad.cpu().double() / 3, grad, **close)
    assert is_clipped.any() == (clip is not None) and not is_clipped.cpu()[weights == 0].any()


def test_value_loss_of_an_unchanged_value_is_unclipped(backend):
    values = torch.tensor([0.1, 0.2], device=backend.device, requires_grad=True)
    returns = torch.tensor([1.0, -1.0], device=backend.device)
    loss, is_clipped = value_loss(
        values, values.detach(), returns, torch.ones_like(returns), clip=1e-6
    )
    (grad,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(grad.cpu(), torch.tensor([-0.9, 1.2]))
    assert not is_clipped.any()
    with pytest.raises(ValueError, match="clip"):
        value_loss(values, values, values, values, clip=0.0)
