"""Agents that wait for one another, share a loop or a client, or break an assumption of the method:
at the door, with the real OpenAI client.
"""

import asyncio
import contextvars
import itertools
import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import httpx2
import openai
import pytest

from ragen_mega.agents import runner
from ragen_mega.agents.player import Clock
from ragen_mega.agents.repetition import begins_again
from ragen_mega.agents.runner import AgentProgram
from ragen_mega.config import EnvironmentConfig
from ragen_mega.config.rules import Sections
from ragen_mega.data.types import Trajectory, TrajectoryGroup, in_groups
from ragen_mega.engines.embedded import engine as embedded
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments import event_loop
from ragen_mega.environments.adapters.tasks import FileTasks
from ragen_mega.environments.episode import ERROR
from ragen_mega.environments.processes import Host
from ragen_mega.rollout.collector import collect
from ragen_mega.rollout.player import PlaySettings
from ragen_mega.rollout.tasks import episode_maker, tasks_for_group
from ragen_mega.run.check import import_agents, task_notes
from ragen_mega.run.guards import RolloutGuard
from tests.support.door import RENDERER, TalkingEngine, ask, play, put_at_the_door, sampled
from tests.support.small_policy import tiny_qwen2

Run = Callable[..., Any]


def two_calls(task: dict[str, Any], client: openai.OpenAI) -> float:
    for number in range(2):
        ask(client, f"call {number}", max_tokens=5)
    return 1.0


def limited(guard: Any) -> Run:
    """An agent whose episodes, all calls of one, go through a semaphore."""

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        with guard:
            return two_calls(task, client)

    return run


def with_lock() -> Run:
    lock = threading.Lock()

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        for number in range(2):
            with lock:
                ask(client, f"call {number}", max_tokens=5)
        return 1.0

    return run


def with_pool() -> Run:
    pool = ThreadPoolExecutor(2)
    return lambda task, client: pool.submit(two_calls, task, client).result()


def with_barrier() -> Run:
    barrier = threading.Barrier(8)

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        for number in range(2):
            ask(client, f"call {number}", max_tokens=5)
            barrier.wait()
        return 1.0

    return run


def with_loop(kind: str) -> Run:
    """A coroutine agent with an object of asyncio's and a client that all episodes share."""
    shared: dict[str, Any] = {}

    async def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
        if not shared:
            tokens = asyncio.Queue()
            for _ in range(2):
                tokens.put_nowait(None)
            shared["Queue"], shared["Lock"] = tokens, asyncio.Lock()
            shared["Semaphore"] = asyncio.Semaphore(2)
            shared["http"] = httpx2.AsyncClient(trust_env=False)
        url, headers = f"{base_url}/chat/completions", {"authorization": f"Bearer {api_key}"}
        for number in range(2):
            body = {"model": "policy", "messages": [{"role": "user", "content": f"call {number}"}]}
            if kind == "Queue":
                await shared["Queue"].get()
                answer = await shared["http"].post(url, json=body, headers=headers)
                shared["Queue"].put_nowait(None)
            else:
                async with shared[kind]:
                    answer = await shared["http"].post(url, json=body, headers=headers)
            assert answer.status_code == 200
        return 1.0

    return run


