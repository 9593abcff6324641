"""Scan and value-loss kernels against float64 loops."""

import pytest
import torch

from tests.kernels.returns_cases import Trajectories, gae_truth, make_trajectories, value_loss_truth


@pytest.fixture
def triton_returns(kernel_device, monkeypatch):
    from ragen_kernels import triton_returns

    monkeypatch.setattr(triton_returns, "SCAN_BLOCK", 32)
    monkeypatch.setattr(triton_returns, "TOKEN_BLOCK", 64)
    return triton_returns


def on(device: str, case: Trajectories) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(device) for x in (case.rewards, case.values, case.loss_mask, case.cu_seqlens))


@pytest.mark.parametrize("bi_level", [False, True])
def test_gae(triton_returns, kernel_device, bi_level):
    case = make_trajectories(lengths=(70, 0, 32, 1, 33, 31), seed=3)
    poison = ~case.loss_mask
    case.values[poison], case.rewards[poison] = torch.nan, torch.nan
    settings = {"gamma": 0.97, "lam": 0.9}
    if bi_level:
        settings |= {"turn_ends": case.turn_ends, "turn_gamma": 0.95, "turn_lam": 0.8}
    advantages, returns = gae_truth(case, **settings)
    if bi_level:
        unsampled_ends = poison & (
            torch.arange(len(poison)) % 3 == 0
        )  # to be ignored like values and rewards there
        settings["turn_ends"] = (case.turn_ends | unsampled_ends).to(kernel_device)
    estimate = triton_returns.gae(*on(kernel_device, case), **settings)
    torch.testing.assert_close(estimate.advantages.cpu().double(), advantages, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(estimate.returns.cpu().double(), returns, rtol=1e-5, atol=1e-5)
    starts = case.cu_seqlens[:-1].tolist()
    stops = case.cu_seqlens[1:].tolist()
    for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        own = advantages[start:stop][case.loss_mask[start:stop]]
        expected = torch.tensor([len(own), float(own.sum()), float(own.square().sum())])
        torch.testing.assert_close(estimate.moments[row].cpu(), expected, rtol=1e-5, atol=1e-5)


def test_sampled_tokens_a_whole_block_apart(triton_returns, kernel_device):
    """The carries of value and advantage cross blocks in which nothing was sampled."""
    case = make_trajectories(lengths=(140,), seed=4)
    case.loss_mask[:] = False
    case.loss_mask[[2, 3, 100, 131]] = True
    case.turn_ends[:] = False
    case.turn_ends[[3, 131]] = True
    settings = {"gamma": 0.9, "lam": 0.8, "turn_gamma": 0.7, "turn_lam": 0.6}
    expected = gae_truth(case, **settings, turn_ends=case.turn_ends)
    estimate = triton_returns.gae(
        *on(kernel_device, case), **settings, turn_ends=case.turn_ends.to(kernel_device)
    )
    torch.testing.assert_close(
        estimate.advantages.cpu().double(), expected[0], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(estimate.returns.cpu().double(), expected[1], rtol=1e-5, atol=1e-5)


def test_whiten(triton_returns, kernel_device):
    case = make_trajectories(lengths=(90, 43), seed=5)
    advantages = torch.where(case.loss_mask, 100 + case.values, torch.nan)
    own = advantages[case.loss_mask].double()
    moments = torch.stack([torch.tensor(float(len(own))).double(), own.sum(), own.square().sum()])
    white = triton_returns.whiten(
        advantages.to(kernel_device), case.loss_mask.to(kernel_device), moments.to(kernel_device)
    )
    torch.testing.assert_close(
        white.cpu()[case.loss_mask].double(), (own - own.mean()) / own.std(), rtol=1e-5, atol=1e-5
    )
    assert not white.cpu()[~case.loss_mask].any()


@pytest.mark.parametrize(
    ("moments", "epsilon", "expected"),
    [
        ((1.0, 2.0, 4.0), 0.0, 3.0),  # the variance of one token counts as 1
        ((0.0, 0.0, 0.0), 0.0, 5.0),
        ((4.0, 4.0, 10.0), 0.25, 4 / (2 + 0.25) ** 0.5),
        ((2.0, 6.0, 18.0), 4.0, 1.0),  # no variance
    ],
)
def test_whiten_by_given_moments(triton_returns, kernel_device, moments, epsilon, expected):
    from ragen_kernels.reference_returns import whiten

    arguments = torch.tensor([5.0]), torch.tensor([True]), torch.tensor(moments)
    assert whiten(*arguments, epsilon=epsilon).item() == pytest.approx(expected)
    actual = triton_returns.whiten(*(x.to(kernel_device) for x in arguments), epsilon=epsilon)
    assert actual.item() == pytest.approx(expected)


def test_scores_that_differ_by_rounding_count_as_equal(triton_returns, kernel_device):
    scores = torch.tensor([1.0, 1.0 + 2**-22, 1.0, 0.0, 1.0], device=kernel_device)
    groups = torch.tensor([0, 0, 0, 1, 1], device=kernel_device)
    assert triton_returns.group_normalize(scores, groups).tolist() == pytest.approx(
        [0, 0, 0, -(0.5**0.5), 0.5**0.5]
    )
    assert triton_returns.group_normalize(scores, groups)[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_group_normalize(triton_returns, kernel_device, scale_by_std):
    from ragen_kernels.reference_returns import group_normalize

    random = torch.Generator().manual_seed(6)
    scores, groups = (
        torch.randn(75, generator=random),
        torch.randint(-3, 9, (75,), generator=random),
    )
    groups[10] = 77  # alone in its group
    groups[20:37] = 78  # all equal, by a value whose float32 sums round
    scores[20:37] = 10.9
    actual = triton_returns.group_normalize(
        scores.to(kernel_device), groups.to(kernel_device), scale_by_std=scale_by_std
    )
    torch.testing.assert_close(
        actual.cpu(),
        group_normalize(scores, groups, scale_by_std=scale_by_std),
        rtol=1e-5,
        atol=1e-6,
    )
    assert actual[10] == 0
    assert not actual[20:37].any()


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss(triton_returns, kernel_device, clip):
    random = torch.Generator().manual_seed(7)
    values, old_values, returns = torch.randn(3, 150, generator=random)
    values[:5] = old_values[:5]
    weights = torch.rand(150, generator=random) * (torch.arange(150) % 4 > 0)
    loss, grad = value_loss_truth(values, old_values, returns, weights, clip)
    poisoned = torch.where(weights == 0, torch.nan, values).to(kernel_device).requires_grad_()
    actual, is_clipped = triton_returns.value_loss(
        poisoned, *(x.to(kernel_device) for x in (old_values, returns, weights)), clip=clip
    )
    (3 * actual).backward()
    torch.testing.assert_close(actual.detach().cpu().double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(poisoned.grad.cpu().double() / 3, grad, rtol=1e-5, atol=1e-6)
    assert is_clipped.any() == (clip is not None)
