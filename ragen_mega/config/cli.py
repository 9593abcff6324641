"""Flags and recipes -> configuration. A recipe is a file of flags; the command line comes after it
and wins.
"""

import argparse
import contextlib
import dataclasses
import difflib
import io
import json
import os
import re
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro

from ragen_mega.config.schema import StarPOConfig, flag_of, parse_shares

RECIPES = Path(__file__).parent / "recipes"
"""Files of flags, one or more per line; `#` starts a comment."""
DEFAULT_RECIPE = "frozen_lake"
"""Of the launch script; the program itself takes none unless it is named."""


def with_recipe(argv: Sequence[str], *, default: str, directory: Path = RECIPES) -> list[str]:
    """The flags of the recipe that `--recipe NAME` names (else of `default`), then the others of
    `argv`.

    NAME is a file `NAME.flags` of `directory`, or `none`. Raises ValueError if there is no such
    recipe.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", nargs="?", default=default, const="")
    parser.add_argument("--environments", nargs="?", const="")
    chosen, rest = parser.parse_known_args(argv)
    name, played = chosen.recipe, chosen.environments
    if played is not None:
        rest += ["--environments", played]
    if name == "none":
        return rest
    known = sorted(path.stem for path in directory.glob("*.flags"))
    if name not in known:
        raise ValueError(
            f"--recipe must name one of {', '.join((*known, 'none'))}, not {name!r}; files are in"
            f" {directory}"
        )
    flags = read_flags(directory / f"{name}.flags")
    return [*(flags if played is None else _of_played(flags, played)), *rest]


def _of_played(flags: list[str], environments: str) -> list[str]:
    """The flags of a recipe without the options of environments that are not played."""
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


def read_flags(path: Path) -> list[str]:
    """The flags in a recipe, in order, quotes as in a shell."""
    return shlex.split(path.read_text(), comments=True)


def parse(argv: Sequence[str], *, recipe: str = "none") -> StarPOConfig:
    """Parse flat flags; a later flag wins. `recipe` is the one that --recipe replaces.

    Raises ValueError on an unknown flag or a combination that cannot work.
    """
    argv = with_recipe(argv, default=recipe)
    known = {"--help"} | {
        flag_of(item.name)
        for section in dataclasses.fields(StarPOConfig)
        for item in dataclasses.fields(section.default_factory)
    }
    for argument in argv:
        flag = argument.split("=", 1)[0].replace("_", "-")
        if flag.startswith("--") and not {flag, flag.replace("--no-", "--")} & known:
            close = difflib.get_close_matches(flag, sorted(known), n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(f"unknown flag {argument.split('=', 1)[0]}; {hint}--help lists all")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(complaint):
            return tyro.cli(
                Annotated[StarPOConfig, tyro.conf.OmitArgPrefixes],
                args=argv,
                prog="examples/pretrain_starpo.sh",
            )
    except SystemExit as error:
        if not error.code:  # --help, which every rank was asked for
            if os.environ.get("RANK", "0") == "0":
                print(complaint.getvalue(), end="")
            raise
        raise ValueError(_unbox(complaint.getvalue())) from None


def _unbox(text: str) -> str:
    """The message inside the frame that tyro draws around it (title, message, rule, hint), on one
    line.
    """
    lines = [line.strip("\u2502| ") for line in text.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and set(line) <= set("\u2500-")]
    start = 1 if text.startswith("\u256d") else rules[0] + 1
    end = next((i for i in rules if i > start), len(lines))
    return re.sub(r"^Error parsing \w+: ", "", " ".join(lines[start:end]).strip())
