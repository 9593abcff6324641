"""The prose of README, docs/ and the code: short sentences, none with a banned opening."""

import ast
import re

import pytest

from tests.test_documentation import PAGES, ROOT, Path, name_of, tokens

MAX_WORDS = 35
BANNED = re.compile(r"(Of|In|With|From|For) (that|those|what)\b|(That|Those) of|What (is|stands)")
OPENING = re.compile(r"\s*(Of|Those|That of|What|As|In|Where|How)\b")  # no docstring begins so
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
