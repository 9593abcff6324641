"""Packing against the worked example of its docstring and against a per-trajectory rebuild."""

import pytest
import torch

from ragen_mega.data.packing import Share, microbatch, microbatches, minibatch_ids, pack, part_of
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


def test_turns_of_ragged_trajectories() -> None:
    """Against a loop over the tokens; turns of one token, none at all, and several."""
    trajectories = [two_turns(), *ragged(5), Trajectory(group_id=9), two_turns()]
    trajectories[-2].append_observation([1, 2, 3])
    batch = pack(trajectories)
    turn_ids, rewards = [], []
    for trajectory in trajectories:
        for token in range(1, len(trajectory)):
            inside = [i for i, t in enumerate(trajectory.turns) if t.start <= token < t.end]
            turn_ids.append(inside[0] if inside else -1)
            ends = [t.reward for t in trajectory.turns if t.end - 1 == token]
            rewards.append(ends[0] if ends else 0.0)
    assert batch.turn_ids.tolist() == turn_ids and batch.rewards.tolist() == rewards
    assert not pack([trajectories[-2]]).loss_mask.any()


def test_microbatches_cover_each_trajectory_once_within_budget() -> None:
    batch = pack(ragged(20))
    bins = microbatches(batch, 12, range(20))
    assert sorted(index for ids in bins for index in ids) == list(range(20))
    assert all(int(batch.lengths[ids].sum()) <= 12 for ids in bins)
    assert microbatches(batch, 1, [0, 1]) == [[1], [0]]  # longer than the budget: each stands alone


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_pipeline_is_filled_with_microbatches_of_like_size(num_stages: int) -> None:
    batch = pack(ragged(40))
    lengths = batch.lengths.tolist()
    parts = microbatches(batch, 10_000, range(1, 40), num_stages=num_stages)
    totals = [sum(lengths[i] for i in ids) for ids in parts]
    assert sorted(i for ids in parts for i in ids) == list(range(1, 40))
    assert len(parts) == 4 * num_stages and max(totals) - min(totals) <= max(lengths)
    tight = microbatches(batch, 14, range(40), num_stages=num_stages)
    assert len(tight) > len(parts) and all(sum(lengths[i] for i in ids) <= 14 for ids in tight)
    alone = microbatches(batch, 1, [3, 2], num_stages=num_stages)  # fewer than stages
    assert sorted(alone) == [[2], [3]]
    assert microbatches(batch, 14, [], num_stages=num_stages) == []


def test_a_microbatch_says_what_the_host_must_know() -> None:
    batch = pack(ragged(9))
    weights = torch.where(batch.loss_mask, 0.5, 0.0)
    sampled = batch.positions([4])
    weights[sampled[batch.loss_mask[sampled]][0]] = 0.0
    for one, active in ((batch, batch.loss_mask), (batch.with_fields(weights=weights), weights)):
        part = Share([4, 1], [0, 0])
        micro = microbatch(part_of(one, part), multiple=16, device=torch.device("cpu"))
        chosen = one.select([4, 1])
        lengths = [len(chain.path) for chain in micro.forest.chains]
        assert lengths[:2] == chosen.lengths.tolist() and len(lengths) == 3
        assert sum(lengths) == micro.forest.num_nodes == len(micro.input_ids) == 16
        assert torch.equal(micro.input_ids[: len(chosen.tokens)], chosen.tokens)
        assert (
            micro.sources is micro.edges is None
            and not micro.input_ids[chosen.num_positions :].any()
        )
        assert micro.depths.tolist() == [depth for length in lengths for depth in range(length)]
        assert torch.equal(micro.rows, active[one.positions([4, 1])].nonzero().squeeze(1))


def test_minibatches_are_balanced_passes() -> None:
    drawn, again = ([*minibatch_ids(20, 8, 2, torch.Generator().manual_seed(3))] for _ in range(2))
    assert drawn == again and [len(ids) for ids in drawn] == [10, 10, 10, 10]
    first, second = drawn[:2], drawn[2:]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(20))
    assert first != second and drawn[0] != list(range(10))


def test_bad_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="zero trajectories"):
        pack([])
    batch = pack([two_turns()])
    with pytest.raises(ValueError, match="old_logprobs must be"):
        batch.with_fields(old_logprobs=torch.zeros(3))
    with pytest.raises(FloatingPointError, match="advantages"):
        batch.with_fields(advantages=torch.full((7,), float("nan")))
    with pytest.raises(ValueError, match=r"rollout_logprobs must have the shape \[2\], not \[1\]"):
        two_turns().append_action(Completion([1, 2], [0.0], "stop"))
