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

from ragen_mega.config.flags import all_flags, help_text, read_settings
from ragen_mega.config.schema import StarPOConfig, flag_of, parse_shares
from ragen_mega.data.registry import did_you_mean

RECIPES = Path(__file__).parent / "recipes"
"""Files of flags, one or more per line; `#` starts a comment."""
DEFAULT_RECIPE = "frozen_lake"
"""The launch script's; the program itself uses no recipe unless one is named."""
_BELONGS_TO = {
    "--advantage-estimator": (("--turn-gamma", "--turn-lam", "--reward-placement"), ()),
    "--filter-strategy": (("--filter-value", "--filter-start"), ("--filter-keep-zero",)),
}
"""Flags with a value, and switches, that mean nothing, or something else, under another choice."""


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
    flags = _of_choices(read_flags(directory / f"{name}.flags"), rest)
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


def _of_choices(flags: list[str], others: Sequence[str]) -> list[str]:
    """The flags of a recipe, less what says how its estimator or its filter works where `others`
    name another.
    """
    defaults = {flag_of(one.name): one.default for one in all_flags()}
    for choice, (values, switches) in _BELONGS_TO.items():
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument(choice, nargs="?", dest="choice", default=defaults[choice])
        of_recipe = parser.parse_known_args(flags)[0].choice
        parser.set_defaults(choice=of_recipe)
        if parser.parse_known_args(others)[0].choice == of_recipe:
            continue
        for value in values:
            parser.add_argument(value, nargs="?")
        for switch in switches:
            parser.add_argument(switch, action=argparse.BooleanOptionalAction)
        flags = parser.parse_known_args(flags)[1]
    return flags


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
