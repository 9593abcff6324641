"""What a request says is kept, harmless or refused: the tables of the interfaces against the types
of OpenAI's and Anthropic's clients, and results of tools against their calls.
"""

import itertools
import json
import typing
import warnings
from typing import Any, get_args, get_origin, get_type_hints

import anthropic
import anthropic.types as claude
import openai
import pytest
from openai.types import responses
from openai.types.chat import (
    ChatCompletionContentPartParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionMessageParam,
)
from openai.types.responses import (
    ResponseFunctionToolCallParam,
    ResponseInputItemParam,
    ResponseOutputMessageParam,
)
from openai.types.shared_params import FunctionDefinition

from ragen_mega.agents import anthropic_messages, chat_completions
from ragen_mega.agents import responses as responses_interface
from ragen_mega.agents.call_tree import CALL
from ragen_mega.agents.chat_completions import CHAT_COMPLETIONS
from ragen_mega.agents.protocol import read_body
from ragen_mega.agents.responses import RESPONSES
from ragen_mega.environments import calls, messages
from ragen_mega.environments.adapters.tasks import FileTasks
from ragen_mega.environments.episode import ERROR
from ragen_mega.environments.examples import read_conversations
from ragen_mega.environments.messages import ChatMessage, RequestError, Table, ToolCall
from tests.support.door import TOOLS, TalkingEngine, play, sampled


def members(union: Any) -> list[Any]:
    """The types that a union consists of, in any depth."""
    found = get_args(union) if get_origin(union) is typing.Union else ()
    return [each for part in found for each in members(part)] or [union]


def kind_of(type_: Any, key: str) -> Any:
    """The literal value of a key of a TypedDict; None if it has no such key."""
    hint = get_type_hints(type_).get(key)
    while hint is not None and get_origin(hint) is not typing.Literal:
        hint = next((part for part in get_args(hint) if part is not type(None)), None)
    return get_args(hint)[0] if hint is not None else None


def keys_of(table: Table) -> set[str]:
    return {*table.readers, *table.neutral, *table.harmless}


UNIONS: list[tuple[Any, str, dict[str, Table], set[str]]] = [
    (ChatCompletionMessageParam, "role", messages.MESSAGES, {"function"}),
    (
        ChatCompletionContentPartParam,
        "type",
        messages.PARTS,
        {"image_url", "input_audio", "file"},
    ),
    (
        ResponseInputItemParam,
        "type",
        responses_interface.ITEMS,
        {
            *("computer_call computer_call_output file_search_call web_search_call").split(),
            *("tool_search_call tool_search_output additional_tools configuration_update").split(),
            *("compaction compaction_trigger image_generation_call code_interpreter_call").split(),
            *("local_shell_call local_shell_call_output shell_call shell_call_output").split(),
            *("apply_patch_call apply_patch_call_output mcp_list_tools mcp_call").split(),
            *("mcp_approval_request mcp_approval_response item_reference program").split(),
            *("program_output custom_tool_call custom_tool_call_output").split(),
        },
    ),
    (
        claude.ContentBlockParam,
        "type",
        anthropic_messages.ANSWER_BLOCKS | anthropic_messages.TURN_BLOCKS,
        {
            *("image document search_result redacted_thinking server_tool_use").split(),
            *("web_search_tool_result web_fetch_tool_result code_execution_tool_result").split(),
            *("bash_code_execution_tool_result container_upload").split(),
            *("text_editor_code_execution_tool_result tool_search_tool_result").split(),
        },
    ),
    (claude.MessageParam, "role", anthropic_messages.MESSAGES_OF, set()),
]


@pytest.mark.parametrize(("union", "key", "tables", "refused"), UNIONS, ids=lambda each: "")
def test_every_key_of_the_clients_is_in_a_table(union, key, tables, refused):
    """A kind that is refused as a whole is named here, so that a new one is noticed."""
    seen = set()
    for type_ in members(union):
        kind = kind_of(type_, key)
        seen.add(kind)
        if kind in tables:
            assert {*get_type_hints(type_)} - keys_of(tables[kind]) <= set(), (kind, type_)
    assert seen - {*tables} == refused
    assert seen & {*tables}


