"""The prose of README, docs/ and the code: short sentences, none with a banned opening, and no
pronoun in place of a noun that the reader would have to look for.
"""

import ast
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.test_documentation import PAGES, ROOT, Path, name_of, tokens

MAX_WORDS = 35
BANNED = re.compile(r"(Of|In|With|From|For) (that|those|what)\b|(That|Those) of|What (is|stands)")
OPENING = re.compile(r"\s*(Of|Those|That of|What|As|In|Where|How)\b")  # no docstring begins so
DANGLING = re.compile(
    r"\b(that|those) of\b|\bof (it|them|(its|their|one's) (own|kind))(?=\s*([.,;:!?)]|$))", re.I
)
"""Pronouns whose noun stands elsewhere: `the size of a and that of b`, `a key of its own.`"""
END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*]*[A-Z0-9`])")


def is_written_by_hand(page: Path) -> bool:
    is_drawn = page.with_suffix(".svg").exists() or "Written by" in page.read_text()[:600]
    return page == ROOT / "README.md" or page.is_relative_to(ROOT / "docs") and not is_drawn


@pytest.mark.parametrize("page", [p for p in PAGES if is_written_by_hand(p)], ids=name_of)
def test_sentences_are_short_and_begin_with_a_subject(page: Path) -> None:
    """Paragraphs and list items are checked; tables, code blocks and lists of links are not."""
    for before, token in zip(tokens(page), tokens(page)[1:], strict=False):
        parts = [part for part in token.children or () if part.type != "link_close"]
        is_list_of_links = 8 * token.content.count("](") > len(token.content.split())
        if before.type == "paragraph_open" and not is_list_of_links:
            pieces = {"code_inline": "`code`", "softbreak": " "}
            text = "".join(pieces.get(part.type, part.content) for part in parts)
            wrong = [s for s in END.split(text) if len(s.split()) > MAX_WORDS or BANNED.match(s)]
            assert not wrong, f"{name_of(page)}: {wrong}"


def test_docstrings_begin_with_a_subject_and_variables_with_a_noun() -> None:
    code = [p for top in ("ragen_mega", "kernels", "tools") for p in (ROOT / top).rglob("*.py")]
    wrong = []
    for path in (p for p in code if "build" not in p.relative_to(ROOT).parts):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))) if OPENING.match(text):
                    wrong.append(f"{name_of(path)}:{node.lineno}: {text[:40]}")
                case ast.Name(id="one" | "of" | "told" as name, ctx=ast.Store()):
                    wrong.append(f"{name_of(path)}:{node.lineno}: {name}")
    assert not wrong, "\n".join(wrong)


def comments_and_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts; the lines of a comment that stand below each other are one text."""
    source, last = path.read_text(), (-1, -1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)
    text = ""
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT:
            if token.start != (last[0] + 1, last[1]):
                yield last[0], text
                text = ""
            text, last = f"{text} {token.string.lstrip('#')}", token.start
    yield last[0], text


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("Return the size of a and that of b.", True),
        ("`options` are those of the task.", True),
        ("Each has a key of its own, which", True),
        ("Return some of them", True),
        ("The share of it; none", True),
        ("Return the keys of its own cache.", False),
        ("Say that one of these is there.", False),
        ("Take the copy of them all.", False),
    ],
)
def test_dangling_pronouns_are_told(text: str, is_wrong: bool) -> None:
    assert bool(DANGLING.search(text)) == is_wrong


def test_no_clause_ends_with_a_pronoun_whose_noun_is_elsewhere() -> None:
    """In comments and docstrings, of tests too: the noun itself is as short, or its possessive."""
    code = [
        path
        for top in ("ragen_mega", "kernels", "tools", "tests")
        for path in (ROOT / top).rglob("*.py")
        if "build" not in path.relative_to(ROOT).parts and path != Path(__file__)
    ]
    wrong = [
        f"{name_of(path)}:{line}: {found.group()}"
        for path in code
        for line, text in comments_and_docstrings(path)
        for found in DANGLING.finditer(" ".join(text.split()))
    ]
    assert not wrong, "\n".join(wrong)
