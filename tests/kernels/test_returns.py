"""Advantages, in plain torch and on Triton, against float64 loops and identities."""

from dataclasses import replace

import pytest
import torch
from ragen_kernels import gae

from tests.kernels.returns_cases import Trajectories, gae_truth, make_trajectories


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


def test_a_trajectory_of_a_hundred_thousand_tokens():
    """The recursion is no loop over tokens: the operations that torch runs do not grow with them,
    but for the logarithm of a scan.
    """

    def operations(num_positions):
        rewards, values = torch.zeros(num_positions), torch.randn(num_positions)
        rewards[-1] = 1.0
        loss_mask = torch.ones(num_positions, dtype=torch.bool)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            estimate, _ = gae(
                rewards, values, loss_mask, torch.tensor([0, num_positions]), gamma=1.0, lam=1.0
            )
        # one chain of float32 terms
        torch.testing.assert_close(estimate, 1.0 - values, atol=1e-4, rtol=0)
        return sum(event.count for event in profile.key_averages())

    few, many = operations(100), operations(100_000)
    assert many < few * 5


@pytest.mark.parametrize("cu_seqlens", [[0, 5], [0]])
def test_nothing_sampled(backend, cu_seqlens):
    zeros = torch.zeros(5, device=backend.device)
    offsets = torch.tensor(cu_seqlens, dtype=torch.int32, device=backend.device)
    estimate, returns = gae(zeros, zeros, zeros.bool(), offsets, gamma=1.0, lam=1.0)
    assert not estimate.any() and not returns.any()


def test_gae_refuses_bad_arguments(backend):
    rewards, values, *layout = on(backend.device, make_trajectories(lengths=(5,), seed=0))
    with pytest.raises(ValueError, match="gamma"):
        gae(rewards, values, *layout, gamma=1.1, lam=1.0)
    with pytest.raises(ValueError, match="one shape"):
        gae(rewards, values[1:], *layout, gamma=1.0, lam=1.0)
