"""Environments in host processes: the same episodes, errors that mean the same, hosts that die."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import psutil
import pytest

from ragen_mega.config import EnvironmentConfig
from ragen_mega.config.rules import Sections
from ragen_mega.environments import calls, processes
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.pool import EnvironmentFailed, Worker, guarded
from ragen_mega.environments.processes import HostedEnvironment
from ragen_mega.environments.protocol import Budget, StepResult
from ragen_mega.environments.reference_players import baselines
from ragen_mega.environments.registry import ENVIRONMENTS, make
from ragen_mega.rollout.tasks import episode_maker, play_settings

WORLD = """
import os

from ragen_mega.environments.protocol import Narrator, Solver
from ragen_mega.environments.tool_calls import tool_calls


class Odd:
    max_turns = 4

    def reset(self, seed):
        return f"{os.getpid()}"

    def step(self, text):
        if text == "hang":
            import time

            time.sleep(600)
        if text == "nap":
            import time

            time.sleep(1)
        if text == "die":
            os._exit(3)
        if text == "fail":
            raise LookupError("no such\\nshelf")
        return text, 0.5, False, False, {}

    def parse(self, text):
        return int(text) and text


class Calling(Odd):
    # A world whose answers are calls of a tool; its solver and narrator cannot be pickled.
    solver = Solver(lambda world, budget: None, lambda world, left: ["yes"] * left)
    narrator = Narrator(lambda world, actions: f"{world._hidden} {actions}", statement="x")
    _hidden = "seen"

    def __init__(self, fails: bool = False):
        if fails:
            raise ValueError("no shop\\nthere")

    def reset(self, seed):
        return "Go."

    async def parse(self, text):
        if text == "deep":
            raise RecursionError("deep")
        return tool_calls(text, [{"name": "look"}])


class Parent:
    # A world with a process of its own, which sleeps, and a process of that in another session.

    def reset(self, seed):
        import multiprocessing
        import subprocess
        import sys

        nap = "import time; time.sleep(600)"
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()

        def child():
            orphan = subprocess.Popen([sys.executable, "-c", nap], start_new_session=True)
            answers.put((os.getpid(), orphan.pid))
            exec(nap)

        context.Process(target=child).start()
        return " ".join(map(str, (os.getpid(), *answers.get())))

    def step(self, text):
        if text == "die":
            os._exit(3)
        if text == "hang":
            import time

            print("hangs", flush=True)
            time.sleep(600)
        return text, 0.5, True, False, {}
"""
OWNER = """
import sys
import threading

from ragen_mega.environments.processes import HostedEnvironment

world = HostedEnvironment("odd_world:Parent", {}, 1)
print(world.reset(0), flush=True)
if sys.argv[1] == "hang":
    threading.Thread(target=world.step, args=["hang"], daemon=True).start()
if sys.argv[1] != "end":
    sys.stdin.read()
"""


def has_ended(pids: Iterable[int], seconds: float = 30.0) -> bool:
    """Return whether all of these processes have ended, or do so soon."""
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > deadline:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Hosts have the path of the process that starts them."""
    folder = tmp_path_factory.mktemp("hosted")
    (folder / "odd_world.py").write_text(WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def test_episodes_are_those_of_this_process() -> None:
    here = make("frozen_lake", observation="coord")
    there = HostedEnvironment("frozen_lake", {"observation": "coord"}, 2)
    for seed in range(5):
        begun = [calls.reset(one, seed, outcome_seed=seed + 1) for one in (here, there)]
        assert begun[0] == begun[1] and here.facts() == there.facts()
        for action in ("Down", "Right", "Down"):
            results = [calls.step(one, action) for one in (here, there)]
            assert results[0] == results[1]
            if results[0].terminated:
                break
    assert there.actions == here.actions and there.narrator.actions_per_turn == 2
    assert there.solver.optimal_actions(there, 3) == here.solver.optimal_actions(here, 3)
    assert not hasattr(there, "parse") and not hasattr(there, "tools")
    config = EnvironmentConfig("frozen_lake", environment_processes=2)
    texts = []
    for settings in (config, EnvironmentConfig("frozen_lake")):
        episode = episode_maker(settings, "frozen_lake")()
        first = episode.start(7, outcome_seed=3)
        result = episode.respond("go</think><answer>Down || Right</answer>")
        texts.append((first, result))
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="no option sizes"):
        HostedEnvironment("frozen_lake", {"sizes": 3}, 2)


@pytest.mark.parametrize("name", ENVIRONMENTS.names())
def test_reference_players_are_those_of_this_process(name: str) -> None:
    """Players of WebShop play in copies of the world."""
    found = [
        baselines(name, [(3, None), (4, None)], EpisodeConfig(), build=build)
        for build in (partial(make, name), partial(HostedEnvironment, name, {}, 1))
    ]
    assert found[0] == found[1]
    world = HostedEnvironment(name, {}, 1)
    calls.reset(world, 3)
    before = world.facts()
    world.solver.references(world, Budget(9, 1, 9))
    assert world.facts() == before


