"""A generated catalogue: departments, groups, attributes, options and prices, drawn from a seed, so
that the shop needs no data files.

Titles, instructions and goals have the form of WebShop's synthetic ones. Results on it can compare
methods, but say nothing about scores on WebShop's own catalogue.
"""

import itertools
import random
import string
from collections.abc import Iterator
from typing import NamedTuple

from ragen_mega.environments.worlds.webshop.catalogue import Product, Request
from ragen_mega.environments.worlds.webshop.reward import CATEGORY_SEPARATOR

_NUM_HALVES = 128
_PRICES = [dollars + 0.99 for dollars in range(4, 60, 5)]
_ATTRIBUTES_PER_PRODUCT, _ATTRIBUTES_ASKED_FOR = 3, 2
_BRANDS = "alder bravo cedar delta ember fjord gusto heron indra juno koral lumen".split()


def _halves(prefix: str, generator: random.Random) -> list[str]:
    """Return distinct halves of identifiers, five characters each."""
    size, signs = 5 - len(prefix), string.ascii_uppercase + string.digits
    halves: dict[str, None] = {}
    while len(halves) < _NUM_HALVES:
        halves[prefix + "".join(generator.choices(signs, k=size))] = None
    return list(halves)


class Department(NamedTuple):
    """A part of the shop, with the words that describe its products."""

    name: str
    groups: dict[str, tuple[str, ...]]
    """Group -> types of product."""
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]


ASIN_HALVES = (_halves("B", random.Random(1)), _halves("", random.Random(2)))
"""First and second halves of all generated identifiers, so that the identifiers of any catalogue
are pairs of the same 256 texts.
"""
_COLOURS = ("black", "white", "red", "blue", "green", "yellow", "grey", "brown")
DEPARTMENTS = (
    Department(
        "clothing",
        {"tops": ("shirt", "sweater", "hoodie"), "bottoms": ("jeans", "skirt", "shorts")},
        ("cotton", "linen", "slim", "loose", "striped", "quilted", "stretch", "casual"),
        {"color": _COLOURS, "size": ("small", "medium", "large", "x-large")},
    ),
    Department(
        "home",
        {"bedroom": ("pillow", "blanket", "mattress"), "lighting": ("lamp", "lantern", "candle")},
        ("wooden", "modern", "rustic", "foldable", "floral", "handmade", "velvet", "compact"),
        {"color": _COLOURS, "style": ("classic", "nordic", "vintage")},
    ),
    Department(
        "electronics",
        {"audio": ("speaker", "headset", "radio"), "power": ("charger", "cable", "adapter")},
        ("wireless", "portable", "braided", "magnetic", "waterproof", "fast", "slender", "gaming"),
        {"color": _COLOURS, "length": ("3ft", "6ft", "10ft")},
    ),
    Department(
        "beauty",
        {"hair": ("shampoo", "conditioner", "brush"), "skin": ("lotion", "soap", "serum")},
        ("vegan", "organic", "natural", "gentle", "herbal", "scented", "moisturizing", "hydrating"),
        {"scent": ("lavender", "citrus", "vanilla", "mint"), "volume": ("4oz", "8oz", "16oz")},
    ),
    Department(
        "grocery",
        {"drinks": ("tea", "coffee", "cocoa"), "snacks": ("cookies", "crackers", "granola")},
        ("roasted", "crunchy", "keto", "kosher", "instant", "salted", "decaf", "gluten-free"),
        {"flavor": ("ginger", "caramel", "berry", "honey"), "pack": ("single", "double", "family")},
    ),
    Department(
        "outdoors",
        {"camping": ("tent", "hammock", "stove"), "cycling": ("helmet", "gloves", "pump")},
        ("rugged", "ventilated", "insulated", "sturdy", "inflatable", "padded", "light", "rigid"),
        {"color": _COLOURS, "capacity": ("solo", "duo", "group")},
    ),
)


def generate_catalogue(
    *, num_products: int, num_departments: int, seed: int
) -> Iterator[tuple[Product, list[Request]]]:
    """Yield the products with one request each, the same ones for the same arguments.

    Titles are distinct. Raises ValueError if there are not as many products or departments.
    """
    if not 1 <= num_departments <= len(DEPARTMENTS):
        raise ValueError(f"departments must be 1 to {len(DEPARTMENTS)}, not {num_departments}")
    kinds = [
        (department, group, noun, brand, attributes)
        for department in DEPARTMENTS[:num_departments]
        for group, nouns in department.groups.items()
        for noun in nouns
        for brand in _BRANDS
        for attributes in itertools.combinations(department.attributes, _ATTRIBUTES_ASKED_FOR)
    ]
    if not 1 <= num_products <= len(kinds):
        raise ValueError(
            f"{num_departments} departments have titles for 1 to {len(kinds)} products, not for"
            f" {num_products}"
        )
    generator = random.Random(seed)
    asins: set[str] = set()
    for department, group, noun, brand, attributes in generator.sample(kinds, num_products):
        shown = generator.sample(attributes, len(attributes))
        others = [attribute for attribute in department.attributes if attribute not in shown]
        hidden = generator.sample(others, _ATTRIBUTES_PER_PRODUCT - len(shown))
        price = generator.choice(_PRICES)
        product = Product(
            asin=_fresh_asin(asins, generator),
            title=" ".join((brand, *shown, noun)).title(),
            description=f"{brand} makes this {noun} for every day.",
            bullets=(f"{', '.join(hidden)} {noun}", f"from the {group} collection"),
            query=noun,
            product_category=f" {CATEGORY_SEPARATOR} ".join((department.name, group, noun)),
            attributes=(*shown, *hidden),
            options={
                name: tuple(_sample_values(values, generator))
                for name, values in department.options.items()
            },
            price=price,
            price_text=f"${price}",
        )
        yield product, [Request(f"i need a {' '.join(shown)} {noun}", tuple(shown), None)]


def _sample_values(values: tuple[str, ...], generator: random.Random) -> list[str]:
    """Return two to four of the values, in their order."""
    chosen = generator.sample(values, generator.randint(2, min(4, len(values))))
    return sorted(chosen, key=values.index)


def _fresh_asin(taken: set[str], generator: random.Random) -> str:
    while True:
        asin = "".join(map(generator.choice, ASIN_HALVES))
        if asin not in taken:
            taken.add(asin)
            return asin
