"""Products and goals of a shop, whatever their source.

Goals are made as in WebShop (arXiv:2207.01206, section 3 and its released code): a price limit
that the product itself respects, and for a synthetic request one goal per combination of options.
"""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NO_LIMIT = 1e6
"""Price limit of a goal without one."""
_PRICE_STEP, _HIGHEST_LIMIT, _LIMITS_DRAWN_FROM = 10, 990, 4
_SHUFFLE_SEED = 233  # WebShop's
_NUM_TEST, _NUM_HELD_OUT = 500, 1500


@dataclass(frozen=True, slots=True)
class Product:
    """One product; texts as the pages show them."""

    asin: str
    """Identifier, at most 10 characters."""
    title: str
    description: str
    bullets: tuple[str, ...]
    """The texts on its `Features` page."""
    query: str
    """Search term under which it was collected; products of one query are of one type."""
    product_category: str
    """Category path, starting with the department; parts are separated by U+203A."""
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    """Option name -> values, in lower case."""
    price: float
    """Price in dollars."""
    price_text: str
    """Price as the pages show it: one price or `$a to $b`."""


class Request(NamedTuple):
    """A request that one product fulfils."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] | None
    """Values asked for; None: a goal for each combination of the product's options."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Task of an episode; `asin` names a product that fulfils it."""

    asin: str
    title: str
    query: str
    product_category: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str | tuple[str, str], ...]
    """Values (people's requests) or (name, value) pairs (synthetic ones)."""
    price_limit: float


class Splits(NamedTuple):
    """Goals, in RAGEN's order: the first 500 test, the next 1000 validation, the rest training."""

    test: tuple[Goal, ...]
    validation: tuple[Goal, ...]
    train: tuple[Goal, ...]


def make_goals(entries: Iterable[tuple[Product, Sequence[Request]]], *, seed: int) -> list[Goal]:
    """Return the goals of all requests, in WebShop's shuffled order; `seed` draws their price
    limits.
    """
    generator = random.Random(seed)
    goals = [
        goal
        for product, requests in entries
        for request in requests
        for goal in _goals_of(product, request, generator)
    ]
    random.Random(_SHUFFLE_SEED).shuffle(goals)
    return goals


def split_goals(goals: Sequence[Goal]) -> Splits:
    """Raises ValueError unless goals are left for training."""
    if len(goals) <= _NUM_HELD_OUT:
        raise ValueError(
            f"a shop needs more than {_NUM_HELD_OUT} goals, {_NUM_HELD_OUT} of them to be held out,"
            f" and this one has {len(goals)}; use more products"
        )
    return Splits(
        tuple(goals[:_NUM_TEST]),
        tuple(goals[_NUM_TEST:_NUM_HELD_OUT]),
        tuple(goals[_NUM_HELD_OUT:]),
    )


def _goals_of(product: Product, request: Request, generator: random.Random) -> list[Goal]:
    limit, clause = _price_limit(product.price, generator)
    names = sorted(product.options)
    combinations: Iterable[tuple[str | tuple[str, str], ...]] = (
        [request.options]
        if request.options is not None
        else (
            tuple(zip(names, values, strict=True))
            for values in itertools.product(*(product.options[name] for name in names))
        )
    )
    return [
        Goal(
            asin=product.asin,
            title=product.title,
            query=product.query,
            product_category=product.product_category,
            instruction=request.text + _option_clause(options) + clause,
            attributes=request.attributes,
            options=options,
            price_limit=limit,
        )
        for options in combinations
    ]


def _price_limit(price: float, generator: random.Random) -> tuple[float, str]:
    """Draw the larger of two draws from the next multiples of 10 above a price, and its clause."""
    limits = range(_PRICE_STEP, _HIGHEST_LIMIT + 1, _PRICE_STEP)
    above = [float(limit) for limit in limits if limit > price][:_LIMITS_DRAWN_FROM]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(generator.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _option_clause(options: Sequence[str | tuple[str, str]]) -> str:
    """Return the options as a clause of a synthetic goal; human requests already name theirs."""
    pairs = [f"{option[0]}: {option[1]}" for option in options if isinstance(option, tuple)]
    return " with " + ", and ".join(pairs) if pairs else ""
