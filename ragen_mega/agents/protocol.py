"""OpenAI's chat completions as JSON. A request is kept to the letter or refused in one sentence.

Reference: https://platform.openai.com/docs/api-reference/chat
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from ragen_mega.agents.call_tree import Answer, Call, ChatMessage, RequestError, ToolCall

_MOST_ANSWERS = 128
_MOST_STOPS = 16
_ROLES = {"developer": "system"} | {name: name for name in ("system", "user", "assistant", "tool")}
_HARMLESS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Parameters that change no sample."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    # A call cannot be forced on a policy; an answer without one reaches the agent as text.
    "tool_choice": ("auto", "required", "none"),
}
"""Parameters of which only these values can be kept."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request to /v1/chat/completions; a field is None where the request does not say."""

    role: str
    """Name of the model."""
    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...]
    num_answers: int = 1
    stop_texts: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    wants_logprobs: bool = False
    is_streamed: bool = False
    wants_usage: bool = False


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
    connection: Connection
    reply: Future[dict[str, Any]]


def read_request(body: bytes) -> ChatRequest:
    """Read the body of a request. Raises RequestError for one that cannot be kept."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body must be JSON ({error})", param="") from None
    if not isinstance(given, dict):
        raise RequestError("the body must be a JSON object", param="")
    given = {name: value for name, value in given.items() if value is not None}
    for name in given.keys() - _HARMLESS - _NEUTRAL.keys() - _READERS.keys():
        raise RequestError(
            f"{name} is not supported, for the trainer could not keep it; leave it out",
            code="unsupported_parameter",
            param=name,
        )
    for name, values in _NEUTRAL.items():
        if name in given and given[name] not in values:
            raise RequestError(
                f"{name} must be {' or '.join(map(json.dumps, values))}, not"
                f" {given[name]!r:.60}, which the trainer could not keep; leave it out",
                code="unsupported_value",
                param=name,
            )
    read = {name: _READERS[name](name, given[name]) for name in _READERS.keys() & given.keys()}
    for name in ("model", "messages"):
        if name not in read:
            raise RequestError(f"{name} is missing", code="missing_required_parameter", param=name)
    tools = () if given.get("tool_choice") == "none" else read.get("tools", ())
    return ChatRequest(
        role=read["model"],
        messages=read["messages"],
        tools=tools,
        num_answers=read.get("n", 1),
        stop_texts=read.get("stop", ()),
        max_tokens=read.get("max_completion_tokens", read.get("max_tokens")),
        temperature=read.get("temperature"),
        top_p=read.get("top_p"),
        seed=read.get("seed"),
        wants_logprobs=read.get("logprobs", False),
        is_streamed=read.get("stream", False),
        wants_usage=read.get("stream_options", False),
    )


def _number(low: float, high: float, kind: type) -> Callable[[str, Any], Any]:
    words = {int: "a whole number", float: "a number"}[kind]

    def read(name: str, value: Any) -> Any:
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            to = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
            raise RequestError(f"{name} must be {words} {to}, not {value!r:.60}", param=name)
        return value

    return read


def _kind(kind: type, words: str) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise RequestError(f"{name} must be {words}, not {value!r:.60}", param=name)
        return value

    return read


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        raise RequestError(f"stop must be a text or at most {_MOST_STOPS} texts", param=name)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError(f"{name} must hold texts that are not empty", param=name)
    return tuple(stops)


def _usage(name: str, value: Any) -> bool:
    return bool(_kind(dict, "an object")(name, value).get("include_usage"))


def _tools(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    for number, tool in enumerate(_kind(list, "a list")(name, value)):
        function = tool.get("function") if isinstance(tool, dict) else None
        is_function = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not is_function or tool.get("type") != "function":
            raise RequestError(
                f"tools[{number}] must be a function with a name, not {tool!r:.80}",
                param=f"tools[{number}]",
            )
    return tuple(value)


def _messages(name: str, value: Any) -> tuple[ChatMessage, ...]:
    messages = _kind(list, "a list")(name, value)
    return tuple(_message(f"{name}[{number}]", each) for number, each in enumerate(messages))


def _message(place: str, message: Any) -> ChatMessage:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise RequestError(
            f"{place} must be a message with one of the roles {', '.join(_ROLES)}, not"
            f" {message!r:.80}",
            param=place,
        )
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RequestError(f"{place}.tool_calls must be a list", param=f"{place}.tool_calls")
    return ChatMessage(
        _ROLES[message["role"]],
        _content(f"{place}.content", message.get("content")),
        tuple(_tool_call(f"{place}.tool_calls[{i}]", call) for i, call in enumerate(calls)),
    )


def _content(place: str, content: Any) -> str:
    """Return the text of a content, which is a text, nothing, or a list of parts."""
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


def _tool_call(place: str, call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    named = function if isinstance(function, dict) else {}
    name, arguments = named.get("name"), named.get("arguments", "{}")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise RequestError(
            f"{place} must have a function with a name and arguments as JSON text, not"
            f" {call!r:.80}",
            param=place,
        )
    return ToolCall(name, arguments)


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "model": _kind(str, "a text"),
    "messages": _messages,
    "tools": _tools,
    "n": _number(1, _MOST_ANSWERS, int),
    "stop": _stop,
    "max_tokens": _number(1, math.inf, int),
    "max_completion_tokens": _number(1, math.inf, int),
    "temperature": _number(0, 2, float),
    "top_p": _number(2**-20, 1, float),
    "seed": _number(-(2**63), 2**63 - 1, int),
    "logprobs": _kind(bool, "true or false"),
    "stream": _kind(bool, "true or false"),
    "stream_options": _usage,
}
"""Parameter -> reader of its value."""


def error_body(message: str, *, code: str, param: str = "", kind: str = "") -> dict[str, Any]:
    """Return an error as OpenAI's clients expect it."""
    error = {"message": message, "type": kind or "invalid_request_error", "code": code}
    return {"error": error | {"param": param or None}}