@pytest.mark.parametrize(
    ("type_", "table"),
    [
        (ChatCompletionMessageFunctionToolCallParam, messages.CALL),
        (openai.types.chat.ChatCompletionMessageCustomToolCallParam, messages.CALL),
        (FunctionDefinition, chat_completions.FUNCTION),
        (ChatCompletionFunctionToolParam, chat_completions.TOOLS["function"]),
        (responses.FunctionToolParam, responses_interface.TOOLS["function"]),
        (ResponseFunctionToolCallParam, responses_interface.ITEMS["function_call"]),
        (ResponseOutputMessageParam, responses_interface.ITEMS["message"]),
        (responses.ResponseOutputTextParam, messages.PARTS["output_text"]),
        (responses.ResponseOutputRefusalParam, messages.PARTS["refusal"]),
        (responses.ResponseInputTextParam, messages.PARTS["input_text"]),
        (claude.ToolParam, anthropic_messages.TOOLS["custom"]),
        (claude.TextBlockParam, messages.PARTS["text"]),
        (openai.types.chat.ChatCompletionMessage, messages.MESSAGES["assistant"]),
        (openai.types.chat.ParsedChatCompletionMessage, messages.MESSAGES["assistant"]),
        (openai.types.chat.ParsedFunction, messages.FUNCTION),
        (responses.ParsedResponseOutputText, messages.PARTS["output_text"]),
        (responses.ParsedResponseFunctionToolCall, responses_interface.ITEMS["function_call"]),
        (claude.ToolUseBlock, anthropic_messages.ANSWER_BLOCKS["tool_use"]),
        (claude.ThinkingBlock, anthropic_messages.ANSWER_BLOCKS["thinking"]),
        (claude.TextBlock, anthropic_messages.ANSWER_BLOCKS["text"]),
    ],
)
def test_every_key_of_a_part_is_in_its_table(type_, table):
    """Also of what clients get, which agents send back as it is."""
    fields = getattr(type_, "model_fields", None)
    names = [field.alias or name for name, field in fields.items()] if fields else []
    assert {*(names or get_type_hints(type_))} - keys_of(table) == set()


@pytest.mark.parametrize(
    ("type_", "interface"),
    [
        (openai.types.chat.completion_create_params.CompletionCreateParamsBase, chat_completions),
        (responses.response_create_params.ResponseCreateParamsBase, responses_interface),
        (claude.message_create_params.MessageCreateParamsBase, anthropic_messages),
    ],
)
def test_parameters_are_in_a_table_or_refused(type_, interface):
    for name in {*get_type_hints(type_)} - keys_of(interface.PARAMETERS):
        with pytest.raises(RequestError, match=f"^{name} is not supported"):
            interface.PARAMETERS.read("", {name: {"odd": 1}})


def call(name: str | None, number: int = 0) -> dict[str, Any]:
    given = {"type": "function", "function": {"name": "f", "arguments": f'{{"n": {number}}}'}}
    return given if name is None else given | {"id": name}


def result(name: str | None, text: str) -> dict[str, Any]:
    given = {"role": "tool", "content": text}
    return given if name is None else given | {"tool_call_id": name}


USER = {"role": "user", "content": "go"}


def chat(*rest: dict[str, Any]) -> tuple[ChatMessage, ...]:
    given = {"model": "m", "messages": [USER, *rest]}
    return CHAT_COMPLETIONS.read(given).messages


