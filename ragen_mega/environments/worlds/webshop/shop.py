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
from ragen_mega.environments.worlds.webshop.generated import ASIN_HALVES, generate_catalogue
from ragen_mega.environments.worlds.webshop.narrator import WORDS
from ragen_mega.environments.worlds.webshop.search import SearchEngine

_WORD = re.compile(r"[\w'.-]*\w")
_SEP = pages.SEPARATOR
_MARKS = (
    *(_SEP, "Price: ", " click[", " search[", f"WebShop{_SEP}", f"{_SEP}Search"),
    *(f"Instruction:{_SEP}i need a", " with", ": ", ", and", ", and price lower than", " dollars"),
    *(f"{_SEP}{pages.BACK}{_SEP}Page ", " (Total results: ", f"){_SEP}{pages.NEXT}"),
    f"{_SEP}{pages.BACK}{_SEP}{pages.PREVIOUS}",
    _SEP.join(("", "Rating: N.A.", *pages.SUB_PAGES, pages.BUY)),
)
"""Texts that many pages share."""


class Shop:
    """Products by identifier, the search engine, and goals by split."""

    def __init__(
        self,
        entries: Sequence[tuple[Product, Sequence[Request]]],
        *,
        seed: int,
        asin_parts: Sequence[str] = (),
    ) -> None:
        """`asin_parts`: texts that all identifiers consist of, if there are such."""
        self.products = {product.asin: product for product, _ in entries}
        self._asins = asin_parts or tuple(self.products)
        self.engine = SearchEngine([product for product, _ in entries])
        self.goals: Splits = split_goals(make_goals(entries, seed=seed))

    @cached_property
    def vocabulary(self) -> list[str]:
        """Identifiers or their parts, words (with and without a space before them), prices, buttons
        and marks.
        """
        products = self.products.values()
        texts = {
            text
            for product in products
            for text in (product.title, *product.options, *_values(product))
        }
        texts |= {goal.instruction for split in self.goals for goal in split}
        words = {word for text in texts for word in _WORD.findall(text)}
        prices = {product.price_text for product in products}
        spaced = {f" {word}" for word in words}
        said = {*WORDS, *_MARKS, *pages.BUTTONS}
        return sorted(said.union(self._asins, words, spaced, prices))


@lru_cache(maxsize=4)
def generated_shop(num_products: int, num_departments: int, seed: int) -> Shop:
    """Return a shop with a generated catalogue."""
    entries = list(
        generate_catalogue(num_products=num_products, num_departments=num_departments, seed=seed)
    )
    return Shop(entries, seed=seed, asin_parts=sum(ASIN_HALVES, []))


@lru_cache(maxsize=2)
def folder_shop(folder: str, goals: GoalKind, seed: int) -> Shop:
    """Return a shop with WebShop's own catalogue."""
    entries = list(read_folder(Path(folder), goals=goals, seed=seed))
    return Shop(entries, seed=seed)


def _values(product: Product) -> list[str]:
    return [value for values in product.options.values() for value in values]
