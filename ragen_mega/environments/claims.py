"""Checks the claims in a thought against the true state, for the reward `grounded_thought`."""

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise, zip_longest
from numbers import Integral
from typing import Any

import numpy as np

from ragen_mega.environments.protocol import Narrator

_SAID = r"(?P<copula>\s*(?:is|are|=|:))?\s*(?:at\s+|in\s+)?(?P<said>\([^()]*\)|-?\d+(?:\.\d+)?|\w+)"
_NOTHING = r"(?!)"
"""Regular expression that fits no text."""
_TRUTHS = {"true": True, "yes": True, "false": False, "no": False}


def check_claims(environment: Any, thought: str) -> list[bool] | None:
    """Return whether each claim in a thought about the current state is true; None if that is
    unknown.

    Uses the environment's `claims(thought)`; else, if its narrator has a `statement` or a
    `sentence`, compares what has that form with what the narrator says; else uses its `facts()`.
    """
    if hasattr(environment, "claims"):
        return [bool(holds) for holds in environment.claims(thought)]
    narrator: Narrator[str] | None = getattr(environment, "narrator", None)
    if narrator is not None and (narrator.statement or narrator.sentence):
        return [
            *_stated(environment, narrator, thought),
            *_explained(environment, narrator, thought),
        ]
    if hasattr(environment, "facts"):
        return list(claims_about(environment.facts(), thought))
    return None


def _stated(environment: Any, narrator: Narrator[str], thought: str) -> Iterable[bool]:
    """Return whether each statement is what the narrator says of the same state: the present one,
    or the one that the actions announced so far lead to.
    """
    statement, announcement = narrator.statement or _NOTHING, narrator.announcement or _NOTHING
    actions = re.findall(announcement, thought)
    truth = _between(announcement, narrator.describe(environment, actions))
    for said, line in zip_longest(_between(announcement, thought), truth, fillvalue=""):
        true = set(re.findall(statement, line))
        yield from (claim in true for claim in re.findall(statement, said))


def _explained(environment: Any, narrator: Narrator[str], thought: str) -> Iterable[bool]:
    """Return whether each sentence is what the narrator explains the same action with."""
    explain = narrator.explain or narrator.describe
    for found in re.finditer(narrator.sentence or _NOTHING, thought):
        yield found[0] in explain(environment, [found[1]])


def _between(announcement: str, thought: str) -> list[str]:
    """Return the parts of a thought, each up to the end of an announcement."""
    ends = [found.end() for found in re.finditer(announcement, thought)]
    return [thought[start:end] for start, end in pairwise([0, *ends, len(thought)])]


def claims_about(facts: Mapping[str, Any], thought: str) -> Iterable[bool]:
    """Return whether each claim `<name of a fact> [is|are|=|:] [at|in] <value>` is true. Values are
    numbers, coordinates like `(1, 2)`, truth values, or words, which need the verb or sign. A claim
    about a collection is true if one of its members fits: `hole (1, 2)`, `holes: (1, 2)`.
    """
    for name in sorted(facts, key=len, reverse=True):  # `low_arm` before `arm`
        value, words = facts[name], re.escape(name.removesuffix("s")).replace("_", "[ _]")
        form = re.compile(rf"\b{words}s?\b{_SAID}", re.IGNORECASE)
        found, thought = list(form.finditer(thought)), form.sub(" ", thought)
        for claim in found:
            members: Iterable[Any] = value if isinstance(value, (set, frozenset, list)) else [value]
            if isinstance(value, tuple) and not all(isinstance(part, Integral) for part in value):
                members = value
            agrees = [_agrees(claim["said"], bool(claim["copula"]), member) for member in members]
            if None not in agrees and agrees:
                yield any(agrees)


def _agrees(said: str, has_copula: bool, value: Any) -> bool | None:
    """Return whether `said` means `value`; None if it is not of the same kind."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return None if said.lower() not in _TRUTHS else _TRUTHS[said.lower()] is value
    if isinstance(value, (int, float)):
        return float(said) == value if re.fullmatch(r"-?\d+(\.\d+)?", said) else None
    if isinstance(value, tuple):
        is_cell = said.startswith("(")
        return tuple(map(float, re.findall(r"-?\d+", said))) == value if is_cell else None
    if isinstance(value, str):
        return said.lower() == value.lower() if has_copula else None
    return None
