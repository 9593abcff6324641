"""Environments that raise, hang or pay nonsense: their trajectory ends, the others and the group go
on.
"""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.config import AdvantageConfig
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.pool import EnvironmentFailed, Worker, late_advice
from ragen_mega.environments.protocol import StepResult
from ragen_mega.environments.registry import make, register
from ragen_mega.environments.worlds.bandit.world import Bandit
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.rollout.collector import collect
from ragen_mega.rollout.endings import describe_errors
from ragen_mega.rollout.engine import EngineError, RolloutEngine
from ragen_mega.rollout.player import PlaySettings
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.summary import environment_errors, summarize
from ragen_mega.rollout.tasks import tasks_for_group


class Panic(BaseException):
    """As of an extension in Rust."""


class Flaky(Bandit):
    """A bandit that fails as `way` says when its outcome seed is even."""

    def __init__(self, *, way: str = "") -> None:
        super().__init__()
        self._way = way
        self._is_bad = False

    def reset(self, seed, *, outcome_seed=None, board=None) -> str:
        self._is_bad = outcome_seed % 2 == 0
        if self._way == "start" and self._is_bad:
            raise KeyError("no server")
        return super().reset(seed, outcome_seed=outcome_seed)

    def step(self, action: str) -> StepResult:
        if self._is_bad:
            match self._way:
                case "raise":
                    raise ConnectionError("lost\nconnection")
                case "exit":
                    sys.exit(3)
                case "panic":
                    raise Panic("index out of bounds")
                case "sleep":
                    time.sleep(20)
                case "nan":
                    return StepResult(
                        "",
                        float("nan"),
                        True,
                        False,
                        {"success": True, "is_action_effective": True},
                    )
        return super().step(action)


class Talker(RolloutEngine):
    """An engine that always pulls an arm; `fail` is raised instead."""

    weight_version = 1

    def __init__(self, renderer: ChatRenderer, fail: Exception | None = None) -> None:
        text = " go</think><answer> Dragon</answer><|im_end|>"
        self.answer = renderer.tokenizer.encode(text, add_special_tokens=False)
        self.fail = fail

    async def generate(
        self, tokens: list[int], sampling: SamplingParams, *, session: int
    ) -> Completion:
        if self.fail:
            raise self.fail
        return Completion(self.answer, [-1.0] * len(self.answer), "stop")


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(
        train_tokenizer(["first second third go Dragon Phoenix The arms are and . 0 1 2 left"]),
        think=True,
    )


@pytest.fixture
def play(renderer: ChatRenderer) -> Iterator[Callable]:
    register("flaky", Flaky)

    def play(way: str, *, timeout: float, fail: Exception | None = None, only_bad: bool = False):
        def episode() -> Episode:
            return Episode(
                make("flaky", way=way),
                EpisodeConfig(prompt_style="compact", max_response_length=60),
            )

        tasks = tasks_for_group(4, "flaky", 11, episode, group_size=8)
        assert {task.outcome_seed % 2 for task in tasks} == {0, 1}
        if only_bad:
            tasks = [task for task in tasks if task.outcome_seed % 2 == 0]
        engine = Talker(renderer, fail)
        return collect(
            engine,
            renderer,
            tasks,
            PlaySettings(200, 1.0, 0, environment_timeout=timeout),
        )

    return play


@pytest.mark.parametrize(
    ("way", "timeout", "reason"),
    [
        ("raise", 5.0, "ConnectionError: lost\nconnection"),
        ("raise", 0.0, "ConnectionError: lost\nconnection"),
        ("exit", 5.0, "SystemExit: 3"),
        ("panic", 5.0, "Panic: index out of bounds"),
        (
            "nan",
            5.0,
            "FloatingPointError: the environment's reward must be a finite number, not nan, and at"
            " most 1e+30 in size; mend its formula, for example a division by 0",
        ),
    ],
)
def test_a_failing_environment_ends_its_trajectory_only(
    play: Callable, way: str, timeout: float, reason: str
) -> None:
    (group,) = play(way, timeout=timeout)
    assert len(group.trajectories) == 8
    for trajectory in group.trajectories:
        bad = trajectory.outcome_seed % 2 == 0
        ended = (trajectory.truncated, trajectory.terminated, trajectory.success)
        assert ended == ((True, False, False) if bad else (False, True, True))
        assert (
            len(trajectory.turns) == 1
            and trajectory.num_sampled_tokens > 5
            and trajectory.turns[0].end == len(trajectory)
        )
        assert trajectory.total_reward == 0.0 or not bad
    errors = environment_errors([group])
    assert {why.partition(" (in step, ")[0] for _, why in errors} == {reason}
    assert (
        summarize([group])["environment_errors"]
        == len(errors)
        == sum(trajectory.outcome_seed % 2 == 0 for trajectory in group.trajectories)
    )


