"""Tools of MCP servers: programs that speak over their standard input and output, or addresses of
streamable HTTP.

Interface: the official SDK, mcp 2.0 to 2.3 (Model Context Protocol, modelcontextprotocol.io).
"""

import asyncio
import copy
import json
import logging
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, TypeVar

from ragen_mega.environments.calls import settled
from ragen_mega.environments.protocol import Message, StepResult
from ragen_mega.environments.tool_calls import check_tools, function_tool
from ragen_mega.extensions.extras import require
from ragen_mega.system.paths import expanded
from ragen_mega.system.web_client import open_client

MAX_RESULT = 20_000
"""Most characters of a result that the policy sees, unless said otherwise."""
_SECONDS_TO_START = 50.0  # less than the default of --environment-timeout
_SECONDS_TO_CLOSE = 8.0  # the SDK takes at most 7 to end a program that does not end by itself
_SECONDS_TO_LIST = 5.0
_MOST_PAGES = 100
"""Most pages of a list of tools."""
_MOST_BYTES = 64 << 20
"""Size of an answer over HTTP, a list of all tools among them."""
_AUTHORIZATION = "RAGEN_MCP_AUTHORIZATION"
"""The variable with the credentials of MCP servers behind a URL."""
_PAUSES = (0.5, 2.0, 8.0)
"""Seconds between attempts to begin a session."""
_LAUNCH = """import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # SIGKILL to the server when this process's parent dies
os.execvp(sys.argv[1], sys.argv[1:])"""

T = TypeVar("T")


