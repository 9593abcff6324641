"""Optional packages, by the extra of `setup.py` that installs them."""

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

EXTRAS = {
    "webshop": ("bm25s", "Stemmer", "rapidfuzz", "ijson"),
    "gymnasium": ("gymnasium",),
    "agents": ("openai", "starlette", "uvicorn"),
    "mcp": ("mcp",),
    "studies": ("matplotlib", "scipy"),
    "verifiers": ("verifiers",),
}
"""Extra -> the modules that it installs and that code of ours imports by statement."""


def installed(distribution: str) -> str | None:
    """Return the version of a distribution, None if there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def require(extra: str, purpose: str) -> None:
    """Raise ValueError with the command that installs `extra` if one of its modules is missing.

    `purpose` is the subject of the message, in the plural: "plots".
    """
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise ValueError(f"{purpose} need {', '.join(missing)}; run {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra into the environment of this process."""
    return f"{sys.executable} -m pip install 'ragen-mega[{extra}]'"


def extra_of(module: str | None) -> str | None:
    """Return the extra that installs a module; None for a module of no extra."""
    top = (module or "").partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if top in modules), None)