def test_hanging_environments_cost_their_time_limit_once(play: Callable) -> None:
    """Those that hang wait together; whoever answers at once is done before. Sleeping threads are
    left to themselves.
    """
    start = time.monotonic()
    (group,) = play("sleep", timeout=3.0)
    num_bad = sum(trajectory.outcome_seed % 2 == 0 for trajectory in group.trajectories)
    assert time.monotonic() - start < 20  # nobody has waited for a sleep to end
    assert (
        sorted(trajectory.truncated for trajectory in group.trajectories)
        == [False] * (8 - num_bad) + [True] * num_bad
    )
    assert {why for _, why in environment_errors([group])} == {"took longer than 3 s"}
    said = describe_errors([group])
    assert said and said.endswith("end sooner, or raise --environment-timeout")
    assert late_advice("agent:my:run", said).endswith("raise --agent-timeout")


def test_calls_that_do_not_return_wait_together() -> None:
    """Four calls that never return, each of which may take three seconds; another one answers."""
    forever = threading.Event()

    async def work() -> None:
        workers = [Worker(3.0) for _ in range(5)]
        calls = [worker.call(forever.wait) for worker in workers[:4]]
        *failed, answered = await asyncio.gather(
            *calls, workers[4].call(lambda: 5), return_exceptions=True
        )
        assert [type(error) for error in failed] == [EnvironmentFailed] * 4 and answered == 5
        assert str(failed[0]) == "took longer than 3 s"
        for worker in workers:
            worker.end(lambda: None)
        forever.set()
        for worker in workers:
            worker.join(5)

    asyncio.run(work())


def test_an_environment_that_never_starts_names_its_seed(play: Callable) -> None:
    with pytest.raises(
        ValueError, match="environment flaky cannot start from seed 11: KeyError: 'no server'"
    ):
        play("start", timeout=5.0, only_bad=True)


def test_an_environment_that_cannot_start_costs_its_trajectory(play: Callable) -> None:
    (group,) = groups = play("start", timeout=5.0)
    for trajectory in group.trajectories:
        is_bad = trajectory.outcome_seed % 2 == 0
        assert (trajectory.num_sampled_tokens == 0) == is_bad == trajectory.truncated
    assert {"no server" in reason for _, reason in environment_errors(groups)} == {True}
    for trajectory in group.trajectories:  # as reward terms do, also of what was not played
        trajectory.turns[-1].reward += 0.5
    batch = pack(group.trajectories)
    assert bool(batch.rewards[~batch.loss_mask].eq(0).all())
    of_turns = [(name, "turn") for name in ("gae", "bilevel_gae", "reinforce_plus_plus")]
    of_whole = [(name, "trajectory") for name in ("gae", "grpo", "rloo", "reinforce_plus_plus")]
    for name, placement in of_turns + of_whole:
        credited = estimate_advantages(
            batch.with_fields(values=torch.zeros(batch.num_positions)),
            group.trajectories,
            AdvantageConfig(advantage_estimator=name, reward_placement=placement),
        )
        assert bool(credited.advantages[~batch.loss_mask].eq(0).all())


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError(), OSError("pipe")])
def test_an_engine_that_fails_says_so(play: Callable, error: Exception) -> None:
    with pytest.raises(EngineError, match=f"the rollout engine failed: {type(error).__name__}"):
        play("", timeout=5.0, fail=error)


def test_no_thread_stays_behind(play: Callable) -> None:
    before = set(threading.enumerate())  # other tests leave some that never return

    def left() -> list[threading.Thread]:
        now = threading.enumerate()
        return [one for one in now if one.name == "environment" and one not in before]

    play("raise", timeout=5.0)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and left():
        time.sleep(0.01)
    assert not left()


def test_a_hanging_environment_does_not_hold_up_the_end_of_the_process() -> None:
    program = """
import asyncio, time
from ragen_mega.environments.pool import Worker
async def work():
    await Worker(0.1).call(lambda: time.sleep(600))
try:
    asyncio.run(work())
except Exception as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "took longer than 0.1 s\n"), done.stderr
