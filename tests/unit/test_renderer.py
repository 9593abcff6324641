"""Token deltas against the tokenizer's own rendering of whole conversations."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from ragen_mega.environments.protocol import Message
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.warm_start.tokenizer import train_tokenizer

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


@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("finished_cleanly", [False, True])
@pytest.mark.parametrize("system", [[], [Message("system", "You're a helpful assistant.")]])
@pytest.mark.parametrize("default_system", [False, True])
def test_deltas_add_up_to_the_whole_conversation(
    think: bool, finished_cleanly: bool, system: list[Message], default_system: bool
) -> None:
    tokenizer = new_tokenizer()
    if default_system:
        tokenizer.chat_template = DEFAULT_SYSTEM + tokenizer.chat_template
    renderer = ChatRenderer(tokenizer, think=think)
    forced = "<think>" if think else ""
    tokens = renderer.start([*system, USER[0]])
    messages = [*system, USER[0]]
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
        (PLAIN_TEXT_END, "must end an assistant turn with a special token"),
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
