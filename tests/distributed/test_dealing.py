"""Tasks that wait for a slot go to whichever engine is free: even work, and the same bits at every
repetition.
"""

from __future__ import annotations

from functools import partial

import pytest
from transformers import Qwen2ForCausalLM

from ragen_mega.data.types import Trajectory
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.registry import make
from ragen_mega.ranks import collectives
from ragen_mega.rollout.all_ranks import JointCollection, deal, engine_metrics
from ragen_mega.rollout.player import PlaySettings
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import tasks_for_group
from tests.support.forked_ranks import on_ranks
from tests.support.small_policy import lake_tokenizer, tiny_qwen2

SETTINGS = PlaySettings(max_context_length=256, temperature=1.0, seed=1)
NUM_SLOTS, TASKS_PER_RANK = 4, 16


def episode(max_turns: int) -> Episode:
    rules = EpisodeConfig(prompt_style="compact", max_turns=max_turns, max_response_length=8)
    return Episode(make("frozen_lake", success_rate=1.0), rules)


LONG, SHORT = partial(episode, 6), partial(episode, 1)


@pytest.mark.parametrize(
    ("num_waiting", "rooms", "shares"),
    [
        (10, [8, 8, 8, 8], [3, 3, 2, 2]),
        (40, [5, 0, 5], [5, 0, 5]),  # the second rank only follows
        (3, [1, 4, 2], [0, 3, 0]),
        (2, [-1, 1], [0, 1]),
        (0, [4], [0]),
    ],
)
def test_where_most_room_is_left(num_waiting: int, rooms: list[int], shares: list[int]) -> None:
    assert deal(num_waiting, rooms) == shares


@pytest.mark.forks
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_long_trajectories_are_everybodys(num_ranks: int) -> None:
    """The first half of the tasks takes six turns, the second one. With parts that are fixed in
    advance the engines of the first half work on when the others are done; steps are counted.
    """
    tokenizer = lake_tokenizer(partial(episode, 6))
    model, renderer = tiny_qwen2(len(tokenizer)), ChatRenderer(tokenizer, think=True)
    num_groups = num_ranks * TASKS_PER_RANK // 4
    groups = [
        tasks_for_group(
            group,
            "frozen_lake",
            group,
            LONG if group < num_groups // 2 else SHORT,
            group_size=4,
        )
        for group in range(num_groups)
    ]

    def play(model: Qwen2ForCausalLM, *, fixed: bool) -> tuple[list[Trajectory], float]:
        engine = EmbeddedEngine(model.config, max_context=256, max_sessions=NUM_SLOTS)
        if fixed:
            engine.num_slots = TASKS_PER_RANK
        with engine.awake(), JointCollection(engine, renderer, SETTINGS) as joint:
            engine.load_weights(model.state_dict().items())
            tasks = joint.add(groups)
            joint.play()
            played = joint.take(tasks)
        assert [group.group_id for group in played] == list(range(num_groups))
        found = [one for group in played for one in group.trajectories]
        expected = [task for group in groups for task in group]
        assert [one.outcome_seed for one in found] == [task.outcome_seed for task in expected]
        return found, engine_metrics(engine)["imbalance"]

    def rank() -> None:
        collectives.start()
        before, dealt_before = play(model, fixed=True)
        after, dealt_after = play(model, fixed=False)
        again, _ = play(model, fixed=False)
        assert dealt_before > 1.5 and dealt_after < 1.15
        if collectives.is_main():  # which has all tokens
            print(f"{num_ranks} ranks: {dealt_before:.2f} -> {dealt_after:.2f}")
            assert [one.tokens for one in after] == [one.tokens for one in before]
        # To the bit, which depends on the batch.
        assert [one.rollout_logprobs for one in again] == [one.rollout_logprobs for one in after]

    on_ranks(rank, num_ranks)
