"""Environments on an OpenEnv server, e.g. `openenv:ws://127.0.0.1:8000`, over one WebSocket each.

Interface: openenv-core 0.3. A session that fails is closed. Connecting and resetting are retried,
because nothing has been played yet; a step is not, because the server may have executed it.
"""

import asyncio
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

import httpx2

from ragen_mega.environments.adapters.packages import required
from ragen_mega.environments.calls import settled
from ragen_mega.environments.protocol import Observation, StepResult
from ragen_mega.environments.tool_calls import function_tool
from ragen_mega.system.addresses import bypass_proxy, check_addresses
from ragen_mega.system.web_client import ask

_TEXTS = ("text", "message", "content", "prompt", "observation", "result", "output", "stdout")
"""Fields of observations that may hold the text, the preferred ones first."""
_PATIENCE = 30.0  # seconds
_LONGEST_PAUSE = 5.0  # seconds
_MAX_NUMBERS = 64  # actions of a bounded number
_TROUBLES = (OSError, RuntimeError, TimeoutError, ValueError)
"""Errors that openenv-core raises if a server is gone, refuses, times out or answers nonsense."""
_INVALID = "(code: VALIDATION_ERROR)"


class OpenEnvWorld:
    """A session on a server. The server's action schema decides the form of an answer: if the only
    required field is an enumeration or a bounded integer, its values are the action names; if it
    is a string, the answer is free text; otherwise it is a tool call with the fields as arguments.
    """

    def __init__(self, url: str, /, *, timeout: float = 20.0, attempts: int = 6) -> None:
        """`timeout`: seconds for one answer of the server; `attempts`: how often to try to begin an
        episode, with pauses that outlast the restart of a server. Raises ValueError if the server
        does not answer or openenv-core is not installed.
        """
        core = required("openenv.core:GenericEnvClient", "openenv")
        from websockets.exceptions import WebSocketException

        check_addresses(url)
        _follow_no_redirects(core.env_client)
        self._troubles = (*_TROUBLES, WebSocketException)
        self._attempts = attempts
        self._client = core.GenericEnvClient(
            url, connect_timeout_s=timeout, message_timeout_s=timeout
        )
        http = "http" + url.rstrip("/").removeprefix("ws").removeprefix("http")
        bypass_proxy(http)
        schema = _get(f"{http}/schema").get("action", {})
        about = _get(f"{http}/metadata")
        description = str(about.get("description", ""))
        if description != f"{about.get('name')} environment":  # OpenEnv's default text
            self.instruction = description
        self._field = self._read_actions(schema)
        self._is_playing = False

    async def reset(self, seed: int) -> Observation:
        for attempt in range(1, self._attempts + 1):
            try:
                result = await self._client.reset(seed=seed)
                self._is_playing = True
                return _words(result.observation)
            except self._troubles as error:
                await self.close()
                if attempt == self._attempts:
                    raise ConnectionError(
                        f"no episode began in {attempt} attempts"
                        f" ({str(error) or type(error).__name__}); is the server up, and has it"
                        " room for another session?"
                    ) from error
                await asyncio.sleep(min(0.1 * 4 ** (attempt - 1), _LONGEST_PAUSE))
        raise ValueError(f"attempts must be at least 1, not {self._attempts}")

    async def step(self, action: Any) -> StepResult:
        if not self._is_playing:  # the client would begin another session and step in that
            raise RuntimeError("no episode runs; reset before the next step")
        if self._field is None:
            payload = action["arguments"]
        else:
            named = isinstance(action, str)
            payload = {self._field: self._values.get(action, action) if named else action}
        try:
            result = await self._client.step(payload)
        except self._troubles as error:
            if str(error).endswith(_INVALID):  # refused before it was executed
                return StepResult(
                    "The server could not read that action.",
                    0.0,
                    False,
                    info={"is_action_valid": False},
                )
            await self.close()  # a late answer must not count for another step
            raise
        answer = result.observation
        info = answer.get("info") if isinstance(answer.get("info"), Mapping) else {}
        info = {key: answer[key] for key in ("success",) if key in answer} | dict(info)
        truncated = bool(answer.get("truncated", False))
        return StepResult(
            _words(answer),
            float(result.reward or 0.0),
            bool(result.done) and not truncated,
            truncated,
            info,
        )

    async def close(self) -> None:
        self._is_playing = False
        await self._client.close()

    def _read_actions(self, schema: Mapping[str, Any]) -> str | None:
        """Read the form of an answer; returns the field that it goes into, None for a tool call."""
        fields = {
            name: part
            for name, part in schema.get("properties", {}).items()
            if name not in ("metadata", "type")
        }
        wanted = [name for name in schema.get("required", ()) if name in fields] or list(fields)
        self._values: dict[str, Any] = {}
        field = wanted[0] if len(wanted) == 1 else None
        part = fields[field] if field else {}
        if "$ref" in part:  # as Python's enumerations are described
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        values = part.get("enum", ())
        if part.get("type") == "integer" and {"minimum", "maximum"} <= set(part):
            numbers = range(part["minimum"], part["maximum"] + 1)
            values = values or (numbers if len(numbers) <= _MAX_NUMBERS else ())
        if values:
            self._values = {str(value): value for value in values}
            self.actions = tuple(self._values)
        elif part.get("type") != "string":
            arguments = {"type": "object", "properties": fields, "required": wanted}
            if "$defs" in schema:
                arguments["$defs"] = schema["$defs"]
            self.tools = [function_tool("act", "Act once.", arguments)]
            return None
        return field


@cache
def _follow_no_redirects(client: ModuleType) -> None:
    """Let a server of openenv-core, which has no option for it, name no other one for its
    connections: it could be any that this machine reaches.
    """

    class Connect(client.ws_connect):  # type: ignore[misc,name-defined]
        def process_redirect(self, exc: Exception) -> Exception:
            return exc

    client.ws_connect = Connect  # type: ignore[attr-defined]


@cache
def _get(url: str) -> dict[str, Any]:
    """Read a server's description of itself. The answer is cached, so that a new session can be
    made while the server is down. Raises ValueError if the server does not answer.
    """
    try:
        answer = settled(ask("GET", url, seconds=_PATIENCE))
        return answer.raise_for_status().json()
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{url} does not answer as an OpenEnv server ({str(error) or type(error).__name__});"
            " start the server first"
        ) from error


def _words(answer: Mapping[str, Any]) -> Observation:
    """Return the messages of an observation, else its text field, else all fields as text."""
    if answer.get("messages"):
        return answer["messages"]
    texts = [answer[name] for name in _TEXTS if isinstance(answer.get(name), str)]
    if texts:
        return texts[0]
    return "\n".join(f"{name}: {value}" for name, value in answer.items() if value is not None)
