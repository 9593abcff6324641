"""JSON over HTTP to a server on this machine: a coroutine for many requests at once, and a call
that blocks.

Standard library only, one connection per request: on the loopback it costs less than a token.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any

from ragen_mega.rollout.engine import EngineError

HOST = "127.0.0.1"


class ConnectionLost(EngineError):
    """No complete answer came: the server is gone, or not there yet."""


class RequestRefused(EngineError):
    """The server answered and said no."""


@dataclass(frozen=True, slots=True)
class JSONClient:
    """Requests to one port of this machine under one key."""

    port: int
    api_key: str = field(repr=False)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The decoded answer. Raises ConnectionLost without one and RequestRefused for a status of
        400 or more.
        """
        content = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", f"Host: {HOST}:{self.port}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self._headers().items()]
        lines += [f"Content-Length: {len(content)}", "", ""]
        try:
            reader, writer = await asyncio.open_connection(HOST, self.port)
            try:
                writer.write("\r\n".join(lines).encode() + content)
                await writer.drain()
                answer = await reader.read()
            finally:
                writer.close()
        except OSError as error:
            raise ConnectionLost(f"{path}: {error}") from error
        return _parse(path, answer)

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float
    ) -> Any:
        """As `post`, blocking, for at most `timeout` seconds of silence."""
        connection = HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), self._headers()
            )
            response = connection.getresponse()
            content = response.read()
        except (OSError, HTTPException) as error:
            raise ConnectionLost(f"{path}: {type(error).__name__} {error}") from error
        finally:
            connection.close()
        return _decode(path, response.status, content)

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"}


def _parse(path: str, answer: bytes) -> Any:
    head, separator, content = answer.partition(b"\r\n\r\n")
    status, _, headers = head.partition(b"\r\n")
    lengths = [
        line.split(b":")[1]
        for line in headers.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    ]
    if not separator or len(lengths) != 1 or int(lengths[0]) != len(content):
        raise ConnectionLost(f"{path}: the answer broke off after {len(answer)} bytes")
    return _decode(path, int(status.split()[1]), content)


def _decode(path: str, status: int, content: bytes) -> Any:
    if status >= 400:
        raise RequestRefused(
            f"{path}: HTTP status {status}: {content[:500].decode(errors='replace')}"
        )
    try:
        return json.loads(content) if content else None
    except ValueError:  # some answers are plain text
        return content.decode(errors="replace")
