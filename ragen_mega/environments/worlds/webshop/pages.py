"""The pages of the shop as text, and what can be clicked on each.

They are the visible strings of WebShop's pages in its text mode, joined by ` [SEP] `. Pages do not
show which options are chosen.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ragen_mega.environments.worlds.webshop.catalogue import Goal, Product

SEPARATOR = " [SEP] "
RESULTS_PER_PAGE = 10
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")
BUTTONS = (BACK, PREVIOUS, NEXT, *SUB_PAGES, BUY)

Kind = Literal["start", "results", "item", "sub", "done"]


@dataclass(frozen=True, slots=True)
class Page:
    """One page as the agent sees it."""

    kind: Kind
    text: str
    buttons: tuple[str, ...] = ()
    products: tuple[Product, ...] = ()
    """Listed on a page of results."""
    option_names: Mapping[str, str] | None = None
    """Option value -> name, on the page of a product."""

    @property
    def clickable(self) -> list[str]:
        """Return the arguments that `click[...]` accepts, as the page spells them."""
        asins = [product.asin for product in self.products]
        return [*self.buttons, *asins, *(self.option_names or {})]


def start_page(goal: Goal) -> Page:
    return _page("start", ["WebShop", *_head(goal), "Search"])


def results_page(goal: Goal, hits: Sequence[Product], number: int) -> Page:
    """Return the page `number` of the hits, ten per page; empty beyond the last page."""
    end = number * RESULTS_PER_PAGE
    products = tuple(hits[end - RESULTS_PER_PAGE : end])
    moves = [PREVIOUS, NEXT] if number > 1 else [NEXT]
    texts = [*_head(goal), BACK, f"Page {number} (Total results: {len(hits)})", *moves]
    for product in products:
        texts += [product.asin, product.title, product.price_text]
    return _page("results", texts, (BACK, *moves), products=products)


def item_page(goal: Goal, product: Product) -> Page:
    options = [text for name, values in product.options.items() for text in (name, *values)]
    price = f"Price: {product.price_text}"
    texts = [*_head(goal), BACK, PREVIOUS, *options, product.title, price, "Rating: N.A."]
    # If two options share a value, the later option has it.
    names = {value: name for name, values in product.options.items() for value in values}
    buttons = (BACK, PREVIOUS, *SUB_PAGES, BUY)
    return _page("item", [*texts, *SUB_PAGES, BUY], buttons, option_names=names)


def sub_page(goal: Goal, product: Product, name: str) -> Page:
    """Return the description, the features or the reviews, of which there are none."""
    texts = {"Description": (product.description,), "Features": product.bullets, "Reviews": ()}
    return _page("sub", [*_head(goal), BACK, PREVIOUS, *texts[name]], (BACK, PREVIOUS))


def done_page(product: Product, chosen: Mapping[str, str], score: float) -> Page:
    """Return the receipt; the original leaves most of it empty."""
    purchased = ["Purchased", "asin", product.asin, "options", json.dumps(chosen)]
    for name in ("attrs", "category", "query", "product category"):
        purchased += [name, "None"]
    target = ["asin", "options", "attrs", "price upper", "instuction text", "category"]
    target += ["product category", "query", "Goal", "None"]
    result = ["Your score (min 0.0, max 1.0)", str(score), "Reward Details", "None"]
    texts = ["Thank you for shopping with us!", "Your code:", "None"]
    texts += ["(Paste it in your MTurk interface.)", *purchased, "Target", *target, "Reward"]
    return _page("done", [*texts, *result])


def _head(goal: Goal) -> list[str]:
    return ["Instruction:", goal.instruction]


def _page(
    kind: Kind,
    texts: Sequence[str],
    buttons: tuple[str, ...] = (),
    *,
    products: tuple[Product, ...] = (),
    option_names: Mapping[str, str] | None = None,
) -> Page:
    return Page(kind, SEPARATOR.join(texts), buttons, products, option_names)
