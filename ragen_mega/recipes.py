"""Recipes: files of flags, one or more per line, `#` starts a comment. The command line comes after them and wins."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ragen_mega.console import fail


def with_recipe(argv: Sequence[str], *, directory: Path, default: str) -> list[str]:
    """The flags of the recipe that `--recipe NAME` names (else of `default`), then the others of `argv`.

    NAME is a file `NAME.flags` of `directory`, or `none`. Leaves with a one-line error if there is no such recipe.
    """
    rest, name = [], default
    arguments = iter(argv)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag == "--recipe":
            name = value if equals else next(arguments, "")
        else:
            rest.append(argument)
    if name == "none":
        return rest
    known = sorted(path.stem for path in directory.glob("*.flags"))
    if name not in known:
        fail(f"--recipe must name one of {', '.join((*known, 'none'))}, not {name!r}; files are in {directory}")
    return [*read_flags(directory / f"{name}.flags"), *rest]


def read_flags(path: Path) -> list[str]:
    """The flags in a recipe, in order, quotes as in a shell."""
    return shlex.split(path.read_text(), comments=True)
