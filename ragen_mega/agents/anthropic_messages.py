"""Anthropic's messages: a content is a list of blocks, which are thoughts, texts, uses of tools and
their results.

Reference: https://docs.anthropic.com/en/api/messages
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragen_mega.agents.protocol import (
    COUNT,
    FLAG,
    SAMPLING,
    ChatRequest,
    Interface,
    Reply,
    call_id,
    read_stops,
    tools_reader,
    typed_event,
)
from ragen_mega.environments.messages import (
    PARTS,
    ChatMessage,
    Given,
    Reader,
    RequestError,
    Table,
    ToolCall,
    assistant_message,
    kind,
    paired,
    read_arguments,
    read_kind,
    read_list,
    read_object,
    read_string,
    read_text,
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
    500: "api_error",
}
"""Status -> type of an error, where it is no invalid request."""
_SIGNATURE = "unsigned"
"""Signature of every thought; clients take a thought without one for a text of the user."""


def _read(
    given: Mapping[str, Any], required: Sequence[str] = ("model", "messages", "max_tokens")
) -> ChatRequest:
    read = replace(PARAMETERS, required=required).read("", given)
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


_CONTENT = frozenset({"role", "content"})
MESSAGES_OF = dict.fromkeys(("user", "assistant", "system"), Table({}, _CONTENT, harmless=_CONTENT))
"""Role of a message -> its keys; contents are read apart, for a turn may be several messages."""
_TEXT = {"text": PARTS["text"]}
_BESIDE = frozenset({"type", "cache_control"})
ANSWER_BLOCKS = _TEXT | {
    "thinking": Table({"thinking": read_string}, ("thinking",), harmless={"type", "signature"}),
    "tool_use": Table(
        {"id": read_string, "name": read_string, "input": read_object},
        ("id", "name", "input"),
        neutral={"caller": ({"type": "direct"},), "toolset_name": ()},
        harmless=_BESIDE,
    ),
}
"""Type of a block of an answer -> its keys."""
TURN_BLOCKS = _TEXT | {
    "tool_result": Table(
        {"tool_use_id": read_string, "content": read_text, "is_error": kind(bool, "true or false")},
        ("tool_use_id",),
        neutral={"toolset_name": ()},
        harmless=_BESIDE,
    ),
}
"""Type of a block of the user's turn -> its keys."""
TOOLS = {
    "custom": Table(
        dict.fromkeys(("name", "description"), read_string) | {"input_schema": read_object},
        ("name",),
        neutral={
            "allowed_callers": (["direct"],),
            "defer_loading": (False,),
            "input_examples": ([],),
        },
        harmless=_BESIDE | {"eager_input_streaming", "strict"},
    )
}
"""Type of a tool -> its keys."""


def _messages(name: str, value: Any) -> tuple[ChatMessage, ...]:
    found: list[Given] = []
    for number, message in enumerate(read_list(name, value)):
        place = f"{name}[{number}]"
        role, _ = read_kind(place, message, MESSAGES_OF, key="role")
        content, place = message["content"], f"{place}.content"
        if not isinstance(content, list):
            found.append(Given(place, ChatMessage(role, read_text(place, content))))
        elif role == "assistant":
            found.append(_answer(place, content))
        else:
            found += _turn(role, place, content)
    return paired(found)


def _answer(place: str, blocks: list[Any]) -> Given:
    """Return the message of an answer, which the blocks are sent back of."""
    thoughts, texts, calls, ids = [], [], [], []
    for number, block in enumerate(blocks):
        _, read = read_kind(f"{place}[{number}]", block, ANSWER_BLOCKS)
        texts.append(read.get("text", ""))
        thoughts += [read["thinking"]] if "thinking" in read else []
        if "id" in read:
            calls.append(ToolCall(read["name"], read_arguments(place, read["input"])))
            ids.append(read["id"])
    thought = "".join(thoughts) if thoughts else None
    message = assistant_message("".join(texts), calls, thought, place=place)
    return Given(place, message, tuple(ids))


def _turn(role: str, place: str, blocks: list[Any]) -> list[Given]:
    """Return the messages of a turn: each result of a tool, and texts between them as one."""
    found: list[Given] = []
    for number, block in enumerate(blocks):
        at = f"{place}[{number}]"
        kind, read = read_kind(at, block, TURN_BLOCKS if role == "user" else _TEXT)
        if kind == "tool_result":
            text = read.get("content", "")
            if read.get("is_error") and not text.lower().startswith("error"):
                text = f"Error: {text}"
            found.append(Given(at, ChatMessage("tool", text), (read["tool_use_id"],)))
            continue
        text = read["text"]
        if found and found[-1].message.role == role:
            text = f"{found.pop().message.content}\n{text}"
        found.append(Given(at, ChatMessage(role, text)))
    return found


_READERS: Mapping[str, Reader] = {
    "model": read_string,
    "messages": _messages,
    "system": read_text,
    "tools": tools_reader(TOOLS, "input_schema", default="custom"),
    "stop_sequences": read_stops,
    "max_tokens": COUNT,
    "stream": FLAG,
    **SAMPLING,
}
"""Parameter -> reader of its value."""
PARAMETERS = Table(_READERS, (), _NEUTRAL, _HARMLESS)


def _error(refused: RequestError) -> dict[str, Any]:
    kind = _ERRORS.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def _body(reply: Reply) -> dict[str, Any]:
    name, (answer,) = call_id(reply.call.index, reply.numbers[0]), reply.answers
    blocks: list[dict[str, Any]] = []
    if answer.thought:
        blocks.append({"type": "thinking", "thinking": answer.thought, "signature": _SIGNATURE})
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
        empty, *deltas = _pieces(block)
        at = {"index": index}
        yield typed_event({"type": "content_block_start", "content_block": empty} | at)
        for delta in deltas:
            yield typed_event({"type": "content_block_delta", "delta": delta} | at)
        yield typed_event({"type": "content_block_stop"} | at)
    yield typed_event({"type": "message_delta", "delta": end, "usage": whole["usage"]})
    yield typed_event({"type": "message_stop"})


def _pieces(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a block as it begins, and then all that it gains."""
    if block["type"] == "tool_use":
        yield {**block, "input": {}}
        yield {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return
    texts = [key for key in (block["type"], "signature") if key in block]
    yield {**block} | dict.fromkeys(texts, "")
    for key in texts:
        yield {"type": f"{key}_delta", key: block[key]}


def _count(reply: Reply) -> dict[str, Any]:
    return {"input_tokens": reply.num_prompt}


MESSAGES = Interface("messages", _read, _body, _events, _error)
COUNT_TOKENS = Interface("messages/count_tokens", _read_count, _count, _events, _error)