def test_what_an_answer_is_told_does_not_depend_on_the_process() -> None:
    read = []
    for build in (
        partial(make, "odd_world:Calling"),
        partial(HostedEnvironment, "odd_world:Calling", {}, 1),
    ):
        episode = Episode(build(), EpisodeConfig(think=False))
        episode.start(0)
        unknown = '<tool_call>{"name": "run", "arguments": {}}</tool_call>'
        read.append([episode.respond(said) for said in (unknown, "deep", "no call")])
        world = episode.environment
        assert world.solver.optimal_actions(world, 2) == ["yes", "yes"]
        narrator = world.narrator
        assert narrator.describe(world, ["yes"]) == "seen ['yes']" and narrator.explain is None
        assert narrator.statement == "x"
    assert read[0] == read[1]
    assert [turn.info["is_format_valid"] for turn in read[0]] == [True, False, False]
    with pytest.raises(
        ValueError, match=r"ValueError: no shop\sthere \(in __init__, .*odd_world.py:\d+\)"
    ):
        HostedEnvironment("odd_world:Calling", {"fails": True}, 1)
    with pytest.raises(ValueError, match="^min_words and max_words must be in order"):
        Worker(0).build("reverse", partial(HostedEnvironment, "reverse", {"min_words": 9}, 1))


def test_a_host_that_hangs_is_ended() -> None:
    HostedEnvironment("odd_world:Odd", {}, 1).reset(0)  # the host is there
    stuck = HostedEnvironment("odd_world:Odd", {}, 1, timeout=3.0)
    with pytest.raises(TimeoutError, match="environment is gone"):
        stuck.step("hang")
    assert HostedEnvironment("odd_world:Odd", {}, 1).reset(0).isdigit()


def test_a_host_that_does_not_die_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one whose call hangs in a driver, which no signal ends: its pipe stays open."""
    host, (near, far), joined = processes.Host.__new__(processes.Host), Pipe(), []
    process = SimpleNamespace(
        pid=4242, kill=lambda: None, join=joined.append, is_alive=lambda: True
    )
    host._process, host._pipe, host._lock = process, near, Lock()
    monkeypatch.setattr(processes, "_end_family", lambda leader: None)
    with pytest.raises(TimeoutError, match="took longer than 0.01 s"):
        host.ask(0.01, 0, "step", "left")
    assert joined == [30.0]
    assert "4242" in capsys.readouterr().err
    far.close()


@pytest.mark.parametrize("how", ["end", "kill", "terminate", "hang"])
def test_processes_of_a_world_end_with_the_run(how: str, folder: Path) -> None:
    """Whether it ends, is killed, or is killed while a call of the world does not return."""
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
        text=True,
    )
    family = [*map(int, owner.stdout.readline().split())]
    assert len(family) == 3, "host, its child and its grandchild"
    if how == "hang":
        assert owner.stdout.readline() == "hangs\n"
    if how in ("kill", "hang"):
        owner.kill()
    elif how == "terminate":
        owner.terminate()
    owner.stdin.close()
    owner.wait()
    assert has_ended(family)
    owner.stdout.close()


def test_processes_of_a_world_end_with_its_host() -> None:
    for last in ("hang", "die"):
        world = HostedEnvironment("odd_world:Parent", {}, 1, timeout=20.0 if last == "die" else 8.0)
        family = [*map(int, world.reset(0).split())]
        with pytest.raises((RuntimeError, TimeoutError), match="environment is gone"):
            world.step(last)
        # The host can no longer name a process that has left both its parent and its session.
        assert has_ended(family if last == "hang" else family[:2])
        if last == "die" and is_running(family[2]):
            os.kill(family[2], signal.SIGKILL)


def test_a_call_that_waits_for_others_in_its_host_is_not_too_late() -> None:
    HostedEnvironment("odd_world:Odd", {}, 1).reset(0)  # the host is there
    config = EnvironmentConfig("odd_world:Odd", environment_processes=1, environment_timeout=3.0)
    settings = play_settings(Sections(environment=config), temperature=1.0, seed=0)
    many = [episode_maker(config, "odd_world:Odd")().environment for _ in range(4)]
    workers = [Worker(settings.environment_timeout) for _ in many]

    async def nap() -> list[StepResult]:
        naps = [worker.call(partial(calls.step, one, "nap")) for worker, one in zip(workers, many)]
        return await asyncio.gather(*naps)

    assert [result.observation for result in asyncio.run(nap())] == ["nap"] * 4
    for worker in workers:
        worker.end(lambda: None)


def test_hosts_share_the_work_and_a_dead_one_is_replaced() -> None:
    many = [HostedEnvironment("odd_world:Odd", {}, 2) for _ in range(6)]
    hosts = [calls.reset(one, 0) for one in many]
    assert len(set(hosts)) == 2 and str(os.getpid()) not in hosts and hosts[:2] * 3 == hosts
    episode = Episode(many[0], EpisodeConfig(think=False))
    episode.start(0)
    assert episode.budget.max_turns == 4
    assert episode.respond("x").info["is_format_valid"] is False, "ValueError stays ValueError"
    assert episode.respond("12").reward == 0.5
    place = r"\(in step, .*odd_world.py:\d+\)"
    with pytest.raises(EnvironmentFailed, match=rf"LookupError: no such\nshelf {place}"):
        guarded(partial(calls.step, many[0], "fail"))
    with pytest.raises(RuntimeError, match="environment is gone"):
        calls.step(many[0], "die")
    with pytest.raises(RuntimeError, match="gone"):
        calls.reset(many[2], 0)
    assert calls.reset(many[1], 0) == hosts[1], "the other host lives"
    deadline = time.monotonic() + 10
    fresh = set()
    while len(fresh) < 2 and time.monotonic() < deadline:
        fresh.add(calls.reset(HostedEnvironment("odd_world:Odd", {}, 2), 0))
    assert len(fresh) == 2 and hosts[1] in fresh and hosts[0] not in fresh
    for one in many[1::2]:
        one.close()
