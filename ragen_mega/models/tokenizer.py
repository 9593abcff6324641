"""A small byte-level BPE tokenizer of Qwen2's kind, with Qwen's chat markers, trained on what the
environments say.

It is used only where no pretrained checkpoint is loaded. Frequent words, pairs of words and
coordinates are one token each, and any other text still round-trips through bytes. transformers
loads it as a Qwen2Tokenizer.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, as Qwen's templates without their default system message; tools are JSON, one a line."""

_MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_UNIT = re.compile(r" ?(?:[a-z]+|[^\s\w]|[A-Z])?\(\d+, \d+\)|(?: then)? [a-z-]+/[a-z]+")
"""A coordinate, with the characters directly before it, e.g. `P(1, 2)` or ` to(1, 2)`; a pair like
` closer-brink/on`, with a `then` before it.
"""
_MIN_FREQUENCY = 2


def train_tokenizer(
    texts: Sequence[str], *, vocabulary: Iterable[str] = (), num_merges: int = 300
) -> Qwen2Tokenizer:
    """Train on `texts`: 256 bytes, markers, tags, the texts of `vocabulary`, the coordinates and
    pairs that occur, and up to `num_merges` merges of the rest.
    """
    vocabulary = sorted(set(vocabulary))
    units = Counter(match for text in texts for match in _UNIT.findall(text))
    frequent = sorted(unit for unit, count in units.items() if count >= _MIN_FREQUENCY)
    added = list(dict.fromkeys((*_TAGS, *vocabulary, *frequent)))
    blank = Qwen2Tokenizer().backend_tokenizer
    blank.train_from_iterator(
        (_UNIT.sub("\n", text) for text in _without_vocabulary(vocabulary, texts)),
        trainers.BpeTrainer(
            vocab_size=256 + len(_MARKERS) + num_merges,
            min_frequency=_MIN_FREQUENCY,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=list(_MARKERS),
        ),
    )
    model = json.loads(blank.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],  # type: ignore[misc]  # it takes pairs
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return tokenizer


def _without_vocabulary(vocabulary: Sequence[str], texts: Sequence[str]) -> Iterator[str]:
    """Yield the texts with a line break in place of each word of the vocabulary."""
    splitter = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    splitter.add_tokens([AddedToken(known, normalized=False) for known in vocabulary])
    for text in texts:
        pieces = splitter.encode(text)
        spans = zip(pieces.ids, pieces.offsets, strict=True)
        yield "\n".join(text[start:end] for token, (start, end) in spans if token == 0)
