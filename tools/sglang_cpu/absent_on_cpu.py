"""Packages of which every name can be imported and nothing can be used.

SGLang imports GPU libraries when it starts, also where none of their code will run. In an
environment without them a stand-in takes such a library's name, so that the import succeeds; what
is called in earnest raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


class _NamesItself(type):
    """Metaclass of a class whose missing attributes are their own names, as
    `InterpolationMode.BICUBIC`.
    """

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Placeholder(metaclass=_NamesItself):
    """Stands for any class: can be a base, an annotation, and be created."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass


class AbsentModule(types.ModuleType):
    """A module in which capitalised names are classes and all others are modules again."""

    def __init__(self, name: str, called: Callable[..., Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._called = called

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        value: Any = sys.modules.get(full_name)
        if name[0].isupper():
            value = _NamesItself(name, (Placeholder,), {"__module__": self.__name__})
        elif value is None:
            value = AbsentModule(full_name, self._called)
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._called(*arguments, **options)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (Placeholder,)

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of `package`."""

    def __init__(self, package: str, called: Callable[..., Any]) -> None:
        self._prefix, self._called = package + ".", called

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_ours = name.startswith(self._prefix)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name, self._called)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(package: str, called: Callable[..., Any]) -> Callable[[str], Any]:
    """Let every `import package.x` succeed; a call of anything in it calls `called`. Returns the
    `__getattr__` of the package.
    """
    sys.meta_path.insert(0, _Finder(package, called))

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return importlib.import_module(f"{package}.{name}")

    return get


def refuse(package: str) -> Callable[..., Any]:
    """Return a function that, when called, says that `package` is a stand-in."""

    def call(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"{package} is a stand-in on this machine: it can be imported, not used"
        )

    return call
