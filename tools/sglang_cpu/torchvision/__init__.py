"""Stand-in for torchvision, whose published build needs the CUDA build of torch."""

import importlib
from typing import Any

from absent_on_cpu import provide_submodules, refuse

__version__ = "0.28.0"
provide_submodules(__name__, refuse(__name__))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"{__name__}.{name}")
