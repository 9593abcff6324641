"""Paths as users write them: in flags, files of flags, studies and environment variables."""

import os


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
