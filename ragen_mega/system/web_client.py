"""The client of all servers that a flag names: agents, judges, tools, environments.

It asks servers of this machine without a proxy and others with their certificates checked, follows
no redirect, and bounds the time and the bytes of an answer. It asks for no compression and refuses
an answer that is compressed, since a megabyte may hold gigabytes.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from ragen_mega.system.addresses import check_addresses, credentials, is_local

MOST_BYTES = 1 << 20
"""Size of an answer, unless said otherwise."""


class _Bounded(httpx2.AsyncByteStream):
    """The body of an answer, up to a number of bytes."""

    def __init__(self, answer: httpx2.Response, most_bytes: int) -> None:
        assert isinstance(answer.stream, httpx2.AsyncByteStream)  # of an asynchronous client
        self._stream, self._most, self._request = answer.stream, most_bytes, answer.request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._stream:
            num_bytes += len(part)
            if num_bytes > self._most:
                why = f"the answer is larger than {self._most:,} bytes"
                raise httpx2.DecodingError(why, request=self._request)
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def open_client(
    url: str,
    authorization: str = "",
    *,
    most_bytes: int = MOST_BYTES,
    has_streams: bool = False,
    **options: Any,
) -> httpx2.AsyncClient:
    """Return a client for the server at `url`. `authorization` is the name of the environment
    variable that holds the header Authorization, `options` are options of httpx2. An answer that is
    compressed or too large raises httpx2.DecodingError; with `has_streams` an event stream may be
    endless, whose reader bounds its parts. Raises ValueError if the address holds credentials or
    the variable holds no header.
    """
    check_addresses(url)
    headers = {"accept-encoding": "identity"} | options.pop("headers", {})
    if value := credentials(authorization):
        headers["authorization"] = value

    async def bound(answer: httpx2.Response) -> None:
        coding = answer.headers.get("content-encoding", "identity")
        if coding.strip().lower() not in ("", "identity"):
            why = f"the answer is compressed ({coding:.40}), which was not asked for"
            raise httpx2.DecodingError(why, request=answer.request)
        kind = answer.headers.get("content-type", "")
        if not (has_streams and kind.startswith("text/event-stream")):
            answer.stream = _Bounded(answer, most_bytes)

    return httpx2.AsyncClient(
        headers=headers,
        timeout=options.pop("timeout", None),
        trust_env=not is_local(url),
        # Certificates, which plain HTTP has none of, are read in a tenth of a second.
        verify=not url.lower().startswith("http:"),
        event_hooks={"response": [bound]},
        **options,
    )


async def ask(
    method: str,
    url: str,
    authorization: str = "",
    *,
    seconds: float | None,
    body: Any = None,
) -> httpx2.Response:
    """Return the whole answer to one request, which sends `body` as JSON. Raises TimeoutError after
    `seconds`, from the first to the last byte, httpx2.HTTPError and what `open_client` raises.
    """
    try:
        async with asyncio.timeout(seconds), open_client(url, authorization) as client:
            return await client.request(method, url, json=body)
    except TimeoutError:
        raise TimeoutError(f"no whole answer of {url} within {seconds:g} s") from None
