"""A curriculum by success: which levels are drawn, what opens the next, and that a resumed run goes
on with the same tasks.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from ragen_mega.algorithm.diagnostics import EchoTrapMonitor
from ragen_mega.commands.replayed_step import RecordedRollouts
from ragen_mega.config import parse
from ragen_mega.data.compact import outlined, outlines_of
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.environments.episode import ERROR
from ragen_mega.environments.registry import make
from ragen_mega.environments.worlds.reverse.world import Reverse
from ragen_mega.ranks import collectives
from ragen_mega.rollout.curriculum import Levels
from ragen_mega.rollout.player import Task
from ragen_mega.rollout.tasks import TRAINING_SEEDS, TaskSampler
from ragen_mega.run.guards import CollapseGuard
from ragen_mega.run.log import StepLog
from ragen_mega.run.run import Run
from ragen_mega.run.timers import Timers
from ragen_mega.storage.checkpoints import Checkpoint
from ragen_mega.storage.rollouts import RolloutStore
from tests.support.forked_ranks import on_ranks

WORDS = '{"reverse": {"min_words": 2, "max_words": 5}}'
FLAGS = ["--recipe", "none", "--environments", "reverse", "--environment-options", WORDS]
FLAGS += ["--curriculum-success", "0.75", "--num-groups", "40", "--group-size", "2"]


def levels_of(tasks: list[list[Task]]) -> list[int]:
    """The number of words of each group, from the world itself."""
    world = make("reverse", **json.loads(WORDS)["reverse"])
    return [len(world.reset(group[0].seed).partition(": ")[2].split()) for group in tasks]


def played(tasks: list[list[Task]], solved: set[int]) -> list[TrajectoryGroup]:
    """Groups in which exactly the tasks of these levels are solved."""
    groups = []
    for group, level in zip(tasks, levels_of(tasks), strict=True):
        members = [
            Trajectory(group_id=task.group_id, environment="reverse", seed=task.seed)
            for task in group
        ]
        for member in members:
            member.append_observation([1])
            member.append_action(completion())
            member.turns[-1].info["success"] = level in solved
        groups.append(TrajectoryGroup(group[0].group_id, members))
    return groups


def completion() -> Completion:

    return Completion([2], [0.0], "stop")


def test_a_level_opens_when_the_one_below_is_solved() -> None:
    levels = Levels([4, 2, 3, 3], 0.75)
    assert levels.levels == (2, 3, 4) and levels.hardest_open == 2
    levels.observe({2: [True, True, False]})
    assert levels.hardest_open == 2  # 2 of 3
    levels.observe({2: [True, True]})
    # Earlier episodes count 0.7: (0.7 * 2 + 2) of (0.7 * 3 + 2)
    assert (0.7 * 2 + 2) / (0.7 * 3 + 2) > 0.75 and levels.hardest_open == 3
    levels.observe({3: [True], 4: [True]})
    assert levels.hardest_open == 4  # also where all are solved
    levels.observe({2: [False] * 9})
    assert levels.hardest_open == 2, "what is forgotten is practised again"


def test_rare_difficulties_share_a_level() -> None:
    """Levels are named by their hardest difficulty; those that are common stay as they are."""
    common = Levels([2] * 4 + [3] * 126 + [4] * 126, 0.75)
    assert common.levels == (2, 3, 4) and common.level_of == {2: 2, 3: 3, 4: 4}
    for numbers, levels in (
        ({1: 3, 2: 125, 3: 128}, {1: 2, 2: 2, 3: 3}),
        ({1: 126, 2: 3, 3: 127}, {1: 1, 2: 3, 3: 3}),
        ({1: 128, 2: 125, 3: 3}, {1: 1, 2: 3, 3: 3}),
        ({1: 2, 2: 2, 3: 2, 4: 2, 5: 248}, {1: 2, 2: 2, 3: 4, 4: 4, 5: 5}),
        ({1: 253, 2: 3}, {1: 2, 2: 2}),
    ):
        merged = Levels([*Counter(numbers).elements()], 0.75)
        assert merged.level_of == levels and merged.levels == tuple(sorted({*levels.values()}))


class Steps:
    """A world of three difficulties, of which those in `rare` come by one seed of all."""

    actions = ("Go",)
    rare: tuple[int, ...] = ()

    def reset(self, seed: int) -> str:
        common = [level for level in (1, 2, 3) if level not in self.rare]
        place = seed - TRAINING_SEEDS[0]
        is_rare = place < len(self.rare)
        self.difficulty = self.rare[place] if is_rare else common[seed % len(common)]
        return f"{self.difficulty} steps from {seed}"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, bool]]:
        return "", 0.0, True, False, {"success": False}


@pytest.mark.parametrize(("rare", "levels"), [(1, (2, 3)), (2, (1, 3)), (3, (1, 3))])
def test_a_difficulty_that_hardly_comes_does_not_end_the_run(
    rare: int, levels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not a run that is resumed from where tasks of this difficulty alone were drawn."""
    monkeypatch.setattr(Steps, "rare", (rare,))
    name = f"{__name__}:Steps"
    flags = ["--recipe", "none", "--environments", name, "--curriculum-success", "0.75"]
    sampler = TaskSampler(parse([*flags, "--num-groups", "40", "--group-size", "2"]))
    for solved in range(rare):
        sampler.load_state_dict({name: {str(each): (9, 9) for each in range(1, solved + 1)}})
        seeds = [group[0].seed for group in sampler.sample(0)]
        assert [group[0].seed for group in sampler.sample(0)] == seeds
        assert {*sampler._drawn.values()} <= {*levels} and len(sampler._drawn) == 40
    assert sampler.levels[name].levels == levels


