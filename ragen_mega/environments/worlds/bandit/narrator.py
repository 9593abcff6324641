"""What can be said of a bandit: its arms, never which one is better."""

from collections.abc import Sequence
from typing import Any

from ragen_mega.environments.protocol import Narrator


def describe(environment: Any, actions: Sequence[str]) -> str:
    """Which arms there are, in the order shown."""
    first, second = environment.facts()["arms"]
    return f" arms {first} {second}"


NARRATOR = Narrator(describe)