WAITING = {
    "semaphore of 1": lambda: limited(threading.Semaphore(1)),
    "semaphore of 2": lambda: limited(threading.Semaphore(2)),
    "lock around calls": with_lock,
    "pool of 2": with_pool,
    "barrier": with_barrier,
    "asyncio.Lock": lambda: with_loop("Lock"),
    "asyncio.Semaphore": lambda: with_loop("Semaphore"),
    "asyncio.Queue": lambda: with_loop("Queue"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", list(WAITING))
@pytest.mark.parametrize("is_ordered", [False, True], ids=["free", "ordered"])
def test_agents_that_wait_for_one_another_need_no_further_time(kind, is_ordered, monkeypatch):
    """Unordered, the engine never pauses: a pause would be longer than this test may take. There
    are fewer slots than episodes, so that those who wait hold the slots of those they wait for.
    """
    monkeypatch.setattr(embedded, "MAX_PATIENCE", 0.1 if is_ordered else 600.0)
    model = tiny_qwen2(len(RENDERER.tokenizer))
    engine = EmbeddedEngine(model.config, max_context=4000, max_sessions=3)
    with engine.awake():
        engine.load_weights(model.state_dict().items())
        played = play(WAITING[kind](), engine=engine, count=8, is_ordered=is_ordered)
    assert [len(member.turns) for member in played] == [2] * 8
    assert not [info for member in played if ERROR in (info := member.turns[-1].info)]
    samples = {member.outcome_seed: (member.tokens, member.rollout_logprobs) for member in played}
    with engine.awake():
        engine.load_weights(model.state_dict().items())
        alone = play(two_calls, engine=engine, count=8)
    if "asyncio" not in kind:  # whose calls have no max_tokens
        assert samples == {
            each.outcome_seed: (each.tokens, each.rollout_logprobs) for each in alone
        }


@pytest.mark.parametrize("scope", ["episode", "call"])
def test_an_episode_that_waits_for_others_is_not_late(scope):
    """Thirty episodes go one at a time, which takes longer than any of them may."""
    turn = threading.Semaphore(1)

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        with turn:
            ask(client, "hello")
            time.sleep(0.05)
        with turn:
            time.sleep(0.05)
            ask(client, "hello again")
        return 1.0

    begun = time.monotonic()
    played = play(run, count=30, agent_timeout=2.5)
    assert time.monotonic() - begun > 2.5
    assert [len(member.turns) for member in played] == [2] * 30


def test_an_episode_that_never_ends_is_late_once_the_others_have_ended():
    ended = threading.Event()
    numbers = itertools.count()

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        ask(client, "hello")
        if next(numbers) == 0:
            ended.wait(60)
        return 1.0

    played = play(run, count=3, agent_timeout=0.5)
    ended.set()
    errors = [member.turns[-1].info.get(ERROR) for member in played]
    assert errors.count(None) == 2 and "took longer than 0.5 s" in next(filter(None, errors))


@pytest.mark.parametrize("standstill", [0.0, 1000.0])
def test_an_episode_is_not_late_because_the_event_loop_stood_still(standstill, monkeypatch):
    """As it does while a server is replaced. The loop's clock is the test's, so that no second
    passes.
    """
    loop, now = asyncio.new_event_loop(), 0.0

    def wait_for_events(seconds: float) -> list[Any]:
        nonlocal now
        now += seconds
        return []

    async def play() -> float:
        nonlocal now
        late = loop.create_future()
        with Clock([]) as clock:
            clock.watch(60.0, lambda: late.set_result(now))
            await asyncio.sleep(20.0)
            now += standstill
            return await late

    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr(loop._selector, "select", wait_for_events)
    assert standstill + 59.0 < loop.run_until_complete(play()) < standstill + 61.0
    loop.close()


def test_coroutines_keep_contexts_of_their_own_and_are_cancelled_alone():
    name = contextvars.ContextVar("name")
    told, cancelled = [], []

    async def run(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
        assert name.get(None) is None
        name.set(task["outcome_seed"])
        loop = asyncio.get_running_loop()
        loop.create_task(leave()).add_done_callback(lambda ended: ended.exception())
        await asyncio.gather(ask(client, "hello"), asyncio.to_thread(time.sleep, 0.01))
        told.append((name.get(), id(loop)))
        if len(told) == 1:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(name.get())
                raise
        return 1.0

    async def leave() -> None:
        raise SystemExit("a task of an agent must not end the loop")

    played = play(run, count=4, agent_timeout=1.0)
    late = [member.outcome_seed for member in played if ERROR in member.turns[-1].info]
    assert len({loop for _, loop in told}) == 1
    assert {seed for seed, _ in told} == {member.outcome_seed for member in played}
    deadline = time.monotonic() + 60
    while not cancelled and time.monotonic() < deadline:
        time.sleep(0.01)  # the loop ends the coroutine in its own time
    assert late == cancelled == [told[0][0]]


def test_a_coroutine_that_blocks_the_loop_is_named(monkeypatch, capsys):
    monkeypatch.setattr(event_loop, "STANDSTILL", 0.2)
    awake = threading.Event()

    async def run(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
        await ask(client, "hello")
        awake.wait(60)
        return 1.0

    try:
        played = play(run, count=2, agent_timeout=2.0)
    finally:
        awake.set()
    place = f"run ({__file__}:{run.__code__.co_firstlineno + 2})"
    said = capsys.readouterr().err
    assert said.count(place) == 1 and "plain function" in said
    assert all(place in member.turns[-1].info[ERROR] for member in played)


def test_a_client_of_the_whole_process_is_named_as_the_cause():
    kept: list[openai.OpenAI] = []
    all_begun = threading.Barrier(4)

    def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
        kept.append(openai.OpenAI(base_url=base_url, api_key=api_key))
        all_begun.wait()
        ask(kept[0], f"hello {task['outcome_seed']}")
        all_begun.wait()
        return 1.0

    played = play(run, count=4)
    errors = [member.turns[-1].info.get(ERROR, "") for member in played]
    assert sum("the whole process shares" in error for error in errors) == 3
    for named in ("--environment-processes", "a cache of the framework"):
        assert all(named in error for error in errors if error)


PROCESS_AGENT = """
import os

from openai import OpenAI

client = OpenAI()
MEMORY = []


def run(task, base_url, api_key):
    assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"] == base_url
    assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"] == api_key
    if task["outcome_seed"] in task["ending"]:
        os._exit(3)
    MEMORY.append(task)
    text = f"hello {task['outcome_seed']}"
    said = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": text}]
    )
    heard = said.choices[0].message.content
    return {"reward": float(heard == text[-5:]), "process": os.getpid(), "heard": [heard, text]}
"""


@pytest.mark.timeout(180)
def test_agents_in_processes_may_share_a_client_and_cost_their_own_episode(tmp_path, monkeypatch):
    (tmp_path / "process_agent.py").write_text(PROCESS_AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    for variable in runner._VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    name, file = "agent:process_agent:run", tmp_path / "rows.jsonl"
    seeds = [task.outcome_seed for task in tasks_for_group(0, name, 7, object, group_size=6)]
    file.write_text("\n".join(json.dumps({"ending": seeds[2:3], "row": i}) for i in range(4)))
    options = json.dumps({name: {"tasks": str(file), "validation": str(file)}})
    config = EnvironmentConfig(name, environment_options=options, environment_processes=2)
    import_agents(config)
    tasks = tasks_for_group(0, name, 7, episode_maker(config, name), group_size=6)
    engine = TalkingEngine(lambda text: re.findall(r"hello (\d+)", text)[0][-5:])
    played = [
        member
        for group in collect(engine, RENDERER, tasks, PlaySettings(4000, 1.0, 3))
        for member in group.trajectories
    ]
    infos = [member.turns[-1].info for member in played]
    assert "process" in infos[2][ERROR]
    others = [member for member in played if member is not played[2]]
    assert [member.total_reward for member in others] == [1.0] * 5, infos
    assert [len(member.turns) for member in others] == [1] * 5
    # Two at a time, and one in place of the one that ended; which takes an episode is up to speed.
    assert len({member.turns[-1].info["outcome"]["process"] for member in others}) <= 3
    for place in iter(runner._processes("process_agent:run", 2).get_nowait, None):
        if place._host is not None:
            place._host.end()
        if runner._processes("process_agent:run", 2).empty():
            break


SLOW_AGENT = """
import multiprocessing
import time

if multiprocessing.parent_process():
    time.sleep(600)


def run(task, client):
    return 1.0
"""


@pytest.mark.parametrize("moment", ["before it is known", "while it imports the agent"])
def test_a_process_that_is_starting_ends_with_its_episode(moment, tmp_path, monkeypatch):
    (tmp_path / "slow_agent.py").write_text(SLOW_AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    runner._processes.cache_clear()
    program = AgentProgram("slow_agent:run", processes=1)
    program.reset(0)
    is_early = moment == "before it is known"
    hosts = []

    class Noted(Host):
        def __init__(self, variables: Any) -> None:
            super().__init__(variables)
            hosts.append(self)
            if is_early:
                program.stop()

    monkeypatch.setattr(runner, "Host", Noted)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(program.run, "http://127.0.0.1:9/v1", lambda key: nullcontext(key))
        if not is_early:
            while program._host is None:
                time.sleep(0.01)
            program.stop()
        try:
            with pytest.raises(RuntimeError, match="was ended before|is gone"):
                ending.result(timeout=60)
        finally:
            hosts[0].end()


def rows_of(world: AgentProgram | FileTasks) -> list[set[str]]:
    return [{json.dumps(getattr(row, "row", row)) for row in part} for part in world._parts]


@pytest.mark.parametrize("kind", ["agent", "tasks"])
def test_equal_rows_are_on_one_side_and_files_that_overlap_are_told(kind, tmp_path, monkeypatch):
    agent = put_at_the_door(two_calls)
    rows = [{"question": f"q{i % 7}", "answer": str(i % 7)} for i in range(40)]
    file, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    other.write_text("\n".join(json.dumps({"question": f"q{i}", "answer": "1"}) for i in (5, 9)))
    if kind == "agent":
        other.write_text("\n".join(map(json.dumps, [rows[5], {"question": "q9", "answer": "1"}])))

    def made(**options: Any) -> AgentProgram | FileTasks:
        if kind == "agent":
            return AgentProgram(agent.removeprefix("agent:"), tasks=str(file), **options)
        return FileTasks(str(file), **options)

    for share in (0.1, 0.3, 0.5, 0.9):
        trained, held = rows_of(world := made(validation_share=share))
        assert not trained & held and len(trained | held) == 7
        assert len(held) == max(1, round(7 * share)) and "33 of 40 tasks repeat" in world.split_note
    assert "1 of 2 tasks of the evaluation" in made(validation=str(other)).split_note
    other.write_text(json.dumps({"question": "new", "answer": "1"}))
    name = agent if kind == "agent" else f"tasks:{file}"
    options = {"validation": str(other)} | ({"tasks": str(file)} if kind == "agent" else {})
    config = EnvironmentConfig(name, environment_options=json.dumps({name: options}))
    (note,) = task_notes(config)
    assert note.startswith(name) and "33 of 41 tasks repeat others" in note


@pytest.mark.parametrize(
    ("way", "is_told"), [("seed", 0), ("outcome", 0), ("counter", 1), ("concurrent", 0)]
)
def test_members_that_begin_differently_are_told_once(way, is_told):
    numbers = itertools.count()

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        number = next(numbers)
        texts = {"seed": task["seed"], "outcome": task["outcome_seed"], "counter": number}
        if way == "concurrent":
            order = [0, 1] if number % 2 else [1, 0]
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(lambda i: ask(client, f"part {i}"), order))
        else:
            said = ask(client, f"do {texts[way]}").choices[0].message.content
            ask(client, f"do {texts[way]}", said, "go on")
        ask(client, f"a new conversation {number}")
        return 1.0

    members = play(run, count=4)
    name = members[0].environment
    groups: list[TrajectoryGroup] = in_groups(members)
    config = Sections(environment=EnvironmentConfig(name))

    def again(episode: Trajectory, step: int) -> bool:
        return begins_again(config, RENDERER, episode, step)

    guard = RolloutGuard(config.environment, again)
    said = guard.check_starts(0, groups)
    assert len(said) == is_told and guard.check_starts(1, groups) == []
    for line in said:
        assert f"seed {members[0].seed}" in line and str(members[0].outcome_seed) in line
    assert all(sampled(member)[0] == "yes" for member in members)
