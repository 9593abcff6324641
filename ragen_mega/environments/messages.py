"""Messages of chats with their calls of tools, as agents, files of tasks and worlds give them.

Every key of an object stands in a table: it is kept, it is harmless, or it is refused in one
sentence.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragen_mega.environments.protocol import Message
from ragen_mega.environments.tool_calls import HERMES

Reader = Callable[[str, Any], Any]
"""Function that reads the value at a place, which an error names. Raises RequestError."""


class RequestError(ValueError):
    """A request that cannot be answered; the text is one sentence for the agent."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_value",
        param: str = "messages",
        kind: str = "invalid_request_error",
        status: int = 400,
    ) -> None:
        """`code`, `param` and `kind`: fields of an error of OpenAI's interface; `status`: HTTP's
        status.
        """
        super().__init__(message)
        self.code, self.param, self.kind, self.status = code, param, kind, status


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool in a message of the assistant."""

    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a request."""

    role: str
    """system, user, assistant or tool."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    thought: str | None = None
    """Thought that came beside the content; None if none came."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """The keys of one kind of object. A key that is null counts as left out."""

    readers: Mapping[str, Reader]
    """Key that is kept -> reader of its value."""
    required: Collection[str] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key -> the only values that can be kept, since they change no sample."""
    harmless: Collection[str] = frozenset()
    """Keys that change no sample."""

    def read(self, place: str, given: Any) -> dict[str, Any]:
        """Return the values of the keys that are kept. Raises RequestError for an object with
        another key, or without a required one. `place`: empty for a whole request.
        """
        if not isinstance(given, Mapping):
            raise RequestError(f"{place} must be an object, not {given!r:.60}", param=place)
        given = {key: value for key, value in given.items() if value is not None}
        before = f"{place}." if place else ""
        for key, value in given.items():
            if key in self.readers or key in self.harmless or value in self.neutral.get(key, ()):
                continue
            name, values = f"{before}{key}", self.neutral.get(key)
            if not values:
                raise RequestError(
                    f"{name:.80} is not supported, for the trainer could not keep it; leave it out",
                    code="unsupported_parameter",
                    param=name,
                )
            raise RequestError(
                f"{name} must be {' or '.join(map(json.dumps, values))}, not {value!r:.60}, which"
                " the trainer could not keep; leave it out",
                code="unsupported_value",
                param=name,
            )
        for key in self.required:
            if key not in given:
                name = f"{before}{key}"
                raise RequestError(
                    f"{name} is missing", code="missing_required_parameter", param=name
                )
        return {
            key: read(f"{before}{key}", given[key])
            for key, read in self.readers.items()
            if key in given
        }


def read_kind(
    place: str, given: Any, tables: Mapping[str, Table], *, key: str = "type", default: str = ""
) -> tuple[str, dict[str, Any]]:
    """Return the kind of an object, which stands under `key`, and what its table keeps. Raises
    RequestError for a kind without a table.
    """
    kind = given.get(key, default) if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in tables:
        raise RequestError(
            f"{place} must be an object with {key} {' or '.join(tables)}, not {given!r:.80}",
            param=place,
        )
    return kind, tables[kind].read(place, given)


def kind(type_: type, words: str) -> Reader:
    """Return a reader of values of a type, which an error calls `words`."""

    def read(name: str, value: Any) -> Any:
        if not isinstance(value, type_):
            raise RequestError(f"{name} must be {words}, not {value!r:.60}", param=name)
        return value

    return read


read_list = kind(list, "a list")
read_object = kind(dict, "an object")
_read_string = kind(str, "a text")


def read_string(place: str, value: Any) -> str:
    """Read a text without halves of characters."""
    try:
        _read_string(place, value).encode()
    except UnicodeEncodeError:
        raise RequestError(f"{place} must be valid Unicode", param=place) from None
    return value


_BESIDE_TEXT = frozenset(
    {"type", "annotations", "cache_control", "citations", "logprobs", "parsed", "parsed_output"}
    | {"prompt_cache_breakpoint"}
)
PARTS = {
    name: Table({(key := name.rpartition("_")[2]): read_string}, (key,), harmless=_BESIDE_TEXT)
    for name in ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")
}
"""Type of a part of a content -> its keys; each holds a text."""


def read_texts(place: str, content: Any) -> list[str]:
    """Read the texts of a content, which is a text, nothing, or a list of parts with texts."""
    if isinstance(content, list):
        parts = [
            read_kind(f"{place}[{number}]", part, PARTS, default="text")[1]
            for number, part in enumerate(content)
        ]
        return [text for part in parts for text in part.values()]
    return [] if content is None else [read_string(place, content)]


def read_text(place: str, content: Any) -> str:
    """Read a content whose parts are separate values, as results of a tool: each is a line."""
    return "\n".join(read_texts(place, content))


def read_sampled(place: str, content: Any) -> str:
    """Read a content or a thought of the assistant, whose parts are pieces of one text."""
    return "".join(read_texts(place, content))


def read_arguments(place: str, value: Any) -> str:
    """Read the arguments of a call, which are JSON text or an object."""
    if isinstance(value, Mapping):
        value = json.dumps(value, ensure_ascii=False)
    return read_string(place, value)


def assistant_message(
    content: str,
    tool_calls: Sequence[ToolCall] = (),
    thought: str | None = None,
    *,
    place: str,
    name: str = "",
) -> ChatMessage:
    """Return a message of the assistant. A thought that also stands in the content is one, and an
    empty one beside the content says nothing. Raises RequestError for two different ones.
    """
    inside, end, _ = content.partition("</think>")
    if end and thought is not None:
        if thought.strip() not in ("", inside.strip().removeprefix("<think>").strip()):
            raise RequestError(
                f"{place} must have one thought, and has another in <think> than beside its"
                " content; send one of them",
                param=place,
            )
        thought = None
    return ChatMessage("assistant", content, tuple(tool_calls), thought, name)


