"""Requests to servers that a flag names, against servers that answer badly on purpose."""

import asyncio
import gzip
import json
import os
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor

import httpx2
import pytest

from ragen_mega.agents.runner import AgentProgram
from ragen_mega.config import parse
from ragen_mega.environments.adapters.mcp import McpTools
from ragen_mega.rollout.verifier import Verifier
from ragen_mega.system.addresses import bypass_proxy, check_addresses, is_local
from ragen_mega.system.web_client import MOST_BYTES, ask
from tests.support.web_server import Request, serving

BOMB = gzip.compress(bytes(32 << 20))


class Answerer(Request):
    """Answers as its path says."""

    authorizations: list[str | None] = []

    def answer(self) -> None:
        getattr(self, self.path.strip("/").partition("?")[0])()

    def score(self) -> None:
        self.authorizations.append(self.headers["authorization"])
        self.reply({"score": 1})

    def headers_of_mine(self) -> None:
        names = ("authorization", "accept-encoding")
        self.reply([self.headers[name] for name in names])

    def bomb(self) -> None:
        self.reply(BOMB, content_encoding="gzip")

    def twice(self) -> None:
        self.reply(gzip.compress(BOMB), content_encoding="gzip, gzip")

    def large(self) -> None:
        self.reply(bytes(2 * MOST_BYTES))

    def events(self) -> None:
        self.reply(bytes(2 * MOST_BYTES), content_type="text/event-stream")

    def elsewhere(self) -> None:
        self.reply(b"", 307, location=f"http://localhost:{self.server.server_port}/headers_of_mine")

    def deep(self) -> None:
        self.reply(b"[" * (1 << 19))

    def slow_body(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(100):
            self.wfile.write(b"1")
            time.sleep(0.05)

    def slow_headers(self) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100:
            self.wfile.write(bytes([byte]))
            time.sleep(0.05)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server beside a proxy that everything else would go to."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with serving(Answerer) as address:
        yield f"http://{address}"


def post(url: str, authorization: str = "", seconds: float = 60.0) -> httpx2.Response:
    return asyncio.run(ask("POST", url, authorization, seconds=seconds, body={"task": 1}))


def test_servers_of_this_machine_are_asked_without_a_proxy(url, monkeypatch):
    monkeypatch.setenv("MINE", "Bearer x")
    port = url.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "127.1", "LOCALHOST", "[::ffff:127.0.0.1]", "0.0.0.0"):
        answer = post(f"http://{host}:{port}/headers_of_mine", "MINE")
        assert answer.json() == ["Bearer x", "identity"], host
    assert is_local("http://a.localhost") and not is_local("http://192.0.2.1:80")
    with pytest.raises(httpx2.ConnectError):  # at the proxy, where nobody listens
        post("http://192.0.2.1/")


def test_libraries_get_to_know_it(monkeypatch):
    monkeypatch.setenv("no_proxy", "mine.example")
    bypass_proxy("http://192.0.2.1/")
    bypass_proxy("ws://127.0.0.1:8000")
    bypass_proxy("http://127.0.0.1:9000")
    assert os.environ["no_proxy"] == "mine.example,127.0.0.1"
    for everything in ("*", "mine.example, *"):  # urllib reads a star only if it stands alone
        monkeypatch.setenv("no_proxy", everything)
        bypass_proxy("http://127.0.0.1:9000")
        assert os.environ["no_proxy"] == everything


def judged(url: str) -> None:
    assert Verifier(url, timeout=60.0).scores([{"text": "x"}]) == ([1.0], "")


def played(url: str) -> None:
    assert AgentProgram(url).play({}, "http://127.0.0.1:1/v1", "key") == {"score": 1}


