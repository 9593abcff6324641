"""The prose of README and docs: sentences of at most 35 words, and none with a banned opening."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_documentation import PAGES, ROOT, name_of, tokens

MAX_WORDS = 35
BANNED = re.compile(
    r"(Of|In|With|From|For) (those|these|that|which|what|it)\b|(That|Those|These) of\b"
    r"|What (stands|is|was|goes|has)\b|Where it\b|Which\b"
)
SENTENCE_END = re.compile(r"(?<=[.!?:])[\"')*`]*\s+(?=[\"'(*]*[A-Z0-9`])")


def is_written_by_hand(page: Path) -> bool:
    is_generated = page.with_suffix(".json").exists() or "\nWritten by " in page.read_text()[:400]
    return page.is_relative_to(ROOT / "docs") and not is_generated or page.parent == ROOT


def sentences(page: Path) -> Iterator[str]:
    """Sentences of paragraphs and list items; tables, headings and code blocks have none."""
    for before, token in zip(tokens(page), tokens(page)[1:], strict=False):
        if token.type == "inline" and before.type == "paragraph_open":
            words = (
                f"`{part.content.replace(' ', '_')}`" if part.type == "code_inline" else part.content or " "
                for part in token.children or ()
                if part.type not in ("link_open", "link_close")
            )
            yield from SENTENCE_END.split("".join(words))


@pytest.mark.parametrize("page", filter(is_written_by_hand, PAGES), ids=name_of)
def test_sentences_are_short_and_begin_well(page: Path) -> None:
    found = [s for s in sentences(page) if len(s.split()) > MAX_WORDS or BANNED.match(s)]
    assert not found, "\n".join(f"{len(s.split())} words: {s}" for s in found)
