"""Stand-ins for GPU libraries that SGLang imports when it starts, also where none of their code
will run.
"""

import types
from typing import Any


class Absent(types.ModuleType):
    """A module, class or function that can be imported, with any name in it, and that raises when
    it is called.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"{self.__name__} is a stand-in on this machine: it can be imported, not used"
        )
