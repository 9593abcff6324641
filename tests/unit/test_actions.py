"""Parsing of responses against the expression that defines the accepted language."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_mega.environments.actions import parse_response

LEGAL = ("Up", "Down", "Left", "Right")
FULL = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", re.DOTALL)
ANSWER_ONLY = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
PIECES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "||",
    " ",
    "\n",
    "up",
    "Left",
    "jump",
    "<|im_end|>",
    "\u221a",
]
texts = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))


def parse(text, *, think=True, max_actions=5):
    return parse_response(text, legal_actions=LEGAL, think=think, max_actions=max_actions)


def test_well_formed_response():
    parsed = parse("Box is above me.</think> <answer>up || RIGHT||  Down </answer>")
    assert parsed.actions == ("Up", "Right", "Down")
    assert parsed.thought == "Box is above me."
    assert parsed.is_format_valid and not parsed.has_invalid_action and parsed.is_action_valid


@pytest.mark.parametrize(
    ("text", "actions", "has_invalid_action"),
    [
        ("Up || jump || Left", ("Up", "Left"), True),
        ("jump || Up || Left || Down", ("Up", "Left"), True),
        ("Up || Left || Down || jump", ("Up", "Left", "Down"), False),
        (" || ", (), False),
    ],
)
def test_unknown_actions_are_dropped_after_the_cap(text, actions, has_invalid_action):
    parsed = parse(f"x</think><answer>{text}</answer>", max_actions=3)
    assert parsed.is_format_valid
    assert (parsed.actions, parsed.has_invalid_action) == (actions, has_invalid_action)
    assert parsed.is_action_valid == (actions != () and not has_invalid_action)


def test_names_that_differ_in_letter_case_alone_are_told_apart():
    legal = ("h", "H", " jump ")
    parsed = parse_response(
        "<answer>h || H || Jump</answer>", legal_actions=legal, think=False, max_actions=5
    )
    assert parsed.actions == legal and parsed.is_action_valid


def test_special_tokens_inside_the_tags_are_removed():
    parsed = parse("a<think>b</think><answer><answer>Up<|im_end|> || <|im_start|></answer>")
    assert parsed.thought == "ab" and parsed.actions == ("Up",)


def test_without_thinking_only_the_answer_counts():
    assert parse("<answer>Up</answer>", think=False).actions == ("Up",)
    assert not parse("<answer>Up</answer>", think=True).is_format_valid


@given(text=texts, think=st.booleans(), max_actions=st.integers(1, 4))
def test_same_language_as_the_defining_expression(text, think, max_actions):
    parsed = parse(text, think=think, max_actions=max_actions)
    match = FULL.search("<think>" + text) if think else ANSWER_ONLY.search(text)
    assert parsed.is_format_valid == (match is not None)
    if match is None:
        assert parsed.actions == () and not parsed.is_action_valid
        return
    answer = match.groups()[-1]
    for marker in ("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>"):
        answer = answer.replace(marker, "")
    pieces = [piece.strip() for piece in answer.split("||") if piece.strip()][:max_actions]
    expected = tuple(name for piece in pieces for name in LEGAL if name.lower() == piece.lower())
    assert parsed.actions == expected
    assert parsed.has_invalid_action == (len(expected) != len(pieces))


def test_adversarial_text_ends():
    # The defining expression needs time cubic in the number of repetitions on these: years.
    for text in (
        "<think></think><answer>" * 20_000,
        ("</think>" + " " * 200) * 2_000,
        "<answer>" * 100_000,
    ):
        assert not parse(text).is_format_valid
        assert not parse(text, think=False).is_format_valid
