"""A shop that is open: its products, its search engine and its goals. Built once a process and
shared by every environment, since nothing in it changes.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ragen_mega.environments.worlds.webshop.catalogue import (
    Product,
    Request,
    Splits,
    make_goals,
    split_goals,
)
from ragen_mega.environments.worlds.webshop.data_folder import GoalKind, read_folder
from ragen_mega.environments.worlds.webshop.generated import generate_catalogue
from ragen_mega.environments.worlds.webshop.search import SearchEngine


class Shop:
    """Products by identifier, what can be searched, and goals by split."""

    def __init__(
        self, entries: Sequence[tuple[Product, Sequence[Request]]], *, label: str, seed: int
    ) -> None:
        self.label = label
        """What results on this shop are called."""
        self.products = {product.asin: product for product, _ in entries}
        self.engine = SearchEngine([product for product, _ in entries])
        self.goals: Splits = split_goals(make_goals(entries, seed=seed))


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
