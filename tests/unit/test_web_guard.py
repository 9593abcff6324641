"""A server that strangers reach: half-sent requests, answers that nobody reads, more connections
than descriptors. Clients whose key it knows are answered all the while.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx2
import pytest

from ragen_mega.environments.adapters import web_guard
from ragen_mega.environments.adapters.web_guard import GuardedServer

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
KEY = {"authorization": "Bearer known"}


async def application(scope, receive, send):
    body = scope["path"].encode() * 50
    await send({
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-length", str(len(body)).encode())],
    })  # fmt: skip
    await send({"type": "http.response.body", "body": body})


@contextmanager
def served(app=application, **settings) -> Iterator[tuple[GuardedServer, tuple[str, int]]]:
    def is_known(scope) -> bool:
        return (b"authorization", b"Bearer known") in scope["headers"]

    server = GuardedServer(app, is_known, log_level="critical", lifespan="off", **settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield server, listener.getsockname()
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


def ends(connection: socket.socket) -> bool:
    """Whether the server closes the connection, within the patience of the test."""
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        HALF,
        HALF + b"Content-Length: 1000\r\n\r\n{",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + HALF,
        HALF + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
    ids=["nothing", "headers", "body", "a second request", "chunks"],
)
def test_a_request_that_does_not_become_whole_is_dropped(sent, monkeypatch):
    monkeypatch.setattr(web_guard, "_SECONDS_TO_ASK", 0.5)

    async def reads(scope, receive, send):
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.request":
            await application(scope, receive, send)

    with (
        served(reads, timeout_keep_alive=1000) as (_, place),
        socket.create_connection(place, timeout=60) as connection,
    ):
        connection.sendall(sent)
        for _ in range(3):  # signs of life do not prolong it
            time.sleep(0.05)
            with suppress(OSError):
                connection.sendall(b"a")
        assert ends(connection)


def test_a_request_that_comes_in_pieces_is_answered():
    with served() as (_, place), socket.create_connection(place, timeout=60) as connection:
        for _ in range(3):
            for byte in b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n":
                connection.sendall(bytes([byte]))
            received = b""
            while not received.endswith(b"/x" * 50):
                assert (part := connection.recv(1 << 16))
                received += part


def test_endless_headers_are_cut():
    with served() as (_, place), socket.create_connection(place, timeout=60) as connection:
        with suppress(ConnectionError):
            connection.sendall(HALF)
            for number in range(1 << 14):
                connection.sendall(b"X-%d: %s\r\n" % (number, b"a" * 1000))
            pytest.fail("16 MB of headers were taken")


def test_answers_that_nobody_reads_end_their_connection(monkeypatch):
    monkeypatch.setattr(web_guard, "_SECONDS_TO_READ", 1)
    with served() as (server, place), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(1.0)
        connection.connect(place)
        request = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 20_000)
        with suppress(OSError):  # 1 MB of an answer each
            for _ in range(100):
                connection.sendall(request)
        while server.server_state.connections:
            time.sleep(0.1)


def test_known_clients_are_answered_beside_strangers_that_take_all_room():
    """40 known clients at once, where there is room for eight, and 60 half-sent requests."""
    with served() as (server, place):
        server.most_connections = 8
        strangers = []
        for _ in range(60):
            connection = socket.socket()
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.connect(place)
            strangers.append(connection)
        for connection in strangers:
            with suppress(OSError):
                connection.send(HALF)

        def use(_: int) -> list[int]:
            with httpx2.Client(trust_env=False, headers=KEY, timeout=100) as client:
                url = f"http://{place[0]}:{place[1]}/"
                return [client.get(url).status_code for _ in range(3)]

        with ThreadPoolExecutor(40) as pool:
            assert all(codes == [200] * 3 for codes in pool.map(use, range(40)))
        assert len(server.server_state.connections) <= 8
        for connection in strangers:
            connection.close()


DOOR = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from ragen_mega.agents.server import Door
class ServedEpisode:
    roles = frozenset({"policy"})
door = Door("127.0.0.1:0")
with door.open(ServedEpisode()) as key:
    print(json.dumps([door.url, key]), flush=True)
    for _ in sys.stdin:
        files = [open(os.devnull) for _ in range(20)]
        print(len(files), flush=True)
        del files
"""


def test_a_rank_goes_on_while_a_stranger_holds_the_door():
    """300 half-sent requests against a limit of 128 descriptors: the rank opens files, an agent is
    answered, and nothing is written.
    """
    with subprocess.Popen(
        [sys.executable, "-c", DOOR],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NO_PROXY": "*"},
    ) as rank:
        url, key = json.loads(rank.stdout.readline())
        place = ("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0]))
        held = [socket.socket() for _ in range(300)]
        for connection in held:
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.connect(place)
        time.sleep(0.2)
        for connection in held:
            with suppress(OSError):
                connection.send(HALF)
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "20\n"
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx2.get(f"{url}/models", headers=headers, timeout=100, trust_env=False)
        assert answer.status_code == 200
        refused = httpx2.get(f"{url}/models", timeout=100, trust_env=False)
        assert refused.status_code == 401
        for connection in held:
            connection.close()
        _, said = rank.communicate()
    assert (rank.returncode, said) == (0, "")


def test_an_unknown_key_is_answered_before_its_body_is_read():
    from ragen_mega.agents.server import Door

    place = Door("127.0.0.1:0").url.removeprefix("http://").partition("/")[0].split(":")
    with socket.create_connection((place[0], int(place[1])), timeout=60) as connection:
        connection.sendall(HALF + b"Content-Length: 8000000\r\n\r\n{")
        assert b"401" in connection.recv(1 << 16)
