"""Requests and replies in no interface's form, and the readers of parameters that the interfaces
share. A request is kept to the letter or refused in one sentence.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from ragen_mega.agents.call_tree import Answer, Call, ChatMessage, RequestError, ToolCall
from ragen_mega.environments.tool_calls import function_tool

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
    """Numbers of the answers among those of the call."""
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


class Refused(Exception):
    """A request that is answered by an error; the text is one sentence for the agent."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        param: str = "",
        kind: str = "invalid_request_error",
    ) -> None:
        """`status`: that of HTTP; `code`, `param` and `kind`: fields of an error of OpenAI's."""
        super().__init__(message)
        self.status, self.code, self.param, self.kind = status, code, param, kind


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
    error: Callable[[Refused], dict[str, Any]]
    """Writer of an error."""


Reader = Callable[[str, Any], Any]
"""Function that reads the value of the parameter with a name. Raises RequestError."""


def read_body(body: bytes) -> dict[str, Any]:
    """Return the parameters of a request that are not null. Raises RequestError if there are none
    to read.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body must be JSON ({error})", param="") from None
    if not isinstance(given, dict):
        raise RequestError("the body must be a JSON object", param="")
    return {name: value for name, value in given.items() if value is not None}


def read_parameters(
    given: Mapping[str, Any],
    readers: Mapping[str, Reader],
    *,
    required: Sequence[str],
    neutral: Mapping[str, tuple[Any, ...]],
    harmless: Collection[str],
) -> dict[str, Any]:
    """Return the values of the parameters with `readers`. `neutral`: parameters of which only some
    values can be kept; `harmless`: parameters that change no sample. Raises RequestError.
    """
    for name in given.keys() - harmless - neutral.keys() - readers.keys():
        raise RequestError(
            f"{name} is not supported, for the trainer could not keep it; leave it out",
            code="unsupported_parameter",
            param=name,
        )
    for name, values in neutral.items():
        if name in given and given[name] not in values:
            raise RequestError(
                f"{name} must be {' or '.join(map(json.dumps, values))}, not"
                f" {given[name]!r:.60}, which the trainer could not keep; leave it out",
                code="unsupported_value",
                param=name,
            )
    for name in required:
        if name not in given:
            raise RequestError(f"{name} is missing", code="missing_required_parameter", param=name)
    return {name: readers[name](name, given[name]) for name in readers if name in given}


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


def kind(type_: type, words: str) -> Reader:
    """Return a reader of values of a type, which an error calls `words`."""

    def read(name: str, value: Any) -> Any:
        if not isinstance(value, type_):
            raise RequestError(f"{name} must be {words}, not {value!r:.60}", param=name)
        return value

    return read


read_list = kind(list, "a list")
read_object = kind(dict, "an object")


def read_stops(name: str, value: Any) -> tuple[str, ...]:
    """Read a text or several that end an answer."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        raise RequestError(f"{name} must be a text or at most {_MOST_STOPS} texts", param=name)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError(f"{name} must hold texts that are not empty", param=name)
    return tuple(stops)


def read_text(place: str, content: Any) -> str:
    """Read the text of a content, which is a text, nothing, or a list of parts with texts."""
    if content is None:
        return ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{place} must hold parts of type text alone", param=place)
        content = "".join(texts)
    if not isinstance(content, str):
        raise RequestError(f"{place} must be a text, not {content!r:.60}", param=place)
    try:
        content.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{place} must be valid Unicode", param=place) from None
    return content


def answer_message(
    content: str, tool_calls: Sequence[ToolCall] = (), *, thought: str = ""
) -> ChatMessage:
    """Return a message of the assistant, with its thought as the tree reads it in a content."""
    before = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    return ChatMessage("assistant", before + content, tuple(tool_calls))


def tools_reader(kind: str, schema: str, what: str, *, default: str | None = None) -> Reader:
    """Return a reader of tools that have their name beside their type `kind`, and the schema of
    their arguments under the key `schema`. `default`: the type of a tool without one; `what`: a
    tool in the words of the error.
    """

    def read(name: str, value: Any) -> tuple[dict[str, Any], ...]:
        found = []
        for place, tool in enumerate(read_list(name, value)):
            is_known = isinstance(tool, dict) and tool.get("type", default) == kind
            if not is_known or not isinstance(tool.get("name"), str):
                raise RequestError(
                    f"tools[{place}] must be {what} with a name, not {tool!r:.80}",
                    param=f"tools[{place}]",
                )
            found.append(function_tool(tool["name"], tool.get("description"), tool.get(schema)))
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
TEXT = kind(str, "a text")