FUNCTION = Table(
    {"name": read_string, "arguments": read_arguments},
    ("name",),
    harmless=frozenset({"parsed_arguments"}),
)
"""Function of a call in chat completions."""
CALL = Table(
    {"function": FUNCTION.read, "id": read_string},
    ("function",),
    neutral={"type": ("function",), "custom": ()},
    harmless=frozenset({"index"}),
)
"""Call of a tool in chat completions."""


def _read_calls(place: str, value: Any) -> list[dict[str, Any]]:
    calls = []
    for number, call in enumerate(read_list(place, value)):
        # Files of conversations also write a function without the call around it.
        is_bare = isinstance(call, Mapping) and "function" not in call and "name" in call
        given = {"function": call} if is_bare else call
        calls.append(CALL.read(f"{place}[{number}]", given))
    return calls


_SAID = {"content": read_text, "name": read_string}
_OF_ROLE = frozenset({"role"})
MESSAGES = dict.fromkeys(
    ("developer", "system", "user"), Table(_SAID, ("content",), harmless=_OF_ROLE)
) | {
    "assistant": Table(
        _SAID
        | {"content": read_sampled, "tool_calls": _read_calls, "refusal": read_string}
        | dict.fromkeys(("reasoning_content", "reasoning"), read_string),
        neutral={"audio": (), "function_call": ()},
        harmless=_OF_ROLE | {"annotations", "parsed", "provider_specific_fields"},
    ),
    "tool": Table(_SAID | {"tool_call_id": read_string}, harmless=_OF_ROLE),
}
"""Role of a message in chat completions -> its keys."""


@dataclass(frozen=True, slots=True)
class Given:
    """A message as it was given."""

    place: str
    message: ChatMessage
    ids: tuple[str | None, ...] = ()
    """Identifiers of the message's calls, or of the call that it is the result of."""


def read_message(place: str, given: Any) -> Given:
    """Read a message in the form of chat completions. Raises RequestError."""
    role, read = read_kind(place, given, MESSAGES, key="role")
    content, name = read.get("content", ""), read.get("name", "")
    if role == "tool":
        return Given(place, ChatMessage(role, content, name=name), (read.get("tool_call_id"),))
    if role != "assistant":
        role = "system" if role == "developer" else role
        return Given(place, ChatMessage(role, content, name=name))
    calls = read.get("tool_calls", [])
    # Clients fill the key that they do not use with an empty text.
    thoughts = [read[key] for key in ("reasoning_content", "reasoning") if key in read]
    message = assistant_message(
        content + read.get("refusal", ""),
        [ToolCall(c["function"]["name"], c["function"].get("arguments", "{}")) for c in calls],
        max(thoughts, key=bool, default=None),
        place=place,
        name=name,
    )
    return Given(place, message, tuple(call.get("id") for call in calls))


def paired(
    found: Sequence[Given], *, directly: bool = True, is_whole: bool = True
) -> tuple[ChatMessage, ...]:
    """Return messages with the results of tools in the order of their calls, behind them. Results
    of calls without identifiers have none and come in this order.

    `directly`: results must follow their calls at once; `is_whole`: no call was made before the
    first message. Raises RequestError for a call without a result and a result without a call.
    """
    messages: list[ChatMessage] = []
    waiting: dict[int, tuple[str | None, str]] = {}  # place of a result -> call that it is of

    def check_answered() -> None:
        for name, place in waiting.values():
            raise RequestError(
                f"{place} calls a tool{'' if name is None else f' ({name:.60})'} whose result does"
                " not follow; each call must have one result, under its id",
                param=place,
            )

    for given in found:
        if given.message.role == "tool" and (is_whole or waiting):
            slot = next((slot for slot, (name, _) in waiting.items() if (name,) == given.ids), None)
            if slot is None:
                raise RequestError(
                    f"{given.place} must be the result of a call before it that has none yet, and"
                    f" its id is {given.ids[0]!r:.60}; send each result once, under its call's id",
                    param=given.place,
                )
            messages[slot] = given.message
            del waiting[slot]
            continue
        if directly:
            check_answered()
        messages.append(given.message)
        if given.message.role == "assistant":
            for name in given.ids:
                waiting[len(messages)] = (name, given.place)
                messages.append(given.message)  # until its result comes
    check_answered()
    return tuple(messages)


def read_messages(name: str, value: Any) -> tuple[ChatMessage, ...]:
    """Read a list of messages in the form of chat completions; see `paired`."""
    given = enumerate(read_list(name, value))
    found = [read_message(f"{name}[{number}]", message) for number, message in given]
    return paired(found)


def as_texts(messages: Sequence[ChatMessage]) -> Iterator[Message]:
    """Yield messages with their thoughts and calls as text."""
    for each in messages:
        yield Message(each.role, _thought(each) + each.content, each.name, _calls(each))


def written(message: ChatMessage) -> str:
    """Return the thought, the content and the calls of a message as an answer writes them."""
    said = filter(None, [message.content, _calls(message)])
    return _thought(message) + "\n".join(said)


def _thought(message: ChatMessage) -> str:
    return f"<think>\n{message.thought}\n</think>\n\n" if message.thought else ""


def _calls(message: ChatMessage) -> str:
    calls = [HERMES.write(call.name, call.arguments or "{}") for call in message.tool_calls]
    return "\n".join(calls)
