"""Limits of a server on the network: on connections, and on the time and size of requests."""

import asyncio
import os
import resource
import socket
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

BACKLOG = 256
"""Connections that wait to be accepted."""
_SECONDS_TO_ASK = 30.0
"""Time for a whole request, from the connection or from its first byte."""
_SECONDS_TO_READ = 60
"""Time for which a client may leave an answer unread that the kernel's buffers cannot hold."""
_MOST_HEADERS = 1 << 16
"""Bytes of a request before its headers are whole."""
_MOST_SENT = 64 << 20
"""Bytes of a request, whatever of them is refused and dropped."""
_GRACE = 0.5
"""Seconds in which a connection may say who it is, or ask again, before it can be closed for
another one.
"""
_PAUSE = 0.05
"""Seconds between attempts to accept a connection where there is no room for one."""

Scope = MutableMapping[str, Any]


def most_connections() -> int:
    """Return how many connections a server may hold: a third of the descriptors that are free. A
    client in this process has another third, and what the process itself opens has the last.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(4, (limit - len(os.listdir("/dev/fd"))) // 3)


class GuardedServer(uvicorn.Server):
    """A server that stays within a number of connections. Where one more comes, it closes one that
    it can spare: the oldest of a stranger, else the one that has been idle for longest. Requests of
    clients that it knows are never refused: where nothing can be spared, others wait to be
    accepted.
    """

    def __init__(
        self,
        application: Any,
        is_known: Callable[[Scope], bool] = lambda scope: False,
        **settings: Any,
    ) -> None:
        """`is_known` says whether a request, whose headers are in the scope, has the key of a
        client; `settings` are uvicorn's settings.
        """
        protocol = type("Protocol", (_GuardedProtocol,), {"is_known": staticmethod(is_known)})
        settings |= {"http": protocol, "backlog": BACKLOG, "access_log": False}
        super().__init__(uvicorn.Config(application, **settings))
        self.most_connections = most_connections()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections of a listener that the caller gives, not by uvicorn's own way: asyncio
        writes a traceback for each connection of the backlog when descriptors run out.
        """
        await super().startup(sockets=[])
        (listener,) = sockets or []
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._accepting = asyncio.create_task(self._accept(listener))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as uvicorn does."""
        self._accepting.cancel()
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop, held = asyncio.get_running_loop(), self.server_state.connections
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptor is left, or the client has gone
                self._close_one()
                await asyncio.sleep(_PAUSE)
                continue
            while len(held) >= self.most_connections and not self._close_one():
                await asyncio.sleep(_PAUSE)
            with suppress(OSError):  # the client has gone
                if option := getattr(socket, "TCP_USER_TIMEOUT", None):  # on Linux
                    # The kernel drops a client that does not read.
                    connection.setsockopt(socket.IPPROTO_TCP, option, 1000 * _SECONDS_TO_READ)
                await loop.connect_accepted_socket(self._protocol, connection)

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]  # uvicorn's own class
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )

    def _close_one(self) -> bool:
        """Close a connection that can be spared; returns whether there was one."""
        held = self.server_state.connections  # WebSockets among them
        requests = [each for each in held if isinstance(each, _GuardedProtocol)]
        others = filter(_GuardedProtocol.can_be_spared, requests)
        spare = min(others, key=lambda connection: connection.worth, default=None)
        if spare is not None:
            held.discard(spare)
            spare.transport.abort()
        return spare is not None


# uvicorn declares a variable, which holds one of its two classes.
class _GuardedProtocol(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """HTTP that closes a connection on which a request is begun and does not become whole."""

    knows_client = False
    is_known: Callable[[Scope], bool]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = time.monotonic()
        self._num_bytes = 0
        self._patience: asyncio.TimerHandle | None = None
        self._expect()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        was_whole = before is not None and not before.more_body
        super().data_received(data)
        if self.transport.get_protocol() is not self:  # a WebSocket
            return self._stop_expecting()
        self._num_bytes += len(data)
        cycle = self.cycle
        has_headers = cycle is not None and (cycle is not before or not was_whole)
        if has_headers:
            self.knows_client = self.knows_client or self.is_known(cycle.scope)
            if not cycle.more_body:
                return self._stop_expecting()
        if self._num_bytes > (_MOST_SENT if has_headers else _MOST_HEADERS):
            return self.transport.abort()
        self._expect()

    def on_response_complete(self) -> None:
        self.since = time.monotonic()
        super().on_response_complete()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_expecting()
        super().connection_lost(error)

    @property
    def _is_answering(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not (cycle.more_body or cycle.response_complete)

    @property
    def worth(self) -> tuple[bool, bool, float]:
        """Return a key by which the connection that can be spared best is the least."""
        return self.knows_client, self._is_answering, self.since

    def can_be_spared(self) -> bool:
        """Return whether nobody whom the server knows asks or waits on this connection, or will at
        once.
        """
        is_in_use = self.knows_client and (self._is_answering or self._patience is not None)
        return not is_in_use and time.monotonic() - self.since > _GRACE

    def _expect(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(_SECONDS_TO_ASK, self.transport.abort)

    def _stop_expecting(self) -> None:
        self._num_bytes = 0
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
