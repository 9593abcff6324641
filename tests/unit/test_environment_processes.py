"""Environments in host processes: the same episodes, errors that mean the same, hosts that die."""

import asyncio
import os
import time
from collections.abc import Iterator
from functools import partial

import pytest

from ragen_mega.config import EnvironmentConfig
from ragen_mega.config.rules import Sections
from ragen_mega.environments import calls
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.pool import Worker
from ragen_mega.environments.processes import HostedEnvironment
from ragen_mega.environments.protocol import StepResult
from ragen_mega.environments.registry import make
from ragen_mega.rollout.tasks import episode_maker, play_settings

WORLD = """
import os


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
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hosts have the path of the process that starts them."""
    folder = tmp_path_factory.mktemp("hosted")
    (folder / "odd_world.py").write_text(WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


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


def test_a_host_that_hangs_is_ended() -> None:
    HostedEnvironment("odd_world:Odd", {}, 1).reset(0)  # the host is there
    stuck = HostedEnvironment("odd_world:Odd", {}, 1, timeout=3.0)
    with pytest.raises(TimeoutError, match="environment is gone"):
        stuck.step("hang")
    assert HostedEnvironment("odd_world:Odd", {}, 1).reset(0).isdigit()


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
    with pytest.raises(RuntimeError, match=rf"LookupError: no such\nshelf {place}"):
        calls.step(many[0], "fail")
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
