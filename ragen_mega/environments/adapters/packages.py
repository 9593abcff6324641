"""What the adapters share: packages that are installed as extras, and random generators that a
package keeps for the whole process.
"""

import importlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np

_swapping = threading.Lock()
MAX_SEED = 2**32
"""Of NumPy's legacy generators, which many packages seed."""


def required(module: str, extra: str) -> ModuleType:
    """The module of an optional package. Raises ValueError that says which extra installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ValueError(
            f"environments of {module.partition('.')[0]} need a package that is not installed; run"
            f" pip install 'ragen-mega[{extra}]'"
        ) from None


class ProcessRandomness:
    """The state of `random` and `numpy.random` that one environment has for itself, for packages
    that draw from these generators of the whole process.
    """

    def __init__(self) -> None:
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Begin anew; `seed` counts modulo 2**32."""
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % MAX_SEED).get_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, the generators of the process are this environment's; one environment at a time,
        and they are afterwards as they were.
        """
        with _swapping:
            others = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])
