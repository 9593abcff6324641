"""Requests and replies in no interface's form, and the readers of parameters that the interfaces
share. A request is kept to the letter or refused in one sentence.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from ragen_mega.agents.call_tree import Answer, Call
from ragen_mega.environments.messages import (
    ChatMessage,
    Reader,
    RequestError,
    Table,
    kind,
    read_kind,
    read_list,
    read_string,
)
from ragen_mega.environments.tool_calls import check_tools, function_tool, is_deep, no_constant

_MOST_STOPS = 16


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for answers; a field is None where the request does not say."""

    role: str
    """Name of the model."""
    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...]
    """Functions in the form of chat completions, as chat templates take them."""
    num_answers: int = 1
    stop_texts: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    wants_logprobs: bool = False
    is_streamed: bool = False
    wants_usage: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """The answers to a request."""

    request: ChatRequest
    call: Call
    numbers: range
    """Numbers of these answers among all answers of the call."""
    num_prompt: int
    """Number of tokens of the prompt."""
    token_texts: Sequence[Sequence[str]] = ()
    """Text of each sampled token of each answer, if the request wants log-probabilities."""

    @property
    def answers(self) -> list[Answer]:
        """The samples, in the order of their numbers."""
        return [self.call.answers[number] for number in self.numbers]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(len(answer.completion.tokens) for answer in self.answers)


@dataclass(slots=True, eq=False)
class Connection:
    """The connection on which a request came."""

    is_lost: bool = False


class Arrival(NamedTuple):
    """A request at the door."""

    request: ChatRequest
    identity: str
    """Digest that a repetition of the request shares."""
    is_retry: bool
    """The client says that it has sent the request before."""
    num_retries: int
    """Number of times that the client says it has."""
    connection: Connection
    reply: Future[Reply]


class Interface(NamedTuple):
    """The translation of one interface from JSON and to JSON."""

    path: str
    """Path behind the base URL."""
    read: Callable[[Mapping[str, Any]], ChatRequest]
    """Reader of a body without its null values. Raises RequestError if it cannot be kept."""
    body: Callable[[Reply], dict[str, Any]]
    """Writer of a reply."""
    events: Callable[[Reply], Iterator[str]]
    """Writer of a reply as server-sent events. An engine answers as a whole, so that each text
    comes in one piece.
    """
    error: Callable[[RequestError], dict[str, Any]]
    """Writer of an error."""


def read_body(body: bytes) -> dict[str, Any]:
    """Return the parameters of a request that are not null. Raises RequestError if there are none
    to read.
    """
    try:
        given = json.loads(body, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body must be JSON ({error!s:.100})", param="") from None
    if not isinstance(given, dict):
        raise RequestError("the body must be a JSON object", param="")
    if is_deep(given):
        raise RequestError("the body must not be nested so deeply", param="")
    read_string("the body", json.dumps(given, ensure_ascii=False))
    return {name: value for name, value in given.items() if value is not None}


def number(low: float, high: float, kind: type) -> Reader:
    """Return a reader of numbers."""
    words = {int: "a whole number", float: "a number"}[kind]

    def read(name: str, value: Any) -> Any:
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            to = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
            raise RequestError(f"{name} must be {words} {to}, not {value!r:.60}", param=name)
        return value

    return read


def read_stops(name: str, value: Any) -> tuple[str, ...]:
    """Read a text or several that end an answer."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        raise RequestError(f"{name} must be a text or at most {_MOST_STOPS} texts", param=name)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError(f"{name} must hold texts that are not empty", param=name)
    return tuple(stops)


def tools_reader(
    tables: Mapping[str, Table], schema: str, *, default: str = ""
) -> Callable[[str, Any], tuple[dict[str, Any], ...]]:
    """Return a reader of tools whose type has a table, with the schema of their arguments under the
    key `schema`. `default`: the type of a tool without one.
    """

    def read(name: str, value: Any) -> tuple[dict[str, Any], ...]:
        found = []
        for number, tool in enumerate(read_list(name, value)):
            _, kept = read_kind(f"{name}[{number}]", tool, tables, default=default)
            kept = kept.get("function", kept)
            found.append(function_tool(kept["name"], kept.get("description"), kept.get(schema)))
            if "return" in kept:
                found[-1]["function"]["return"] = kept["return"]
        try:
            check_tools(found)
        except ValueError as error:
            raise RequestError(str(error), param=name) from None
        return tuple(found)

    return read


def typed_event(event: Mapping[str, Any]) -> str:
    """Return a server-sent event whose name is its type."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def call_id(index: int, number: int) -> str:
    """Return the `id` of answer `number` to call `index` of the episode; a reply has the `id` of
    its first answer.
    """
    return f"call-{index}-{number}"


SAMPLING: Mapping[str, Reader] = {
    "temperature": number(0, 2, float),
    "top_p": number(2**-20, 1, float),
}
"""Readers of parameters that all interfaces share."""
COUNT = number(1, math.inf, int)
FLAG = kind(bool, "true or false")