def test_a_world_of_one_common_difficulty_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "rare", (2, 3))
    flags = ["--recipe", "none", "--environments", f"{__name__}:Steps"]
    with pytest.raises(ValueError, match="several values, each in 1.6% of the states"):
        TaskSampler(parse([*flags, "--curriculum-success", "0.75"]))


def test_half_of_the_tasks_are_of_the_hardest_open_level_and_none_is_above() -> None:
    sampler = TaskSampler(parse(FLAGS))
    drawn = Counter()
    for step in range(3):
        tasks = sampler.sample(step)
        assert set(levels_of(tasks)) == {2}
        sampler.observe(played(tasks, set()))
    for _ in range(4):
        sampler.observe(played(tasks, {2}))
    assert sampler.levels["reverse"].hardest_open == 3
    for step in range(3, 23):
        tasks = sampler.sample(step)
        drawn.update(levels_of(tasks))
        metrics = sampler.observe(played(tasks, {2}))
        assert metrics == {"level/reverse": 3.0}
    assert set(drawn) == {2, 3}
    # Half are of level 3, and half of the others: 75% of 800, within five deviations.
    assert abs(drawn[3] / 800 - 0.75) < 5 * (0.75 * 0.25 / 800) ** 0.5


def test_only_a_level_that_opens_is_another_task(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = "reverse,lookup,frozen_lake"  # the last one has no levels
    options = json.dumps(json.loads(WORDS) | {"lookup": {"min_people": 2, "max_people": 4}})
    flags = ["--recipe", "none", "--environments", environments, "--environment-options", options]
    flags += ["--curriculum-success", "0.75", "--num-groups", "12", "--group-size", "2"]
    sampler, solved, failed = TaskSampler(parse(flags)), [True] * 9, [False] * 9
    assert sampler.levels.keys() == {"reverse", "lookup"}
    for reverse, lookup, hardest, has_changed in (
        ({}, {}, (3, 3), False),
        ({3: solved}, {}, (4, 3), True),
        ({2: failed}, {}, (2, 3), False),
        ({2: failed}, {3: failed}, (2, 3), False),
        ({2: failed}, {3: solved}, (2, 4), True),
    ):
        sampler.load_state_dict({name: {"2": (9, 9)} for name in ("reverse", "lookup")})
        results = {"reverse": reverse, "lookup": lookup}
        monkeypatch.setattr(sampler, "_results", lambda groups, results=results: results)
        assert (*sampler.observe([]).values(),) == hardest
        assert sampler.has_changed == has_changed


def test_a_run_says_once_that_a_level_opens_or_closes() -> None:
    run, hardest = Run.__new__(Run), [2.0]  # the easiest level is open
    run.tasks, run.trainers, run.score_average = TaskSampler(parse(FLAGS)), {}, None
    for name in ("console", "rollout_guard", "guard"):
        setattr(run, name, Mock())
    run.guard.take_count.return_value = 0
    for step, solved in enumerate(({2}, {2}, {2, 3}, {2, 3}, set(), set())):
        log = StepLog(step, Timers())
        run.advance(played(run.tasks.sample(step), solved), log)
        hardest.append(log.result()["rollout/level/reverse"])
    changes = [(step, *pair) for step, pair in enumerate(pairwise(hardest)) if len({*pair}) > 1]
    assert {after > before for _, before, after in changes} == {True, False}
    assert [call.args[0] for call in run.console.say.call_args_list] == [
        f"step {step}: states of reverse are drawn up to difficulty {after:g} from now on, up to"
        f" {before:g} before"
        for step, before, after in changes
    ]


def test_the_guard_sees_a_collapse_that_closes_levels() -> None:
    """The loop of a run: `Run.advance`, then `Run.roll_back_if_collapsed`."""
    sampler, guard = TaskSampler(parse(FLAGS)), CollapseGuard(parse(["--guard", "warn"]).guard)
    levels, said = [], []
    for step in range(30):
        groups = played(sampler.sample(step), {2} if step < 15 else set())
        levels.append(sampler.observe(groups)["level/reverse"])
        success = [one.success for group in groups for one in group.trajectories]
        rate = {"success_rate": sum(success) / len(success)}
        said.append(guard.observe(rate, is_last=False))
        if sampler.has_changed:
            guard.task_changed()
    assert {*levels[:15]} == {3.0} and levels[-1] == 2.0
    assert not any(said[:15]) and any(said[15:])


def test_episodes_that_failed_count_for_no_level() -> None:
    sampler = TaskSampler(parse(FLAGS))
    groups = played(sampler.sample(0), {2})
    for group in groups:  # one of two members
        group.trajectories[0].turns[-1].info = {"success": False, ERROR: "the server is away"}
    assert sampler.observe(groups) == {"level/reverse": 3.0} and sampler.has_changed
    sampler.observe(played(sampler.sample(1), {2}))
    assert not sampler.has_changed


def test_a_resumed_run_draws_the_same_tasks() -> None:
    whole, resumed = TaskSampler(parse(FLAGS)), TaskSampler(parse(FLAGS))
    for step in range(4):
        whole.observe(played(whole.sample(step), {2, 3} if step > 1 else {2}))
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    fresh = TaskSampler(parse(FLAGS))
    seeds = [[group[0].seed for group in each.sample(4)] for each in (whole, resumed, fresh)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_levels_are_those_of_the_weights_and_of_the_tasks() -> None:
    """They return with the checkpoint that the guard goes back to, and begin anew where a resumed
    run has other tasks.
    """

    def run_of(*flags: str) -> Any:
        config = parse([*FLAGS, "--guard", "react", *flags])
        guard, sampler = CollapseGuard(config.guard), TaskSampler(config)
        guard.good_step = 4
        run = Run.__new__(Run)
        run.config, run.tasks, run.collapse_guard = config, sampler, guard
        run.monitor, run.step_version = EchoTrapMonitor(), 0
        for name in ("engine", "console", "log", "rollouts", "checkpoints", "guard"):
            setattr(run, name, Mock())
        run.checkpoints.restore = lambda saved: sampler.load_state_dict(saved.state["curriculum"])
        run.checkpoints.read.return_value = saved
        return run

    sampler = TaskSampler(parse(FLAGS))
    sampler.observe(played(sampler.sample(0), {2}))
    state = json.loads(json.dumps({"curriculum": sampler.state_dict()}))
    saved = Checkpoint(Path("c"), 4, None, parse(FLAGS).to_dict(), {}, state)
    for flags, hardest in (((), 3), (("--temperature", "0.5"), 2)):
        run = run_of(*flags)
        run.restore(saved)
        assert run.tasks.levels["reverse"].hardest_open == hardest
        run.tasks.observe(played(run.tasks.sample(4), {2, 3}))
        log = StepLog(4, Timers())
        run.collapse_guard.observe = lambda signals, is_last: "success fell"
        run.roll_back_if_collapsed(log)
        assert log.went_back and run.tasks.levels["reverse"].hardest_open == hardest


@pytest.mark.forks
def test_all_ranks_draw_the_tasks_of_one(tmp_path: Path) -> None:
    """Ranks have the success of trajectories that they played themselves, and the first one of
    all.
    """

    def seeds_and_levels() -> list[Any]:
        sampler, seeds = TaskSampler(parse(FLAGS)), []
        for step in range(4):
            tasks = sampler.sample(step)
            groups = played(tasks, {2})
            if collectives.rank() == 1:  # which has played the second half
                members = [outlined(outlines_of(group.trajectories)) for group in groups[:20]]
                groups[:20] = [TrajectoryGroup(one[0].group_id, one) for one in members]
            sampler.observe(groups)
            seeds.append([group[0].seed for group in tasks])
        return [seeds, sampler.state_dict()]

    def rank() -> None:
        collectives.start()
        (tmp_path / str(collectives.rank())).write_text(json.dumps(seeds_and_levels()))

    on_ranks(rank, 2)
    expected = json.loads(json.dumps(seeds_and_levels()))
    for name in ("0", "1"):
        assert json.loads((tmp_path / name).read_text()) == expected


@pytest.mark.forks
@pytest.mark.parametrize("ill", [0, 1])
def test_an_environment_that_fails_on_one_rank_draws_no_other_tasks(
    ill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws the same on the other rank, or none there either."""
    expected = [group[0].seed for group in TaskSampler(parse(FLAGS)).sample(0)]

    def rank() -> None:
        collectives.start()
        sampler = TaskSampler(parse(FLAGS))
        if collectives.rank() == ill:
            monkeypatch.setattr(Reverse, "reset", Mock(side_effect=OSError("no server")))
        if ill == 0:
            with pytest.raises(ValueError, match="cannot begin with training seed .*no server"):
                sampler.sample(0)
        else:
            assert [group[0].seed for group in sampler.sample(0)] == expected

    on_ranks(rank, 2)


def test_a_rollout_from_the_disk_is_observed_as_the_one_that_was_sampled(tmp_path: Path) -> None:
    config = parse([*FLAGS, "--max-sampling-rounds", "2"])
    run, replayed = TaskSampler(config), TaskSampler(config)
    groups = [group for each in range(2) for group in played(run.sample(0, each), {2})]
    (store := RolloutStore(tmp_path)).write(0, groups, {})
    metrics = run.observe(groups)
    recalled = RecordedRollouts(store, replayed).recall(0)
    assert recalled is not None and replayed.observe(recalled) == metrics
    assert metrics == {"level/reverse": 3.0} and replayed.state_dict() == run.state_dict()


def test_one_environment_looks_at_the_seeds_of_a_step_and_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler, construct = TaskSampler(parse(FLAGS)), Reverse.__init__
    made: list[Reverse] = []
    closed: SimpleQueue[Reverse] = SimpleQueue()

    def count(self: Reverse, **options: Any) -> None:
        construct(self, **options)
        made.append(self)

    monkeypatch.setattr(Reverse, "__init__", count)
    monkeypatch.setattr(Reverse, "close", lambda self: closed.put(self), raising=False)
    sampler.sample(0)
    (world,) = made
    while closed.get(timeout=60) is not world:
        pass  # an environment of the constructor, whose thread closes it when it comes to it


def test_an_environment_that_fails_to_begin_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = TaskSampler(parse(FLAGS))

    def fail(self: Reverse, seed: int | None = None) -> str:
        raise RuntimeError("the server is away")

    monkeypatch.setattr(Reverse, "reset", fail)
    with pytest.raises(ValueError, match="reverse cannot begin with training seed .*is away"):
        sampler.sample(0)


def test_without_difficulties_it_is_refused() -> None:
    flags = [flag if flag != "reverse" else "frozen_lake" for flag in FLAGS if flag != WORDS]
    flags.remove("--environment-options")
    with pytest.raises(ValueError, match="curriculum_success .* difficulty .* frozen_lake has"):
        TaskSampler(parse(flags))
    with pytest.raises(ValueError, match="curriculum_success .* separate"):
        parse([*FLAGS, "--placement", "separate", "--rollout-ranks", "1"])
    with pytest.raises(ValueError, match="curriculum_success .* drop --curriculum or"):
        parse([*FLAGS, "--curriculum", '{"3": {"reverse": {"max_words": 4}}}'])
