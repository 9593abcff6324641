"""Anthropic's messages: a content is a list of blocks, which are thoughts, texts, uses of tools and
their results.

Reference: https://docs.anthropic.com/en/api/messages
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragen_mega.agents.call_tree import ChatMessage, RequestError, ToolCall
from ragen_mega.agents.protocol import (
    COUNT,
    FLAG,
    SAMPLING,
    TEXT,
    ChatRequest,
    Interface,
    Reader,
    Refused,
    Reply,
    answer_message,
    call_id,
    read_list,
    read_parameters,
    read_stops,
    read_text,
    tools_reader,
    typed_event,
)

_HARMLESS = frozenset({"cache_control", "inference_geo", "metadata", "service_tier", "speed"})
"""Parameters that change no sample."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "thinking": ({"type": "adaptive"},),  # the model decides
    # A call cannot be forced on a policy; an answer without one reaches the agent as text.
    "tool_choice": tuple(
        {"type": name} | more
        for more in ({}, {"disable_parallel_tool_use": False})
        for name in ("auto", "any", "none")
    ),
}
"""Parameters of which only these values can be kept."""
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
"""Status -> type of an error, where it is no invalid request."""


def _read(
    given: Mapping[str, Any], required: Sequence[str] = ("model", "messages", "max_tokens")
) -> ChatRequest:
    read = read_parameters(given, _READERS, required=required, neutral=_NEUTRAL, harmless=_HARMLESS)
    system = [ChatMessage("system", read["system"])] if "system" in read else []
    has_tools = given.get("tool_choice", {}).get("type") != "none"
    return ChatRequest(
        role=read["model"],
        messages=(*system, *read["messages"]),
        tools=read.get("tools", ()) if has_tools else (),
        stop_texts=read.get("stop_sequences", ()),
        max_tokens=read.get("max_tokens"),
        temperature=read.get("temperature"),
        top_p=read.get("top_p"),
        is_streamed=read.get("stream", False),
    )


def _read_count(given: Mapping[str, Any]) -> ChatRequest:
    return replace(_read(given, ("model", "messages")), num_answers=0, is_streamed=False)


def _messages(name: str, value: Any) -> tuple[ChatMessage, ...]:
    found: list[ChatMessage] = []
    for number, message in enumerate(read_list(name, value)):
        place = f"{name}[{number}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise RequestError(
                f"{place} must be a message of user, assistant or system, not {message!r:.80}",
                param=place,
            )
        content = message.get("content")
        if not isinstance(content, list):
            found.append(ChatMessage(role, read_text(f"{place}.content", content)))
        elif role == "assistant":
            found.append(_answer(f"{place}.content", content))
        else:
            found += _turn(role, f"{place}.content", content)
    return tuple(found)


def _answer(place: str, blocks: list[Any]) -> ChatMessage:
    """Return the message of an answer, which the blocks are sent back of."""
    thought, text, calls = "", "", []
    for number, block in enumerate(blocks):
        match block:
            case {"type": "thinking", "thinking": str(said)}:
                thought += said
            case {"type": "text"}:
                text += read_text(f"{place}[{number}]", [block])
            case {"type": "tool_use", "name": str(name), "input": dict(arguments)}:
                calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
            case _:
                raise _unknown(f"{place}[{number}]", "text, thinking and tool_use", block)
    return answer_message(text, calls, thought=thought)


def _turn(role: str, place: str, blocks: list[Any]) -> list[ChatMessage]:
    """Return the messages of a turn: each result of a tool, and texts between them as one."""
    found: list[ChatMessage] = []
    for number, block in enumerate(blocks):
        match block:
            case {"type": "tool_result"} if role == "user":
                result = read_text(f"{place}[{number}].content", block.get("content"))
                found.append(ChatMessage("tool", result))
            case {"type": "text"}:
                text = read_text(f"{place}[{number}]", [block])
                if found and found[-1].role == role:
                    text = found.pop().content + text
                found.append(ChatMessage(role, text))
            case _:
                raise _unknown(f"{place}[{number}]", "text and tool_result", block)
    return found


def _unknown(place: str, kinds: str, block: Any) -> RequestError:
    return RequestError(f"{place} must be a block of {kinds}, not {block!r:.80}", param=place)


_READERS: Mapping[str, Reader] = {
    "model": TEXT,
    "messages": _messages,
    "system": read_text,
    "tools": tools_reader("custom", "input_schema", "a tool of the agent", default="custom"),
    "stop_sequences": read_stops,
    "max_tokens": COUNT,
    "stream": FLAG,
    **SAMPLING,
}
"""Parameter -> reader of its value."""


def _error(refused: Refused) -> dict[str, Any]:
    kind = _ERRORS.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def _body(reply: Reply) -> dict[str, Any]:
    name, (answer,) = call_id(reply.call.index, reply.numbers[0]), reply.answers
    blocks: list[dict[str, Any]] = []
    if answer.thought:
        blocks.append({"type": "thinking", "thinking": answer.thought, "signature": ""})
    if answer.content or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.content})
    for place, call in enumerate(answer.tool_calls):
        used = {"name": call.name, "input": json.loads(call.arguments)}
        blocks.append({"type": "tool_use", "id": f"{name}-{place}"} | used)
    stop = "end_turn" if answer.stopped_by is None else "stop_sequence"
    if answer.completion.finish_reason == "length":
        stop = "max_tokens"
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": reply.request.role,
        "content": blocks,
        "stop_reason": "tool_use" if answer.tool_calls else stop,
        "stop_sequence": answer.stopped_by,
        "usage": {"input_tokens": reply.num_prompt, "output_tokens": reply.num_sampled},
    }


def _events(reply: Reply) -> Iterator[str]:
    whole = _body(reply)
    end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    usage = whole["usage"] | {"output_tokens": 0}
    begun = whole | {"content": [], "usage": usage} | dict.fromkeys(end)
    yield typed_event({"type": "message_start", "message": begun})
    for index, block in enumerate(whole["content"]):
        empty, delta = _pieces(block)
        at = {"index": index}
        yield typed_event({"type": "content_block_start", "content_block": empty} | at)
        yield typed_event({"type": "content_block_delta", "delta": delta} | at)
        yield typed_event({"type": "content_block_stop"} | at)
    yield typed_event({"type": "message_delta", "delta": end, "usage": whole["usage"]})
    yield typed_event({"type": "message_stop"})


def _pieces(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a block as it begins, and all that it gains."""
    if block["type"] == "tool_use":
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return {**block, "input": {}}, delta
    name = block["type"]  # also the key of its text
    return {**block, name: ""}, {"type": f"{name}_delta", name: block[name]}


def _count(reply: Reply) -> dict[str, Any]:
    return {"input_tokens": reply.num_prompt}


MESSAGES = Interface("messages", _read, _body, _events, _error)
COUNT_TOKENS = Interface("messages/count_tokens", _read_count, _count, _events, _error)
