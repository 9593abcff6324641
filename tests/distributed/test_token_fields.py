"""A per-token field that the package does not know goes, aligned with its token, wherever tokens
go: into microbatches, into rollout files, from rank to rank, and back from a file.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ragen_mega.data.compact import compact, expand
from ragen_mega.data.exchange import (
    gather_batch,
    gather_field,
    gather_to_main,
    keep_trained,
    read_on_main,
)
from ragen_mega.data.fields import TOKEN_FIELDS, TokenField
from ragen_mega.data.packing import Share, microbatch, pack, part_of, parts_of
from ragen_mega.data.types import Completion, TokenBatch, Trajectory, in_groups
from ragen_mega.ranks import collectives
from ragen_mega.storage.rollouts import RolloutStore
from tests.support.forked_ranks import on_ranks

SHAPE = (2, 3)


@pytest.fixture(autouse=True)
def routes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Experts of two layers, three for each token."""
    monkeypatch.setitem(
        TOKEN_FIELDS, "routes", TokenField(torch.uint8, "trajectory", np.uint8, SHAPE)
    )
    yield


def route(token: int) -> list[list[int]]:
    """The experts of a token, here a function of the token alone."""
    return [[token % 251, token % 7, 1], [token % 11, 255 - token % 13, token % 2]]


def routes_of(tokens: list[int]) -> np.ndarray:
    return np.array([route(token) for token in tokens], np.uint8).reshape(-1, *SHAPE)


