"""Turn a model's text into actions: `<think> ... </think> <answer> a || b </answer>`.

The accepted language is RAGEN's (arXiv:2504.20073, appendix B); the search is linear in the text
instead of a backtracking expression, whose cost on repeated tags grows with the cube of the length.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

ACTION_SEPARATOR = "||"

# Linear: a failed attempt costs the whitespace behind one tag, and no two tags share whitespace.
_THOUGHT_TO_ANSWER = re.compile(r"</think>\s*<answer>")
_ANSWER = re.compile("<answer>")
_MARKERS = re.compile(r"</?think>|</?answer>|<\|im_start\|>|<\|im_end\|>")


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """The part of a response that the environment may see."""

    actions: tuple[str, ...]
    """Legal action names in the environment's spelling, in order, at most `max_actions`."""
    thought: str
    is_format_valid: bool
    """The tags were found in the required order."""
    has_invalid_action: bool
    """At least one of the actions inside the cap was unknown and dropped."""

    @property
    def is_action_valid(self) -> bool:
        return bool(self.actions) and not self.has_invalid_action

    @property
    def is_penalised(self) -> bool:
        """The format penalty is due: no tags, no legal action, or any unknown action."""
        return not (self.is_format_valid and self.is_action_valid)


def parse_response(
    text: str, *, legal_actions: Sequence[str], think: bool, max_actions: int
) -> ParsedResponse:
    """Parse what the model generated in one turn; no text raises.

    With `think`, `text` follows a forced `<think>` tag that it does not contain itself. The first
    `max_actions` pieces of the answer count; unknown ones among them are dropped and the rest still
    runs.
    """
    # Each tag may be matched at its first occurrence: whatever follows a later occurrence also
    # follows the first one.
    opening = (_THOUGHT_TO_ANSWER if think else _ANSWER).search(text)
    answer_end = text.find("</answer>", opening.end()) if opening else -1
    if answer_end < 0:
        return ParsedResponse((), "", is_format_valid=False, has_invalid_action=False)
    spans = (text[: opening.start()] if think else "", text[opening.end() : answer_end])
    thought, answer = (_MARKERS.sub("", span).strip() for span in spans)
    spelling = {name.lower(): name for name in legal_actions}
    pieces = [piece for part in answer.split(ACTION_SEPARATOR) if (piece := part.strip())]
    pieces = pieces[:max_actions]
    known = tuple(spelling[piece.lower()] for piece in pieces if piece.lower() in spelling)
    return ParsedResponse(
        known, thought, is_format_valid=True, has_invalid_action=len(known) < len(pieces)
    )
