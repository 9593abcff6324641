"""OpenAI's responses: an answer is a list of items, which are a thought, a text and calls of tools.

Reference: https://platform.openai.com/docs/api-reference/responses
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ragen_mega.agents.call_tree import Answer, ChatMessage, RequestError, ToolCall
from ragen_mega.agents.chat_completions import HARMLESS, TOOL_CHOICES, error_body
from ragen_mega.agents.protocol import (
    COUNT,
    FLAG,
    SAMPLING,
    TEXT,
    ChatRequest,
    Interface,
    Reader,
    Reply,
    answer_message,
    call_id,
    read_list,
    read_parameters,
    read_text,
    tools_reader,
    typed_event,
)

_ROLES = {"developer": "system"} | {name: name for name in ("system", "user", "assistant")}
_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}
"""Kind of an item of the assistant -> its place in an answer."""
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
    read = read_parameters(
        given,
        _READERS,
        required=("model", "input"),
        neutral=_NEUTRAL,
        harmless=HARMLESS | {"stream_options"},
    )
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
    """Return the messages of a text or of items; those of one answer are one message."""
    if isinstance(value, str):
        return (ChatMessage("user", read_text(name, value)),)
    messages: list[ChatMessage] = []
    last = -1  # order of the last item, if it is the assistant's
    for place, item in enumerate(read_list(name, value)):
        message = _item(f"{name}[{place}]", item)
        if message.role != "assistant":
            messages.append(message)
            last = -1
            continue
        order = _ORDER[item.get("type", "message")]
        if -1 < last < order or last == order == _ORDER["function_call"]:
            earlier = messages.pop()
            calls = earlier.tool_calls + message.tool_calls
            message = ChatMessage("assistant", earlier.content + message.content, calls)
        messages.append(message)
        last = order
    return tuple(messages)


def _item(place: str, item: Any) -> ChatMessage:
    given = item if isinstance(item, dict) else {}
    match given.get("type", "message"):
        case "message" if given.get("role") in [*_ROLES]:
            content = read_text(f"{place}.content", given.get("content"))
            return ChatMessage(_ROLES[given["role"]], content)
        case "reasoning":
            return answer_message("", thought=read_text(f"{place}.content", given.get("content")))
        case "function_call":
            name, arguments = given.get("name"), given.get("arguments")
            if isinstance(name, str) and isinstance(arguments, str):
                return answer_message("", [ToolCall(name, arguments)])
        case "function_call_output":
            return ChatMessage("tool", read_text(f"{place}.output", given.get("output")))
    raise RequestError(
        f"{place} must be a message of {', '.join(_ROLES)}, a reasoning, a function_call with name"
        f" and arguments or a function_call_output, not {item!r:.80}",
        param=place,
    )


_READERS: Mapping[str, Reader] = {
    "model": TEXT,
    "input": _input,
    "instructions": read_text,
    "tools": tools_reader("function", "parameters", "a function"),
    "max_output_tokens": COUNT,
    "stream": FLAG,
    "conversation": _stateless,
    "previous_response_id": _stateless,
    **SAMPLING,
}
"""Parameter -> reader of its value."""


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
        empty = {"arguments": ""} if "arguments" in item else {"content": []}
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
            more = {"logprobs": []} if part["type"] == "output_text" else {}
            yield {"type": "response.content_part.added", "part": part | {"text": ""}} | at_part
            yield {"type": f"{kind}.delta", "delta": part["text"]} | at_part | more
            yield {"type": f"{kind}.done", "text": part["text"]} | at_part | more
            yield {"type": "response.content_part.done", "part": part} | at_part
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


RESPONSES = Interface("responses", _read, _body, _events, error_body)
