"""The interfaces of the door, with the real clients of OpenAI and Anthropic: the same conversation
has the same tokens in each interface.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import anthropic
import openai
import pytest

from ragen_mega.agents.anthropic_messages import MESSAGES
from ragen_mega.agents.call_tree import RequestError
from ragen_mega.agents.chat_completions import CHAT_COMPLETIONS
from ragen_mega.agents.protocol import Interface
from ragen_mega.agents.responses import RESPONSES
from ragen_mega.data.types import Trajectory
from ragen_mega.environments.episode import ERROR
from tests.support.door import TOOLS, TalkingEngine, ask, play, sampled

FUNCTION = TOOLS[0]["function"]
FLAT_TOOLS = [{"type": "function", "strict": False, **FUNCTION}]
ANTHROPIC_TOOLS = [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}]
CALLS = "".join(
    f'\n<tool_call>\n{{"name": "add", "arguments": {{"b": {b}, "a": "\u00e4"}}}}\n</tool_call>'
    for b in (1, 2)
)
SAYINGS = [f"<think>\nwhy\n</think>\n\nsure{CALLS}", CALLS[1:], "<think>\n\n</think>\n\ndone"]
"""Answers of the policy: a thought, a text and calls; calls alone; a text alone."""


def say(text: str) -> str:
    return SAYINGS[text.count("<|im_start|>assistant") - 1]


def by_chat(base_url: str, api_key: str, streams: bool) -> None:
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Add."},
        ]
        for number in range(2):
            said = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = said.choices[0].message
            messages += [
                message,
                *(
                    {"role": "tool", "tool_call_id": call.id, "content": str(number)}
                    for call in message.tool_calls
                ),
            ]
        client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)


def by_responses(base_url: str, api_key: str, streams: bool) -> None:
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        items: list[Any] = [{"role": "user", "content": "Add."}]

        def answer() -> Any:
            given = {"model": "policy", "input": items, "instructions": "Be brief."}
            if not streams:
                return client.responses.create(**given, tools=FLAT_TOOLS)
            with client.responses.stream(**given, tools=FLAT_TOOLS) as events:
                deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
                final = events.get_final_response()
            assert "".join(deltas) == final.output_text
            return final

        for number in range(2):
            response = answer()
            assert response.status == "completed"
            items += response.output
            for call in response.output:
                if call.type == "function_call":
                    assert json.loads(call.arguments)["a"] == "\u00e4"
                    result = {"type": "function_call_output", "call_id": call.call_id}
                    items.append(result | {"output": str(number)})
        kinds = [item.type for item in items if not isinstance(item, dict)]
        assert kinds == ["reasoning", "message", *["function_call"] * 4]
        last = answer()
        assert last.output_text == "done" and len(last.output) == 1
        assert last.usage.output_tokens > len("done") and last.tools[0].name == "add"


def by_messages(base_url: str, api_key: str, streams: bool) -> None:
    base_url = base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": "Add."}]

        def answer() -> Any:
            given = {"model": "policy", "system": "Be brief.", "max_tokens": 400}
            given |= {"messages": messages, "tools": ANTHROPIC_TOOLS}
            if not streams:
                return client.messages.create(**given)
            with client.messages.stream(**given) as events:
                text = "".join(events.text_stream)
                final = events.get_final_message()
            assert text == "".join(block.text for block in final.content if block.type == "text")
            return final

        def is_signed(block: Any) -> bool:
            return block.type != "thinking" or bool(block.signature)

        kinds = []
        for number in range(2):
            message = answer()
            assert message.stop_reason == "tool_use"
            kinds += [block.type for block in message.content]
            assert all(map(is_signed, message.content)), "clients drop others"
            used = [block for block in message.content if block.type == "tool_use"]
            assert [block.input for block in used] == [{"b": b, "a": "\u00e4"} for b in (1, 2)]
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(number)}
                for block in used
            ]
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": results},
            ]
        assert kinds == ["thinking", "text", *["tool_use"] * 4]
        last = answer()
        assert [block.text for block in last.content] == ["done"]
        assert last.stop_reason == "end_turn" and last.usage.output_tokens > len("done")


def played(talk: Callable[..., None], **settings: Any) -> Trajectory:
    """The trajectory of an agent that ends well."""

    def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
        talk(base_url, api_key)
        return 1.0

    (trajectory,) = play(run, **{"say": say} | settings)
    assert ERROR not in trajectory.turns[-1].info, trajectory.turns[-1].info
    return trajectory


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("converse", [by_responses, by_messages])
def test_a_conversation_has_the_tokens_that_it_has_by_chat_completions(converse, streams):
    """It also stays in one segment: what a client sends back of an answer is found in the tree."""
    trajectory = played(lambda *where: converse(*where, streams))
    assert trajectory.breaks == [] and sampled(trajectory) == SAYINGS
    by_hand = played(lambda *where: by_chat(*where, streams))
    assert trajectory.tokens == by_hand.tokens
    assert trajectory.loss_mask == by_hand.loss_mask


def test_texts_of_an_agent_are_messages():
    """Answers that were not sampled, and contents in parts, as one interface and the other has
    them.
    """
    texts = ["Hel\nlo.", "<think>\nhm\n</think>\n\nHi.", "Go on."]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hel\nlo."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]},
        {"role": "user", "content": "Go on."},
    ]
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Hi."},
    ]
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}],
        },
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "Go on."},
    ]

    def talk(base_url: str, api_key: str) -> None:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            ask(client, *texts)
            client.responses.create(model="policy", input=items)
        with anthropic.Anthropic(base_url=base_url[:-3], auth_token=api_key) as client:
            client.messages.create(model="policy", max_tokens=9, messages=messages)

    engine = TalkingEngine(lambda text: "yes")
    trajectory = played(talk, engine=engine)
    (first, _), *others = engine.asked
    assert [tokens for tokens, _ in others] == [first] * 2
    assert len(trajectory.turns) == 3  # samples of one call


def test_limits_of_an_answer_are_kept_and_told():
    seen = []

    def talk(base_url: str, api_key: str) -> None:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            seen.append(client.responses.create(model="policy", input="go", max_output_tokens=4))
            with client.responses.stream(model="policy", input="go", max_output_tokens=5) as events:
                seen.append(list(events)[-1].response)
        with anthropic.Anthropic(base_url=base_url[:-3], api_key=api_key) as client:
            given = {"model": "policy", "messages": [{"role": "user", "content": "go"}]}
            seen.append(client.messages.count_tokens(**given))
            for limits in ({"max_tokens": 4}, {"max_tokens": 99, "stop_sequences": ["x", " END"]}):
                seen.append(client.messages.create(**given, **limits))

    engine = TalkingEngine(lambda text: "before END after")
    trajectory = played(talk, engine=engine)
    short, streamed, count, cut, stopped = seen
    for response, size in ((short, 4), (streamed, 5)):
        assert response.status == "incomplete" and response.output_text == "before END after"[:size]
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.output_tokens == size
    assert count.input_tokens == len(engine.asked[0][0]) == cut.usage.input_tokens
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("max_tokens", None, "befo")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " END")
    assert stopped.content[0].text == "before" and len(trajectory.turns) == 4


@pytest.mark.parametrize(
    ("parameters", "code", "named"),
    [
        ({"previous_response_id": "call-0-0"}, "unsupported_parameter", "previous_response_id"),
        ({"conversation": "mine"}, "unsupported_parameter", "conversation"),
        ({"reasoning": {"effort": "low"}}, "unsupported_value", "reasoning"),
        ({"text": {"format": {"type": "json_object"}}}, "unsupported_value", "text"),
        ({"truncation": "auto"}, "unsupported_value", "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "unsupported_value", "include"),
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "invalid_value", "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "invalid_value",
            "input[0].content[0]",
        ),
        ({"input": "x" * 5000}, "context_length_exceeded", "messages"),
    ],
)
def test_a_response_that_cannot_be_kept_is_refused(parameters, code, named):
    errors = []

    def talk(base_url: str, api_key: str) -> None:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(**{"model": "policy", "input": "hello"} | parameters)
            errors.append(caught.value)
            assert client.responses.create(model="policy", input="still").output_text == "yes"

    played(talk, say=lambda text: "yes")
    (error,) = errors
    assert (error.code, error.param) == (code, named)
    assert "\n" not in error.body["message"] and len(error.body["message"]) < 300


@pytest.mark.parametrize(
    ("parameters", "kind", "named"),
    [
        ({"top_k": 3}, "invalid_request_error", "top_k"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            "invalid_request_error",
            "thinking",
        ),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "invalid_request_error", "tool_choice"),
        ({"tools": [{"type": "web_search_20250305"}]}, "invalid_request_error", "tools[0]"),
        ({"max_tokens": None}, "invalid_request_error", "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "invalid_request_error",
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
            "invalid_request_error",
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": "I"}]},
            "invalid_request_error",
            "assistant",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 5000}]},
            "invalid_request_error",
            "context",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 10_000_000}]},
            "request_too_large",
            "bytes",
        ),
        ({"key": "wrong"}, "authentication_error", "key"),
    ],
)
def test_a_message_that_cannot_be_kept_is_refused(parameters, kind, named):
    errors = []

    def talk(base_url: str, api_key: str) -> None:
        parameters_left = dict(parameters)
        key = parameters_left.pop("key", api_key)
        where = {"base_url": base_url[:-3], "max_retries": 0}
        given = {
            "model": "policy",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "hi"}],
        }
        with anthropic.Anthropic(api_key=key, **where) as client:
            with pytest.raises(anthropic.APIStatusError) as caught:
                client.post("/v1/messages", body=given | parameters_left, cast_to=object)
            errors.append(caught.value)
        with anthropic.Anthropic(api_key=api_key, **where) as client:
            assert client.messages.create(**given).content[0].text == "yes"

    played(talk, say=lambda text: "yes")
    (error,) = errors
    assert error.body["type"] == "error" and error.type == error.body["error"]["type"] == kind
    assert named in error.body["error"]["message"] and "\n" not in error.body["error"]["message"]


COMMON = {"model": "policy", "stream": True, "temperature": 1.0, "tool_choice": "auto"}
FULL: list[tuple[Interface, dict[str, Any]]] = [
    (
        CHAT_COMPLETIONS,
        COMMON
        | {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "2"},
            ],
            "tools": TOOLS,
            "stop": ["x"],
            "n": 2,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        RESPONSES,
        COMMON
        | {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "2"},
            ],
            "tools": FLAT_TOOLS,
            "instructions": "Be brief.",
            "max_output_tokens": 9,
        },
    ),
    (
        MESSAGES,
        COMMON
        | {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "tool_use", "id": "1", "name": "add", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}],
                },
            ],
            "system": [{"type": "text", "text": "Be brief."}],
            "tools": ANTHROPIC_TOOLS,
            "tool_choice": {"type": "auto"},
            "stop_sequences": ["x"],
            "max_tokens": 9,
        },
    ),
]


def variants(value: Any) -> Iterator[Any]:
    """Yield a JSON value with one of its parts replaced by one of another kind, or left out."""
    yield from (None, True, 1, -1.5, "\ud800", [], [1], ["x"], {}, {"type": ["x"]}, {"role": {}})
    if not isinstance(value, (dict, list)):
        return
    for key in value if isinstance(value, dict) else range(len(value)):
        rest = value.copy()
        for part in variants(value[key]):
            rest[key] = part
            yield rest
        del rest[key]
        yield rest


@pytest.mark.parametrize(("interface", "full"), FULL, ids=[one.path for one, _ in FULL])
def test_no_body_is_too_odd_to_be_read_or_refused(interface, full):
    request = interface.read(full)
    roles = [message.role for message in request.messages if message.role != "system"]
    assert roles == ["user", "assistant", "tool"] and request.tools and request.is_streamed
    count = 0
    for body in variants(full):
        count += 1
        if isinstance(body, dict):
            with suppress(RequestError):
                interface.read({name: value for name, value in body.items() if value is not None})
    assert count > 300
