"""Reward of a purchase for a goal, from 0 to 1.

Source: WebShop (arXiv:2207.01206, section 3), in the form of its released code:
r = r_type * (attributes + options + [price <= limit]) / (|attributes| + |options| + 1).

The original finds the nouns of titles with a tagger whose model is on no package index; here any
alphabetic word is a noun unless its ending or a short list excludes it (`title_nouns`).
"""

import re
from collections.abc import Iterable

from rapidfuzz import fuzz, utils

from ragen_mega.environments.worlds.webshop.catalogue import Goal, Product

_SIMILAR = 85  # percent; a match must exceed it
CATEGORY_SEPARATOR = "\u203a"

# A value is replaced by the first of these colours that it contains.
_COLOURS = (
    "amber aqua beige black blue bronze brown burgundy camel charcoal copper coral cream crimson"
    " cyan dark ebony gold gray green grey indigo ivory khaki lavender light lilac lime magenta"
    " maroon mint multicolor mustard natural navy olive orange peach pink plum purple rainbow red"
    " rose rust sand silver tan taupe teal turquoise violet white wine yellow"
).split()

_NO_NOUNS = frozenset(
    "a an and are as at be by for from in into is it its no not of off on or our per plus so than"
    " that the their these this to under up with without you your all any each extra"
    " free high large long low mini more most new small soft super very wide".split()
)
_ADJECTIVE_ENDINGS = ("able", "ible", "ful", "less", "ous")
_PARTICIPLE = re.compile(r"[a-z]{3,}[^e]ed")


def reward(goal: Goal, product: Product, chosen: dict[str, str]) -> float:
    """Return the score of buying `product` with the options `chosen` (name -> value)."""
    fitting = (
        _fitting_attributes(goal, product)
        + _fitting_options(goal, chosen.values())
        + (product.price <= goal.price_limit)
    )
    return type_reward(goal, product) * fitting / (len(goal.attributes) + len(goal.options) + 1)


def type_reward(goal: Goal, product: Product) -> float:
    """1 for a product of the requested kind, 0.5 for another kind, and 0.1 or 0 if the titles share
    few nouns or none, whatever else they have in common.
    """
    wanted = title_nouns(goal.title)
    shared = len(set(wanted) & set(title_nouns(product.title)))
    similarity = shared / len(wanted) if wanted else 0.2
    if similarity == 0:
        return 0.0
    if similarity < 0.1:
        return 0.1
    is_of_kind = (
        product.query == goal.query
        or len(_category_parts(product.product_category) & _category_parts(goal.product_category))
        >= 2
        or similarity > 0.2
    )
    return 1.0 if is_of_kind else 0.5


def title_nouns(title: str) -> list[str]:
    """Return the words of a title that count as nouns, in lower case, repetitions included."""
    words = (
        word.replace(".", "").replace("'", "").removesuffix("\u2019s")
        for word in re.split(r"[^\w.'\u2019]+", title.lower())
    )
    return [
        word
        for word in words
        if word.isalpha()
        and word not in _NO_NOUNS
        and not word.endswith(_ADJECTIVE_ENDINGS)
        and not _PARTICIPLE.fullmatch(word)
    ]


def _category_parts(path: str) -> set[str]:
    return {part.strip() for part in path.split(CATEGORY_SEPARATOR)}


def _fitting_attributes(goal: Goal, product: Product) -> int:
    """Count the requested attributes that the product has or that one of its texts mentions."""
    texts = (product.title, " ".join(product.bullets), product.description)
    return sum(
        any(_is_similar(attribute, own) for own in product.attributes)
        or any(attribute in text.lower() for text in texts)
        for attribute in goal.attributes
    )


def _fitting_options(goal: Goal, chosen: Iterable[str]) -> int:
    """Return the number of requested options that were chosen. A (name, value) pair is compared as
    the text `name value`, so that the value alone matches it.
    """
    values = [_plain_colour(value) for value in chosen]
    return sum(
        any(
            _is_similar(
                _plain_colour(option) if isinstance(option, str) else " ".join(option), value
            )
            for value in values
        )
        for option in goal.options
    )


def _plain_colour(value: str) -> str:
    """Return the first known colour in a value, else the value itself."""
    return next((colour for colour in _COLOURS if colour in value), value)


def _is_similar(title: str, other: str) -> bool:
    ascii_only = (text.encode("ascii", "ignore").decode() for text in (title, other))
    return round(fuzz.token_set_ratio(*ascii_only, processor=utils.default_process)) > _SIMILAR
