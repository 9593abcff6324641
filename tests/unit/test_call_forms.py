"""Calls of tools in the forms of published chat templates: what is read and written is what the
template itself renders.
"""

import copy
import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ragen_mega.agents.call_tree import CallTree, ChatMessage, ToolCall
from ragen_mega.data.types import Completion
from ragen_mega.environments.episode import Episode, EpisodeConfig, quote
from ragen_mega.environments.messages import RequestError
from ragen_mega.environments.protocol import Message
from ragen_mega.environments.tool_calls import CALL_FORMAT, HERMES, CallForm
from ragen_mega.rollout.renderer import ChatRenderer
from tests.support.published_tokenizers import small_qwen3, small_smollm2

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "deep": {"type": "object"}},
        },
    },
}
ARGUMENTS = {"place": 'a "box" \u4f60', "deep": {"n": [1, {"x": None}]}}
CHAT = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + tools|tojson + '<|im_end|>' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.tool_calls %}CALLS{%- else %}{{- m.content }}{%- endif %}"
    "{{- '<|im_end|>' }}{%- endfor %}{{- '<|im_start|>assistant\\n' }}"
)
# The lines that write calls come from the published templates.
LLAMA = (
    "{%- if not m.tool_calls|length == 1 %}"
    '{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}'
    "{%- set tool_call = m.tool_calls[0].function %}"
    "{{- '{\"name\": \"' + tool_call.name + '\", ' }}"
    '{{- \'"parameters": \' }}{{- tool_call.arguments | tojson }}{{- "}" }}'
)
NEMOTRON = (
    "{{- '<TOOLCALL>[' }}{%- for t in m.tool_calls %}"
    '{{- \'{"name": "\' + t.function.name + \'", "arguments": \' }}'
    "{{- t.function.arguments | tojson + '}' }}{{- ', ' if not loop.last else '' }}{%- endfor %}"
    "{{- ']</TOOLCALL>' }}"
)
COMMAND_R = (
    "{{- 'Action: ```json\\n[\\n' }}{%- for t in m.tool_calls %}"
    '{{- \'    {\\n        "tool_name": "\' + t.function.name }}'
    "{{- '\",\\n        \"parameters\": ' + t.function.arguments|tojson + '\\n    }' }}"
    "{{- ',\\n' if not loop.last else '' }}{%- endfor %}{{- '\\n]```' }}"
)
HERMES_2 = (
    '{%- for t in m.tool_calls %}{{- \'<tool_call>\\n{"name": "\' + t.function.name }}'
    "{{- '\", \"arguments\": ' + t.function.arguments|tojson + '}\\n</tool_call>' }}"
    "{{- '\\n' if not loop.last else '' }}{%- endfor %}"
)
MISTRAL = (
    "{{- '[TOOL_CALLS][' }}{%- for t in m.tool_calls %}"
    "{{- t.function|tojson|replace('}', '') + ', \"id\": \"' + t.id + '\"}' }}{%- endfor %}"
    "{{- ']' }}"
)
DEEPSEEK = (
    "{%- for t in m.tool_calls %}{{- 'function<sep>' + t.function.name + '\\n```json\\n' }}"
    "{{- t.function.arguments|tojson + '\\n```' }}{%- endfor %}"
)
OPENAI = "{{- m.tool_calls|tojson }}"
CODER = (
    "{%- for t in m.tool_calls %}{{- '<function=' + t.function.name + '>' }}"
    "{%- for k, v in t.function.arguments|items %}{{- k ~ v }}{%- endfor %}{%- endfor %}"
)
SPECIAL = HERMES_2.replace("<tool_call>", "<empty_output>")
FORMS = {"llama": LLAMA, "nemotron": NEMOTRON, "command-r": COMMAND_R, "hermes": HERMES_2}


def tokenizer_of(calls: str) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(small_smollm2())
    tokenizer.chat_template = CHAT.replace("CALLS", calls)
    return tokenizer


def written_by_template(tokenizer: PreTrainedTokenizerBase, *names: str) -> str:
    """The text of a message with calls, between the head and the end of its turn."""
    calls = [{"function": {"name": name, "arguments": ARGUMENTS}, "id": name} for name in names]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    user = {"role": "user", "content": "go"}
    text = tokenizer.apply_chat_template([user, said, user], tokenize=False, tools=[TOOL])
    return text.split("assistant\n")[1].partition("<|im_end|>")[0]


@pytest.mark.parametrize("kind", FORMS)
def test_calls_are_read_and_written_as_the_template_writes_them(kind: str) -> None:
    tokenizer = tokenizer_of(FORMS[kind])
    renderer = ChatRenderer(tokenizer, think=False)
    for names in (("look",), ("look", "look")):
        call = ToolCall("look", json.dumps(ARGUMENTS, ensure_ascii=False))
        calls = tuple(call for _ in names)
        tree = CallTree(renderer, max_context_length=10_000)
        user = ChatMessage("user", "go")
        if kind == "llama" and len(names) > 1:
            with pytest.raises(RequestError, match="writes one call of a tool in a message"):
                tree.begin([user, ChatMessage("assistant", "", calls), user], [TOOL])
            continue
        text = written_by_template(tokenizer, *names)
        begun = tree.begin([user, ChatMessage("assistant", "", calls), user], [TOOL])
        assert (
            tokenizer.decode(begun.tokens).split("assistant\n")[1].startswith(f"{text}<|im_end|>")
        )
        call_of_text = tree.begin([user], [TOOL])
        sampled = tokenizer.encode(text) + [renderer.end_of_turn]
        answer = tree.answer(call_of_text, Completion(sampled, [0.0] * len(sampled), "stop"))
        assert [json.loads(call.arguments) for call in answer.tool_calls] == [ARGUMENTS] * len(
            names
        )
        assert answer.content == "" and {call.name for call in answer.tool_calls} == {"look"}
        again = tree.begin([user, ChatMessage("assistant", "", answer.tool_calls), user], [TOOL])
        assert again.parent == (call_of_text, 0)


