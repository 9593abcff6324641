"""A small byte-level BPE tokenizer with Qwen's chat markers, trained on what the environments say.

It is used only where no pretrained checkpoint is loaded. Every cell of a board is one token, every frequent word is one
token, and any other text still round-trips through bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, as Qwen's templates without their default system message."""

_MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# A capital that starts no word is a cell of a board; so is every other lone symbol.
_PIECES = r"\|\|| \|\|| ?[A-Z](?![a-z])| ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]|\n|\s"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train on `texts`. The vocabulary is 256 bytes, 7 markers and tags, and merges; it may stay below `vocab_size`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(_MARKERS),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in _TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
