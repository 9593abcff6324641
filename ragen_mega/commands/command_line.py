"""Parts that all commands share: flags, one-line errors, folders of reports.

Only the standard library is imported at the top, because doctor.py has to work where nothing else
is installed.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ragen_mega.ranks.launcher import PROGRAM, forget_foreign_ranks, is_rank, ranks_command
from ragen_mega.system.paths import expanded

Flag = tuple[str, dict[str, Any]]


def flag(name: str, about: str, default: Any = None, **options: Any) -> Flag:
    """Return one flag of `parse`. The default, which --help shows, gives the type; False makes a
    switch. `options` are argparse's options.
    """
    if default is False:
        options["action"] = "store_true"
    elif default is not None:
        options = {"type": type(default), "default": default} | options
        about += " (default: %(default)s)"
    return name, {"help": about} | options


def name_or_path(text: str) -> str:
    """Return the value of a flag that may be a path, with the home directory in place of `~`."""
    try:
        return expanded(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def any_path(text: str) -> Path:
    """Return the absolute path that a flag names: worlds and models that are played may change the
    working directory.
    """
    return Path(os.path.abspath(name_or_path(text)))


def target(text: str) -> Path:
    """Return a file that can be there; what takes minutes must not end with none."""
    if (path := any_path(text)).is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} must be a file in an existing folder; make the folder first, or give another"
        )
    return path


JSON = flag("--json", "write the result here", type=target, metavar="OUT")


def report_folder(pages: str, beside: Path) -> Path:
    """Return the folder of a report: these pages of the repository if it is the working directory,
    else the folder `beside` the subject of the report.
    """
    from ragen_mega.report.provenance import REPOSITORY

    return Path(pages) if Path.cwd() == REPOSITORY else beside


class _CommandParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def parse(
    manual: str | None, *flags: Flag, argv: Sequence[str] | None = None, takes_others: bool = False
) -> argparse.Namespace:
    """Return the command line, itself as `argv`. Flags that are not among `flags` become `others`
    if `takes_others`, else an error: one line and exit code 2, as for any bad flag.
    """
    parser = _CommandParser(
        description=manual,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, options in flags:
        kind = options.get("type")
        parser.add_argument(name, **options | ({"type": any_path} if kind is Path else {}))
    argv = sys.argv[1:] if argv is None else argv
    arguments, others = parser.parse_known_args(argv)
    if others and not takes_others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    vars(arguments).update(argv=argv, others=others)
    return arguments


def command(
    manual: str | None, *flags: Flag, takes_others: bool = False
) -> Callable[[Callable[[argparse.Namespace], int | None]], Callable[..., None]]:
    """Turn a function of the parsed command line, which may return an exit code, into the `main` of
    a tool. Bad input (ValueError, OSError) or numbers that are not finite (FloatingPointError) are
    one line and exit code 2.
    """

    def decorate(work: Callable[[argparse.Namespace], int | None]) -> Callable[..., None]:
        @functools.wraps(work)
        def main(argv: Sequence[str] | None = None) -> None:
            try:
                status = work(parse(manual, *flags, argv=argv, takes_others=takes_others))
            except (ValueError, OSError, FloatingPointError) as error:
                from ragen_mega.report.console import fail
                from ragen_mega.storage.integrity import describe_error

                fail(describe_error(error) if isinstance(error, OSError) else str(error))
            if status:
                raise SystemExit(status)

        return main

    return decorate


def check_together(*rules: tuple[object, str]) -> None:
    """Raise ValueError for the first rule, (whether it is broken, its text), that is broken."""
    for is_broken, text in rules:
        if is_broken:
            raise ValueError(text)


def relaunch(num_ranks: int, name: str, argv: Sequence[str]) -> None:
    """Become command `name` on that many ranks of this machine; nothing if one is enough, or if
    this is a rank already. Raises ValueError where others than torchrun promise ranks.
    """
    forget_foreign_ranks()
    if num_ranks > 1 and not is_rank():
        os.execv(sys.executable, ranks_command(num_ranks, PROGRAM, name, *argv))
