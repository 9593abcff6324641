"""Names that users extend: a name, an import path or an entry point stands for a function or class.

One `Registry` per kind of thing (environments, advantage estimators, filters, rewards, metrics).
What comes with the package is listed by import path, so that asking for the names imports nothing.
"""

import difflib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from types import BuiltinFunctionType, FunctionType
from typing import Any

from ragen_mega.extensions.extras import extra_of, install_command

_MOST_NAMED = 20


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean x?)` of the known name that is closest, nothing if none is close.
    The dashes that all flags share do not count.
    """
    bare = {word.lstrip("-"): word for word in known}
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1)
    return f" (did you mean {bare[close[0]]}?)" if close else ""


def takes(function: Any, parameter: str) -> bool:
    """Return whether a function has a parameter of this name."""
    try:
        return parameter in inspect.signature(function).parameters
    except (ValueError, TypeError):  # compiled, and it does not say; or no function
        return False


def _module_of(file: str) -> tuple[str, str]:
    """Return the module of a file, and what else its import needs: the working directory alone is
    on the path of modules.
    """
    path = os.path.relpath(file).removesuffix(".py")
    if os.pardir not in path.split(os.sep):
        return path.replace(os.sep, "."), ""
    folder, module = os.path.split(os.path.abspath(path))
    return module, f", and add {folder} to PYTHONPATH"


class Registry:
    """Name -> object. `my_module:thing` is a name too: of a module on the path or in the working
    directory.
    """

    def __init__(
        self,
        kind: str,
        flag: str,
        builtin: Mapping[str, Any],
        *,
        families: Mapping[str, str] | None = None,
        known_elsewhere: Mapping[str, str] | None = None,
        forms: Mapping[str, tuple[re.Pattern[str], Sequence[str]]] | None = None,
        remedy: str = "change its parameters (docs/extending.md)",
    ) -> None:
        """`kind` is its name in errors, `builtin` maps names to things or their import paths;
        entry points come from the group `ragen_mega.<kind, with underscores, in the plural>`.
        `families` maps a prefix to the import path of the thing for every name `prefix:...`,
        `known_elsewhere` other projects' names to ours, which errors then suggest. `forms` maps the
        prefix of a family to the form of its names and to prefixes that are mistaken for it.
        `remedy`: what helps a function that takes other arguments.
        """
        self.kind = kind
        self.flag = flag
        self._known: dict[str, Any] = dict(builtin)
        self._packaged = frozenset(builtin)
        self._families = families or {}
        self._known_elsewhere = known_elsewhere or {}
        self._forms = forms or {}
        self._remedy = remedy

    @property
    def group(self) -> str:
        """The group of entry points that an installed package declares its own things under."""
        return f"ragen_mega.{self.kind.replace(' ', '_')}s"

    def register(self, name: str, thing: Any) -> None:
        """Give `thing` (or its import path) a name. Raises ValueError for a name that is taken by
        something else, or that could be read as an import path or a list of names.
        """
        if not name or set(name) & set(":, ") or self._known.get(name, thing) is not thing:
            raise ValueError(
                f"{self.kind} {name!r} is registered already, or no name (without colon, comma and"
                " space); choose another name"
            )
        self._known[name] = thing

    def member(self, name: str) -> str | None:
        """Return the text after the prefix of a family; None for any other name."""
        family, colon, member = name.partition(":")
        return member if colon and family in self._families else None

    def is_packaged(self, name: str) -> bool:
        """Return whether the thing with this name comes with the package."""
        return name in self._packaged

    def names(self) -> list[str]:
        """Return every name that is known, import paths aside."""
        named = {name for name in self._known if ":" not in name}
        return sorted(named | {entry.name for entry in entry_points(group=self.group)})

    def check(self, name: str) -> Any:
        """Return the thing with this name, or its import path if it is of the package itself:
        nothing of it is imported. Raises ValueError, in one line, if there is no such thing.
        """
        return self._known[name] if name in self._known else self.get(name)

    def get(self, name: str, flag: str | None = None) -> Any:
        """Return the thing with this name. Raises ValueError, in one line, if there is none or it
        cannot be imported. `flag`: which one gave the name, if it is another one than usual.
        """
        thing = self._known.get(name)
        if thing is None:
            installed = {entry.name: entry.value for entry in entry_points(group=self.group)}
            path = name if ":" in name else None
            if self.member(name) is not None:
                path = self._families[name.partition(":")[0]]
            thing = installed.get(name, path)
        if thing is None:
            meant, names = self._known_elsewhere.get(name.lower(), name), self.names()
            module, dot, member = name.rpartition(".")
            paths = [f"{module}:{member}"] if dot else []
            close = self._of_family(name) or did_you_mean(meant, [*names, *paths])
            if member == "py":
                written, needed = _module_of(name)
                close = f" (a file: write {written}:NAME, a class or function in it{needed})"
            known = f"choose one of {', '.join(names)}, or " if names else ""
            raise ValueError(
                f"{flag or self.flag}: unknown {self.kind} {name!r}{close}; {known}give an import"
                " path such as my_module:my_thing"
            )
        if isinstance(thing, str):
            thing = self._known[name] = self._import(name, thing)
        return thing

    def check_call(
        self, name: str, function: Callable[..., Any] | str, *arguments: str, **options: Any
    ) -> None:
        """Raise ValueError unless a user's function can be called with these: now, and not when the
        first rollout is there. One of the package is an import path still, and can.
        """
        if isinstance(function, str):
            return
        if inspect.iscoroutinefunction(function):
            raise ValueError(
                f"{self.flag} {name} must be a plain function, and is a coroutine function, which"
                " nobody awaits; write def, and call services by a client that waits"
            )
        try:
            signature = inspect.signature(function)
        except (ValueError, TypeError):  # compiled, and it does not say
            return
        try:
            signature.bind(*arguments, **options)
        except TypeError as error:
            given = ", ".join([*arguments, *(f"{option}=..." for option in options)])
            raise ValueError(
                f"{self.flag} {name} is called with ({given}), and takes {signature}: {error};"
                f" {self._remedy}"
            ) from None

    def _of_family(self, name: str) -> str:
        """Return ` (did you mean prefix:name?)` for a name, with a wrong prefix or none, that has
        the form of a family's names; else nothing.
        """
        prefix, colon, member = name.rpartition(":")
        for family, (form, others) in self._forms.items():
            if form.fullmatch(member) and (not colon or prefix in others):
                return f" (did you mean {family}:{member}?)"
        return ""

    def _refuse_library(self, name: str, module: str) -> None:
        """Raise ValueError for a module of Python's own. The configuration of a run may come from
        somebody else, and `subprocess:Popen` is no environment.
        """
        if module.partition(".")[0] in sys.stdlib_module_names:
            raise ValueError(
                f"{self.flag} {name} must be of a module of yours or of an installed package, and"
                f" {module} is Python's own; rename the module or give another"
            )

    def _import(self, name: str, path: str) -> Any:
        self._refuse_library(name, path.partition(":")[0])
        if os.getcwd() not in sys.path:
            # torchrun's ranks have the script's folder there, not the user's.
            sys.path.append(os.getcwd())
        try:
            thing = pkgutil.resolve_name(path)
        except Exception as error:
            module_name = path.partition(":")[0]
            remedy = "mend the module"
            if module_name.endswith(".py"):
                written, needed = _module_of(module_name)
                remedy = f"write {written}:{path.partition(':')[2]}, a module{needed}"
            elif isinstance(error, ImportError) and (extra := extra_of(error.name)):
                remedy = f"run {install_command(extra)}"
            elif isinstance(error, ModuleNotFoundError) and error.name:
                remedy = f"install {error.name}, which {module_name} imports, or mend the import"
                if f"{module_name}.".startswith(f"{error.name}."):
                    remedy = (
                        "check the name, and that the module is installed or in the working"
                        " directory"
                    )
            elif path.count(":") > 1:
                remedy = "write module:name, with a whole number behind a further colon for shares"
            known, colon, _ = name.partition(":")
            if colon and known in self.names():
                remedy = f"{known} is a name itself, and only a whole number may follow its colon"
            elif isinstance(error, AttributeError) and (module := sys.modules.get(module_name)):
                own = [
                    key
                    for key, value in vars(module).items()
                    if callable(value) and not key.startswith("_")
                ]
                remedy = (
                    f"the module is there ({getattr(module, '__file__', None) or 'a folder'}), and"
                    f" has {', '.join(own[:_MOST_NAMED]) or 'no function or class'}"
                    f"{did_you_mean(path.partition(':')[2], own)}"
                )
            raise ValueError(
                f"{self.flag} {name}: cannot import {path} ({type(error).__name__}: {error});"
                f" {remedy}{self._of_family(name)}"
            ) from error
        if isinstance(thing, (type, FunctionType, BuiltinFunctionType)):
            self._refuse_library(name, thing.__module__ or "")
        if not callable(thing) and not hasattr(thing, "function"):  # as declarations have
            raise ValueError(
                f"{self.flag} {name}: {path} must be a function or class, not {thing!r:.60}; name"
                " one of the module"
            )
        return thing
