"""Text of worlds, models and judges on a terminal, and commands as they can be typed there."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1: escape sequences begin so
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # marks that reorder what stands beside them
)


def printable(text: str) -> str:
    """Return the text with control characters shown as escapes, so that it cannot move the cursor,
    name the window, write to the clipboard or reorder what a person reads.
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def shown(path: Path) -> str:
    """Return a path as short as it can be typed in the working directory, if it lies there."""
    return os.path.relpath(path) if path.is_relative_to(os.getcwd()) else str(path)


def command_line(*words: object) -> str:
    """Return `ragen-mega WORDS`, quoted for a shell, after the activation of this environment where
    the shell does not find the program.
    """
    activate = Path(sys.executable).with_name("activate")
    is_found = shutil.which("ragen-mega") is not None or not activate.exists()
    before = "" if is_found else f"source {shlex.quote(shown(activate))}; "
    return before + shlex.join(["ragen-mega", *map(str, words)])
