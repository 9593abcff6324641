"""Thoughts about a page: what on it matches the instruction, never which action is best.

A listed product is described by how many keywords of the instruction are in its title and whether
its price is within the limit; an option by whether it is asked for or chosen. The thought ends with
the same description of what the next action clicks.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ragen_mega.environments.protocol import Narrator
from ragen_mega.environments.worlds.webshop.catalogue import Goal, Product
from ragen_mega.environments.worlds.webshop.pages import BUY, Page
from ragen_mega.environments.worlds.webshop.players import keywords, keywords_of

_COUNTS = ("none", "one", "two", "three", "more")
_PRICES = ("within", "over")
WORDS = (
    *(f"{count}/{price}" for count in _COUNTS for price in _PRICES),
    *("go", "all", "one", "asked", "chosen", "other", "buy", "page"),
)
"""The words of thoughts, besides identifiers and options."""
_ARGUMENT = re.compile(r"\[(.+)\]")


def describe(environment: Any, actions: Sequence[str]) -> str:
    """A line such as `B7KVUT98FN two/within; B6IOAHWSBF three/over; go three/over`."""
    facts = environment.facts()
    page, goal = facts["page"], facts["goal"]
    told = _told(page, goal, facts["chosen"])
    chosen = [_ARGUMENT.search(action)[1] for action in actions]
    if page.kind == "start":
        going = ["all" if " " in query else "one" for query in chosen]
    else:
        going = [told.get(name, "buy" if name == BUY else "page") for name in chosen]
    parts = [f"{name} {word}" for name, word in told.items() if word != "other"]
    return "; ".join([*parts, *(f"go {word}" for word in going)])


def _told(page: Page, goal: Goal, chosen: Mapping[str, str]) -> dict[str, str]:
    """Name of a product or option on the page -> its description."""
    wanted = keywords(goal)
    told = {product.asin: _fit(product, wanted, goal) for product in page.products}
    for value, name in (page.option_names or {}).items():
        is_wanted = set(keywords_of(value)) <= set(wanted)
        told[value] = "chosen" if chosen.get(name) == value else "asked" if is_wanted else "other"
    return told


def _fit(product: Product, wanted: Sequence[str], goal: Goal) -> str:
    count = len(set(wanted) & set(keywords_of(product.title)))
    highest = float(product.price_text.rpartition("$")[2])  # of a range, as the page shows it
    price = _PRICES[highest > goal.price_limit]
    return f"{_COUNTS[min(count, len(_COUNTS) - 1)]}/{price}"


NARRATOR = Narrator(describe)
