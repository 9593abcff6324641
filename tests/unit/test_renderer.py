"""Token deltas against the tokenizer's own rendering of whole conversations."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from ragen_mega.config import parse
from ragen_mega.environments.episode import SYSTEM_PROMPT
from ragen_mega.environments.protocol import Message
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.rollout import template_cost
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import episode_maker
from tests.support.serving_page import CLIENT, command
from tests.support.web_server import Request, serving

USER = [
    Message("user", "State:\nP _ O\nYou have 10 actions left.\n"),
    Message("user", "Reward:\n-0.1\n"),
    Message("user", ""),
]
ANSWERS = ["the goal is right </think> <answer> Right || Down </answer>", " \n<answer>Up</answer>"]
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a"
    " model.<|im_end|>\\n' }}{% endif %}"
)
LAST_USER_ONLY = (
    "{{ '<|im_start|>user\\n' + messages[-1]['content'] +"
    " '<|im_end|>\\n<|im_start|>assistant\\n' }}"
)
NUMBERED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + (messages|length|string) + '\\n' +"
    " m['content'] }}{{ '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' }}"
)
PLAIN_TEXT_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}{{ 'assistant:"
    " ' }}"
)


def new_tokenizer() -> PreTrainedTokenizerFast:
    texts = [
        "system\nuser\nassistant\nfirst second third",
        *(message.content for message in USER),
        *ANSWERS,
    ]
    return train_tokenizer(texts * 3)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return new_tokenizer()


def whole_conversation(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("finished_cleanly", [False, True])
def test_deltas_add_up_to_the_whole_conversation(finished_cleanly: bool) -> None:
    tokenizer = new_tokenizer()
    if finished_cleanly:
        tokenizer.chat_template = DEFAULT_SYSTEM + tokenizer.chat_template
    renderer = ChatRenderer(tokenizer, think=finished_cleanly)
    forced = "<think>" if finished_cleanly else ""
    tokens = renderer.start(USER[:1])
    messages = USER[:1]
    for answer, message in zip(ANSWERS, USER[1:], strict=True):
        sampled = tokenizer.encode(answer, add_special_tokens=False)
        tokens += sampled + ([renderer.end_of_turn] if finished_cleanly else [])
        tokens += renderer.observe([message], finished_cleanly)
        messages += [Message("assistant", forced + answer), message]
    assert tokens == whole_conversation(tokenizer, messages) + tokenizer.encode(
        forced, add_special_tokens=False
    )


def test_deltas_begin_and_end_where_the_policy_samples(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = ChatRenderer(tokenizer, think=True)
    assert tokenizer.decode(renderer.start(USER[:1])).endswith("<|im_start|>assistant\n<think>")
    assert tokenizer.decode(renderer.observe([USER[1]], False)).startswith(
        "<|im_end|>\n<|im_start|>user\nReward"
    )
    assert tokenizer.decode(renderer.observe([USER[1]], True)).startswith(
        "\n<|im_start|>user\nReward"
    )
    renderer.observe([USER[1]], True).append(0)  # a caller's list is the caller's
    assert renderer.observe([USER[1]], True)[-1] == tokenizer.convert_tokens_to_ids("<think>")


def test_decode_action_keeps_tags_and_drops_special_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    renderer = ChatRenderer(tokenizer, think=True)
    tokens = tokenizer.encode(ANSWERS[0] + "<|im_end|>", add_special_tokens=False)
    assert tokens[-1] == renderer.end_of_turn
    assert renderer.decode_action(tokens) == ANSWERS[0]
    assert renderer.decode_action([]) == ""


def test_stop_tokens_are_end_of_turn_and_end_of_text() -> None:
    tokenizer = new_tokenizer()
    assert ChatRenderer(tokenizer, think=False).stop_token_ids == (
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|endoftext|>"
    expected = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert set(ChatRenderer(tokenizer, think=False).stop_token_ids) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat_template"),
        (LAST_USER_ONLY, "drops or rewrites"),
        (NUMBERED, "not prefix-stable"),
        (PLAIN_TEXT_END, "put a special token right behind an answer, not"),
    ],
)
def test_templates_that_cannot_be_appended_to_are_refused(
    template: str | None, message: str
) -> None:
    tokenizer = new_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        ChatRenderer(tokenizer, think=True)


@pytest.mark.parametrize("text", [*ANSWERS, "</think>", "", "thinks and never ends"])
def test_a_thought_ends_with_the_first_token_that_completes_its_end(tokenizer, text) -> None:
    renderer = ChatRenderer(tokenizer, think=True)
    tokens = [*tokenizer.encode(text, add_special_tokens=False), renderer.end_of_turn]
    length = renderer.thought_length(tokens)
    ends = [n for n in range(1, len(tokens)) if "</think>" in renderer.decode_action(tokens[:n])]
    assert length == (ends[0] if ends else len(tokens))


def test_the_examples_of_the_documentation_ask_as_training_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a server that says the same to everything; its prompts beside the chat template's."""
    said, asked = "so</think><answer>Up</answer>", []

    class Server(Request):
        def answer(self) -> None:
            asked.append((self.path, json.loads(self.body)))
            self.reply({"choices": [{"text": said}]})

    config = parse(["--recipe", "sokoban", "--max-turns", "2", "--max-actions", "2"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    tokenizer = train_tokenizer(["#_PXO up down left right"] * 9)
    tokenizer.save_pretrained(tmp_path / "huggingface")
    program = tmp_path / "my_client.py"
    program.write_text(CLIENT)
    with serving(Server) as address:
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(sys, "argv", [program.name, str(tmp_path), f"http://{address}"])
        runpy.run_path(str(program), run_name="__main__")
        curl = command("curl ", int(address.partition(":")[2]))
        subprocess.run(["bash", "-c", curl], check=True, capture_output=True, timeout=60)
    path, by_curl = asked.pop()
    assert path == "/v1/chat/completions"
    assert by_curl["messages"][0] == {"role": "system", "content": SYSTEM_PROMPT}
    for name in ("model", "temperature", "top_p", "top_k", "repetition_penalty"):
        assert by_curl[name] == asked[0][1][name], name
    assert len(asked) == 2 and {path for path, _ in asked} == {"/v1/completions"}
    episode = episode_maker(config.environment, "sokoban")()
    messages = episode.start(seed=123)
    chat = [{"role": one.role, "content": one.content} for one in messages]
    for _, request in asked:
        told = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(request["prompt"]) == f"{told}<think>"
        assert (request["temperature"], request["max_tokens"]) == (0.5, 160)
        chat.append({"role": "assistant", "content": f"<think>{said}"})
        turn = episode.respond(said)
        chat += [{"role": one.role, "content": one.content} for one in turn.messages]
    assert len(capsys.readouterr().out.splitlines()) == 2


COSTLY = {
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a large power": "{{ 9 ** (9 ** 9) }}",
    "memory": "{{ 'a' * 10 ** 12 }}",
    "gigabytes of text": "{% for i in range(2000) %}{{ 'a' * 10 ** 6 }}{% endfor %}",
    "of the tools alone": "{% if tools %}{{ 9 ** (9 ** 9) }}{% endif %}",
}


@pytest.mark.parametrize("case", COSTLY)
def test_a_template_that_takes_all_time_or_memory_is_refused(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_large = case in ("memory", "gigabytes of text")
    monkeypatch.setattr(template_cost, "_SECONDS", 60 if is_large else 1)
    tokenizer = new_tokenizer()
    tokenizer.chat_template += COSTLY[case]
    most = "1024 MiB" if is_large else "1 s"
    with pytest.raises(ValueError, match=f"the chat template takes more than {most} to"):
        ChatRenderer(tokenizer, think=True)


@pytest.mark.parametrize(
    "code",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content }}",
        "{{ messages | sum }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_an_error_of_a_template_is_one_of_its_model(code: str) -> None:
    tokenizer = new_tokenizer()
    tokenizer.chat_template += code
    with pytest.raises(ValueError, match="the chat template does not take messages"):
        ChatRenderer(tokenizer, think=True)
