"""Turn a model's text into steps of an environment: actions or free text in answer tags, tool
calls, or whatever the environment's own parser reads.

`<think> ... </think> <answer> a || b </answer>` is RAGEN's format (arXiv:2504.20073, appendix B).
The search takes time linear in the text; a single backtracking expression would take cubic time on
repeated tags. Tool calls have the format of Qwen's chat templates (the Hermes format).
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from ragen_mega.environments import calls
from ragen_mega.environments.tool_calls import WrongCall, first_calls, tool_calls

ACTION_SEPARATOR = "||"

# Linear: a failed attempt scans the whitespace after one tag, and no two tags share whitespace.
_THOUGHT_TO_ANSWER = re.compile(r"</think>\s*<answer>")
_ANSWER = re.compile("<answer>")
_NO_WIDTH = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
_MARKERS = re.compile(r"</?think>|</?answer>|<\|im_start\|>|<\|im_end\|>")


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """The part of a response that the environment may see."""

    actions: tuple[Any, ...] = ()
    """Steps, in order, at most as many as a turn may have: legal names in the environment's
    spelling, texts, or what a parser made of the texts.
    """
    thought: str = ""
    is_format_valid: bool = False
    """The tags are in the required order, or the parser could read the answer."""
    has_invalid_action: bool = False
    """At least one of the first `max_actions` actions was unknown and dropped."""
    problem: str = ""
    """Problem of the answer, as a parser or the reader of tool calls explains it to the policy."""

    @property
    def is_action_valid(self) -> bool:
        return bool(self.actions) and not self.has_invalid_action


def read_response(environment: Any, text: str, *, think: bool, max_actions: int) -> ParsedResponse:
    """Parse what the policy wrote in one turn, as this environment requires: by its `parse`, as
    tool calls, as names of its actions, or as free text. With `think`, `text` follows a forced
    `<think>`.

    Raises whatever the environment's parser raises except ValueError, which marks the answer as
    malformed.
    """
    if hasattr(environment, "parse"):
        return _read(partial(calls.parse, environment), text, think, max_actions)
    if tools := getattr(environment, "tools", None):
        return _read(partial(tool_calls, tools=tools), text, think, max_actions)
    if (legal := getattr(environment, "actions", None)) is not None:
        return parse_response(text, legal_actions=legal, think=think, max_actions=max_actions)
    if (spans := split_response(text, think)) is None:
        return ParsedResponse()
    thought, answer = spans
    return ParsedResponse((answer,) if answer else (), thought, is_format_valid=True)


def _read(
    parse: Callable[[str], Sequence[Any]], text: str, think: bool, max_actions: int
) -> ParsedResponse:
    """Apply `parse` to what follows the thought, and where it refuses that, to as many calls of
    tools as count.
    """
    thought, end, rest = text.partition("</think>") if think else ("", "</think>", text)
    thought = _MARKERS.sub("", thought).strip()
    if not end:
        return ParsedResponse()
    rest = rest.strip()
    try:
        try:
            actions = parse(rest)
        except ValueError:
            if (counting := first_calls(rest, max_actions)) == rest:
                raise
            actions = parse(counting)
    except WrongCall as error:
        return ParsedResponse(
            thought=thought, is_format_valid=True, has_invalid_action=True, problem=str(error)
        )
    except RecursionError:  # JSON nested too deeply
        return ParsedResponse(thought=thought)
    except ValueError as error:
        return ParsedResponse(thought=thought, problem=str(error))
    return ParsedResponse(tuple(actions[:max_actions]), thought, is_format_valid=True)


def parse_response(
    text: str, *, legal_actions: Sequence[str], think: bool, max_actions: int
) -> ParsedResponse:
    """Parse what the model generated in one turn; no text raises.

    With `think`, `text` follows a forced `<think>` tag that it does not contain itself. Only the
    first `max_actions` pieces of the answer count; unknown ones among them are dropped, the rest
    are kept.
    """
    if (spans := split_response(text, think)) is None:
        return ParsedResponse()
    thought, answer = spans
    spelling = _spellings(tuple(legal_actions))
    pieces = [piece for part in answer.split(ACTION_SEPARATOR) if (piece := part.strip())]
    pieces = pieces[:max_actions]
    meant = (spelling.get(piece, spelling.get(same_word(piece))) for piece in pieces)
    known = tuple(name for name in meant if name is not None)
    return ParsedResponse(
        known, thought, is_format_valid=True, has_invalid_action=len(known) < len(pieces)
    )


def same_word(name: str) -> str:
    """Return one form of all spellings of a name that a reader takes for the same: letter case,
    composed or decomposed accents, wide digits, kinds of spaces, marks without width.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return " ".join(_NO_WIDTH.sub("", folded).split())


@lru_cache(maxsize=64)
def _spellings(names: tuple[str, ...]) -> dict[str, str]:
    """Return a map: spelling -> name; names that differ in letter case alone count as they are
    spelled.
    """
    folded: dict[str, list[str]] = {}
    for name in names:
        folded.setdefault(same_word(name), []).append(name)
    spellings = {form: alike[-1] for form, alike in folded.items()}
    return (
        spellings
        | {unicodedata.normalize("NFC", name): name for name in names}
        | {name: name for name in names}
    )


def split_response(text: str, think: bool) -> tuple[str, str] | None:
    """Return the thought and answer without tags; None unless the tags are there in the required
    order.
    """
    # Matching the first occurrence of each tag is enough: whatever follows a later one also follows
    # the first.
    opening = (_THOUGHT_TO_ANSWER if think else _ANSWER).search(text)
    if opening is None or (answer_end := text.find("</answer>", opening.end())) < 0:
        return None
    spans = (text[: opening.start()] if think else "", text[opening.end() : answer_end])
    thought, answer = (_MARKERS.sub("", span).strip() for span in spans)
    return thought, answer
