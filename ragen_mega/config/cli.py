"""Flags and recipes -> configuration. A recipe is a file of flags; the command line comes after it
and wins.
"""

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ragen_mega.config.flags import help_text, read_settings
from ragen_mega.config.schema import StarPOConfig, parse_shares
from ragen_mega.data.registry import did_you_mean

RECIPES = Path(__file__).parent / "recipes"
"""Files of flags, one or more per line; `#` starts a comment."""
DEFAULT_RECIPE = "frozen_lake"
"""The launch script's; the program itself uses no recipe unless one is named."""


def with_recipe(argv: Sequence[str], *, default: str, directory: Path = RECIPES) -> list[str]:
    """The flags of the recipe that `--recipe NAME` names (else of `default`), then the others of
    `argv`.

    NAME is a file `NAME.flags` of `directory`, or `none`. Raises ValueError if there is no such
    recipe.
    """
    name, rest = split_recipe(argv, default)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--environments", nargs="?", const="")
    chosen, rest = parser.parse_known_args(rest)
    played = chosen.environments
    if played is not None:
        rest += ["--environments", played]
    if name == "none":
        return rest
    known = recipe_names(directory)
    if name not in known:
        raise ValueError(
            f"--recipe must name one of {', '.join(known)}, not {name!r}"
            f"{did_you_mean(name, known)}; files are in {directory}"
        )
    flags = _of_estimator(read_flags(directory / f"{name}.flags"), rest)
    return [*(flags if played is None else _of_played(flags, played)), *rest]


def split_recipe(argv: Sequence[str], default: str) -> tuple[str, list[str]]:
    """The recipe that `--recipe NAME` names, else `default`, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", nargs="?", default=default, const="")
    chosen, rest = parser.parse_known_args(argv)
    return chosen.recipe, rest


def recipe_names(directory: Path = RECIPES) -> list[str]:
    """The names that --recipe takes."""
    return [*sorted(path.stem for path in directory.glob("*.flags")), "none"]


def _of_played(flags: list[str], environments: str) -> list[str]:
    """The flags of a recipe, less the options of environments that are not played."""
    names = parse_shares(environments).keys()

    def keep(options: dict[str, object]) -> dict[str, object]:
        return {name: value for name, value in options.items() if name in names}

    kept = list(flags)
    for index, (flag, value) in enumerate(pairwise(flags), start=1):
        if flag == "--environment-options":
            kept[index] = json.dumps(keep(json.loads(value)))
        elif flag == "--curriculum":
            steps = json.loads(value)
            kept[index] = json.dumps({step: keep(options) for step, options in steps.items()})
    return kept


def _of_estimator(flags: list[str], others: Sequence[str]) -> list[str]:
    """The flags of a recipe, less what says how its estimator works where `others` name another."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--advantage-estimator", nargs="?")
    of_recipe, chosen = (parser.parse_known_args(words)[0] for words in (flags, others))
    if chosen.advantage_estimator in (None, of_recipe.advantage_estimator):
        return flags
    for option in ("--turn-gamma", "--turn-lam", "--reward-placement"):
        parser.add_argument(option, nargs="?")
    return parser.parse_known_args(flags)[1]


def read_flags(path: Path) -> list[str]:
    """The flags in a recipe, in order, quotes as in a shell."""
    return shlex.split(path.read_text(), comments=True)


def parse(argv: Sequence[str], *, recipe: str = "none") -> StarPOConfig:
    """Parse flat flags; a later flag wins. `recipe` is the default that --recipe replaces.

    Raises ValueError on an unknown flag or a combination that cannot work.
    """
    name, rest = split_recipe(argv, recipe)
    if {"-h", "--help"} & set(rest):
        if os.environ.get("RANK", "0") == "0":  # which every rank was asked for
            chosen = read_settings(with_recipe([], default=name))
            print(help_text(name, chosen, recipe_names()), end="")
        raise SystemExit(0)
    settings = read_settings(with_recipe(rest, default=name))
    settings.setdefault("logging", {})["recipe"] = name
    return StarPOConfig.from_dict(settings)
