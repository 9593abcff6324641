"""The door: an HTTP server of this process at which agents ask for completions.

It speaks OpenAI's chat completions and responses and Anthropic's messages. Every episode has its
own key. Requests are read and replies are written in the server's thread; they are answered in the
event loop of the rollout.
"""

import asyncio
import os
import secrets
import socket
import threading
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ragen_mega.agents.anthropic_messages import COUNT_TOKENS, MESSAGES
from ragen_mega.agents.chat_completions import CHAT_COMPLETIONS, models_body
from ragen_mega.agents.protocol import Arrival, Connection, Interface, read_body
from ragen_mega.agents.responses import RESPONSES
from ragen_mega.agents.served_episode import ServedEpisode
from ragen_mega.environments.adapters.web_guard import BACKLOG, GuardedServer
from ragen_mega.environments.messages import RequestError
from ragen_mega.ranks.launcher import open_many_files

INTERFACES = (CHAT_COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS)
MOST_BYTES = 8 << 20
"""Size of a request."""
_REMEMBERED_KEYS = 1 << 14
"""Keys of episodes that are over, whose requests get to know it."""
_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open."""
_PAUSE = 0.5
"""Seconds until a request of an episode that is over is answered, so that an agent that asks on
takes little of the process.
"""


def episode_over() -> RequestError:
    """Return the answer to a request of an episode that has ended."""
    return RequestError(
        "this episode is over and its key is closed; ask only before the agent returns, and by a"
        " client that the present episode has made: one that the process keeps has the key of its"
        " first episode (--environment-processes lets it)",
        status=403,
        code="episode_over",
        param="",
        kind="permission_error",
    )


@dataclass(slots=True)
class Door:
    """A listening server. The thread ends with the process."""

    listen: str
    url: str = ""
    """Base URL for clients."""
    _served: dict[str, ServedEpisode] = field(default_factory=dict)
    _closed: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_KEYS))

    def __post_init__(self) -> None:
        """Raise ValueError if nothing can listen there."""
        host, _, port = self.listen.rpartition(":")
        try:
            listener = socket.create_server(
                (host.strip("[]"), int(port)),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=BACKLOG,
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"agent_listen {self.listen} must be HOST:PORT of this machine that is free"
                f" ({error}); set --agent-listen 127.0.0.1:0 for any free port"
            ) from None
        name = socket.gethostname() if host.strip("[]") in ("0.0.0.0", "::", "") else host
        self.url = f"http://{name}:{listener.getsockname()[1]}/v1"
        open_many_files()
        server = GuardedServer(
            self._application(),
            lambda scope: _key(Headers(scope=scope)) in self._served,
            log_level="critical",
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE,
        )
        run = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name="agent door", daemon=True
        )
        run.start()

    @contextmanager
    def open(self, served: ServedEpisode, key: str | None = None) -> Iterator[str]:
        """Give the key under which the requests of an agent reach `served`, during the block: a new
        one, or the `key` of a process of the agent.
        """
        key = key or f"episode-{secrets.token_urlsafe(18)}"
        self._served[key] = served
        try:
            yield key
        finally:
            self._closed.append(key)
            del self._served[key]

    def _application(self) -> Starlette:
        return Starlette(
            routes=[
                *(
                    Route(
                        f"/v1/{interface.path}",
                        _answered(partial(self._complete, interface), interface),
                        methods=["POST"],
                    )
                    for interface in INTERFACES
                ),
                Route("/v1/models", _answered(self._models)),
                Route("/v1/models/{name:path}", _answered(self._model)),
                Route("/{path:path}", _answered(self._unknown), methods=["GET", "POST", "PUT"]),
            ]
        )

    def _find(self, request: Request) -> ServedEpisode:
        """Return the episode whose key a request has. Raises RequestError if there is none."""
        key = _key(request.headers)
        if served := self._served.get(key):
            return served
        if key in self._closed:
            raise episode_over()
        raise RequestError(
            "the API key is not that of an episode; use the api_key that the agent was given",
            status=401,
            code="invalid_api_key",
            param="",
            kind="authentication_error",
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse(models_body(self._find(request).roles))

    async def _model(self, request: Request) -> Response:
        self._find(request)
        return JSONResponse(models_body([request.path_params["name"]])["data"][0])

    async def _unknown(self, request: Request) -> Response:
        error = RequestError(
            f"{request.url.path} is not served here; ask /v1/models or"
            f" {', '.join(f'/v1/{interface.path}' for interface in INTERFACES)}",
            status=404,
            code="unknown_url",
            param="",
        )
        if served := self._served.get(_key(request.headers)):
            served.refusal = str(error)
        raise error

    async def _complete(self, interface: Interface, request: Request) -> Response:
        served = self._find(request)
        try:
            return await self._answer(interface, request, served)
        except RequestError as error:
            served.refusal = str(error)
            raise

    async def _answer(
        self, interface: Interface, request: Request, served: ServedEpisode
    ) -> Response:
        body = await _body(request)
        asked = interface.read(read_body(body))
        headers = request.headers
        named, retries = headers.get("idempotency-key", ""), headers.get("x-stainless-retry-count")
        connection = Connection()
        arrival = Arrival(
            asked,
            identity=sha256(f"{interface.path}\n{named}\n".encode() + body).hexdigest(),
            is_retry=bool(named) or retries not in (None, "0"),
            num_retries=int(retries[:9]) if retries and retries.isdecimal() else 0,
            connection=connection,
            reply=Future(),
        )
        try:
            served.loop.call_soon_threadsafe(served.arrive, arrival)
        except RuntimeError:  # the loop is closed
            raise episode_over() from None
        watch = asyncio.create_task(_watch(request, connection))
        try:
            reply = await asyncio.wrap_future(arrival.reply)
        except asyncio.CancelledError:  # the loop has ended
            raise episode_over() from None
        finally:
            watch.cancel()
        if not asked.is_streamed:
            return JSONResponse(interface.body(reply))
        return Response("".join(interface.events(reply)), media_type="text/event-stream")


@cache
def door(listen: str) -> Door:
    """Return the door of this process at an address HOST:PORT; port 0 is any free one."""
    return Door(listen)


# A forked process has no thread of the server, so that it opens its own door.
os.register_at_fork(after_in_child=door.cache_clear)


def _key(headers: Headers) -> str:
    given = headers.get("x-api-key") or headers.get("authorization", "")
    return given.removeprefix("Bearer ").strip()


def _answered(
    endpoint: Callable[[Request], Awaitable[Response]], interface: Interface = CHAT_COMPLETIONS
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint whose errors are written as `interface` has them."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestError as error:
            if error.code == "episode_over":
                await asyncio.sleep(_PAUSE)
            refused = error
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            # The default filter of warnings shows each text once.
            why = f"{type(error).__name__}: {error!s:.200}".encode("utf-8", "replace").decode()
            warnings.warn(f"a request of an agent could not be answered: {why}", stacklevel=1)
            refused = RequestError(
                f"the trainer could not answer this request ({why}); its log has the same line",
                status=500,
                code="internal_error",
                param="",
                kind="server_error",
            )
        return JSONResponse(interface.error(refused), refused.status)

    return answer


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise RequestError(
                f"the request is larger than {MOST_BYTES:,} bytes; shorten the conversation",
                status=413,
                code="request_too_large",
                param="",
            )
    return bytes(body)


async def _watch(request: Request, connection: Connection) -> None:
    """Note the loss of the connection while its request is answered."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    connection.is_lost = True
