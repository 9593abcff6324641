"""Every estimator against float64 loops written from the formulas, on ragged batches with masked
tokens.
"""

import math
import statistics
from dataclasses import dataclass

import pytest
import torch

from ragen_mega.algorithm import advantages as starpo

DISCOUNTS = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)]


@dataclass
class Batch:
    rewards: torch.Tensor
    values: torch.Tensor
    loss_mask: torch.Tensor
    turn_ids: torch.Tensor
    cu_seqlens: torch.Tensor

    def trajectories(self):
        """Positions of the sampled tokens of each trajectory."""
        offsets = self.cu_seqlens.tolist()
        return [
            [t for t in range(start, end) if self.loss_mask[t]]
            for start, end in zip(offsets, offsets[1:])
        ]


def make_batch(seed, dtype=torch.float64, num_trajectories=9, reward_everywhere=False):
    """Ragged trajectories of 0..6 turns with turns of one token, zero rewards, an empty trajectory,
    padding behind.
    """
    generator = torch.Generator().manual_seed(seed)

    def randint(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    mask, turn_ids, ends, offsets = [], [], [], [0]
    for trajectory in range(num_trajectories):
        for turn in range(0 if trajectory == 2 else randint(0, 7)):
            num_observed, num_sampled = randint(0, 4), randint(1, 6)
            mask += [False] * num_observed + [True] * num_sampled
            turn_ids += [-1] * num_observed + [turn] * num_sampled
            ends.append(len(mask) - 1)
        if trajectory != 4:  # a trajectory without any position
            mask += [False] * randint(1, 4)
            turn_ids += [-1] * (len(mask) - len(turn_ids))
        offsets.append(len(mask))
    num_positions = len(mask) + 3
    mask += [False] * 3
    turn_ids += [-1] * 3
    loss_mask = torch.tensor(mask)
    noise = torch.randn(num_positions, generator=generator, dtype=dtype)
    rewards = torch.zeros(num_positions, dtype=dtype)
    paid = [end for end in ends if randint(0, 3) > 0]  # a third of the turns earn exactly 0
    rewards[paid] = noise[paid]
    if reward_everywhere:
        rewards = noise * loss_mask
    values = torch.randn(num_positions, generator=generator, dtype=dtype)
    return Batch(
        rewards, values, loss_mask, torch.tensor(turn_ids).int(), torch.tensor(offsets).int()
    )


def brute_force_gae(batch, gamma, lam):
    """Eq. 16 as the double sum A_i = sum_l (gamma lam)^l delta_{i+l}."""
    advantages = [0.0] * len(batch.rewards)
    for positions in batch.trajectories():
        r = [float(batch.rewards[t]) for t in positions]
        v = [float(batch.values[t]) for t in positions] + [0.0]
        deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(r))]
        for i, position in enumerate(positions):
            advantages[position] = math.fsum(
                (gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(r))
            )
    return advantages


def brute_force_bilevel(batch, gamma, lam, turn_gamma, turn_lam):
    """RAGEN's two passes, position by position, with turn ends from the turn ids."""
    advantages = [0.0] * len(batch.rewards)
    r, v, turn = batch.rewards.tolist(), batch.values.tolist(), batch.turn_ids.tolist()
    for positions in batch.trajectories():
        ends = [
            p for p, q in zip(positions, positions[1:] + [None]) if q is None or turn[q] != turn[p]
        ]
        turn_return, following, next_value = {}, 0.0, 0.0
        for end in reversed(ends):
            following = (
                r[end] + turn_gamma * next_value - v[end] + turn_gamma * turn_lam * following
            )
            next_value = v[end]
            turn_return[end] = following + v[end]
        following, next_value = 0.0, 0.0
        for p in reversed(positions):
            reward = r[p]
            if p in turn_return:
                reward, following, next_value = turn_return[p], 0.0, 0.0
            following = reward + gamma * next_value - v[p] + gamma * lam * following
            next_value = v[p]
            advantages[p] = following
    return advantages


def check(estimate, returns, expected, batch, tolerance):
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(estimate.double(), expected, atol=tolerance, rtol=tolerance)
    with_values = torch.where(batch.loss_mask, expected + batch.values.double(), 0.0)
    torch.testing.assert_close(returns.double(), with_values, atol=tolerance, rtol=tolerance)
    assert estimate.dtype == returns.dtype == batch.rewards.dtype
    assert not estimate[~batch.loss_mask].any() and not returns[~batch.loss_mask].any()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_gae(seed, gamma, lam, dtype, tolerance):
    batch = make_batch(seed, dtype, reward_everywhere=seed % 2 == 0)
    estimate, returns = starpo.gae(
        batch.rewards, batch.values, batch.loss_mask, batch.cu_seqlens, gamma=gamma, lam=lam
    )
    check(estimate, returns, brute_force_gae(batch, gamma, lam), batch, tolerance)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
