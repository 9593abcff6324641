"""Environments on real OpenEnv servers on loopback, ours and foreign ones; servers that hang, go
away and come back.
"""

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import httpx2
import psutil
import pytest

from ragen_mega.environments import calls
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.protocol import Message
from ragen_mega.environments.registry import make
from ragen_mega.ranks.launcher import PROGRAM

pytest.importorskip("openenv.core", reason="needs the extra openenv")
import uvicorn  # noqa: E402
from openenv.core.env_server.http_server import create_fastapi_app  # noqa: E402
from openenv.core.env_server.interfaces import Environment  # noqa: E402
from openenv.core.env_server.types import (  # noqa: E402
    Action,
    ConcurrencyConfig,
    Observation,
    State,
)

from ragen_mega.environments.adapters.openenv import OpenEnvWorld  # noqa: E402
from ragen_mega.environments.adapters.openenv_server import application  # noqa: E402

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[int]:
    """The application on a port of loopback while the context lasts."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


# Foreign servers


class Say(Action):
    message: str


class Buy(Action):
    item: str
    count: int


class Item(Enum):
    TEA = "tea"
    RICE = "rice"


class Take(Action):
    message: Item


class Take99(Action):
    message: Literal[tuple(map(str, range(99)))]


class Told(Observation):
    echoed: str = ""
    left: int = 0


class Shop(Environment):
    """Counts down from the seed; `hang` never answers in time, `fail` raises."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    num_steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Told:
        self.left = seed or 0
        return Told(echoed="ready", left=self.left)

    def step(self, action: Any, timeout_s: float | None = None) -> Told:
        Shop.num_steps += 1
        word = getattr(action, "message", None) or f"{action.count} {action.item}"
        if word == "hang":
            time.sleep(2)
        if word == "fail":
            raise KeyError("lost")
        self.left -= 1
        return Told(echoed=word, left=self.left, reward=0.5, done=self.left <= 0)

    @property
    def state(self) -> State:
        return State()


def shop(action: type[Action], sessions: int = 8) -> Any:
    limits = ConcurrencyConfig(max_concurrent_envs=sessions)
    return create_fastapi_app(Shop, action, Told, concurrency_config=limits)


def test_a_foreign_server_of_text_takes_free_text() -> None:
    with serving(shop(Say)) as port:
        world = make(f"openenv:ws://127.0.0.1:{port}")
        assert not hasattr(world, "actions") and not hasattr(world, "tools")
        assert calls.reset(world, 2) == "echoed: ready\nleft: 2"
        first, last = calls.step(world, "hello"), calls.step(world, "bye")
        assert (first.observation, first.reward, first.terminated) == (
            "echoed: hello\nleft: 1",
            0.5,
            False,
        )
        assert last.terminated and not last.truncated
        calls.close(world)


@pytest.mark.parametrize(
    ("action", "names"), [(Take, ("tea", "rice")), (Take99, tuple(map(str, range(99))))]
)
def test_an_enumeration_names_the_actions(action: type[Action], names: tuple[str, ...]) -> None:
    with serving(shop(action)) as port:
        world = make(f"openenv:ws://127.0.0.1:{port}")
        assert world.actions == names and not hasattr(world, "tools")
        calls.reset(world, 9)
        assert calls.step(world, names[1]).info == {}, "the server takes it"
        calls.close(world)


def test_actions_of_several_fields_are_tool_calls() -> None:
    with serving(shop(Buy)) as port:
        world = make(f"openenv:http://127.0.0.1:{port}")
        (tool,) = world.tools
        assert set(tool["function"]["parameters"]["properties"]) == {"item", "count"}
        episode = Episode(world, EpisodeConfig(think=False))
        episode.start(3)
        bought = episode.respond(
            '<tool_call>{"name": "act", "arguments": {"item": "tea", "count": 2}}</tool_call>'
        )
        assert "echoed: 2 tea" in bought.messages[0].content and bought.info["is_action_valid"]
        wrong = episode.respond('<tool_call>{"name": "act", "arguments": {"price": 2}}</tool_call>')
        assert not wrong.info["is_action_valid"] and not wrong.terminated
        calls.close(world)


def test_steps_are_not_repeated_and_a_late_answer_is_nobodys() -> None:
    with serving(shop(Say)) as port:
        world = make(f"openenv:ws://127.0.0.1:{port}", timeout=1.0)
        for word in ("hang", "fail"):
            calls.reset(world, 5)
            before = Shop.num_steps
            with pytest.raises((TimeoutError, RuntimeError)):
                calls.step(world, word)
            assert Shop.num_steps == before + 1
            with pytest.raises(RuntimeError, match="reset"):
                calls.step(world, "again")
            assert calls.reset(world, 9) == "echoed: ready\nleft: 9"
            assert calls.step(world, "next").observation == "echoed: next\nleft: 8"
        calls.close(world)