@pytest.mark.parametrize("use", [judged, played, McpTools])
def test_credentials_are_stripped_or_refused_and_never_repeated(url, use, monkeypatch, capfd):
    """An HTTP library quotes the whole value that it cannot send."""
    name = {judged: "JUDGE", played: "AGENT", McpTools: "MCP"}[use]
    name = f"RAGEN_{name}_AUTHORIZATION"
    for number, end in enumerate(("", "\n", "\r", "\r\n", " ", "\t\n")):
        monkeypatch.setenv(name, f"Bearer hidden{end}")
        Answerer.authorizations.clear()
        try:
            use(f"{url}/score?{number}")
        except ValueError as error:  # no server of MCP
            assert use is McpTools and "hidden" not in str(error)
        assert set(Answerer.authorizations) == {"Bearer hidden"}, end
    for inside in ("\u00e9", "\x01", "\x7f", "\r\nX: y", "\udcff", "\u2028x"):
        monkeypatch.setenv(name, f"Bearer hidden{inside}hidden")
        with pytest.raises(ValueError, match=f"{name} must hold one line") as caught:
            use(f"{url}/score?{ascii(inside)}")
        assert "hidden" not in "".join(traceback.format_exception(caught.value))
    assert "hidden" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("path", ["bomb", "twice", "large", "events"])
def test_an_answer_is_bounded_however_it_is_packed(url, path):
    with pytest.raises(httpx2.DecodingError, match="compressed|larger than 1,048,576 bytes"):
        post(f"{url}/{path}")


@pytest.mark.parametrize("path", ["slow_body", "slow_headers"])
def test_the_whole_answer_is_bounded_in_time(url, path):
    with pytest.raises(TimeoutError, match="no whole answer of .* within 1 s"):
        post(f"{url}/{path}", seconds=1.0)


def test_no_redirect_takes_task_and_key_elsewhere(url):
    assert post(f"{url}/elsewhere").status_code == 307


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("bomb", "is compressed"),
        ("large", "larger than"),
        ("deep", "must answer with JSON"),
        ("elsewhere", "answered 307"),
    ],
)
def test_an_agent_behind_a_url_fails_its_episode_alone(url, path, said):
    agent = AgentProgram(f"{url}/{path}")
    with pytest.raises((RuntimeError, httpx2.HTTPError), match=said):
        agent.play({}, "http://127.0.0.1:1/v1", "key")


def test_an_agent_behind_a_url_is_not_waited_for_once_its_episode_is_ended(url):
    agent = AgentProgram(f"{url}/slow_body")
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(agent.play, {}, "http://127.0.0.1:1/v1", "key")
        while agent._awaited is None:
            time.sleep(0.01)
        agent.stop()
        with pytest.raises(CancelledError):
            playing.result()


@pytest.mark.parametrize(
    "address",
    [
        "http://me:hidden@host/",
        "http://hidden@host:80/path",
        "https://host/mcp?api_key=hidden",
        "https://host/mcp/?a=1&tavilyApiKey=hidden",
        "http://host/x?token=hidden",
        "WSS://me:hidden@host/",
        "http://host/x?key=hidden",
        "http://host/?accessToken=hidden",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_repeated(address):
    world = json.dumps({"tasks:a.jsonl": {"mcp": [f"tool --at {address}"]}})
    for flags in (
        ["--agent", address],
        ["--reward", f"environment + 0.5*{address}"],
        ["--environments", f"openenv:{address}"],
        ["--environments", "tasks:a.jsonl", "--environment-options", world],
    ):
        with pytest.raises(ValueError, match="must hold no name, password or key") as caught:
            parse(flags)
        assert "hidden" not in str(caught.value)
        assert "RAGEN_JUDGE_AUTHORIZATION" in str(caught.value)
    with pytest.raises(ValueError, match="must hold no name"):
        post(address)


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8000/score?max_tokens=5&sort=key",
        "me@example.com and http://host/@path",
        "0.5*http://127.0.0.1:8000/score + environment",
        "agent:my_module:run",
    ],
)
def test_other_addresses_stay(text):
    check_addresses(text)


def test_names_of_parameters_tell_credentials():
    """Services document these: `code` and `x-functions-key` are Azure's."""
    secret = "code x-functions-key pass bearer my_key key api-key apikey accessKey subscription-key"
    secret += " user_pass db-password X-Amz-Signature sig id_token accessToken"
    harmless = "monkey seed keyboard bypass compass postcode unicode encoder bearers passes hockey"
    harmless += " tokens keys signal author split mode max_tokens"
    for name in secret.split():
        for address in (f"http://host/x?{name}=hidden", f"https://host/#a=1&{name}=hidden"):
            with pytest.raises(ValueError, match="must hold no name, password or key"):
                check_addresses(address)
    for name in harmless.split():
        check_addresses(f"http://host/x?{name}=key&a=1#{name}=code")
