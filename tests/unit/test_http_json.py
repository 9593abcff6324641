"""The JSON client against a real server on the loopback, which answers well, badly, in half, or not
at all, and ends connections that could be used again.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from ragen_mega.engines.sglang.http_json import ConnectionLost, JSONClient, RequestRefused
from tests.support.web_server import Request, serving

GO = threading.Event()


class Answerer(Request):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        if self.headers["Authorization"] != "Bearer key":
            return self.reply("no", 401)
        if self.path == "/half":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"tokens": [1')
            self.close_connection = True
            return None
        if self.path == "/text":
            return self.reply(b"not JSON")
        if self.path == "/empty":
            return self.reply(b"")
        if self.path == "/slow":
            time.sleep(json.loads(self.body)["seconds"])
        if self.path == "/go":
            GO.set()
        if self.path == "/wait" and not GO.wait(60):
            return self.reply(b"the last request did not come", 500)
        if self.path == "/connection":
            return self.reply({"port": self.client_address[1]})
        if self.path == "/once":  # a connection that has answered is ended at its second request
            if getattr(self, "has_answered", False):
                self.close_connection = True
                return None
            self.has_answered = True
        self.reply(self.body, 400 if self.path == "/refused" else 200)
        # Without a word of it in the answer.
        self.close_connection = self.close_connection or self.path == "/bye"
        return None


@pytest.fixture(scope="module")
def client() -> Iterator[JSONClient]:
    with serving(Answerer) as address:
        yield JSONClient(address, "Bearer key")


def ask(client: JSONClient, way: str, path: str, body: dict[str, Any]) -> Any:
    if way == "post":
        return asyncio.run(client.post(path, body))
    return client.call("POST", path, body, timeout=5)


@pytest.mark.parametrize("way", ["post", "call"])
def test_answers(client: JSONClient, way: str) -> None:
    body = {"tokens": list(range(100_000)), "text": "a \u00e9"}
    assert ask(client, way, "/echo", body) == body
    assert ask(client, way, "/text", {}) == "not JSON"
    assert ask(client, way, "/empty", {}) is None


@pytest.mark.parametrize("way", ["post", "call"])
def test_failures_are_told_apart(client: JSONClient, way: str) -> None:
    with pytest.raises(RequestRefused, match="/refused: .*400: .*why"):
        ask(client, way, "/refused", {"why": 1})
    with pytest.raises(RequestRefused, match="401"):
        ask(JSONClient(client.address, "Bearer wrong"), way, "/echo", {})
    with pytest.raises(ConnectionLost, match="/half"):
        ask(client, way, "/half", {})
    with pytest.raises(ConnectionLost, match="/echo"):
        ask(JSONClient("127.0.0.1:9", "Bearer key"), way, "/echo", {})


def test_silence_has_a_limit(client: JSONClient) -> None:
    with pytest.raises(ConnectionLost, match="/slow: ReadTimeout"):
        client.call("POST", "/slow", {"seconds": 2}, timeout=0.2)


def test_requests_do_not_wait_for_each_other(client: JSONClient) -> None:
    """More than clients usually open connections for, answered when the last one has come."""

    async def gather() -> list[Any]:
        waiting = (client.post("/wait", {"i": i}) for i in range(150))
        return await asyncio.gather(*waiting, client.post("/go", {}))

    assert asyncio.run(gather()) == [*({"i": i} for i in range(150)), {}]


def test_connections_are_used_again(client: JSONClient) -> None:
    async def ask_thrice() -> list[int]:
        return [(await client.post("/connection", {}))["port"] for _ in range(3)]

    ports = {*asyncio.run(ask_thrice())}
    assert len(ports) == 1
    for _ in range(2):
        ports.add(client.call("POST", "/connection", {}, timeout=5)["port"])
    assert len(ports) == 2
    assert not ports & {*asyncio.run(ask_thrice())}  # a loop leaves no connection to the next


@pytest.mark.filterwarnings("error")
def test_a_loop_closes_its_connections(client: JSONClient) -> None:
    async def ask_twice() -> None:
        await asyncio.gather(*(client.post("/slow", {"seconds": 0.1}) for _ in range(2)))

    def num_connections() -> int:
        connections = psutil.Process().net_connections("tcp")
        return sum(bool(c.raddr) and c.raddr.port == client.port for c in connections)

    before = num_connections()
    gc.disable()  # which would close them as well
    try:
        asyncio.run(ask_twice())
        assert num_connections() == before
    finally:
        gc.enable()


def test_a_connection_that_the_server_has_ended_is_no_loss(client: JSONClient) -> None:
    """What is idle is looked at before it is used again."""

    async def ask_thrice() -> list[Any]:
        answers = []
        for i in range(3):
            answers.append(await client.post("/bye", {"i": i}))
            await asyncio.sleep(0.1)  # for the server to end the connection
        return answers

    assert asyncio.run(ask_thrice()) == [{"i": i} for i in range(3)]
    for i in range(3):
        assert client.call("POST", "/bye", {"i": i}, timeout=5) == {"i": i}
        time.sleep(0.1)


def test_what_the_server_may_have_begun_is_not_asked_twice(client: JSONClient) -> None:
    async def ask_twice() -> None:
        assert await client.post("/once", {"i": 0}) == {"i": 0}
        with pytest.raises(ConnectionLost, match="/once"):
            await client.post("/once", {"i": 1})

    asyncio.run(ask_twice())
    assert client.call("POST", "/once", {"i": 0}, timeout=5) == {"i": 0}
    with pytest.raises(ConnectionLost, match="/once"):
        client.call("POST", "/once", {"i": 1}, timeout=5)


def test_a_cancelled_request_leaves_the_others_alone(client: JSONClient) -> None:
    async def cancel_one() -> Any:
        kept = asyncio.create_task(client.post("/slow", {"seconds": 0.5}))
        cancelled = asyncio.create_task(client.post("/slow", {"seconds": 60.0}))
        await asyncio.sleep(0.2)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        return await kept, await client.post("/echo", {"i": 1})

    assert asyncio.run(cancel_one()) == ({"seconds": 0.5}, {"i": 1})


@pytest.mark.parametrize("way", ["post", "call"])
def test_proxies_are_not_asked(
    client: JSONClient, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    fresh = JSONClient(client.address, "Bearer key")
    assert ask(fresh, way, "/echo", {"i": 1}) == {"i": 1}


def test_the_key_is_not_printed() -> None:
    assert "secret" not in repr(JSONClient("127.0.0.1:1", "Bearer secret"))