def test_a_server_that_comes_back_is_found_again() -> None:
    with serving(shop(Say)) as port:
        world = make(f"openenv:ws://127.0.0.1:{port}", timeout=2.0)
        calls.reset(world, 5)
    with pytest.raises(Exception, match=".+"):
        calls.step(world, "anybody?")
    name = f"openenv:ws://127.0.0.1:{port}"
    world = make(name, timeout=2.0, attempts=3)  # as the pool does
    with pytest.raises(ConnectionError, match="in 3 attempts"):
        calls.reset(world, 5)
    with serving(shop(Say), port):
        assert calls.reset(world, 4) == "echoed: ready\nleft: 4"
        calls.close(world)


def test_sessions_are_given_back() -> None:
    with serving(shop(Say, sessions=2)) as port:
        name = f"openenv:ws://127.0.0.1:{port}"
        worlds = [make(name, attempts=2) for _ in range(3)]
        for world in worlds[:2]:
            calls.reset(world, 1)
        with pytest.raises(ConnectionError, match="room for another session"):
            calls.reset(worlds[2], 1)
        calls.close(worlds[0])
        calls.reset(worlds[2], 1)
        for _ in range(10):
            world = make(name)
            calls.close(worlds.pop())
            calls.reset(world, 1)
            worlds.append(world)
        for world in worlds:
            calls.close(world)


# Ours as a server


class Talk:
    """Messages, tools, limits, and an info that says more than may leave the machine."""

    tools = [{"type": "function", "function": {"name": "look"}}]
    instruction = "Look."
    max_turns = 7
    format_penalty = -0.5

    def reset(self, seed):
        return [("system", "You have tools."), ("user", f"{seed}?")]

    def step(self, call):
        info = {"success": True, "is_action_effective": True, "array": object()}
        return [("tool", call["name"])], 2.0, False, call["name"] == "stop", info


class Words:
    """A parser that finds several steps in a text."""

    def reset(self, seed):
        self.said = []
        return "Speak."

    def parse(self, text):
        if "?" in text:
            raise ValueError("no questions")
        return text.split()

    def step(self, word):
        self.said.append(word)
        return " ".join(self.said), 1.0, word == "end", False, {}


class Turns(Words):
    """Every word says what its step gives; an answer has three steps at most."""

    max_actions_per_turn = 3

    def reset(self, seed):
        return [("user", "Speak.")]

    def parse(self, text):
        return text.split()

    def step(self, word):
        info = {"is_action_valid": word != "bad", "is_action_effective": word == "on"}
        reward = {"cost": -2.0, "end": 0.5}.get(word, 0.0)
        return [("tool", word)], reward, word in ("end", "both"), word in ("both", "stop"), info


@pytest.mark.parametrize(
    ("name", "options"), [("sokoban", {"dim": 7}), ("frozen_lake", {}), ("bandit", {})]
)
def test_ours_play_the_same_over_a_server(name: str, options: dict[str, Any]) -> None:
    with serving(application(name, options, 8)) as port:
        far, near = make(f"openenv:ws://127.0.0.1:{port}"), make(name, **options)
        assert far.actions == tuple(near.actions)
        assert far.instruction == near.instruction
        for seed in range(6):
            assert calls.reset(far, seed, outcome_seed=seed + 1) == calls.reset(
                near, seed, outcome_seed=seed + 1
            )
            for turn in range(12):
                action = near.actions[(seed * 5 + turn * 3) % len(near.actions)]
                result = calls.step(near, action)
                assert calls.step(far, action) == result
                if result.terminated:
                    break
        calls.close(far)


class Dungeon(Words):
    instruction = "Escape from this environment"


def test_an_instruction_may_end_in_any_word() -> None:
    with serving(application(f"{__name__}:Dungeon", {}, 2)) as port:
        assert make(f"openenv:ws://127.0.0.1:{port}").instruction == Dungeon.instruction
    for app in (application(f"{__name__}:Words", {}, 2), shop(Say)):
        with serving(app) as port:
            assert not hasattr(make(f"openenv:ws://127.0.0.1:{port}"), "instruction")


class Door:
    """What can be done changes with the state."""

    actions = ("open",)

    def reset(self, seed):
        self.actions = ("open",)
        return "A door."

    def step(self, action):
        self.actions = ("go", "back")
        return f"After {action}.", 0.0, action == "back", False, {}