class McpTools:
    """The tools of one or more servers. A `close` ends an episode, or the environment. Methods
    wait, so that none may be called in an `async` one.
    """

    def __init__(
        self,
        *servers: str,
        only: Sequence[str] = (),
        timeout: float = 20.0,
        is_shared: bool | None = None,
        max_result: int = MAX_RESULT,
        directory: str = "",
    ) -> None:
        """`servers`: commands or URLs; `only`: names of the tools that the policy may call, all if
        empty; `timeout`: seconds for a call; `is_shared`: all environments of this process use one
        session of each server, which outlives episodes (None: of a server that declares every one
        of these tools read-only); `max_result`: characters of a result; `directory`: folder that
        programs start in, else the working directory.

        Raises ValueError, in one line, if a server does not start, names no tool or one of another
        server, or gives a schema that is none, and if the SDK is not installed.
        """
        require("mcp", "tools of MCP servers")
        for name in ("mcp.client", "client"):  # it logs errors with the places where they arose
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._timeout, self._max_result, self._directory = timeout, max_result, directory
        self._sessions: dict[str, _Session] = {}
        self._server_of: dict[str, str] = {}
        self._is_shared: dict[str, bool] = {}
        self.tools: list[dict[str, Any]] = []
        """Schemas for the chat template; parameters are the server's, unchanged."""
        for server in servers:
            tools, read_only = _listed(server, directory)
            called = {tool["function"]["name"] for tool in tools}
            is_free = (called & {*only} if only else called) <= read_only
            self._is_shared[server] = is_free if is_shared is None else is_shared
            for tool in copy.deepcopy(tools):
                name = tool["function"]["name"]
                if name in self._server_of:
                    raise ValueError(
                        f"tools must have distinct names, and {name} is one of"
                        f" {self._server_of[name]!r} and of {server!r}; rename it in one"
                    )
                self._server_of[name] = server
                if not only or name in only:
                    self.tools.append(tool)
        if unknown := sorted(set(only) - set(self._server_of)):
            raise ValueError(
                f"the chosen tools must be of {', '.join(servers)}, not {', '.join(unknown)}; it"
                f" has {', '.join(self._server_of)}"
            )

    def step(self, call: Mapping[str, Any]) -> StepResult:
        """Return the text with which the server answers a call, `{"name": ..., "arguments": ...}`,
        as a message of the tool; it may be a tool's own error. Calls are not repeated, because the
        server may have acted.

        Raises TimeoutError for a call that takes too long, ConnectionError if the server does not
        start, is gone or breaks the protocol.
        """
        if call["name"] in self._server_of:
            text, is_error = settled(self._call(call["name"], call["arguments"]))
        else:
            text, is_error = f"Error: there is no tool {call['name']!r:.60}", True
        if len(text) > self._max_result:
            text = f"{text[: self._max_result]}\n[cut: it has {len(text)} characters]"
        return StepResult(
            [Message("tool", text)], 0.0, False, info={"is_action_effective": not is_error}
        )

    def close(self) -> None:
        """End the sessions that are not shared, and wait for their programs to end. The next call
        of a tool begins a new one, so an episode without calls costs nothing.
        """
        settled(_close(self._sessions.values()))

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool in the session of its server, which begins with the first call. Pauses
        between attempts to begin outlast the restart of a server.
        """
        server = self._server_of[name]
        is_shared = self._is_shared[server]
        sessions = _shared if is_shared else self._sessions
        for pause in (*_PAUSES, None):
            if server not in sessions or sessions[server].is_over:
                sessions[server] = _Session(server, is_shared, self._directory)
            session = sessions[server]
            try:
                await session.opened()
                break
            except ConnectionError:
                if pause is None:
                    raise
            await asyncio.sleep(pause)
        return await session.call(name, arguments, self._timeout)


_shared: dict[str, "_Session"] = {}


class _Session:
    """A connection to a server, opened, held and closed by a separate task, to which the SDK binds
    it. A program ends with its session, and with this process.
    """

    def __init__(self, server: str, is_shared: bool, directory: str) -> None:
        self._server, self._directory = server, directory
        # Only the older handshake gives a client of HTTP a session; later protocols have none.
        self._mode = "legacy" if _is_url(server) and not is_shared else "auto"
        self._end = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # What a program writes besides messages.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace", newline="\n")
        self._holder = asyncio.create_task(self._hold())
        # An error is read here, so that asyncio logs none, and reported by who waits.
        self._holder.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def is_over(self) -> bool:
        return self._end.is_set() or self._holder.done()

    async def opened(self) -> Any:
        """Return the SDK's client. Raises ConnectionError if the server has not started."""
        await asyncio.wait((self._client, self._holder), return_when=asyncio.FIRST_COMPLETED)
        if self._client.done():
            return self._client.result()
        error = self._holder.exception() or TimeoutError(f"not within {_SECONDS_TO_START:g} s")
        raise ConnectionError(self._describe("does not start", error)) from error

    async def call(
        self, name: str, arguments: Mapping[str, Any], seconds: float
    ) -> tuple[str, bool]:
        """Return the text of a result, and whether it is an error. Raises as `ask`; the session is
        over if the server answers no other request either.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        async def request(client: Any) -> tuple[str, bool]:
            try:
                result = await client.call_tool(name, dict(arguments))
            except MCPError as error:  # the SDK and servers share this code
                if error.code == CONNECTION_CLOSED and not await _answers(client):
                    raise
                return f"Error: {error}", True
            return _text(result), bool(result.is_error)

        try:  # what cannot be sent would end the session
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            return f"Error: arguments must be valid JSON ({error!s:.100})", True
        try:
            return await self.ask(f"tool {name}", request, seconds)
        except TimeoutError:
            try:
                await self.ask("its list", lambda client: client.list_tools(), _SECONDS_TO_LIST)
            except OSError:  # of both kinds
                self._end.set()
            raise

    async def ask(self, what: str, request: Callable[[Any], Awaitable[T]], seconds: float) -> T:
        """Return the answer to a request. Raises TimeoutError, or ConnectionError if the server is
        gone or breaks the protocol, which ends the session.
        """
        from anyio import BrokenResourceError, ClosedResourceError
        from mcp import MCPError

        broken = (MCPError, RuntimeError, ValueError, BrokenResourceError, ClosedResourceError)
        client = await self.opened()
        try:
            async with asyncio.timeout(seconds):
                return await request(client)
        except TimeoutError:
            raise TimeoutError(
                f"{what} of {self._server!r} took longer than {seconds:g} s; raise its timeout, or"
                " let the tool itself say that it takes too long"
            ) from None
        except broken as error:
            self._end.set()
            raise ConnectionError(self._describe(f"failed in {what}", error)) from error

    async def close(self) -> None:
        self._end.set()
        await asyncio.wait((self._holder,))

    async def _hold(self) -> None:
        from anyio import CancelScope, current_time
        from mcp import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        web: Any = nullcontext()
        if _is_url(self._server):
            web = open_client(
                self._server, _AUTHORIZATION, most_bytes=_MOST_BYTES, has_streams=True
            )
            transport = streamable_http_client(self._server, http_client=web)
        else:
            launch = [
                "-I",
                "-S",
                "-c",
                _LAUNCH,
                *map(expanded, shlex.split(self._server)),
            ]
            program = StdioServerParameters(
                command=sys.executable,
                args=launch,
                env=dict(os.environ),
                cwd=self._directory or None,
            )
            transport = stdio_client(program, errlog=self._log)
        with CancelScope(deadline=current_time() + _SECONDS_TO_START) as scope:
            async with web, Client(transport, mode=self._mode, cache=None) as client:
                scope.deadline = math.inf
                self._client.set_result(client)
                await self._end.wait()
                scope.deadline = current_time() + _SECONDS_TO_CLOSE

    def _describe(self, what: str, error: BaseException) -> str:
        """Return one line about an error of the server, with the last line that it wrote."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        reason = " ".join(str(error).split()) or type(error).__name__
        self._log.seek(0)
        lines = self._log.read().split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"MCP server {self._server!r} {what} ({reason}{last and f'; it wrote: {last:.200}'})"


