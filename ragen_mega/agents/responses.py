"""OpenAI's responses: an answer is a list of items, which are a thought, a text and calls of tools.

Reference: https://platform.openai.com/docs/api-reference/responses
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ragen_mega.agents.call_tree import Answer
from ragen_mega.agents.chat_completions import HARMLESS, TOOL_CHOICES, error_body
from ragen_mega.agents.protocol import (
    COUNT,
    FLAG,
    SAMPLING,
    ChatRequest,
    Interface,
    Reply,
    call_id,
    tools_reader,
    typed_event,
)
from ragen_mega.environments.messages import (
    ChatMessage,
    Given,
    Reader,
    RequestError,
    Table,
    ToolCall,
    assistant_message,
    paired,
    read_arguments,
    read_kind,
    read_list,
    read_object,
    read_sampled,
    read_string,
    read_text,
    read_texts,
)

_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}
"""Kind of an item of the assistant -> its place in an answer."""
_OF_ITEM = frozenset({"id", "type", "status", "phase"})
_NOT_OURS: dict[str, tuple[Any, ...]] = {
    "caller": ({"type": "direct"},),
    "namespace": (),
    "async": (False,),
}
ITEMS = {
    "message": Table({"role": read_string, "content": read_texts}, ("content",), harmless=_OF_ITEM),
    "reasoning": Table(
        {"content": read_sampled, "summary": read_sampled},
        neutral={"encrypted_content": ()},
        harmless=_OF_ITEM,
    ),
    "function_call": Table(
        {"call_id": read_string, "name": read_string, "arguments": read_arguments},
        ("call_id", "name", "arguments"),
        neutral=_NOT_OURS,
        harmless=_OF_ITEM | {"parsed_arguments"},
    ),
    "function_call_output": Table(
        {"call_id": read_string, "output": read_text, "name": read_string},
        ("call_id", "output"),
        neutral=_NOT_OURS,
        harmless=_OF_ITEM,
    ),
}
"""Type of an item -> its keys."""
ROLES = {"developer": "system"} | {name: name for name in ("system", "user", "assistant")}
TOOLS = {
    "function": Table(
        dict.fromkeys(("name", "description"), read_string) | {"parameters": read_object},
        ("name",),
        neutral={
            "allowed_callers": (["direct"],),
            "defer_loading": (False,),
            "output_schema": (),
            "async": (False,),
        },
        harmless=frozenset({"type", "strict"}),
    )
}
"""Type of a tool -> its keys."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),  # a thought comes in the clear
    "parallel_tool_calls": (True,),
    "reasoning": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": TOOL_CHOICES,
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Parameters of which only these values can be kept."""


def _read(given: Mapping[str, Any]) -> ChatRequest:
    read = PARAMETERS.read("", given)
    instructions = read.get("instructions")
    system = [] if instructions is None else [ChatMessage("system", instructions)]
    return ChatRequest(
        role=read["model"],
        messages=(*system, *read["input"]),
        tools=() if given.get("tool_choice") == "none" else read.get("tools", ()),
        max_tokens=read.get("max_output_tokens"),
        temperature=read.get("temperature"),
        top_p=read.get("top_p"),
        is_streamed=read.get("stream", False),
    )


def _stateless(name: str, value: Any) -> None:
    raise RequestError(
        f"{name} is not supported, for a request must hold its whole conversation; send all items"
        " as input",
        code="unsupported_parameter",
        param=name,
    )


def _input(name: str, value: Any) -> tuple[ChatMessage, ...]:
    """Return the messages of a text or of items; the items of one answer are one message."""
    if isinstance(value, str):
        return (ChatMessage("user", read_string(name, value)),)
    found: list[Given] = []
    last = -1  # order of the last item, if it is the assistant's
    for number, item in enumerate(read_list(name, value)):
        kind, given = _item(f"{name}[{number}]", item)
        if given.message.role != "assistant":
            found.append(given)
            last = -1
            continue
        order = _ORDER[kind]
        if -1 < last < order or last == order == _ORDER["function_call"]:
            given = _joined(found.pop(), given)
        found.append(given)
        last = order
    return paired(found, directly=False)


def _joined(before: Given, given: Given) -> Given:
    """Return two items of one answer as one message."""
    first, then = before.message, given.message
    calls = first.tool_calls + then.tool_calls
    content, place = first.content + then.content, before.place
    message = assistant_message(content, calls, first.thought, place=place)
    return Given(before.place, message, before.ids + given.ids)


def _item(place: str, item: Any) -> tuple[str, Given]:
    kind, read = read_kind(place, item, ITEMS, default="message")
    ids: tuple[str, ...] = (read["call_id"],) if "call_id" in read else ()
    match kind:
        case "reasoning":
            thought = read.get("content") or read.get("summary", "")
            message = ChatMessage("assistant", "", thought=thought)
        case "function_call":
            call = ToolCall(read["name"], read["arguments"])
            message = ChatMessage("assistant", "", (call,))
        case "function_call_output":
            message = ChatMessage("tool", read["output"], name=read.get("name", ""))
        case _:
            if (role := ROLES.get(read.get("role", ""))) is None:
                raise RequestError(
                    f"{place} must be a message of {', '.join(ROLES)}, not {item!r:.80}",
                    param=place,
                )
            between = "" if role == "assistant" else "\n"  # see `read_text`
            message = ChatMessage(role, between.join(read["content"]))
    return kind, Given(place, message, ids)


_READERS: Mapping[str, Reader] = {
    "model": read_string,
    "input": _input,
    "instructions": read_text,
    "tools": tools_reader(TOOLS, "parameters"),
    "max_output_tokens": COUNT,
    "stream": FLAG,
    "conversation": _stateless,
    "previous_response_id": _stateless,
    **SAMPLING,
}
"""Parameter -> reader of its value."""
PARAMETERS = Table(_READERS, ("model", "input"), _NEUTRAL, HARMLESS | {"stream_options"})


def _body(reply: Reply) -> dict[str, Any]:
    name, (answer,) = call_id(reply.call.index, reply.numbers[0]), reply.answers
    is_whole = answer.completion.finish_reason != "length"
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "model": reply.request.role,
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "error": None,
        "output": _items(name, answer, "completed" if is_whole else "incomplete"),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [
            {"type": "function", "parameters": None, "strict": False} | tool["function"]
            for tool in reply.request.tools
        ],
        "usage": {
            "input_tokens": reply.num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.num_prompt + reply.num_sampled,
        },
    }


def _items(name: str, answer: Answer, status: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.thought:
        thought = {"type": "reasoning_text", "text": answer.thought}
        items.append({"type": "reasoning", "summary": [], "content": [thought]})
    if answer.content or not answer.tool_calls:
        text = {"type": "output_text", "text": answer.content, "annotations": []}
        items.append({"type": "message", "role": "assistant", "status": status, "content": [text]})
    for place, call in enumerate(answer.tool_calls):
        named = {"call_id": f"{name}-{place}", "name": call.name, "arguments": call.arguments}
        items.append({"type": "function_call", "status": status} | named)
    return [{"id": f"item-{name}-{place}"} | item for place, item in enumerate(items)]


def _events(reply: Reply) -> Iterator[str]:
    for number, event in enumerate(_event_bodies(_body(reply))):
        yield typed_event(event | {"sequence_number": number})


def _event_bodies(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = whole | {"status": "in_progress", "incomplete_details": None, "output": []}
    begun["usage"] = None
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        empty: dict[str, Any] = {"arguments": ""} if "arguments" in item else {"content": []}
        added = item | {"status": "in_progress"} | empty
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        if "arguments" in item:
            kind = "response.function_call_arguments"
            yield {"type": f"{kind}.delta", "delta": item["arguments"]} | at
            yield {
                "type": f"{kind}.done",
                "arguments": item["arguments"],
                "name": item["name"],
            } | at
        for place, part in enumerate(item.get("content", ())):
            at_part = at | {"content_index": place}
            kind = f"response.{part['type']}"
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield {"type": "response.content_part.added", "part": part | {"text": ""}} | at_part
            yield {"type": f"{kind}.delta", "delta": part["text"]} | at_part | more
            yield {"type": f"{kind}.done", "text": part["text"]} | at_part | more
            yield {"type": "response.content_part.done", "part": part} | at_part
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


RESPONSES = Interface("responses", _read, _body, _events, error_body)
