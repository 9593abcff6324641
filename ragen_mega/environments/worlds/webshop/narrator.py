"""Thoughts about a page: what became of the options that are asked for, and what the next action
clicks, never which action is best.

A result is described by its place on the page. The thought names the target of a click before the
click.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ragen_mega.environments.protocol import Narrator
from ragen_mega.environments.worlds.webshop.catalogue import Goal
from ragen_mega.environments.worlds.webshop.pages import BUY, Page
from ragen_mega.environments.worlds.webshop.players import keywords, keywords_of

_PLACES = ("first", "second", "third")
WORDS = (
    *(f" {word} " for word in (*_PLACES, "later", "offered", "chosen", "missing", "other")),
    *(" all", " some", " buy", " page", "| ", "go:"),
)
"""The texts that thoughts consist of, besides identifiers and options."""
_ARGUMENT = re.compile(r"\[(.+)\]")


def describe(environment: Any, actions: Sequence[str]) -> str:
    """Return a line such as `go: second B7KVUT98FN` or `red offered | small missing | go: offered
    red`.
    """
    facts = environment.facts()
    page: Page = facts["page"]
    (clicked,) = (_ARGUMENT.findall(action)[0] for action in actions)
    if page.kind == "start":
        return f"go: {'all' if clicked.split() == keywords(facts['goal']) else 'some'}"
    option_words = _option_words(page, facts["goal"], facts["chosen"])
    parts = [f"{value} {word}" for value, word in option_words.items()]
    if clicked in page.buttons:
        return " | ".join([*parts, f"go: {'buy' if clicked == BUY else 'page'}"])
    words = option_words | dict(zip((product.asin for product in page.products), _PLACES))
    word = words.get(clicked, "later" if page.products else "other")
    return " | ".join([*parts, f"go: {word} {clicked}"])


def _option_words(page: Page, goal: Goal, chosen: Mapping[str, str]) -> dict[str, str]:
    """Return a map: value of a requested option -> its state on a product's page."""
    if page.option_names is None:
        return {}
    named = set(keywords(goal))
    option_words = {}
    for option in goal.options:
        value = option if isinstance(option, str) else option[1]
        if set(keywords_of(value)) <= named:
            offer = "offered" if value in page.option_names else "missing"
            option_words[value] = "chosen" if value in chosen.values() else offer
    return option_words


NARRATOR = Narrator(describe)
