"""Environments on real OpenEnv servers on loopback; servers that hang, go away and come back."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import pytest

from ragen_mega.environments import calls
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.registry import make

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
        for word, trouble in (("hang", TimeoutError), ("fail", RuntimeError)):
            calls.reset(world, 5)
            before = Shop.num_steps
            with pytest.raises(trouble):
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


def test_a_server_that_redirects_leads_to_no_other_one() -> None:
    """It could be one that only this machine reaches."""

    class Redirecting(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            action = {"properties": {"message": {"type": "string"}}}
            body = json.dumps({"action": action}).encode()
            self.send_response(302 if self.path == "/ws" else 200)
            self.send_header("Location", f"ws://127.0.0.1:{inner.getsockname()[1]}/ws")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    with (
        socket.create_server(("127.0.0.1", 0)) as inner,
        ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"openenv:ws://127.0.0.1:{server.server_port}"
        world = make(url, timeout=2.0, attempts=1)
        with pytest.raises(ConnectionError, match="302"):
            calls.reset(world, 1)
        server.shutdown()
        inner.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has come
            inner.accept()
