"""Limits of a server of environments: on the pages that may use it, on sizes, on silence."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MOST_BYTES = 1 << 20
"""Size of a request or message."""
_SECONDS_TO_ASK = 30.0
"""Time from a connection to its first whole request."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class ImpatientProtocol(AutoHTTPProtocol):
    """HTTP that closes a connection on which no whole request has come for a while."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._patience = self.loop.call_later(_SECONDS_TO_ASK, self._close_unasked, transport)

    def _close_unasked(self, transport: asyncio.Transport) -> None:
        if self.cycle is None and transport.get_protocol() is self:  # no request, no WebSocket
            transport.close()


def guard(application: Application, idle_seconds: float) -> Application:
    """`application` for programs and for its own pages alone: a page of another origin, which a
    browser on this machine may have open, is refused; so are large requests. A WebSocket on which
    nothing comes for `idle_seconds` is closed, so that its place is free for others.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await application(scope, receive, send)
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        is_web_socket = scope["type"] == "websocket"
        if not _is_own_page(headers):
            if is_web_socket:
                await receive()
                return await send({"type": "websocket.close", "code": 1008})
            return await _refuse(send, 403, b"pages of another origin are refused")
        if not headers.get("content-length", "0").isdecimal() or (
            int(headers.get("content-length", "0")) > MOST_BYTES
        ):
            return await _refuse(send, 413, b"the request is too large")
        num_bytes = 0

        async def limited() -> MutableMapping[str, Any]:
            nonlocal num_bytes
            if is_web_socket:
                try:
                    return await asyncio.wait_for(receive(), idle_seconds)
                except TimeoutError:
                    return {"type": "websocket.disconnect", "code": 1001}
            message = await receive()
            num_bytes += len(message.get("body", b""))
            return message if num_bytes <= MOST_BYTES else {"type": "http.disconnect"}

        await application(scope, limited, send)

    return guarded


def _is_own_page(headers: dict[str, str]) -> bool:
    """Return whether a request comes from a program, which names no origin, or from a page of this
    server.
    """
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


async def _refuse(send: Send, status: int, reason: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": reason})