@pytest.mark.parametrize(
    "calls", [MISTRAL, DEEPSEEK, OPENAI, CODER, SPECIAL, "{{- raise_exception('no') }}"]
)
def test_tools_are_refused_where_calls_have_another_form(calls: str) -> None:
    renderer = ChatRenderer(tokenizer_of(calls), think=False)
    user = Message("user", "go")
    assert renderer.start([user])
    with pytest.raises(ValueError, match="must write calls of tools as JSON objects") as caught:
        renderer.start([user], [TOOL])
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match="must write calls of tools"):
        CallTree(renderer, max_context_length=999).begin([ChatMessage("user", "go")], [TOOL])


def test_qwens_template_and_one_that_writes_no_calls_have_the_form_of_environments() -> None:
    assert ChatRenderer(small_qwen3(), think=True).call_form == HERMES
    assert ChatRenderer(tokenizer_of("{{- m.content }}"), think=False).call_form == HERMES
    assert CALL_FORMAT == '<tool_call> {"name": [name], "arguments": [arguments]} </tool_call>'


class Looking:
    tools = (TOOL,)
    instruction = "Look around."

    def reset(self, seed: int) -> str:
        self.seen: list[Any] = []
        return "a room"

    def step(self, call: dict[str, Any]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.seen.append(call)
        return "seen", 0.0, False, False, {}


@pytest.mark.parametrize("kind", FORMS)
def test_an_environment_reads_the_calls_of_any_template(kind: str) -> None:
    tokenizer = tokenizer_of(FORMS[kind])
    renderer = ChatRenderer(tokenizer, think=False)
    episode = Episode(Looking(), EpisodeConfig(think=False))
    prompt = tokenizer.decode(renderer.start(episode.start(0), episode.tools))
    form = renderer.call_form
    assert form.described in prompt and (kind == "hermes") == (CALL_FORMAT in prompt)

    def respond(text: str) -> Any:
        return episode.respond(renderer.read_answer(tokenizer.encode(text), episode.tools))

    assert respond(written_by_template(tokenizer, "look")).info["is_action_valid"]
    assert episode.environment.seen == [{"name": "look", "arguments": ARGUMENTS}]
    cut = written_by_template(tokenizer, "look")[:-3]
    for text in (cut, "hello", '{"name": 3, "parameters": {}}'):
        assert not respond(text).info["is_format_valid"]
    assert len(episode.environment.seen) == 1
    scripted = HERMES.write("look", json.dumps(ARGUMENTS, ensure_ascii=False))
    sampled = renderer.encode_answer(scripted)[:-1]
    assert tokenizer.decode(sampled) == written_by_template(tokenizer, "look")


def test_an_environment_is_not_blamed_for_the_marker_in_a_problem_of_a_call() -> None:
    episode = Episode(Looking(), EpisodeConfig(think=False))
    episode.start(0)
    result = episode.respond('<tool_call>{"name": "look", "arguments": {}}} </tool_call>')
    (message,) = result.messages
    assert quote("right after its JSON a tool call must end with </tool_call>") in message.content
    assert "quoted_markers" not in result.info


def test_words_around_calls_stay() -> None:
    form = CallForm("<TOOLCALL>[", "]</TOOLCALL>", ", ", ('{"name": "', '", "arguments": ', "}"))
    text = 'one <TOOLCALL> [{"name":"a"} ,\n{"arguments":{"x":1},"name":"b"}] </TOOLCALL>two'
    text = text.replace("<TOOLCALL> [", "<TOOLCALL>[").replace("] </", "]</")
    calls, around = form.split(text)
    assert calls == [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]
    assert around == "one two"
    read, rest = HERMES.split(form.to_hermes(text))
    assert read == calls and rest.split() == ["one", "two"]


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_history_has_each_thought_once(is_empty: bool) -> None:
    """Where the template opens a thought also in histories, or writes an empty one between calls of
    tools.
    """
    tokenizer = copy.deepcopy(small_smollm2())
    opened = "{%- if m.role == 'assistant' %}{{- '<think>\\n' }}{%- endif %}"
    if is_empty:
        opened = (
            "{%- if m.role == 'assistant' and messages[-1].role == 'tool' %}"
            "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
        )
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
        + opened
        + "{{- m.content + '<|im_end|>' }}{%- endfor %}{{- '<|im_start|>assistant\\n' }}"
        + ("" if is_empty else "{{- '<think>\\n' }}")
    )
    renderer = ChatRenderer(tokenizer, think=True)
    user, result = Message("user", "go"), Message("tool" if is_empty else "user", "seen")
    said = Message("assistant", "<think>\nso\n</think>\n\nok")
    text = tokenizer.decode(renderer.start([user, said, result]))
    first, last = text.split("assistant\n")[1:]
    assert first.startswith("<think>\n") and first.count("<think>") == 1
    assert first.replace("<think>\n", "", 1).lstrip().startswith("so\n</think>\n\nok<|im_end|>")
    assert last.strip() == "<think>"
    sampled = renderer.encode_answer("<think>so</think>ok")
    assert tokenizer.decode(sampled).startswith("so</think>ok")