def models_body(roles: Sequence[str]) -> dict[str, Any]:
    """Return the list of models, of which each is a role."""
    entry = {"object": "model", "created": 0, "owned_by": "ragen-mega"}
    return {"object": "list", "data": [{"id": role} | entry for role in roles]}


def reply_body(
    request: ChatRequest, call: Call, numbers: Sequence[int], decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """Return the reply to a request: the answers with these numbers of its call. `decode` gives the
    text of tokens, for their log-probabilities.
    """
    answers = [call.answers[number] for number in numbers]
    num_prompt = len(call.tokens)
    num_sampled = sum(len(answer.completion.tokens) for answer in answers)
    return {
        "id": call_id(call.index, numbers[0]),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.role,
        "choices": [
            {
                "index": index,
                "message": _reply_message(call_id(call.index, number), answer),
                "logprobs": _logprobs(answer, decode) if request.wants_logprobs else None,
                "finish_reason": "tool_calls"
                if answer.tool_calls
                else {"length": "length"}.get(answer.completion.finish_reason, "stop"),
            }
            for index, (number, answer) in enumerate(zip(numbers, answers, strict=True))
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
    }


def call_id(index: int, number: int) -> str:
    """Return the `id` of a reply: call `index` of the episode, from its answer `number` on."""
    return f"call-{index}-{number}"


def index_of(name: object) -> int:
    """Return the index of a call for its index or the `id` of its reply. Raises ValueError."""
    text = str(name)
    return int(text.split("-")[1] if text.startswith("call-") else text)


def _reply_message(name: str, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.thought is not None:
        message["reasoning_content"] = answer.thought
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": f"{name}-{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(answer.tool_calls)
        ]
    return message


def _logprobs(answer: Answer, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """Return the log-probability of every sampled token, its end of turn included."""
    completion = answer.completion
    rows = zip(map(decode, ([token] for token in completion.tokens)), completion.logprobs)
    return {
        "content": [
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for text, logprob in rows
        ],
        "refusal": None,
    }


def stream_events(reply: Mapping[str, Any], *, wants_usage: bool) -> Iterator[str]:
    """Yield a reply as server-sent events. An engine answers as a whole, so that each choice has
    one piece of text.
    """
    common = {name: reply[name] for name in ("id", "created", "model")}
    common |= {"object": "chat.completion.chunk"} | ({"usage": None} if wants_usage else {})

    def event(**changes: Any) -> str:
        return f"data: {json.dumps(common | changes)}\n\n"

    for choice in reply["choices"]:
        message = dict(choice["message"])
        calls = message.get("tool_calls", ())
        if calls:
            message["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        piece = {"index": choice["index"], "logprobs": choice["logprobs"], "finish_reason": None}
        yield event(choices=[piece | {"delta": message}])
        last = {"logprobs": None, "finish_reason": choice["finish_reason"], "delta": {}}
        yield event(choices=[piece | last])
    if wants_usage:
        yield event(choices=[], usage=reply["usage"])
    yield "data: [DONE]\n\n"
