"""OpenAI's chat completions.

Reference: https://platform.openai.com/docs/api-reference/chat
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ragen_mega.agents.call_tree import Answer
from ragen_mega.agents.protocol import (
    COUNT,
    FLAG,
    SAMPLING,
    ChatRequest,
    Interface,
    Reply,
    call_id,
    number,
    read_stops,
    tools_reader,
)
from ragen_mega.environments.messages import (
    Reader,
    RequestError,
    Table,
    read_messages,
    read_object,
    read_string,
)

_MOST_ANSWERS = 128
HARMLESS = frozenset(
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
"""Parameters of OpenAI's that change no sample."""
TOOL_CHOICES = ("auto", "required", "none")
"""Choices of tools that are kept: a call cannot be forced on a policy; an answer without one
reaches the agent as text.
"""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "tool_choice": TOOL_CHOICES,
}
"""Parameters of which only these values can be kept."""


def _read(given: Mapping[str, Any]) -> ChatRequest:
    read = PARAMETERS.read("", given)
    return ChatRequest(
        role=read["model"],
        messages=read["messages"],
        tools=() if given.get("tool_choice") == "none" else read.get("tools", ()),
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


def _usage(name: str, value: Any) -> bool:
    return bool(read_object(name, value).get("include_usage"))


FUNCTION = Table(
    dict.fromkeys(("name", "description"), read_string)
    | dict.fromkeys(("parameters", "return"), read_object),
    ("name",),
    harmless=frozenset({"strict"}),  # a call cannot be forced on a policy
)
TOOLS = {"function": Table({"function": FUNCTION.read}, ("function",), harmless={"type"})}
"""Type of a tool -> its keys."""
_READERS: Mapping[str, Reader] = {
    "model": read_string,
    "messages": read_messages,
    "tools": tools_reader(TOOLS, "parameters"),
    "n": number(1, _MOST_ANSWERS, int),
    "stop": read_stops,
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "seed": number(-(2**63), 2**63 - 1, int),
    "logprobs": FLAG,
    "stream": FLAG,
    "stream_options": _usage,
    **SAMPLING,
}
"""Parameter -> reader of its value."""
PARAMETERS = Table(_READERS, ("model", "messages"), _NEUTRAL, HARMLESS)


def error_body(refused: RequestError) -> dict[str, Any]:
    """Return an error as OpenAI's clients expect it."""
    error = {"message": str(refused), "type": refused.kind, "code": refused.code}
    return {"error": error | {"param": refused.param or None}}


def models_body(roles: Sequence[str]) -> dict[str, Any]:
    """Return the list of models, of which each is a role."""
    entry = {"object": "model", "created": 0, "owned_by": "ragen-mega"}
    return {"object": "list", "data": [{"id": role} | entry for role in roles]}


def _body(reply: Reply) -> dict[str, Any]:
    index = reply.call.index
    texts_of: Sequence[Sequence[str] | None] = reply.token_texts or [None] * len(reply.numbers)
    rows = zip(reply.numbers, reply.answers, texts_of)
    return {
        "id": call_id(index, reply.numbers[0]),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": reply.request.role,
        "choices": [
            {
                "index": place,
                "message": _reply_message(call_id(index, number), answer),
                "logprobs": None if texts is None else _logprobs(answer, texts),
                "finish_reason": "tool_calls"
                if answer.tool_calls
                else {"length": "length"}.get(answer.completion.finish_reason, "stop"),
            }
            for place, (number, answer, texts) in enumerate(rows)
        ],
        "usage": {
            "prompt_tokens": reply.num_prompt,
            "completion_tokens": reply.num_sampled,
            "total_tokens": reply.num_prompt + reply.num_sampled,
        },
    }


def _reply_message(name: str, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.thought is not None:
        message["reasoning_content"] = answer.thought
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": f"{name}-{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(answer.tool_calls)
        ]
    return message


def _logprobs(answer: Answer, texts: Sequence[str]) -> dict[str, Any]:
    """Return the log-probability of every sampled token, its end of turn included."""
    return {
        "content": [
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for text, logprob in zip(texts, answer.completion.logprobs, strict=True)
        ],
        "refusal": None,
    }


def _events(reply: Reply) -> Iterator[str]:
    """Yield a reply as server-sent events. A choice begins with its role and thought; then come its
    content and each of its calls alone, for clients read one call of an event, and none beside a
    content.
    """
    whole, wants_usage = _body(reply), reply.request.wants_usage
    common = {name: whole[name] for name in ("id", "created", "model")}
    common |= {"object": "chat.completion.chunk"} | ({"usage": None} if wants_usage else {})

    def event(**changes: Any) -> str:
        return f"data: {json.dumps(common | changes)}\n\n"

    for choice in whole["choices"]:
        begun = dict(choice["message"])
        calls = begun.pop("tool_calls", ())
        content = begun["content"]
        texts = [] if content is None else [{"content": content}]
        begun["content"] = None if content is None else ""
        deltas = [*texts, *({"tool_calls": [{"index": i} | call]} for i, call in enumerate(calls))]
        piece = {"index": choice["index"], "logprobs": None, "finish_reason": None}
        yield event(choices=[piece | {"delta": begun}])
        for place, delta in enumerate(deltas):
            # The log-probabilities belong to the whole answer, and come once.
            is_theirs = place == (0 if texts else len(deltas) - 1)
            more = {"logprobs": choice["logprobs"]} if is_theirs else {}
            yield event(choices=[piece | more | {"delta": delta}])
        yield event(choices=[piece | {"finish_reason": choice["finish_reason"], "delta": {}}])
    if wants_usage:
        yield event(choices=[], usage=whole["usage"])
    yield "data: [DONE]\n\n"


CHAT_COMPLETIONS = Interface("chat/completions", _read, _body, _events, error_body)
