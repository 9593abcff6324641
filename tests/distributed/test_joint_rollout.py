"""Rollouts of several ranks: engines that lose their weights, fail or are interrupted, early and
late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from transformers import Qwen2ForCausalLM

from ragen_mega.data.types import Completion, SamplingParams, TrajectoryGroup
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.protocol import Message
from ragen_mega.environments.registry import make
from ragen_mega.ranks import collectives
from ragen_mega.rollout.all_ranks import JointCollection
from ragen_mega.rollout.collector import collect
from ragen_mega.rollout.engine import EngineError, EngineShard, Interrupted, WeightsLost
from ragen_mega.rollout.player import PlaySettings, Task
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.sync import WeightSync
from ragen_mega.rollout.tasks import tasks_for_group
from tests.support.forked_ranks import on_ranks
from tests.support.rounding import exact_logprobs
from tests.support.small_policy import lake_tokenizer, tiny_qwen2

pytestmark = pytest.mark.forks
NUM_RANKS = 3
SETTINGS = PlaySettings(max_context_length=256, temperature=1.0, seed=1)


def episode(max_response_length: int = 6) -> Episode:
    rules = EpisodeConfig(
        prompt_style="compact", max_turns=3, max_response_length=max_response_length
    )
    return Episode(make("frozen_lake", success_rate=1.0), rules)


def groups_of(maker: Callable[[], Episode]) -> list[list[Task]]:
    return [tasks_for_group(group, "frozen_lake", group, maker, group_size=4) for group in range(3)]


GROUPS = groups_of(episode)


class ForgetfulEngine(EmbeddedEngine):
    """Loses its weights when it is asked for the n-th time, for n in `forgets`; fails when n is
    `fails`.
    """

    def __init__(
        self, *args: Any, forgets: Iterable[int] = (), fails: int = 0, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.forgets, self.fails = set(forgets), fails
        self.num_asked = self.num_sent_again = 0
        self.is_lost = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, again: bool = False) -> None:
        super().load_weights(weights, again=again)
        self.is_lost = False
        self.num_sent_again += again

    async def generate(
        self, tokens: list[int], sampling: SamplingParams, *, session: int
    ) -> Completion:
        self.num_asked += 1
        if self.num_asked == self.fails:
            raise RuntimeError("broken")
        self.is_lost |= self.num_asked in self.forgets
        if self.is_lost:
            raise WeightsLost("gone")
        return await super().generate(tokens, sampling, session=session)


class LateEngine(ForgetfulEngine):
    """Loses its weights with the requests that are under way, once `is_lost` is set."""

    async def generate(
        self, tokens: list[int], sampling: SamplingParams, *, session: int
    ) -> Completion:
        completion = await super().generate(tokens, sampling, session=session)
        if self.is_lost:
            raise WeightsLost("gone")
        return completion


def build() -> tuple[Qwen2ForCausalLM, ChatRenderer]:
    tokenizer = lake_tokenizer(episode)
    return tiny_qwen2(len(tokenizer)), ChatRenderer(tokenizer, think=True)


def play_on_ranks(
    faults: dict[int, dict[str, Any]],
    check: Callable[[Callable[[], list[TrajectoryGroup]], ForgetfulEngine], None],
    *,
    advance: Callable[[int, bool], None] | None = None,
    groups: list[list[Task]] = GROUPS,
) -> None:
    """`check(play, engine)` on every rank, whose engine has the faults of that rank."""
    model, renderer = build()

    def rank() -> None:
        collectives.start()
        index = collectives.rank()
        engine = ForgetfulEngine(
            model.config, max_context=256, max_sessions=8, **faults.get(index, {})
        )

        def export(shard: EngineShard | None) -> Iterator[tuple[str, Tensor]]:
            collectives.barrier()  # as of ranks that each hold a part
            yield from model.state_dict().items()

        sync = WeightSync(engine, export)

        def play() -> list[TrajectoryGroup]:
            options = {"advance": advance, "send_again": sync.send_again}
            with JointCollection(engine, renderer, SETTINGS, **options) as joint:
                tasks = joint.add(groups)
                joint.play()
                return joint.take(tasks)

        with engine.awake():
            engine.load_weights(model.state_dict().items())
            check(play, engine)
        assert engine.weight_version == 1

    on_ranks(rank, NUM_RANKS)


@pytest.mark.parametrize(
    ("faults", "num_sent_again"),
    [
        ({}, 0),
        ({1: {"forgets": (1,)}}, 1),
        ({0: {"forgets": (7,)}, 2: {"forgets": (7,)}}, 1),
        ({1: {"forgets": (3, 12)}, 2: {"forgets": (8,)}}, 2),
    ],
    ids=["none", "at once", "two ranks", "twice"],
)
def test_lost_weights_change_nothing(
    faults: dict[int, dict[str, Any]], num_sent_again: int
) -> None:
    model, renderer = build()
    alone = EmbeddedEngine(model.config, max_context=256, max_sessions=12)
    with alone.awake():
        alone.load_weights(model.state_dict().items())
        expected = collect(alone, renderer, [task for group in GROUPS for task in group], SETTINGS)
    assert sum(len(one.turns) for group in expected for one in group.trajectories) > 24
    played = [one for group in expected for one in group.trajectories]
    bound = 2 * max(exact_logprobs(model, one.tokens, 1.0)[1] for one in played)

    def check(play: Callable[[], list[TrajectoryGroup]], engine: ForgetfulEngine) -> None:
        groups = play()
        assert engine.num_sent_again == num_sent_again
        assert [group.group_id for group in groups] == [group.group_id for group in expected]
        for ours, theirs in zip(groups, expected, strict=True):
            for one, other in zip(ours.trajectories, theirs.trajectories, strict=True):
                assert (one.outcome_seed, len(one)) == (other.outcome_seed, len(other))
                assert one.is_held == (collectives.rank() in (0, one.rank))
                if one.is_held:
                    assert list(one.tokens) == other.tokens
                    sampled = list(one.rollout_logprobs)
                    assert sampled == pytest.approx(other.rollout_logprobs, abs=bound)

    play_on_ranks(faults, check)


@pytest.mark.parametrize("when", ["in the last part", "while the others hold"])
def test_weights_that_are_lost_before_trajectories_hold_come_again(when: str) -> None:
    """The weights of one engine: begun turns then end, as on the ranks that hold already."""
    model, renderer = build()
    groups = groups_of(lambda: episode(24))

    def rank() -> None:
        collectives.start()
        engine = LateEngine(model.config, max_context=256, max_sessions=8)
        loses = collectives.rank() == 1
        advanced = 0

        def advance(num_tokens: int, is_over: bool) -> None:
            nonlocal advanced
            advanced += 1

        def send_again() -> None:
            collectives.barrier()
            engine.load_weights(model.state_dict().items(), again=True)

        def play(faulty: bool) -> list[list[int]]:
            options = {"advance": advance, "send_again": send_again}
            with JointCollection(engine, renderer, SETTINGS, **options) as joint:
                tasks, is_enough = joint.add(groups), iter([False, True])
                engine.is_lost = faulty and loses and when == "in the last part"
                joint.play(lambda left: next(is_enough))
                engine.is_lost |= faulty and loses and when == "while the others hold"
                before = advanced
                joint.finish_turns()
                if faulty and loses:
                    assert advanced > before
                before = advanced
                joint.finish_turns()  # all do already
                assert advanced == before and joint.unfinished
                joint.play()
                return [
                    list(one.tokens)
                    for group in joint.take(tasks)
                    for one in group.trajectories
                    if one.rank == collectives.rank()
                ]

        with engine.awake():
            engine.load_weights(model.state_dict().items())
            expected = play(False)
            assert play(True) == expected and len(expected) == 4
        assert engine.num_sent_again == 1

    on_ranks(rank, NUM_RANKS)


@pytest.mark.parametrize(
    "faults",
    [
        {1: {"fails": 5}},
        {0: {"forgets": (2,)}, 1: {"fails": 5}},
        {0: {"forgets": (2, 9)}, 2: {"forgets": (3,), "fails": 11}},
    ],
    ids=["one fails", "one waits for weights", "after its weights came again"],
)
def test_a_rollout_fails_on_all_ranks_or_on_none(faults: dict[int, dict[str, Any]]) -> None:
    def check(play: Callable[[], list[TrajectoryGroup]], engine: ForgetfulEngine) -> None:
        with pytest.raises(EngineError, match="RuntimeError: broken"):
            play()

    play_on_ranks(faults, check)


@pytest.mark.parametrize("step", ["pause", "load_weights", "start"])
def test_weights_that_cannot_be_sent_again_end_the_rollout_on_all_ranks(step: str) -> None:
    """Before the ranks meet in the stream of weights, in it and behind it."""

    def check(play: Callable[[], list[TrajectoryGroup]], engine: ForgetfulEngine) -> None:
        work = getattr(engine, step)

        def refuse(*arguments: Any, **options: Any) -> None:
            for weights in arguments:  # an engine that fails takes the stream to its end
                deque(weights, maxlen=0)
            raise EngineError("no server starts")

        setattr(engine, step, refuse if collectives.rank() == 2 else work)
        with pytest.raises(EngineError, match="no server starts"):
            play()

    play_on_ranks({0: {"forgets": (4,)}}, check)


def test_an_interruption_is_everybodys_also_while_weights_are_lost() -> None:
    def interrupt(num_tokens: int, is_over: bool) -> None:
        if collectives.rank() == 1:
            raise Interrupted

    def check(play: Callable[[], list[TrajectoryGroup]], engine: ForgetfulEngine) -> None:
        with pytest.raises(Interrupted):
            play()

    play_on_ranks({0: {"forgets": (2,)}, 2: {"fails": 5}}, check, advance=interrupt)


class NoLake(Episode):
    """Its server is away."""

    def start(self, *arguments: Any, **keywords: Any) -> list[Message]:
        raise ConnectionError("no server")


def test_a_rank_none_of_whose_trajectories_can_begin_does_not_end_the_rollout() -> None:
    away = [
        replace(task, make_episode=lambda: NoLake(make("frozen_lake"), EpisodeConfig()))
        for task in GROUPS[0]
    ]

    def check(play: Callable[[], list[TrajectoryGroup]], engine: ForgetfulEngine) -> None:
        trajectories = [one for group in play() for one in group.trajectories]
        failed = [one for one in trajectories if not one.num_sampled_tokens]
        assert (engine.num_asked == 0) == (collectives.rank() == 0)
        assert (len(trajectories), len(failed)) == (12, 4)
        if collectives.rank() == 0:  # which has all infos
            assert all("no server" in one.turns[-1].info["error"] for one in failed)

    play_on_ranks({}, check, groups=[away, *GROUPS[1:]])  # a third for each rank, in order
