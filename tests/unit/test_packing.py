"""Packing against the worked example of its docstring and against a per-trajectory rebuild."""

import pytest
import torch

from ragen_mega.data.packing import microbatches, minibatches, pack, pad
from ragen_mega.data.types import Completion, Trajectory


def two_turns() -> Trajectory:
    trajectory = Trajectory(group_id=7)
    trajectory.append_observation([10, 11, 12])
    trajectory.append_action(Completion([20, 21], [-1.0, -2.0], "stop")).reward = 0.5
    trajectory.append_observation([13, 14])
    trajectory.append_action(Completion([22], [-3.0], "stop")).reward = -1.5
    return trajectory


def ragged(num: int) -> list[Trajectory]:
    trajectories = []
    for index in range(num):
        trajectory = Trajectory(group_id=index // 3)
        trajectory.append_observation(list(range(2 + index % 4)))
        tokens = list(range(100, 101 + (index * 7) % 5))
        trajectory.append_action(
            Completion(tokens, [-0.5 * i for i in range(len(tokens))], "stop")
        ).reward = index
        trajectories.append(trajectory)
    return trajectories


def test_worked_example() -> None:
    batch = pack([two_turns()])
    assert batch.tokens.tolist() == [10, 11, 12, 20, 21, 13, 14]
    assert batch.labels.tolist() == [11, 12, 20, 21, 13, 14, 22]
    assert batch.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert batch.turn_ids.tolist() == [-1, -1, 0, 0, -1, -1, 1]
    assert batch.rewards.tolist() == [0, 0, 0, 0.5, 0, 0, -1.5]
    assert batch.rollout_logprobs.tolist() == [0, 0, -1, -2, 0, 0, -3]
    assert batch.position_ids.tolist() == list(range(7))
    assert batch.cu_seqlens.tolist() == [0, 7]


def test_every_sampled_token_is_a_label_once() -> None:
    trajectories = ragged(11)
    batch = pack(trajectories)
    offsets = batch.cu_seqlens.tolist()
    for index, trajectory in enumerate(trajectories):
        span = slice(offsets[index], offsets[index + 1])
        mask = batch.loss_mask[span]
        sampled = [t for t, m in zip(trajectory.tokens, trajectory.loss_mask) if m]
        assert batch.labels[span][mask].tolist() == sampled
        assert batch.rewards[span].sum() == trajectory.total_reward
        assert batch.position_ids[span].tolist() == list(range(len(trajectory) - 1))


def test_select_and_pad_keep_the_trajectories() -> None:
    batch = pack(ragged(9))
    chosen = batch.select([4, 1])
    assert torch.equal(chosen.labels, batch.labels[batch.positions([4, 1])])
    padded = pad(chosen, 16)
    assert padded.num_positions % 16 == 0 and padded.num_trajectories == 3
    assert not padded.loss_mask[chosen.num_positions :].any()
    assert torch.equal(padded.select([0, 1]).tokens, chosen.tokens)


def test_microbatches_cover_each_trajectory_once_within_budget() -> None:
    batch = pack(ragged(20))
    bins = microbatches(batch, 12, range(20))
    assert sorted(index for ids in bins for index in ids) == list(range(20))
    assert all(int(batch.lengths[ids].sum()) <= 12 for ids in bins)
    assert microbatches(batch, 1, [0, 1]) == [[1], [0]]  # longer than the budget: each stands alone


def test_minibatches_are_balanced_passes() -> None:
    batch = pack(ragged(20))
    sizes = [
        m.num_trajectories
        for m in minibatches(batch, 8, num_passes=2, generator=torch.Generator().manual_seed(0))
    ]
    assert sizes == [10, 10, 10, 10]
    first, again = (
        [
            m.labels.tolist()
            for m in minibatches(batch, 8, num_passes=1, generator=torch.Generator().manual_seed(3))
        ]
        for _ in range(2)
    )
    assert first == again


def test_bad_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="zero trajectories"):
        pack([])
    batch = pack([two_turns()])
    with pytest.raises(ValueError, match="old_logprobs must be"):
        batch.with_fields(old_logprobs=torch.zeros(3))
    with pytest.raises(FloatingPointError, match="advantages"):
        batch.with_fields(advantages=torch.full((7,), float("nan")))
    with pytest.raises(ValueError, match="2 tokens, 1 log-probabilities"):
        two_turns().append_action(Completion([1, 2], [0.0], "stop"))
