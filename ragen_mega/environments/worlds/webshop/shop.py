"""A shop: its products, its search engine and its goals. Built once per process and shared by all
environments, because it never changes.
"""

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

from ragen_mega.environments.worlds.webshop import pages
from ragen_mega.environments.worlds.webshop.catalogue import (
    Product,
    Request,
    Splits,
    make_goals,
    split_goals,
)
from ragen_mega.environments.worlds.webshop.data_folder import GoalKind, read_folder
from ragen_mega.environments.worlds.webshop.generated import generate_catalogue
from ragen_mega.environments.worlds.webshop.narrator import WORDS
from ragen_mega.environments.worlds.webshop.search import SearchEngine

_WORD = re.compile(r"[\w'.-]*\w")
_MARKS = (pages.SEPARATOR, "Instruction:", "Price: ", "Rating: N.A.")
_MARKS += ("; ", ": ", " click[", " search[")


class Shop:
    """Products by identifier, the search engine, and goals by split."""

    def __init__(
        self, entries: Sequence[tuple[Product, Sequence[Request]]], *, label: str, seed: int
    ) -> None:
        self.label = label
        """How results on this shop are to be labelled."""
        self.products = {product.asin: product for product, _ in entries}
        self.engine = SearchEngine([product for product, _ in entries])
        self.goals: Splits = split_goals(make_goals(entries, seed=seed))

    @cached_property
    def vocabulary(self) -> list[str]:
        """Identifiers, words (with and without a space before them), prices, buttons and marks."""
        products = self.products.values()
        texts = {text for one in products for text in (one.title, *one.options, *_values(one))}
        texts |= {goal.instruction for split in self.goals for goal in split}
        words = {*WORDS, *(word for text in texts for word in _WORD.findall(text))}
        prices = {product.price_text for product in products}
        spaced = {f" {word}" for word in words}
        return sorted({*_MARKS, *pages.BUTTONS}.union(self.products, words, spaced, prices))


@lru_cache(maxsize=4)
def generated_shop(num_products: int, num_departments: int, seed: int) -> Shop:
    """A shop with a generated catalogue."""
    entries = list(
        generate_catalogue(num_products=num_products, num_departments=num_departments, seed=seed)
    )
    return Shop(entries, label=f"WebShop-compatible, {num_products} generated products", seed=seed)


@lru_cache(maxsize=2)
def folder_shop(folder: str, goals: GoalKind, seed: int) -> Shop:
    """A shop with WebShop's own catalogue."""
    entries = list(read_folder(Path(folder), goals=goals, seed=seed))
    return Shop(entries, label=f"WebShop-compatible, {len(entries)} products", seed=seed)


def _values(product: Product) -> list[str]:
    return [value for values in product.options.values() for value in values]
