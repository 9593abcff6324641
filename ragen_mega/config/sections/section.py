"""The base of every section: bounds of numbers, flags that need another one, and the check of both.

Field docstrings are the text of `--help`. A value that cannot work, or that would do nothing, is a
ValueError that names the rule, the values and the remedy.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, Self, get_args, get_type_hints

from ragen_mega.environments.protocol import MAX_SEED
from ragen_mega.system.addresses import check_addresses
from ragen_mega.system.paths import expanded


@dataclass(frozen=True)
class Bounds:
    """Range in which a number must lie, in the words of the error and in numbers."""

    words: str
    low: float
    high: float = math.inf
    is_open: bool = False
    """Whether `low` itself is excluded."""
    is_whole: bool = False
    """Whether only whole numbers lie in it."""

    def __contains__(self, value: float) -> bool:
        if self.is_whole and type(value) is not int:
            return False
        return (self.low < value if self.is_open else self.low <= value) and value <= self.high


@dataclass(frozen=True)
class OnlyWith:
    """The other setting, of the same section or of another, without which a field does nothing."""

    name: str
    remedy: str
    """Flags with which the field has an effect."""
    values: tuple[Any, ...] = ()
    """Values of the setting with which it has one; none are named: all but the default."""


@dataclass(frozen=True)
class PathOf:
    """A file or folder, whose `~` becomes the home directory. A run knows it by its absolute path,
    because environments may change the working directory, and a run may be resumed from another.
    """

    when: Callable[[str], bool] = bool
    """Whether a value is a path, where it may be the name of something else."""


Count = Annotated[int, Bounds("at least 1", 1)]
Natural = Annotated[int, Bounds("at least 0", 0)]
Positive = Annotated[float, Bounds("positive", 0, is_open=True)]
NonNegative = Annotated[float, Bounds("at least 0", 0)]
Seed = Annotated[int, Bounds("a whole number from 0 to 2**63 - 1", 0, MAX_SEED, is_whole=True)]
PathName = Annotated[str, PathOf()]
Share = Annotated[float, Bounds("from 0 to 1", 0, 1)]
BelowOne = Annotated[float, Bounds("at least 0, below 1", 0, 1 - 2**-24)]
Probability = Annotated[float, Bounds("a probability, from 0 to 1", 0, 1)]


@dataclass(frozen=True)
class Section:
    """A section of the configuration, checked when it is built."""

    def __post_init__(self) -> None:
        """Expand paths. Raise ValueError for a path without a home directory, for a number that is
        not finite or out of bounds, for a field that does nothing, for credentials in an address,
        and for a broken rule.
        """
        for name, path in self.paths().items():
            object.__setattr__(self, name, expanded(path))
        bounds = self._declared(Bounds)
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, not {value}")
            if isinstance(value, str):
                check_addresses(value)
            if name in bounds and value is not None and value not in bounds[name]:
                raise ValueError(
                    f"{name} must be {bounds[name].words}, not {value}; set {flag_of(name)}"
                )
        check_effects(self)
        self.check()

    def check(self) -> None:
        """Raise ValueError if fields do not go together."""

    def paths(self) -> dict[str, str]:
        """Return the fields that name a file or folder, or may name one, and are set."""
        named = ((name, getattr(self, name)) for name in self._declared(PathOf))
        return {name: path for name, path in named if path is not None}

    def located(self) -> Self:
        """Return the section with absolute paths."""
        kinds = self._declared(PathOf)
        paths = {
            name: os.path.abspath(path)
            for name, path in self.paths().items()
            if path and kinds[name].when(path)
        }
        return replace(self, **paths)

    @classmethod
    @cache
    def defaults(cls) -> dict[str, Any]:
        """Return field -> its default, which is no factory's."""
        return {item.name: item.default for item in fields(cls)}

    @classmethod
    @cache
    def _declared(cls, kind: type) -> dict[str, Any]:
        """Return field -> the item of this kind in its annotation, for fields that have one."""
        return {
            name: item
            for name, hint in get_type_hints(cls, include_extras=True).items()
            for item in _parts(hint)
            if type(item) is kind
        }


def check_effects(*sections: Section) -> None:
    """Raise ValueError for a field that is not at its default and does nothing."""
    for _, why in idle_fields(*sections):
        raise ValueError(why)


def idle_fields(*sections: Section) -> Iterator[tuple[str, str]]:
    """Yield each field that is not at its default and does nothing (see `OnlyWith`), and the words
    that refuse it. Settings of other sections than the given ones are not looked at.
    """
    for section in sections:
        for name, needed in section._declared(OnlyWith).items():
            if getattr(section, name) == section.defaults()[name]:
                continue
            owner = next((each for each in sections if needed.name in each.defaults()), None)
            if owner is None:
                continue
            value, usual = getattr(owner, needed.name), owner.defaults()[needed.name]
            if value not in needed.values if needed.values else value == usual:
                without = f"with {needed.name} {value}" if value else f"without {needed.name}"
                remedy = f"drop {flag_of(name)} or set {needed.remedy}"
                yield name, f"{name} does nothing {without}; {remedy}"


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and all that it is made of, metadata included."""
    yield annotation
    for part in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from _parts(part)


def flag_of(name: str) -> str:
    """Return how a field is set on the command line."""
    return "--" + name.replace("_", "-")
