"""JSON over HTTP to a server: a coroutine for many requests at once, and a blocking call, over
connections that are reused.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import httpx2

from ragen_mega.rollout.engine import EngineError

HOST = "127.0.0.1"
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
"""Any number of requests at once. An idle connection ends here before SGLang ends it, after 5 s."""
_Client = TypeVar("_Client", httpx2.Client, httpx2.AsyncClient)


class ConnectionLost(EngineError):
    """No complete answer came: the server is gone, or not there yet."""


class RequestRefused(EngineError):
    """The server answered and said no."""


class JSONClient:
    """Requests to one address with one key, never through a proxy."""

    def __init__(self, address: str, authorization: str) -> None:
        """`address` is HOST:PORT, `authorization` the value of that header; empty for none."""
        self.address = address
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self._authorization = authorization
        self._blocking = self._open(httpx2.Client)
        self._loop: asyncio.AbstractEventLoop | None = None  # of the connections of `post`

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the decoded answer, however long it takes. Raises ConnectionLost if there is none
        and RequestRefused for a status of 400 or more. A request that the server may have begun is
        not sent twice.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._requests = loop, self._open(httpx2.AsyncClient)
            self._end_of_loop = _close_with_loop(self._requests)
            await anext(self._end_of_loop)
        try:
            answer = await self._requests.post(path, json=body)
        except httpx2.TransportError as error:
            raise ConnectionLost(f"{path}: {type(error).__name__} {error}") from error
        return _decode(path, answer)

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float = 600.0
    ) -> Any:
        """Call the server like `post`, but block, for at most `timeout` seconds of silence."""
        try:
            answer = self._blocking.request(method, path, json=body, timeout=timeout)
        except httpx2.TransportError as error:
            raise ConnectionLost(f"{path}: {type(error).__name__} {error}") from error
        return _decode(path, answer)

    def _open(self, kind: type[_Client]) -> _Client:
        return kind(
            base_url=f"http://{self.address}",
            headers={"Authorization": self._authorization} if self._authorization else {},
            limits=_LIMITS,
            timeout=None,
            trust_env=False,  # no proxies
            verify=False,  # plain HTTP: reading certificates would take a tenth of a second
        )


async def _close_with_loop(client: httpx2.AsyncClient) -> AsyncIterator[None]:
    """Close the connections at the end of the event loop, which closes such generators."""
    try:
        yield
    finally:
        await client.aclose()


def _decode(path: str, answer: httpx2.Response) -> Any:
    if answer.status_code >= 400:
        raise RequestRefused(f"{path}: HTTP status {answer.status_code}: {answer.text[:500]}")
    try:
        return answer.json() if answer.content else None
    except ValueError:  # some answers are plain text
        return answer.text
