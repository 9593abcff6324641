"""The JSON client against a real server on the loopback, which answers well, badly, in half, or not
at all.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ragen_mega.engines.sglang.http_json import ConnectionLost, JSONClient, RequestRefused


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer key":
            return self.reply(401, b'"no"')
        if self.path == "/half":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"tokens": [1')
            self.close_connection = True
            return None
        if self.path == "/text":
            return self.reply(200, b"not JSON")
        if self.path == "/empty":
            return self.reply(200, b"")
        if self.path == "/slow":
            time.sleep(json.loads(body)["seconds"])
        return self.reply(400 if self.path == "/refused" else 200, body)

    do_GET = do_POST

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def client() -> Iterator[JSONClient]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *arguments: None  # clients that left
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield JSONClient(server.server_port, "key")
    server.shutdown()
    server.server_close()


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
    with pytest.raises(RequestRefused, match="/refused: HTTP status 400: .*why"):
        ask(client, way, "/refused", {"why": 1})
    with pytest.raises(RequestRefused, match="401"):
        ask(JSONClient(client.port, "wrong"), way, "/echo", {})
    with pytest.raises(ConnectionLost, match="/half"):
        ask(client, way, "/half", {})
    with pytest.raises(ConnectionLost, match="/echo"):
        ask(JSONClient(9, "key"), way, "/echo", {})


def test_silence_has_a_limit(client: JSONClient) -> None:
    with pytest.raises(ConnectionLost, match="TimeoutError"):
        client.call("POST", "/slow", {"seconds": 2}, timeout=0.2)


def test_requests_do_not_wait_for_each_other(client: JSONClient) -> None:
    async def race() -> list[float]:
        order: list[float] = []

        async def one(seconds: float) -> None:
            order.append((await client.post("/slow", {"seconds": seconds}))["seconds"])

        await asyncio.gather(*(one(seconds) for seconds in (1.0, 0.5, 0.0)))
        return order

    assert asyncio.run(race()) == [0.0, 0.5, 1.0]


def test_the_key_is_not_printed() -> None:
    assert "secret" not in repr(JSONClient(1, "secret"))