def test_actions_that_change_are_told_with_every_state() -> None:
    with serving(application(f"{__name__}:Door", {}, 2)) as port:
        far, near = make(f"openenv:ws://127.0.0.1:{port}"), Door()
        for _ in range(2):
            assert calls.reset(far, 0) == calls.reset(near, 0) and far.actions == near.actions
            for action in ("open", "go", "back"):
                told = calls.step(far, action).observation
                assert told == calls.step(near, action).observation and far.actions == near.actions
        calls.close(far)


def test_messages_tools_limits_and_truncation_pass() -> None:
    with serving(application(f"{__name__}:Talk", {}, 2)) as port:
        world = make(f"openenv:ws://127.0.0.1:{port}")
        assert (world.tools, world.instruction) == (Talk.tools, Talk.instruction)
        assert (world.max_turns, world.format_penalty) == (7, -0.5)
        assert calls.reset(world, 3) == (
            Message("system", "You have tools."),
            Message("user", "3?"),
        )
        look = calls.step(world, {"name": "look", "arguments": {}})
        assert look.observation == (Message("tool", "look"),) and look.reward == 2.0
        assert look.info == {"success": True, "is_action_effective": True}
        stop = calls.step(world, {"name": "stop", "arguments": {}})
        assert stop.truncated and not stop.terminated
        with pytest.raises(RuntimeError, match="no episode runs"):
            calls.step(world, {"name": "look", "arguments": {}})
        calls.close(world)


def test_a_served_parser_reads_the_text() -> None:
    with serving(application(f"{__name__}:Words", {}, 2)) as port:
        world = make(f"openenv:ws://127.0.0.1:{port}")
        calls.reset(world, 0)
        both = calls.step(world, "one two")
        assert (both.observation, both.reward) == ("one two", 2.0)
        assert calls.step(world, "what?").info["is_action_valid"] is False
        assert calls.step(world, "end of it").observation == "one two end"
        calls.close(world)


def test_the_steps_of_an_answer_count_together_as_they_do_here() -> None:
    with serving(application(f"{__name__}:Turns", {}, 2)) as port:
        config = EpisodeConfig(think=False, max_turns=9)
        far = Episode(make(f"openenv:ws://127.0.0.1:{port}"), config)
        near = Episode(Turns(), config)
        for text in ("a b", "bad a", "on a", "a b c d", "cost end", "both", "a stop b", "end a"):
            far.start(0), near.start(0)
            there, here = far.respond(f"<answer>{text}</answer>"), near.respond(text)
            same = ("success", "is_format_valid", "is_action_valid", "is_action_effective")
            for name in ("reward", "messages", "terminated", "truncated"):
                assert getattr(there, name) == getattr(here, name), (text, name)
            assert [there.info[name] for name in same] == [here.info[name] for name in same], text
        calls.reset(far.environment, 0)
        nothing = calls.step(far.environment, "")
        assert nothing.info == {"is_action_valid": False} and not nothing.terminated
        calls.close(far.environment)


@pytest.mark.parametrize("member", ["actions", "tools"])
def test_a_served_parser_goes_first(member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"actions": ("one", "two"), "tools": Talk.tools}[member]
    monkeypatch.setattr(Words, member, value, raising=False)
    with serving(application(f"{__name__}:Words", {}, 2)) as port:
        world = make(f"openenv:ws://127.0.0.1:{port}")
        assert not hasattr(world, "actions") and not hasattr(world, "tools")
        calls.reset(world, 0)
        assert calls.step(world, "three four").observation == "three four"
        calls.close(world)


def test_many_sessions_keep_apart() -> None:
    with serving(application("sokoban", {}, 64)) as port:
        name = f"openenv:ws://127.0.0.1:{port}"

        def play(seed: int) -> list[Any]:
            world, near = make(name), make("sokoban")
            seen = [calls.reset(world, seed) == calls.reset(near, seed)]
            for action in near.actions * 2:
                result = calls.step(near, action)
                seen.append(calls.step(world, action) == result)
                if result.terminated:
                    break
            calls.close(world)
            return seen

        with ThreadPoolExecutor(16) as pool:
            assert all(all(seen) for seen in pool.map(play, range(48)))


@contextmanager
def served_by_the_tool(
    environment: str, folder: Path, *others: str, port: int = 0
) -> Iterator[tuple[str, Any]]:
    """Name of the environment, and the process of ragen-mega serve-environment."""
    command = [sys.executable, "-P", "-m", PROGRAM, "serve-environment"]
    flags = ["--environment", environment, "--port", str(port), "--max-sessions", "300", *others]
    log = folder / f"{len(list(folder.glob('*.log')))}.log"
    with log.open("w") as output, subprocess.Popen([*command, *flags], stderr=output) as server:
        try:
            while "running on" not in log.read_text() and server.poll() is None:
                time.sleep(0.1)
            address = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())[0]
            yield f"openenv:{address}", psutil.Process(server.pid)
        finally:
            server.terminate()


