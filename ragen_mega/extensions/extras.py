"""Optional packages, by the extra of `setup.py` that installs them."""

import pkgutil
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

EXTRAS = {
    "webshop": ("bm25s:BM25", "Stemmer:Stemmer", "rapidfuzz:fuzz", "ijson:items"),
    "gymnasium": ("gymnasium:make",),
    "agents": ("openai:AsyncOpenAI", "starlette.applications:Starlette", "uvicorn:Server"),
    "mcp": ("mcp:Client",),
    "studies": ("matplotlib:use", "scipy.stats:t"),
    "verifiers": ("verifiers.v1:TaskData",),
}
"""Extra -> the modules that it installs and that code of ours imports by statement, each with a
name that is used from there.
"""


def installed(distribution: str) -> str | None:
    """Return the version of a distribution, None if there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def lack(use: str) -> str | None:
    """Return why `module:attribute` cannot be used, None if it can. Only an import tells: a file or
    a folder of the working directory may have the name of a package that is not installed.
    """
    try:
        pkgutil.resolve_name(use)
    except Exception as error:  # a broken package raises anything
        found = sys.modules.get(_top(use))
        if isinstance(error, ModuleNotFoundError) and error.name == _top(use):
            return "is not installed"
        if found is None or not isinstance(error, (ImportError, AttributeError)):
            return f"cannot be imported ({type(error).__name__}: {error})"
        place = getattr(found, "__file__", None) or next(iter(found.__path__))
        return f"is {place} here, and not the package ({error}); rename that if it is yours"
    return None


def is_found(module: str) -> bool:
    """Return whether a module is there, without importing it: no folder without code is one."""
    found = find_spec(module)
    return found is not None and found.origin is not None


def require(extra: str, purpose: str) -> None:
    """Raise ValueError with the command that installs `extra` if one of its modules is missing.

    `purpose` is the subject of the message, in the plural: "plots".
    """
    missing = [f"{_top(use)}, which {reason}" for use in EXTRAS[extra] if (reason := lack(use))]
    if missing:
        raise ValueError(f"{purpose} need {', and '.join(missing)}; run {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra into the environment of this process."""
    return shlex.join([sys.executable, "-m", "pip", "install", f"ragen-mega[{extra}]"])


def extra_of(module: str | None) -> str | None:
    """Return the extra that installs a module; None for a module of no extra."""
    top = _top(module or "")
    return next((extra for extra, uses in EXTRAS.items() if top in map(_top, uses)), None)


def _top(use: str) -> str:
    """Return the name of the package that a module or a part of one is in."""
    return use.partition(":")[0].partition(".")[0]
