"""Trajectories on their way from the ranks that sampled them to those that train them: none is
lost, none travels twice, and an update on parts of a batch is the update on the whole.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data import exchange
from ragen_mega.data.balance import Cost
from ragen_mega.data.compact import Contents, contents_of, outlined, outlines_of
from ragen_mega.data.exchange import (
    gather_batch,
    gather_field,
    gather_to_main,
    keep_trained,
    read_on_main,
)
from ragen_mega.data.packing import choose_owners, minibatch_ids, pack
from ragen_mega.data.types import Completion, Elsewhere, TokenBatch, Trajectory, in_groups
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.policy import MegatronPolicy
from ragen_mega.ranks import collectives
from ragen_mega.report.step_metrics import engine_vs_policy
from ragen_mega.storage.rollouts import RolloutStore
from tests.support.forked_ranks import on_ranks
from tests.support.small_policy import tiny_qwen2

NUM_RANKS, SIZE = 4, 4
COST = Cost(100, 1, 50)
VOCAB = 50


def play(index: int, *, turns: int = 2) -> Trajectory:
    """The trajectory of a task; trajectories of a group begin alike."""
    draw, group = random.Random(index), index // SIZE
    one = Trajectory(group, f"world {group % 2}", group, 2**62 + index, 3)
    one.append_observation([1 + group] * (3 + group % 3))
    for turn in range(turns + index % 2):
        size = draw.randrange(1, 9)
        logprobs = [-draw.randrange(1, 2**10) / 2**8 for _ in range(size)]
        answer = Completion([draw.randrange(VOCAB) for _ in range(size)], logprobs, "stop")
        one.append_action(answer).reward = draw.random()
        one.turns[-1].info = {"thought": "so", "success": index % 3 == 0}
        one.append_observation([draw.randrange(VOCAB)] * 2, afresh=turn == 1 and group == 1)
    one.terminated, one.truncated = index % 2 == 0, index % 2 == 1
    return one


def without_info(one: Trajectory) -> Trajectory:
    absent = Elsewhere(len(one))
    turns = [replace(turn, info={}) for turn in one.turns]
    return replace(one, tokens=absent, loss_mask=absent, rollout_logprobs=absent, turns=turns)


def test_outlines_are_all_but_tokens_and_infos(tmp_path: Path) -> None:
    played = [play(index, turns=index % 3) for index in range(9)] + [Trajectory(group_id=3)]
    for rank, one in enumerate(played):
        one.rank = rank
    again = outlined(pickle.loads(pickle.dumps(outlines_of(played))))
    assert again == [without_info(one) for one in played]
    assert [one.rank for one in again] == list(range(10))
    assert not any(one.is_held for one in again)
    assert outlined(outlines_of([])) == []
    with pytest.raises(LookupError, match="on another rank"):
        list(again[1].tokens)
    with pytest.raises(LookupError, match="on another rank"):
        RolloutStore(tmp_path).write(0, in_groups(again), {})


def dealt(num: int) -> list[list[int]]:
    """Tasks by rank: unevenly, and in no order."""
    tasks = random.Random(5).sample(range(num), num)
    return [tasks[:1], tasks[1:9], [], tasks[9:]]


@pytest.mark.forks
@pytest.mark.parametrize(
    ("most_nodes", "homes"),
    [(0.0, [0, 1, 2, 3]), (1.0, [0, 0, 1, 1])],
    ids=["alone", "shared, two ranks for each part"],
)
def test_every_trajectory_is_where_it_is_trained_and_nowhere_else(
    most_nodes: float, homes: list[int]
) -> None:
    num, num_parts = 32, max(homes) + 1

    def rank() -> None:
        collectives.start()
        mine, tasks = collectives.rank(), dealt(num)
        expected = [play(index) for index in range(num)]
        found = gather_to_main([play(index) for index in tasks[mine]])
        by_task = {i: one for at, part in zip(tasks, found) for i, one in zip(at, part)}
        for index, one in by_task.items():
            assert index in tasks[one.rank]
            if mine in (0, one.rank):
                assert one == expected[index]
            else:
                assert one == without_info(expected[index])
        groups = in_groups(by_task[index] for index in range(num))
        kept = [groups[place] for place in (6, 1, 2, 3, 4)]
        trajectories = [one for group in kept for one in group.trajectories]
        plan = list(minibatch_ids(20, 8, 2, torch.Generator().manual_seed(0)))
        options = {"homes": homes, "cost": COST, "most_nodes": most_nodes}
        owners = collectives.on_main(
            lambda: choose_owners(trajectories, plan, num_parts, **options)
        )
        assert owners.shape == (2, 20) and owners.min() == 0 and owners.max() == max(homes)
        held_before = [one.is_held for one in trajectories]
        sizes: list[int] = []
        exchange = collectives.exchange_bytes

        def counting(parts: list[bytes]) -> list[bytes]:
            arrived = exchange(parts)
            sizes.extend(len(pickle.loads(data)["tokens"].shared) for data in arrived if data)
            return arrived

        collectives.exchange_bytes = counting
        keep_trained(groups, trajectories, owners, homes=homes, num_shown=1)
        collectives.exchange_bytes = exchange
        trains = (owners == homes[mine]).any(0).tolist()
        assert sum(sizes) == sum(now and not was for now, was in zip(trains, held_before))
        for one, trained in zip(trajectories, trains, strict=True):
            index = next(i for i, other in by_task.items() if other is one)
            assert one.is_held == trained
            if trained:
                tokens = (one.tokens, one.loss_mask, one.rollout_logprobs)
                other = expected[index]
                assert tokens == (other.tokens, other.loss_mask, other.rollout_logprobs)
        rest = [one for group in (groups[0], groups[5], groups[7]) for one in group.trajectories]
        assert [one.is_held for one in rest] == [mine == 0] * 4 + [False] * 8
        exact = pack(
            [expected[i] for group in (6, 1, 2, 3, 4) for i in range(4 * group, 4 * group + 4)]
        )
        batch = replace(pack(trajectories), here=owners[0] == homes[mine])
        for name in ("loss_mask", "turn_ids", "rewards", "cu_seqlens", "cu_segments", "group_ids"):
            assert torch.equal(getattr(batch, name), getattr(exact, name)), name
        for name, value in gather_batch(batch).tensors():
            assert torch.equal(value, getattr(exact, name)), name

    on_ranks(rank, NUM_RANKS)


@pytest.mark.forks
def test_what_one_rank_has_read_goes_to_those_that_train() -> None:
    """As of a rollout on the disk; without owners every rank gets what is kept, whole."""

    def rank() -> None:
        collectives.start()
        is_main = collectives.is_main()
        groups = read_on_main(lambda: in_groups(play(index) for index in range(8)))
        assert is_main or not any(one.is_held for group in groups for one in group.trajectories)
        keep_trained(groups, groups[1].trajectories, None, homes=[0, 1])
        expected = [play(index) for index in range(4, 8)]
        for one, other in zip(groups[1].trajectories, expected, strict=True):
            assert one == other  # what an estimator reads is the same on all ranks
        assert not any(one.is_held for one in groups[0].trajectories)
        assert read_on_main(lambda: None) is None

    on_ranks(rank, 2)


class Counted:
    """Information that counts how often this process serializes it."""

    times = 0

    def __reduce__(self) -> tuple:
        Counted.times += 1
        return Counted, ()


@pytest.mark.forks
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_several_ranks_want_is_serialized_once(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Infos of turns, of which rank 0 alone has all, and a part for the ranks of a replica."""
    homes = [at * 2 // num_ranks for at in range(num_ranks)]
    sent: list[Trajectory] = []

    def counting(part: Sequence[Trajectory]) -> Contents:
        sent.extend(part)
        return contents_of(part)

    def rank() -> None:
        collectives.start()
        for owners in (None, torch.arange(8)[None] // 4):
            groups = read_on_main(lambda: in_groups(play(index) for index in range(8)))
            trajectories = [one for group in groups for one in group.trajectories]
            if is_main := collectives.is_main():
                trajectories[5].turns[1].info["call"] = Counted()
            sent.clear()
            keep_trained(groups, trajectories, owners, homes=homes)
            if is_main:
                assert len(sent) == (8 if owners is None or num_ranks > 2 else 4)
            elif owners is None:
                assert isinstance(trajectories[5].turns[1].info["call"], Counted)
        assert Counted.times == is_main

    monkeypatch.setattr(exchange, "contents_of", counting)
    on_ranks(rank, num_ranks)


def results(policy: MegatronPolicy, batch: TokenBatch) -> tuple[torch.Tensor, dict, dict]:
    """Log-probabilities, their comparison with the engine's, and an update with its gradients."""
    logprobs = policy.logprobs(batch)
    compared = engine_vs_policy(batch, logprobs)
    ready = batch.with_fields(old_logprobs=logprobs, advantages=batch.rewards + batch.loss_mask)
    update = policy.update(ready)
    del update["computed_share"]  # what ranks share, they compute each
    gradients = {name: one.clone() for name, one in policy.trainer.gradients().items()}
    return logprobs, compared | update, gradients


@pytest.mark.forks
def test_an_update_on_parts_is_that_on_the_whole() -> None:
    """Two ranks that hold a part each against one process that has everything."""
    model = tiny_qwen2(VOCAB)
    played = [play(index) for index in range(12)]

    def build() -> MegatronPolicy:
        parallel = ParallelConfig()
        groups = initialize(parallel)
        train = TrainConfig(max_tokens_per_microbatch=64)
        loss = LossConfig(importance_cap=2.0)
        policy = MegatronPolicy(model.config, groups, parallel, train, loss, temperature=1.0)
        policy.load_weights(model.state_dict().get)
        return policy

    logprobs, numbers, gradients = results(build(), pack(played))

    def rank() -> None:
        policy = build()
        dp, trainer = policy.groups.dp, policy.trainer
        groups = read_on_main(lambda: in_groups(played))
        trajectories = [one for group in groups for one in group.trajectories]
        options = {"homes": [0, 1], "cost": trainer.cost, "most_nodes": trainer.most_nodes}
        everyone = [list(range(len(played)))]
        owners = collectives.on_main(lambda: choose_owners(trajectories, everyone, 2, **options))
        keep_trained(groups, trajectories, owners, homes=[0, 1])
        batch = replace(pack(trajectories), here=owners[0] == dp.rank())
        assert not batch.tokens[~batch.here.repeat_interleave(batch.lengths.long())].any()
        ours, found, mine = results(policy, batch)
        torch.testing.assert_close(ours, logprobs, atol=1e-5, rtol=1e-5)
        assert found == pytest.approx(numbers, rel=1e-4, abs=1e-6)
        for name, one in mine.items():
            bound = 1e-5 * float(gradients[name].abs().max()) + 1e-9
            torch.testing.assert_close(one, gradients[name], atol=bound, rtol=1e-4)
        assert (
            gather_field(batch, "rollout_logprobs").tolist()
            == pack([play(index) for index in range(12)]).rollout_logprobs.tolist()
        )

    on_ranks(rank, 2)