def open_sessions(processes: Iterable[psutil.Process]) -> int:
    """WebSocket connections of clients, as the servers see them."""
    num_open = 0
    for process in processes:
        connections = process.net_connections("tcp")  # reads the sockets of the whole machine
        ports = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
        num_open += sum(
            one.status == psutil.CONN_ESTABLISHED and one.laddr.port in ports for one in connections
        )
    return num_open


def play_at_once(names: list[str], num_sessions: int, servers: list[psutil.Process]) -> None:
    """All sessions are open together; every one plays its own episode, and all are closed."""
    worlds = [make(names[place % len(names)]) for place in range(num_sessions)]
    near = make("sokoban")
    with ThreadPoolExecutor(num_sessions) as pool:
        seen = list(pool.map(lambda item: calls.reset(item[1], item[0]), enumerate(worlds)))
        assert seen == [near.reset(seed) for seed in range(num_sessions)]
        assert open_sessions(servers) == num_sessions
        results = list(pool.map(lambda world: calls.step(world, "up"), worlds))
        for seed, result in enumerate(results):
            near.reset(seed)
            assert result == calls.step(near, "up")
        list(pool.map(calls.close, worlds))
    while open_sessions(servers):  # a server notices a moment later
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("num_servers", "num_sessions"),
    [(1, 40), pytest.param(4, 1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_sessions_leave_nothing_behind(tmp_path: Path, num_servers: int, num_sessions: int) -> None:
    """Neither files nor threads, here or on the servers; nor memory from one round to the next."""
    with ExitStack() as stack:
        served = [
            stack.enter_context(served_by_the_tool("sokoban", tmp_path)) for _ in range(num_servers)
        ]
        names, servers = [name for name, _ in served], [process for _, process in served]
        everybody = [psutil.Process(), *servers]
        play_at_once(names, num_sessions, servers)  # the event loop, caches, pools of the servers
        before = [(one.num_fds(), one.num_threads()) for one in everybody]
        memory = [one.memory_info().rss for one in everybody]
        for _ in range(2):
            play_at_once(names, num_sessions, servers)
        assert [(one.num_fds(), one.num_threads()) for one in everybody] == before
        grown = [one.memory_info().rss - old for one, old in zip(everybody, memory)]
        assert max(grown) < 2 * num_sessions * 20_000 + 20e6, "less than 20 kB a session"


def test_the_tool_serves_on_loopback(tmp_path: Path) -> None:
    with served_by_the_tool("bandit", tmp_path) as (name, _):
        assert name.startswith("openenv:http://127.0.0.1:")
        world = make(name)
        assert "Phoenix" in calls.reset(world, 0)
        calls.close(world)


def test_a_server_is_for_programs_and_bounds_what_strangers_send(tmp_path: Path) -> None:
    """Pages of another origin, large requests, and connections that say nothing."""
    flags = ("--idle-timeout", "1")
    with served_by_the_tool("bandit", tmp_path, *flags) as (name, _):
        address = name.removeprefix("openenv:")
        place = ("127.0.0.1", int(address.rpartition(":")[2]))
        foreign = {"Origin": "http://evil.example"}
        assert httpx2.get(f"{address}/schema", headers=foreign).status_code == 403
        assert httpx2.get(f"{address}/schema", headers={"Origin": address}).status_code == 200
        large = httpx2.post(f"{address}/reset", content=b"x" * (2 << 20))
        assert large.status_code == 413 and len(large.content) < 100
        upgrade = "\r\n".join((
            "GET /ws HTTP/1.1", "Host: x", "Connection: Upgrade", "Upgrade: websocket",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13",
        ))  # fmt: skip
        with socket.create_connection(place, timeout=30) as page:
            page.sendall(f"{upgrade}\r\nOrigin: http://evil.example\r\n\r\n".encode())
            assert b"403" in page.recv(1 << 16)
        with socket.create_connection(place, timeout=30) as silent:
            silent.sendall(f"{upgrade}\r\n\r\n".encode())
            received = b""
            while part := silent.recv(1 << 16):  # until the server hangs up
                received += part
            assert b"101" in received


def test_a_server_sets_no_attribute_but_limits() -> None:
    schema = {"limits": {"max_turns": 3, "format_penalty": -1.0, "step": 1, "_client": "x"}}
    world = object.__new__(OpenEnvWorld)
    world._read_actions(schema | {"properties": {}})
    assert (world.max_turns, world.format_penalty) == (3, -1.0)
    assert callable(world.step) and "_client" not in vars(world)
