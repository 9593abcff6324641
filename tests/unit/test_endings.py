"""How trajectories end: what failed is played again, and is in no ranking, mean or loss."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.algorithm.filters import filter_groups
from ragen_mega.algorithm.rewards import VERDICTS
from ragen_mega.config import AdvantageConfig, parse
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, SamplingParams, Trajectory, TrajectoryGroup, in_groups
from ragen_mega.environments.calls import step
from ragen_mega.environments.episode import CAUSES, Episode, EpisodeConfig, failed_turn
from ragen_mega.environments.pool import EnvironmentFailed
from ragen_mega.environments.registry import make, register
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.ranks import collectives
from ragen_mega.report.step_metrics import custom_metrics, filter_metrics
from ragen_mega.rollout.collector import FAILED_ATTEMPTS, collect
from ragen_mega.rollout.endings import PolicyErrors, cause, describe_errors
from ragen_mega.rollout.engine import RolloutEngine
from ragen_mega.rollout.player import PlaySettings, Task
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.summary import summarize
from ragen_mega.rollout.tasks import tasks_for_group
from ragen_mega.run.guards import RolloutGuard
from ragen_mega.run.selection import shape_on_main
from ragen_mega.storage.rollouts import RolloutStore
from tests.support.forked_ranks import on_ranks

LOST = EnvironmentFailed("ConnectionError: no server (in step, a.py:3)")


def played(
    group_id: int,
    *rewards: float,
    error: EnvironmentFailed | None = None,
    action: str | None = None,
    environment: str = "world",
) -> Trajectory:
    """A trajectory of one sampled token a turn; with an error its last turn is a failure."""
    one = Trajectory(group_id, environment, seed=group_id)
    for reward in rewards:
        one.append_observation([1, 2])
        turn = one.append_action(Completion([3], [-1.0], "stop"))
        turn.reward, turn.info = reward, {"actions": ["work"], "is_format_valid": True}
    if error is not None:
        one.turns[-1].reward = 0.0
        one.turns[-1].info = failed_turn(error, action).info
        one.truncated = True
    return one


def eight_groups() -> list[TrajectoryGroup]:
    """Eight groups of eight, all returns -3; three trajectories are lost to a server."""
    return [
        TrajectoryGroup(
            g,
            [
                played(g, -1.0, 0.0, error=LOST)
                if member == 5 and g in (1, 4, 6)
                else played(g, -1.0, -1.0, -1.0)
                for member in range(8)
            ],
        )
        for g in range(8)
    ]


def test_a_lost_trajectory_does_not_make_its_group_worth_training() -> None:
    groups = eight_groups()
    whole, samples, _ = shape_on_main(groups, {"environment": 1.0})
    assert whole == groups and [len(group.trajectories) for group in samples] == [
        8, 7, 8, 8, 7, 8, 7, 8,
    ]  # fmt: skip
    for given in (samples, groups):  # the filter by itself does not rank them either
        options = {"value": 0.25, "keep_zero": False}
        assert filter_groups(given, strategy="top_fraction", **options) == []
    found = filter_metrics(samples, [], len(groups))
    assert found["constant_groups"] == 1.0 and found["short_groups"] == 0.0
    told = summarize(groups)
    assert (told["reward"], told["in_group_std"], told["success"]) == (-3.0, 0.0, 0.0)
    assert (told["lost_trajectories"], told["num_trajectories"]) == (3.0, 64.0)
    assert custom_metrics(groups, ["distinct_responses"]) == {"distinct_responses": 1 / 61}


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"])
def test_advantages_are_those_of_the_group_without_its_lost_member(estimator: str) -> None:
    returns = [-3.0, -1.0, 2.0, 5.0]
    group = TrajectoryGroup(0, [played(0, value) for value in returns])
    broken = TrajectoryGroup(0, [*group.trajectories, played(0, 9.0, error=LOST)])
    settings = AdvantageConfig(advantage_estimator=estimator)
    expected = None
    for each in (group, broken):
        _, samples, _ = shape_on_main([each], {"environment": 1.0})
        kept = filter_groups(samples, strategy="none", value=None, keep_zero=False)
        trajectories = [one for one in kept[0].trajectories]
        found = estimate_advantages(pack(trajectories), trajectories, settings).advantages
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
    if estimator == "grpo":
        mean, spread = statistics.fmean(returns), statistics.stdev(returns)
        known = [(value - mean) / spread for value in returns]
        assert expected[expected != 0].tolist() == pytest.approx(known)


def test_a_group_with_fewer_than_two_returns_is_dropped_and_counted() -> None:
    lost = [played(0, 1.0), played(0, 0.0, error=LOST), played(0, 0.0, error=LOST)]
    groups = [TrajectoryGroup(0, lost), TrajectoryGroup(1, [played(1, 1.0), played(1, 2.0)])]
    _, samples, _ = shape_on_main(groups, {"environment": 1.0})
    assert [group.group_id for group in samples] == [1]
    options = {"keep_zero": False, "num_groups": 2}
    kept = filter_groups(samples, strategy="top_k", value=2, **options)
    assert kept == samples, "a number that was valid for what was played stays valid"
    found = filter_metrics(samples, kept, 2)
    assert (found["short_groups"], found["kept_groups"], found["kept_fraction"]) == (1.0, 1.0, 0.5)
    alone = [TrajectoryGroup(2, [played(2, 1.0)]), TrajectoryGroup(3, [played(3, 0.0, error=LOST)])]
    assert shape_on_main(alone, {"environment": 1.0})[1] == alone[:1], "groups of one stay"
    nothing = [TrajectoryGroup(3, [played(3, 0.0, error=LOST)])]
    told = summarize(nothing)
    assert "success" not in told and told["lost_trajectories"] == 1.0
    assert custom_metrics(nothing, ["distinct_responses"]) == {}


def test_rewards_of_a_group_do_not_see_its_lost_members() -> None:
    group = TrajectoryGroup(0, [played(0, 1.0), played(0, 3.0), played(0, 50.0, 0.0, error=LOST)])
    whole, samples, logged = shape_on_main([group], {"group_relative": 1.0})
    assert samples[0].total_rewards == [-2.0, 2.0]
    assert [id(one) for one in whole[0].trajectories[:2]] == [
        id(one) for one in samples[0].trajectories
    ]
    assert whole[0].trajectories[2] is group.trajectories[2]
    spread = {"in_group_std": pytest.approx(8**0.5)}  # of -2 and 2
    assert logged == {"total": 0.0, "group_relative": 0.0} | spread


def test_a_trajectory_without_a_verdict_is_no_sample_where_the_judge_weighs() -> None:
    url = "http://127.0.0.1:1/score"
    members = [played(0, 1.0) for _ in range(4)]
    for one, verdict in zip(members, (0.0, 2.0, None, 4.0), strict=True):
        one.turns[-1].info[VERDICTS] = {url: verdict}
    _, samples, logged = shape_on_main([TrajectoryGroup(0, members)], {"environment": 1, url: 0.5})
    assert samples[0].total_rewards == [1.0, 2.0, 3.0]
    assert logged["missing_verdicts"] == 1.0 and logged[url] == 1.0
    _, logged_only, _ = shape_on_main([TrajectoryGroup(0, members)], {"environment": 1, url: 0.0})
    assert logged_only[0].total_rewards == [1.0] * 4


@pytest.mark.forks
def test_all_ranks_drop_the_same() -> None:
    """Only rank 0 has the infos of all turns."""

    def rank() -> None:
        collectives.start()
        groups, expected = eight_groups(), eight_groups()
        if not collectives.is_main():
            for one in (one for group in groups for one in group.trajectories):
                for turn in one.turns:
                    turn.info = {}
        for terms in ({"environment": 1.0}, {"environment": 1.0, "format": 0.5}):
            _, samples, _ = shape_on_main(groups, terms)
            _, alike, _ = shape_on_main(expected, terms)
            returns = [group.total_rewards for group in samples]
            assert returns == [group.total_rewards for group in alike]
            assert sorted(map(len, returns)) == [7, 7, 7, 8, 8, 8, 8, 8]

    on_ranks(rank, 2)


# Another attempt


class Crash:
    """Breaks in its second step for some outcome seeds, or where the policy pulls."""

    actions = ("push", "pull")
    max_turns, max_actions_per_turn, max_actions = 3, 1, 3
    is_instant = True

    def __init__(self, way: str = "never") -> None:
        self.way = way

    def reset(self, seed: int, *, outcome_seed: int | None = None) -> str:
        self.outcome, self.steps = outcome_seed, 0
        return "go"

    def step(self, action: str) -> tuple:
        self.steps += 1
        is_odd = self.way == "odd" and self.outcome % 2
        if (self.steps == 2 and (self.way == "always" or is_odd)) or self.way == action:
            raise ConnectionError("no server")
        if self.way == "late" and self.steps == 2:
            raise TimeoutError("the server is slow")
        if self.way == "own" and self.steps == 2:
            return "cut", 0.0, False, True, {}
        return "go", float(self.outcome % 7), self.way == "end", False, {}


class Talker(RolloutEngine):
    """Says the same in every turn, from the seed of the sample."""

    weight_version = 1

    def __init__(self, renderer: ChatRenderer) -> None:
        self.answers = [
            renderer.tokenizer.encode(text, add_special_tokens=False)
            for text in ("<answer> push</answer><|im_end|>", "<answer> pull</answer><|im_end|>")
        ]
        self.num_calls = 0

    async def generate(
        self, tokens: list[int], sampling: SamplingParams, *, session: int
    ) -> Completion:
        self.num_calls += 1
        answer = self.answers[sampling.seed % 2][: sampling.max_tokens]
        return Completion(answer, [-1.0] * len(answer), "stop")


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    words = "<answer> push pull </answer> go cut 0 1 2 3 left"
    return ChatRenderer(train_tokenizer([words]), think=False)


Play = Callable[..., list[TrajectoryGroup]]


@pytest.fixture
def play(renderer: ChatRenderer) -> Iterator[Play]:
    register("crash", Crash)
    rules = EpisodeConfig(prompt_style="compact", think=False, max_response_length=40)

    def run(way: str, attempts: int = 1, context: int = 400, order: int = 1) -> list:
        def episode() -> Episode:
            return Episode(make("crash", way=way), rules)

        tasks: list[Task] = [
            task
            for group in range(2)
            for task in tasks_for_group(group, "crash", group, episode, group_size=8)
        ]
        settings = PlaySettings(context, 1.0, 0, attempts=attempts)
        groups = collect(Talker(renderer), renderer, tasks[::order], settings)
        members = [one for group in groups for one in group.trajectories]
        return in_groups(members[::order])

    return run


def test_a_healthy_rollout_does_not_depend_on_the_number_of_attempts(play: Play) -> None:
    assert play("never", attempts=2) == play("never", attempts=1)


def test_a_failed_trajectory_is_played_again_from_the_same_start(play: Play) -> None:
    groups = play("odd", attempts=2)
    once = [one for group in play("odd") for one in group.trajectories]
    assert [len(group.trajectories) for group in groups] == [8, 8]
    again = [one for group in groups for one in group.trajectories]
    repeated = [new for old, new in zip(once, again, strict=True) if old.outcome_seed % 2]
    assert len(repeated) > 3 and any(cause(one) == "budget" for one in repeated)
    for old, new in zip(once, again, strict=True):
        assert (new.group_id, new.seed) == (old.group_id, old.seed)
        if old.outcome_seed % 2 == 0:
            assert new == old, "what did not fail is what it was"
            continue
        (failure,) = new.turns[-1].info[FAILED_ATTEMPTS]
        assert failure["outcome_seed"] == old.outcome_seed != new.outcome_seed
        assert failure["error"] == old.turns[-1].info["error"]
        assert (cause(new) == "error") == bool(new.outcome_seed % 2)
    assert len({one.outcome_seed for one in again}) == 16
    assert play("odd", attempts=2) == groups, "a repetition is the same"
    assert play("odd", attempts=2, order=-1) == groups, "whoever plays what first"
    told = summarize(groups)
    num_failed = sum(one.outcome_seed % 2 for one in once)
    num_lost = sum(cause(one) == "error" for one in again)
    assert told["environment_errors"] == num_failed + num_lost
    assert (told["resampled"], told["lost_trajectories"]) == (num_failed, num_lost)
    said = describe_errors(groups)
    assert said and not said.endswith("--environment-timeout")
    assert f"closed {num_failed + num_lost} of {16 + num_failed} episodes" in said


def test_attempts_are_bounded(play: Play) -> None:
    with_one = play("always", attempts=2)
    for one in (one for group in with_one for one in group.trajectories):
        assert len(one.turns[-1].info[FAILED_ATTEMPTS]) == 1 and cause(one) == "error"
    assert summarize(with_one)["environment_errors"] == 32.0
    assert shape_on_main(with_one, {"environment": 1.0})[1] == []


@pytest.mark.parametrize(
    ("way", "context", "expected"),
    [
        ("never", 400, "budget"),
        ("own", 400, "environment"),
        ("never", 35, "context"),
        ("late", 400, "time"),
        ("always", 400, "error"),
        ("end", 400, None),
    ],
)
def test_causes_are_told_apart(
    play: Play, tmp_path: Path, way: str, context: int, expected: str | None
) -> None:
    groups = play(way, context=context)
    assert {cause(one) for group in groups for one in group.trajectories} == {expected}
    told = summarize(groups)
    shares = {name: told[f"truncated_by_{name}"] for name in CAUSES}
    assert shares == {name: float(name == expected) for name in CAUSES}
    assert told["truncated_rate"] == float(expected is not None) == math.fsum(shares.values())
    RolloutStore(tmp_path).write(0, groups, {})
    stored = RolloutStore(tmp_path).read(0).groups
    assert stored == groups and summarize(stored) == told


def test_what_the_policy_breaks_is_named_once_and_what_a_server_breaks_is_not(play: Play) -> None:
    errors = PolicyErrors()
    (said,) = errors.add(play("pull", attempts=2))
    assert "crash" in said and "'pull'" in said and "push" not in said and "penalty" in said
    assert errors.add(play("pull", attempts=2)) == []
    for way in ("always", "odd", "never"):
        assert PolicyErrors().add(play(way, attempts=2)) == []


def test_errors_of_the_policy_are_counted_over_steps_and_kinds() -> None:
    text = EnvironmentFailed("ValueError: invalid literal for int(): 'x' (in step, a.py:3)")
    errors, said = PolicyErrors(), []
    for n in range(4):
        failed = played(n, 0.0, error=text, action=f"word {n}")
        group = TrajectoryGroup(n, [failed, *(played(n, 1.0) for _ in range(3))])
        said.append(errors.add([group]))
    assert [len(lines) for lines in said] == [0, 0, 1, 0]
    assert "ValueError" in said[2][0] and "3 of the last 12 episodes" in said[2][0]


def test_a_reward_that_is_nan_has_a_remedy() -> None:
    class Odd:
        def step(self, action: str) -> tuple:
            return "on", math.nan, True, False, {}

    with pytest.raises(
        FloatingPointError, match="finite number, not nan.* mend its formula"
    ) as nan:
        step(Odd(), "jump")
    error = EnvironmentFailed(f"FloatingPointError: {nan.value}")
    groups = [
        TrajectoryGroup(n, [played(n, 0.0, error=error, action="jump"), played(n, 1.0)])
        for n in range(3)
    ]
    (said,) = PolicyErrors().add(groups)
    assert "not nan" in said and "a finite reward" in said and "raising" not in said


# Groups of different tasks


class Starts:
    """Draws its first observation as `way` says."""

    actions = ("push", "pull")
    max_turns = 1
    is_instant = True
    count = 0

    def __init__(self, way: str = "seed") -> None:
        self.way = way

    def reset(self, seed: int, *, outcome_seed: int | None = None) -> str:
        type(self).count += 1
        drawn = {"seed": seed, "ignored": self.count, "outcome": outcome_seed}[self.way]
        return f"go {drawn % 4}"

    def step(self, action: str) -> tuple:
        return "", 1.0, True, False, {}


@pytest.mark.parametrize(("way", "is_told"), [("seed", 0), ("ignored", 1), ("outcome", 0)])
def test_members_that_play_different_tasks_are_told_once(
    renderer: ChatRenderer, way: str, is_told: int
) -> None:
    register("starts", Starts)
    rules = EpisodeConfig(prompt_style="compact", think=False, max_response_length=40)
    tasks = tasks_for_group(0, "starts", 5, lambda: Episode(Starts(way), rules), group_size=6)
    groups = collect(Talker(renderer), renderer, tasks, PlaySettings(400, 1.0, 0))
    options = json.dumps({"starts": {"way": way}})
    flags = ["--environments", "starts", "--environment-options", options]
    guard = RolloutGuard(parse([*flags, "--prompt-style", "compact"]).environment)
    said = guard.check_starts(0, groups)
    assert len(said) == is_told and guard.check_starts(1, groups) == []
    assert all("starts" in line and "--environment-processes" in line for line in said)