def test_results_come_in_the_order_of_their_calls():
    names = ["b", "a", "c"]
    asked = {"role": "assistant", "tool_calls": [call(name) for name in names]}
    for order in itertools.permutations(names):
        read = chat(asked, *(result(name, name * 2) for name in order), USER)
        assert [message.content for message in read] == ["go", "", "bb", "aa", "cc", "go"]
    reused = chat(asked, *map(result, names, "xyz"), asked, *map(result, names[::-1], "zyx"))
    assert [m.content for m in reused if m.role == "tool"] == [*"xyzxyz"], "ids come again"
    unnamed = {"role": "assistant", "tool_calls": [call(None), call(None, 1)]}
    assert [m.content for m in chat(unnamed, result(None, "x"), result(None, "y"))][2:] == [
        "x",
        "y",
    ]
    items = [
        {"role": "user", "content": "go"},
        *({"type": "function_call", "call_id": n, "name": "f", "arguments": "{}"} for n in names),
        {"role": "user", "content": "wait"},
        *({"type": "function_call_output", "call_id": n, "output": n} for n in "cab"),
    ]
    read = RESPONSES.read({"model": "m", "input": items}).messages
    assert [message.content for message in read] == ["go", "", "b", "a", "c", "wait"]
    blocks = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in names]
    results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in "cab"]
    turns = [
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [*results, {"type": "text", "text": "on"}]},
    ]
    read = anthropic_messages.MESSAGES.read({"model": "m", "max_tokens": 1, "messages": turns})
    assert [message.content for message in read.messages] == ["", "b", "a", "c", "on"]


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ([result("x", "?")], "must be the result of a call before it"),
        ([{"role": "assistant", "tool_calls": [call("a")]}, USER], "result does not follow"),
        ([{"role": "assistant", "tool_calls": [call("a")]}], r"\(a\) whose result"),
        ([{"role": "assistant", "tool_calls": [call("a")]}, result("b", "")], "its id is 'b'"),
        ([{"role": "assistant", "tool_calls": [call("a")]}, result(None, "")], "its id is None"),
        (
            [{"role": "assistant", "tool_calls": [call("a")]}, result("a", ""), result("a", "")],
            r"messages\[3\] must be the result",
        ),
        (
            [{"role": "assistant", "tool_calls": [call("a"), call("b")]}, result("a", ""), USER],
            r"\(b\) whose result",
        ),
    ],
)
def test_calls_and_results_that_do_not_match_are_refused(rest, said):
    with pytest.raises(RequestError, match=said) as caught:
        chat(*rest)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("extra", "kept"),
    [
        ({"name": "bob"}, True),
        ({"refusal": " no"}, True),
        ({"reasoning_content": "why"}, True),
        ({"reasoning": "why"}, True),
        ({"annotations": [{"type": "url_citation"}], "audio": None, "function_call": None}, False),
        ({"parsed": {"x": 1}, "provider_specific_fields": {}}, False),
        ({"audio": {"id": "x"}}, None),
        ({"function_call": {"name": "f", "arguments": "{}"}}, None),
        ({"mood": "good"}, None),
        ({"mood": None}, False),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, None),
        ({"content": [{"type": "text", "text": "hi", "mood": 1}]}, None),
        ({"content": [{"type": "text", "text": "hi", "cache_control": {}}]}, False),
        ({"content": [{"type": "text", "text": "h"}, {"type": "refusal", "refusal": "i"}]}, False),
        ({"tool_calls": [{"type": "custom", "id": "a", "custom": {"name": "f"}}]}, None),
        ({"tool_calls": [call("a") | {"mood": 1}]}, None),
        ({"reasoning_content": "b", "content": "<think>a</think>hi"}, None),
    ],
)
def test_a_key_changes_the_message_or_nothing_or_is_refused(extra, kept):
    plain = {"role": "assistant", "content": "hi"}
    if kept is None:
        with pytest.raises(RequestError, match=r"messages\[1\]"):
            chat(plain | extra, USER)
    else:
        assert (chat(plain | extra, USER) != chat(plain, USER)) == kept


@pytest.mark.parametrize("beside", [{"reasoning_content": "a"}, {"reasoning_content": ""}])
def test_a_thought_beside_a_content_that_has_it_is_one(beside):
    twice = {"role": "assistant", "content": "<think>\na\n</think>\n\nhi"} | beside
    (message,) = messages.read_messages("m", [twice])
    assert messages.written(message).count("<think>") == 1
    (message,) = messages.read_messages("m", [beside | {"role": "assistant", "reasoning": "a"}])
    assert message.thought == "a"


def test_parts_are_lines_and_those_of_an_answer_are_one_text():
    """Results of MCP are a part for each value, and clients merge messages of the user."""

    def parts(kind: str = "text") -> list[dict[str, Any]]:
        return [{"type": kind, "text": text} for text in ("3", "4 pieces")]

    lines, joined = "3\n4 pieces", "34 pieces"
    told = [{"role": role, "content": parts()} for role in ("developer", "system", "user")]
    asked = {"role": "assistant", "content": parts(), "tool_calls": [call("a")]}
    read = chat(*told, asked, result("a", parts()))
    assert [message.content for message in read] == ["go", *[lines] * 3, joined, lines]
    items = [
        {"role": "user", "content": parts("input_text")},
        {"role": "assistant", "content": parts("output_text")},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": parts("input_text")},
    ]
    read = RESPONSES.read({"model": "m", "input": items}).messages
    assert [message.content for message in read] == [lines, joined, lines]
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    of_tool = {"type": "tool_result", "tool_use_id": "a", "content": parts()}
    turns = [
        {"role": "user", "content": parts()},
        {"role": "assistant", "content": [*parts(), used]},
        {"role": "user", "content": [of_tool, *parts()]},
    ]
    given = {"model": "m", "max_tokens": 1, "messages": turns, "system": parts()}
    read = anthropic_messages.MESSAGES.read(given).messages
    assert [message.content for message in read] == [lines, lines, joined, lines, lines]


