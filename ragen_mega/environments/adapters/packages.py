"""Helpers of all adapters: importing optional packages, and isolating packages that draw from the
global random generators.
"""

import importlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np

from ragen_mega.extensions.extras import install_command, lack

_swapping = threading.Lock()
MAX_SEED = 2**32
"""Exclusive bound on seeds of NumPy's legacy generators, which many packages seed."""


def required(use: str, extra: str, *, purpose: str = "") -> ModuleType:
    """Import the module of an optional package of which the caller uses `module:attribute`. Raises
    ValueError naming the extra that installs it; `purpose` is what needs it, by default
    environments of the package.
    """
    module = use.partition(":")[0]
    if reason := lack(use):
        package = module.partition(".")[0]
        raise ValueError(
            f"{purpose or f'environments of {package}'} need {package}, which {reason}; run"
            f" {install_command(extra)}"
        )
    return importlib.import_module(module)


class ProcessRandomness:
    """One environment's own state of `random` and `numpy.random`, for packages that draw from these
    global generators.
    """

    def __init__(self) -> None:
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Start both generators afresh; NumPy gets `seed` modulo 2**32."""
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % MAX_SEED).get_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install this environment's state in the global generators for the block, and restore
        their previous state afterwards. One environment at a time.
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
