"""What can be said of a page: what of it the instruction mentions, never which action is best."""

from collections.abc import Sequence
from typing import Any

from ragen_mega.environments.protocol import Narrator
from ragen_mega.environments.worlds.webshop.players import keywords

_COUNTS = ("none", "one", "two", "three")


def describe(environment: Any, actions: Sequence[str]) -> str:
    return ""


NARRATOR = Narrator(describe)