def test_strict_schemas_have_the_same_prompt_in_each_interface():
    function = {"name": "f", "description": "F.", "parameters": {"type": "object"}}
    strict = function | {"strict": True}
    tools = [
        CHAT_COMPLETIONS.read(
            {"model": "m", "messages": [USER], "tools": [{"type": "function", "function": strict}]}
        ).tools,
        RESPONSES.read(
            {"model": "m", "input": "go", "tools": [{"type": "function"} | strict]}
        ).tools,
        anthropic_messages.MESSAGES.read(
            {
                "model": "m",
                "messages": [USER],
                "max_tokens": 1,
                "tools": [
                    {"name": "f", "description": "F.", "input_schema": {"type": "object"}}
                    | {"strict": True, "cache_control": {"type": "ephemeral"}}
                ],
            }
        ).tools,
    ]
    assert tools == [({"type": "function", "function": function},)] * 3


def test_an_error_of_a_tool_is_told():
    def said(**more: Any) -> str:
        block = {"type": "tool_result", "tool_use_id": "a", "content": "no file"} | more
        used = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
        turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [block]}]
        given = {"model": "m", "max_tokens": 1, "messages": turns}
        return anthropic_messages.MESSAGES.read(given).messages[-1].content

    assert said() == said(is_error=False) == "no file"
    assert said(is_error=True) == "Error: no file"
    assert said(is_error=True, content="Error: no file") == "Error: no file"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"model": "\\ud83d"}', "valid Unicode"),
        ('{"messages": [{"content": "\\uD83D x"}]}', "valid Unicode"),
        ('{"temperature": NaN}', "NaN is no JSON"),
        ('{"seed": ' + "1" * 5000 + "}", "must be JSON"),
        ('{"a": ' + "[" * 900 + "]" * 900 + "}", "nested"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "a JSON object"),
    ],
)
def test_a_body_that_no_prompt_can_hold_is_refused(body, said):
    with pytest.raises(RequestError, match=said) as caught:
        read_body(body.encode())
    assert len(str(caught.value)) < 200
    assert read_body(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


THOUGHTS = ["because", "", "therefore"]


@pytest.mark.parametrize(
    ("thought", "thoughts"), [*((each, THOUGHTS) for each in THOUGHTS), ("", THOUGHTS[:1])]
)
@pytest.mark.parametrize("by", ["reasoning_content", "reasoning", "responses", "claude", "content"])
def test_a_thought_that_is_sent_back_chooses_the_sample(thought, thoughts, by):
    """Of three samples with the same content, in each interface. An empty thought that was not
    sampled is one that was not sent back.
    """
    answers = iter([f"<think>\n{each}\n</think>\n\nyes" for each in thoughts] + ["end"])

    def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in thoughts:
                client.chat.completions.create(model="policy", messages=[USER])
            said: dict[str, Any] = {"role": "assistant", "content": "yes"}
            if by in ("reasoning_content", "reasoning"):
                history = [USER, said | {by: thought}, USER]
                client.chat.completions.create(model="policy", messages=history)
            elif by == "content":
                text = f"<think>\n{thought}\n</think>\n\nyes"
                history = [USER, said | {"content": text}, USER]
                client.chat.completions.create(model="policy", messages=history)
            elif by == "responses":
                content = [{"type": "reasoning_text", "text": thought}]
                item = {"type": "reasoning", "id": "x", "summary": [], "content": content}
                client.responses.create(model="policy", input=[USER, item, said, USER])
        if by == "claude":
            with anthropic_client(base_url, api_key) as claude_client:
                blocks = [
                    {"type": "thinking", "thinking": thought, "signature": "of another"},
                    {"type": "text", "text": "yes"},
                ]
                history = [USER, {"role": "assistant", "content": blocks}, USER]
                claude_client.messages.create(model="policy", max_tokens=9, messages=history)
        return 1.0

    engine = TalkingEngine(lambda text: next(answers))
    (trajectory,) = play(run, engine=engine)
    assert ERROR not in trajectory.turns[-1].info, trajectory.turns[-1].info
    (last,) = [turn for turn in trajectory.turns if turn.info[CALL]["index"] == 1]
    assert last.info[CALL]["parent"] == [0, thoughts.index(thought) if thought in thoughts else 0]


def anthropic_client(base_url: str, api_key: str) -> Any:
    return anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)


HALF = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d"}}\n</tool_call>'


