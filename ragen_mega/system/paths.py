"""Paths as users write them, in flags, files and environment variables, and as errors name them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def expanded(path: str) -> str:
    """Return a path with the home directory in place of its leading `~` or `~user`, which a shell
    leaves as it is in `--output=~/runs`, in quotes and in files. Raises ValueError for a `~` whose
    home directory is not known.
    """
    whole = os.path.expanduser(path)
    if whole.startswith("~"):
        raise ValueError(
            f"{path!r} begins with {whole.partition(os.sep)[0]}, and no such user has a home"
            f" directory; write the whole path, or ./{path} for a folder of that name"
        )
    return whole


def path_in(directory: str, path: str) -> str:
    """Return a path that begins in a directory unless it is absolute or begins with `~`, as
    `expanded` has it.
    """
    return os.path.join(directory, expanded(path))


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Name a path in errors of the operating system within the block: Python leaves it out where
    reading or writing fails, and not opening.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def dangling(path: str) -> str | None:
    """Return what is wrong with a path that is a link to nothing; None for any other."""
    if not os.path.islink(path) or os.path.exists(path):
        return None
    return f"{path} is a link to {os.readlink(path)}, which does not exist"