@pytest.mark.parametrize(("turn_gamma", "turn_lam"), [(0.95, 1.0), (0.9, 0.7), (0.0, 0.5)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_bilevel_gae(seed, gamma, lam, turn_gamma, turn_lam, dtype, tolerance):
    batch = make_batch(seed, dtype, reward_everywhere=seed % 2 == 0)
    discounts = {"gamma": gamma, "lam": lam, "turn_gamma": turn_gamma, "turn_lam": turn_lam}
    estimate, returns = starpo.bilevel_gae(
        batch.rewards, batch.values, batch.loss_mask, batch.turn_ids, batch.cu_seqlens, **discounts
    )
    check(estimate, returns, brute_force_bilevel(batch, **discounts), batch, tolerance)


def test_bilevel_equals_gae_in_one_turn_and_without_discount():
    batch = make_batch(1)
    arguments = (batch.rewards, batch.values, batch.loss_mask)
    one_turn = torch.where(batch.loss_mask, 0, -1)
    bilevel, _ = starpo.bilevel_gae(
        *arguments, one_turn, batch.cu_seqlens, gamma=0.9, lam=0.8, turn_gamma=0.3, turn_lam=0.1
    )
    torch.testing.assert_close(
        bilevel, starpo.gae(*arguments, batch.cu_seqlens, gamma=0.9, lam=0.8)[0]
    )

    ones = {"gamma": 1.0, "lam": 1.0, "turn_gamma": 1.0, "turn_lam": 1.0}
    bilevel, _ = starpo.bilevel_gae(*arguments, batch.turn_ids, batch.cu_seqlens, **ones)
    torch.testing.assert_close(
        bilevel, starpo.gae(*arguments, batch.cu_seqlens, gamma=1.0, lam=1.0)[0]
    )


def test_turns_that_earn_nothing_stay_turns():
    """A tiny reward and no reward at a turn's end must give the same advantages (RAGEN merges the
    latter's turn).
    """
    batch = make_batch(3)
    discounts = {"gamma": 0.9, "lam": 0.9, "turn_gamma": 0.8, "turn_lam": 0.7}

    def estimate(rewards):
        return starpo.bilevel_gae(
            rewards, batch.values, batch.loss_mask, batch.turn_ids, batch.cu_seqlens, **discounts
        )[0]

    tiny = torch.where(batch.rewards != 0, 1e-30, 0.0).double()
    torch.testing.assert_close(estimate(batch.rewards * 0), estimate(tiny), atol=1e-12, rtol=0)


def test_observations_have_no_part():
    batch = make_batch(5)
    noisy = torch.where(batch.loss_mask, batch.values, 1e30)
    arguments = {"gamma": 0.99, "lam": 0.95}
    expected = starpo.gae(
        batch.rewards, batch.values, batch.loss_mask, batch.cu_seqlens, **arguments
    )
    actual = starpo.gae(batch.rewards, noisy, batch.loss_mask, batch.cu_seqlens, **arguments)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_a_trajectory_of_a_hundred_thousand_tokens():
    """The recursion is no loop over tokens: the operations that torch runs do not grow with them,
    but for the logarithm of a scan.
    """

    def operations(num_positions):
        rewards, values = torch.zeros(num_positions), torch.randn(num_positions)
        rewards[-1] = 1.0
        loss_mask = torch.ones(num_positions, dtype=torch.bool)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            estimate, _ = starpo.gae(
                rewards, values, loss_mask, torch.tensor([0, num_positions]), gamma=1.0, lam=1.0
            )
        # one chain of float32 terms
        torch.testing.assert_close(estimate, 1.0 - values, atol=1e-4, rtol=0)
        return sum(event.count for event in profile.key_averages())

    few, many = operations(100), operations(100_000)
    assert many < few * 5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
def test_returns_to_go_and_reinforce_plus_plus(seed, gamma):
    batch = make_batch(seed, reward_everywhere=True)
    expected = [0.0] * len(batch.rewards)
    for positions in batch.trajectories():
        for i, position in enumerate(positions):
            expected[position] = math.fsum(
                gamma**n * float(batch.rewards[t]) for n, t in enumerate(positions[i:])
            )
    arguments = (batch.rewards, batch.loss_mask, batch.cu_seqlens)
    assert starpo.returns_to_go(*arguments, gamma=gamma).tolist() == pytest.approx(
        expected, abs=1e-12
    )

    sampled = [value for value, is_sampled in zip(expected, batch.loss_mask.tolist()) if is_sampled]
    mean, std = statistics.mean(sampled), statistics.stdev(sampled)
    whitened = [(e - mean) / std if m else 0.0 for e, m in zip(expected, batch.loss_mask.tolist())]
    assert starpo.reinforce_plus_plus(*arguments, gamma=gamma).tolist() == pytest.approx(
        whitened, abs=1e-6
    )


def test_place_at_end():
    batch = make_batch(2)
    scores = torch.arange(1.0, len(batch.cu_seqlens))
    expected = torch.zeros(len(batch.rewards))
    for score, positions in zip(scores, batch.trajectories()):
        if positions:
            expected[positions[-1]] = score
    assert torch.equal(starpo.place_at_end(scores, batch.loss_mask, batch.cu_seqlens), expected)


def test_nothing_sampled():
    zeros, nothing = torch.zeros(5), torch.zeros(5, dtype=torch.bool)
    for cu_seqlens in (torch.tensor([0, 5]), torch.tensor([0])):
        estimate, returns = starpo.gae(zeros, zeros, nothing, cu_seqlens, gamma=1.0, lam=1.0)
        assert not estimate.any() and not returns.any()


def test_errors():
    batch = make_batch(0)
    arguments = (batch.rewards, batch.values, batch.loss_mask)
    with pytest.raises(ValueError, match="gamma must be in"):
        starpo.gae(*arguments, batch.cu_seqlens, gamma=1.5, lam=1.0)
    with pytest.raises(ValueError, match="outside loss_mask"):
        starpo.gae(batch.rewards + 1.0, *arguments[1:], batch.cu_seqlens, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="only padding"):
        starpo.gae(*arguments, torch.tensor([0, 4]), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="needs its turn"):
        ones = {"gamma": 1.0, "lam": 1.0, "turn_gamma": 1.0, "turn_lam": 1.0}
        starpo.bilevel_gae(
            *arguments, torch.full_like(batch.turn_ids, -1), batch.cu_seqlens, **ones
        )