def _is_url(server: str) -> bool:
    return server.startswith(("http://", "https://"))


async def _close(sessions: Iterable[_Session]) -> None:
    await asyncio.gather(*(session.close() for session in sessions))


@cache
def _listed(server: str, directory: str) -> tuple[list[dict[str, Any]], frozenset[str]]:
    """Return the tools of a server as the chat template takes them, and the names of those that it
    declares read-only. They are asked for once, so that environments can be built while the server
    is down. They are shared: do not write into them.

    Raises ValueError, in one line, if it cannot be asked, has none, or a schema is invalid.
    """
    try:
        tools = settled(_ask_for_tools(server, directory))
    except OSError as error:
        raise ValueError(f"{error}; try the command by hand, or start the server") from error
    if not tools:
        raise ValueError(f"MCP server {server!r} must have tools, and names none; give another")
    found = [function_tool(tool.name, tool.description or "", tool.input_schema) for tool in tools]
    try:
        check_tools(found)
    except ValueError as error:
        raise ValueError(f"MCP server {server!r}: {error}") from None
    hints = {tool.name: tool.annotations for tool in tools}
    return found, frozenset(name for name, hint in hints.items() if hint and hint.read_only_hint)


async def _ask_for_tools(server: str, directory: str) -> list[Any]:
    """Return all that a server says of its tools, page by page. Raises as `_Session.ask`, also for
    a server whose pages do not end.
    """
    session = _Session(server, is_shared=True, directory=directory)

    async def request(client: Any) -> list[Any]:
        page = await client.list_tools()
        tools, cursors = page.tools, set[str]()
        while cursor := page.next_cursor:
            if cursor in cursors or len(cursors) == _MOST_PAGES:
                raise ValueError(
                    f"its list of tools has no end: after {len(cursors) + 1} pages the cursor of"
                    f" the next one is {cursor!r:.60}; a last page has none"
                )
            cursors.add(cursor)
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
        return tools

    try:
        return await session.ask("the list of tools", request, _SECONDS_TO_START)
    finally:
        await session.close()


async def _answers(client: Any) -> bool:
    """Return whether the server of a client still answers."""
    from anyio import BrokenResourceError, ClosedResourceError
    from mcp import MCPError

    broken = (MCPError, OSError, RuntimeError, ValueError, BrokenResourceError, ClosedResourceError)
    try:
        async with asyncio.timeout(_SECONDS_TO_LIST):
            await client.list_tools()
    except broken:
        return False
    return True


def _text(result: Any) -> str:
    """Return a result in words: its parts, else its structured content."""
    parts = [_words(part) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    said = "\n".join(parts).encode("utf-8", "replace").decode()
    return said or "[the tool says nothing]"


def _words(part: Any) -> str:
    """Return a part of a result in words; what is no text is refused in words."""
    resource = getattr(part, "resource", part)  # embedded, or the part itself
    if hasattr(resource, "text"):
        return resource.text
    if part.type == "resource_link":
        return f"[a link to {part.uri}]"
    kind = getattr(resource, "mime_type", None) or part.type
    return f"[{kind} is left out: only text can be read]"
