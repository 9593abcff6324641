"""WebShop's own catalogue, read from a folder with its files.

They are not part of this package, because the licence of the scraped catalogue is not stated. Files
are read entry by entry; each entry is checked, and an error says where the faulty entry is.
"""

import random
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import ijson

from ragen_mega.environments.worlds.webshop.catalogue import Product, Request

GoalKind = Literal["synthetic", "human"]

_LONGEST_ASIN = 10
_DEFAULT_PRICE = 100.0
_NO_ATTRIBUTES = ["DUMMY_ATTR"]  # as the original: fits no goal
_DOWNLOAD = (
    "download it as its setup.sh does (github.com/princeton-nlp/WebShop; a copy of the small set is"
    " the Hugging Face data set ZihanWang314/ragen-datasets)"
)


def read_folder(
    folder: Path, *, goals: GoalKind, seed: int
) -> Iterator[tuple[Product, list[Request]]]:
    """Yield the products with their requests; `seed` draws the prices that are given as a range.

    The small set (items_shuffle_1000.json) is read if it exists, else the full one. Products with
    an identifier that is longer than 10 characters, or repeated, are left out as in the original.
    Raises ValueError for a missing file or a faulty entry.
    """
    products, attributes_file, human = _find(folder, goals)
    described = dict(_entries(attributes_file, ""))
    asked = dict(_entries(human, "")) if goals == "human" else {}
    generator = random.Random(seed)
    seen: set[str] = set()
    for number, entry in enumerate(_entries(products, "item")):
        where = f"{products.name}, product {number}"
        asin = _text(entry, "asin", where)
        if asin == "nan" or len(asin) > _LONGEST_ASIN or asin in seen:
            continue
        seen.add(asin)
        where_about = f"{attributes_file.name}, {asin}"
        about = _checked(described.get(asin, {}), dict, "the entry", where_about)
        attributes = _texts(about.get("attributes", _NO_ATTRIBUTES), "attributes", where_about)
        product = _product(entry, asin, attributes, where, generator)
        if goals == "human":
            yield product, _human_requests(asked.get(asin, []), f"{human.name}, {asin}")
        else:
            yield product, _synthetic_requests(about, where_about)


def _find(folder: Path, goals: GoalKind) -> tuple[Path, Path, Path]:
    """Return the files of products, attributes and people's requests, of the small or the full
    set. Raises ValueError naming the first missing one.
    """
    has = {size: (folder / f"items_shuffle{size}.json").is_file() for size in ("", "_1000")}
    size = "" if has[""] and not has["_1000"] else "_1000"
    files = (
        folder / f"items_shuffle{size}.json",
        folder / f"items_ins_v2{size}.json",
        folder / "items_human_ins.json",
    )
    for path in files if goals == "human" else files[:2]:
        if not path.is_file():
            raise ValueError(
                f"WebShop's data has a file {path.name}, and {path} is none; {_DOWNLOAD}"
            )
    return files


def _entries(path: Path, prefix: str) -> Iterator[Any]:
    """Yield the entries of the file, one by one: elements of a list (`item`), or (key, value)."""
    read, kind = (ijson.items, "array") if prefix else (ijson.kvitems, "map")
    try:
        with path.open("rb") as file:
            if next(ijson.basic_parse(file))[0] != f"start_{kind}":
                what = "a list of products" if prefix else "an object with products' identifiers"
                raise ValueError(f"{path} must hold {what}; {_DOWNLOAD}")
            file.seek(0)
            yield from read(file, prefix, use_float=True)
    except ijson.JSONError as error:
        raise ValueError(f"{path} is not whole JSON ({error}); {_DOWNLOAD} again") from None


def _product(
    entry: dict[str, Any],
    asin: str,
    attributes: tuple[str, ...],
    where: str,
    generator: random.Random,
) -> Product:
    price, price_text = _price(entry.get("pricing"), where, generator)
    bullets, described = entry.get("small_description") or [], entry.get("full_description")
    return Product(
        asin=asin,
        title=_text(entry, "name", where),
        description=_text(entry, "full_description", where) if described else "",
        bullets=tuple(map(str, bullets)) if isinstance(bullets, list) else (str(bullets),),
        query=_text(entry, "query", where).lower().strip(),
        product_category=_text(entry, "product_category", where),
        attributes=attributes,
        options=_options(entry.get("customization_options") or {}, where),
        price=price,
        price_text=price_text,
    )


def _price(text: Any, where: str, generator: random.Random) -> tuple[float, str]:
    """Return the price in dollars, and its text on the page; for a range, a price drawn from it."""
    if not text:
        return _DEFAULT_PRICE, f"${_DEFAULT_PRICE}"
    digits = [re.sub(r"[^\d.]", "", part) for part in str(text).split("$")[1:]]
    try:
        prices = [float(Decimal(part)) for part in digits][:2]
    except ArithmeticError:
        prices = []
    if not prices:
        raise ValueError(f"{where}: pricing must be $a or $a to $b, not {text!r:.60}")
    if len(prices) == 1:
        return prices[0], f"${prices[0]}"
    return generator.uniform(*prices), f"${prices[0]} to ${prices[1]}"


def _options(named: Any, where: str) -> dict[str, tuple[str, ...]]:
    return {
        name.lower(): tuple(
            _text(value, "value", where).strip().replace("/", " | ").lower()
            for value in _checked(values, list, f"customization_options of {name}", where)
        )
        for name, values in _checked(named, dict, "customization_options", where).items()
        if values is not None
    }


def _synthetic_requests(about: dict[str, Any], where: str) -> list[Request]:
    if about.get("instruction") is None:
        return []
    text = _text(about, "instruction", where)
    return [Request(text, _attributes(about, where), None)]


def _human_requests(requests: Any, where: str) -> list[Request]:
    """Return the requests that name attributes, as in the original."""
    return [
        Request(
            _text(request, "instruction", where).strip("."),
            _attributes(request, where),
            _texts(request.get("instruction_options") or [], "instruction_options", where),
        )
        for request in _checked(requests, list, "the entry", where)
        if _checked(request, dict, "a request", where).get("instruction_attributes")
    ]


def _attributes(about: dict[str, Any], where: str) -> tuple[str, ...]:
    attributes = _texts(about.get("instruction_attributes"), "instruction_attributes", where)
    if not attributes:
        raise ValueError(f"{where}: instruction_attributes must name at least one")
    return attributes


def _texts(value: Any, key: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{where}: {key} must be a list of texts, not {value!r:.60}")
    return tuple(value)


def _checked(value: Any, kind: type, key: str, where: str) -> Any:
    """Return a value that is of this kind, list or dict."""
    if not isinstance(value, kind):
        what = "a list" if kind is list else "an object"
        raise ValueError(f"{where}: {key} must be {what}, not {value!r:.60}")
    return value


def _text(entry: Any, key: str, where: str) -> str:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key} must be a text, not {value!r:.60}")
    return value
