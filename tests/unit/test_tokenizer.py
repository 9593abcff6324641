"""The small tokenizer: one token per unit that matters, lossless, and the same after transformers
has loaded it.
"""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen2Config, Qwen2Tokenizer

from ragen_mega.models.tokenizer import train_tokenizer

TURN = (
    "<|im_start|>user\nPlayer: (0, 1)\nGoal: (3, 2)\n10"
    " left<|im_end|>\n<|im_start|>assistant\n<think> Left (0, 0) farther</think><answer> Left ||"
    " Down</answer><|im_end|>"
)


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    words = "system\nuser\nassistant\n"
    return train_tokenizer(
        [words, "Player: (0, 1)\nGoal: (3, 2)\n10 left", " Left (0, 0) farther Down || Left"] * 9
    )


def test_units_are_single_tokens(tokenizer: Qwen2Tokenizer) -> None:
    for unit in (
        " (0, 1)",
        " Left",
        " farther",
        "Player",
        "<think>",
        "</answer>",
        "<|im_end|>",
        "assistant",
    ):
        assert len(tokenizer.encode(unit)) == 1, unit


def test_a_vocabulary_is_kept_whole_and_takes_no_merges() -> None:
    texts = ["buy BQXYZJKWVF ; sell BQXYZPPPPP ; zigzag zigzag"] * 9
    known = ["BQXYZJKWVF", "BQXYZPPPPP", " ; "]
    tokenizer = train_tokenizer(texts, vocabulary=known)
    for word in known:
        assert tokenizer.convert_tokens_to_ids(word) in tokenizer.encode(f"buy {word} now")
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]
    assert len(tokenizer.encode(" zigzag")) == 1
    merged = set(train_tokenizer(texts).get_vocab()) - set(tokenizer.get_vocab())
    assert any("QXYZ" in token for token in merged)  # what it would have spent merges on


@pytest.mark.parametrize(
    "text", [TURN, "P__O\n_X\u221a#", "\u00e9t\u00e9 (7, 9) \U0001f600 || ||", ""]
)
def test_round_trip(tokenizer: Qwen2Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_survives_saving_beside_a_model(tokenizer: Qwen2Tokenizer, tmp_path: Path) -> None:
    Qwen2Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(TURN) == tokenizer.encode(TURN)
    assert loaded.chat_template == tokenizer.chat_template and loaded.eos_token == "<|im_end|>"
    assert (
        json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"]
        == "Qwen2Tokenizer"
    )


def test_chat_template_is_chatml(tokenizer: Qwen2Tokenizer) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