def play(index: int) -> Trajectory:
    """A trajectory of two or three turns; pairs begin alike, and some have two segments."""
    one = Trajectory(group_id=index // 2, seed=index)
    one.append_observation([100 + index // 2, 3, 4, 5])
    for turn in range(2 + index % 2):
        said = [20 + (7 * index + 5 * turn + k) % 200 for k in range(1 + (index + turn) % 4)]
        logprobs = [-1.0 - k for k in range(len(said))]
        one.append_action(Completion(said, logprobs, "stop", {"routes": routes_of(said)}))
        one.append_observation([9, 8, 30 + turn], afresh=turn == 0 and index % 3 == 0)
    one.further_fields["routes"].array[:4] = routes_of(one.tokens[:4])  # an engine's, of the prompt
    return one


def expected(one: Trajectory) -> list[list[list[int]]]:
    """Observations behind the prompt have the default."""
    return [
        route(token) if place < 4 or sampled else [[0] * 3] * 2
        for place, (token, sampled) in enumerate(zip(one.tokens, one.loss_mask))
    ]


def of_labels(one: Trajectory) -> list[list[list[int]]]:
    values = expected(one)
    return [values[place] for start, end in one.segments for place in range(start + 1, end)]


def assert_aligned(batch: TokenBatch, played: list[Trajectory]) -> None:
    values = [value for one in played for value in of_labels(one)]
    assert len(values) == batch.num_positions
    assert batch.further_fields["routes"].dtype == torch.uint8
    assert batch.further_fields["routes"].tolist() == values


def test_a_batch_and_its_microbatches_have_the_field() -> None:
    played = [play(index) for index in range(6)]
    assert played[3].token_fields["routes"][:] == expected(played[3])
    batch = pack(played)
    assert_aligned(batch, played)
    assert_aligned(batch.select([4, 1]), [played[4], played[1]])
    cpu = torch.device("cpu")
    for most_nodes in (0.0, 1.0):
        for part in parts_of(batch, range(6), 40, most_nodes=most_nodes):
            micro = microbatch(part_of(batch, part), multiple=8, device=cpu)
            assert micro.forest.is_shared == bool(most_nodes and sum(part.shared))
            assert_aligned(micro, [played[i] for i in part.ids])
    with pytest.raises(ValueError, match="routes"):
        batch.with_fields(routes=torch.zeros(batch.num_positions))
    changed = batch.with_fields(routes=batch.further_fields["routes"] + 1)
    assert not torch.equal(changed.further_fields["routes"], batch.further_fields["routes"])
    assert_aligned(batch, played)


def test_a_field_of_inputs_belongs_to_the_token_of_its_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first token of every segment has its value too, and the last one, a mere label, not."""
    row = replace(TOKEN_FIELDS["routes"], is_of_inputs=True)
    monkeypatch.setitem(TOKEN_FIELDS, "routes", row)
    played = [play(index) for index in range(6)]
    assert sum(len(one.breaks) for one in played) > 1
    batch = pack(played)
    values = [
        expected(one)[place]
        for one in played
        for start, end in one.segments
        for place in range(start, end - 1)
    ]
    assert batch.further_fields["routes"].tolist() == values
    for most_nodes in (0.0, 1.0):
        for part in parts_of(batch, range(6), 40, most_nodes=most_nodes):
            micro = microbatch(part_of(batch, part), multiple=8, device=torch.device("cpu"))
            of_nodes, forest = micro.further_fields["routes"], micro.forest
            assert forest.is_shared == bool(most_nodes and sum(part.shared))
            chosen = batch.select(part.ids).further_fields["routes"]
            assert torch.equal(of_nodes[torch.from_numpy(forest.sources)], chosen)
            assert not of_nodes[forest.num_nodes - forest.padding :].any()


def test_nodes_that_trajectories_share_have_the_field_of_the_first() -> None:
    batch = pack([play(2), play(3)])
    part = part_of(batch, Share([0, 1], [0, 4]))
    micro = microbatch(part, multiple=8, device=torch.device("cpu"))
    nodes = micro.forest.per_node(micro.further_fields["routes"])
    assert nodes.shape == (micro.forest.num_nodes, *SHAPE)
    size = int(batch.lengths[0])
    assert nodes[:size].tolist() == of_labels(play(2))
    own = of_labels(play(3))[4:]
    assert nodes[size : size + len(own)].tolist() == own
    assert not nodes[size + len(own) :].any()


def test_a_completion_needs_a_value_for_every_token() -> None:
    with pytest.raises(ValueError, match="routes"):
        Trajectory(0).append_action(
            Completion([1, 2], [0.0, 0.0], "stop", {"routes": routes_of([1])})
        )


def test_equal_beginnings_travel_once() -> None:
    played = [play(2), play(3)]
    packed = compact(played)
    assert packed.contents["routes"].shared.tolist() == [0, 4]
    assert expand(packed) == played


def test_a_file_from_before_the_field_has_its_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RolloutStore(tmp_path)
    row = TOKEN_FIELDS.pop("routes")
    store.write(0, in_groups([play_plain()]), {})
    monkeypatch.setitem(TOKEN_FIELDS, "routes", row)
    [group] = store.recall(0, {}, pytest.fail)
    assert group.trajectories[0].token_fields["routes"][:] == [[[0] * 3] * 2] * 3
    assert not pack(group.trajectories).further_fields["routes"].any()


def play_plain() -> Trajectory:
    one = Trajectory(0)
    one.append_observation([1, 2])
    one.append_action(Completion([3], [-1.0], "stop"))
    return one


@pytest.mark.forks
def test_ranks_exchange_store_and_recall_the_field(tmp_path: Path) -> None:
    """Rank 0 plays tasks 0 to 3 and trains 4 to 7, rank 1 the other way round; then both resume
    from the file of rank 0.
    """

    def check(trajectories: list[Trajectory]) -> None:
        mine = collectives.rank()
        owners = torch.tensor([[1] * 4 + [0] * 4])
        keep_trained(in_groups(trajectories), trajectories, owners, homes=[0, 1])
        for index, one in enumerate(trajectories):
            assert one.is_held == (owners[0, index] == mine)
            if one.is_held:
                assert one.token_fields["routes"][:] == expected(play(index))
        batch = replace(pack(trajectories), here=owners[0] == mine)
        trained = [index for index in range(8) if owners[0, index] == mine]
        assert_aligned(batch.select(trained), [play(index) for index in trained])
        played = [play(index) for index in range(8)]
        assert_aligned(gather_batch(batch), played)
        assert torch.equal(gather_field(batch, "routes"), pack(played).further_fields["routes"])

    def rank() -> None:
        collectives.start()
        mine = collectives.rank()
        found = gather_to_main([play(index) for index in range(4 * mine, 4 * mine + 4)])
        trajectories = [one for part in found for one in part]
        store = RolloutStore(tmp_path)
        if collectives.is_main():
            assert trajectories == [play(index) for index in range(8)]
            store.write(5, in_groups(trajectories), {"weights": "abc"})
        check(trajectories)
        groups = read_on_main(
            lambda: RolloutStore(tmp_path).recall(5, {"weights": "abc"}, pytest.fail)
        )
        check([one for group in groups for one in group.trajectories])

    on_ranks(rank, 2)
