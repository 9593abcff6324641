"""Stand-in for Triton: kernels can be defined and not launched."""

import importlib
from collections.abc import Callable
from typing import Any

from absent_on_cpu import Placeholder, refuse, stand_in

__version__ = "3.6.0"


def _decorate(*arguments: Any, **options: Any) -> Any:
    """Act as a decorator, with or without options, that changes nothing."""
    if len(arguments) == 1 and callable(arguments[0]) and not options:
        return arguments[0]
    return lambda function: function


__getattr__ = stand_in(__name__, _decorate)
autotune = heuristics = lambda *arguments, **options: lambda function: function


class JITFunction(Placeholder):
    """A kernel that cannot run."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "kernel")
        self.__doc__, self.__module__ = fn.__doc__, fn.__module__

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return refuse(f"the Triton kernel {self.__name__}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return refuse(f"the Triton kernel {self.__name__}")()


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return the decorator of a kernel, with or without options."""
    return JITFunction if fn is None else JITFunction(fn)


class Config:
    """One choice of an autotuner."""

    def __init__(
        self,
        kwargs: dict[str, Any] | None = None,
        num_warps: int = 4,
        num_stages: int = 2,
        **extra: Any,
    ) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages
        vars(self).update(extra)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


class _Constant:
    def __init__(self, value: Any = None) -> None:
        self.value = value


def _fill_submodules() -> None:
    """Define the names that SGLang and torch use for more than an annotation."""
    language = importlib.import_module(f"{__name__}.language")
    runtime, compiled = (
        importlib.import_module(f"{__name__}.runtime{part}") for part in ("", ".jit")
    )
    vars(language).update(constexpr=_Constant, dtype=type("dtype", (), {}))
    vars(runtime).update(JITFunction=JITFunction)
    vars(compiled).update(JITFunction=JITFunction, KernelInterface=Placeholder)


_fill_submodules()