def test_half_a_character_in_a_call_is_text_that_costs_the_policy():
    """In each interface, and streamed."""
    seen: list[Any] = []

    def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            said = client.chat.completions.create(model="policy", messages=[USER], tools=TOOLS)
            seen.append(said.choices[0].message.content)
            flat = [{"type": "function", "strict": False, **TOOLS[0]["function"]}]
            seen.append(client.responses.create(model="policy", input="go", tools=flat).output_text)
        with anthropic_client(base_url, api_key) as client:
            tools = [{"name": "add", "input_schema": {"type": "object"}}]
            given = {"model": "policy", "max_tokens": 300, "messages": [USER], "tools": tools}
            seen.append(client.messages.create(**given).content[0].text)
            with client.messages.stream(**given) as events:
                seen.append("".join(events.text_stream))
        return 1.0

    (trajectory,) = play(run, lambda text: HALF)
    assert ERROR not in trajectory.turns[-1].info, trajectory.turns[-1].info
    assert seen == [HALF] * 4 and set(sampled(trajectory)) == {HALF}
    assert not any(turn.info["is_format_valid"] for turn in trajectory.turns)


@pytest.mark.parametrize("at", ["chat", "claude"])
def test_an_error_of_ours_has_the_form_of_the_interface(at, monkeypatch):
    def fail(*given: Any) -> Any:
        raise ZeroDivisionError("a bug \ud83d")

    where = chat_completions if at == "chat" else anthropic_messages
    monkeypatch.setattr(where, "call_id", fail)
    errors: list[Any] = []

    def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
        if at == "chat":
            with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                with pytest.raises(openai.InternalServerError) as caught:
                    client.chat.completions.create(model="policy", messages=[USER])
        else:
            with anthropic_client(base_url, api_key).with_options(max_retries=0) as client:
                with pytest.raises(anthropic.InternalServerError) as caught:
                    client.messages.create(model="policy", max_tokens=9, messages=[USER])
        errors.append(caught.value)
        return 1.0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        play(run)
    (error,) = errors
    assert error.status_code == 500 and "ZeroDivisionError: a bug" in str(error.body)
    if at == "claude":
        assert error.body["type"] == "error" and error.body["error"]["type"] == "api_error"
    else:
        assert error.code == "internal_error" and error.body["type"] == "server_error"


def test_worlds_and_files_write_calls_as_chat_completions_has_them(tmp_path):
    asked = {"role": "assistant", "content": None, "tool_calls": [call("b", 1), call("a", 2)]}
    given = [USER, asked, result("a", "two"), result("b", "one")]

    class World:
        def reset(self, seed):
            return given

        def step(self, action):
            return [{"role": "tool", "content": "x", "tool_call_id": "of the policy"}], 0.0, True

    told = calls.reset(World(), 0)
    assert [message.content for message in told] == ["go", "", "one", "two"]
    arguments = [f'{{"name": "f", "arguments": {{"n": {n}}}}}' for n in (1, 2)]
    block = "<tool_call>\n{}\n</tool_call>".format
    assert told[1].calls == "\n".join(map(block, arguments))
    rows = [{"prompt": [*given, {"role": "user", "content": f"{n}"}], "answer": 1} for n in "ab"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = FileTasks(str(file), validation=str(file))
    assert task.reset(0)[:4] == told
    file.write_text(json.dumps({"messages": [*given, {"role": "assistant", "content": "ok"}]}))
    ((*conversation, last),) = read_conversations(file)
    assert tuple(conversation) == told and last.content == "ok"
    bad = [given[0], asked, result("a", "two")]
    file.write_text(json.dumps({"messages": [*bad, {"role": "assistant", "content": "ok"}]}))
    with pytest.raises(ValueError, match=r"line 1: messages\[1\] calls a tool \(b\) whose result"):
        read_conversations(file)
    with pytest.raises(ValueError, match="mood is not supported"):
        calls.reset(type("Odd", (World,), {"reset": lambda s, seed: [USER | {"mood": 1}]})(), 0)


def test_a_call_is_read_in_the_forms_that_data_sets_have():
    for given in (
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": "\u00e9"}}},
        {"function": {"name": "f", "arguments": '{"x": "\u00e9"}'}},
        {"name": "f", "arguments": {"x": "\u00e9"}},
    ):
        message = messages.read_message("m", {"role": "assistant", "tool_calls": [given]}).message
        assert message.tool_calls == (ToolCall("f", '{"x": "\u00e9"}'),)
