"""Stand-in for SGLang's kernel package, of which there is no build for the CPU.

There are no submodules: SGLang takes the absence of some as the sign that a feature is missing.
"""

from collections.abc import Callable
from typing import Any

from absent_on_cpu import refuse

__version__ = "0.4.5"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return refuse(f"sgl_kernel.{name}")
