"""What a piece of code costs on the device: waits of the host and where they are, operations, bytes
copied, peak memory.
"""

import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import fake_cuda_device as native

from tests.fake_cuda.build import HERE


def one_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for one kernel: what it does inside is not counted, only that it ran."""

    @functools.wraps(function)
    def launch(*args: Any, **options: Any) -> Any:
        native.enter_kernel()
        try:
            return function(*args, **options)
        finally:
            native.leave_kernel()

    return launch


@dataclass
class Counts:
    """The counts for the code inside `counted()`, complete once it is left."""

    synchronizations: int = 0
    operations: int = 0
    """Kernels launched and copies inside the device."""
    to_device: int = 0
    """Bytes copied from the host."""
    to_host: int = 0
    """Bytes copied to the host."""
    peak: int = 0
    """Most bytes allocated at any one time, above those at the start."""
    sites: Counter[str] = field(default_factory=Counter)
    """Why and where the host waited -> how often: the nearest lines outside torch."""


@contextmanager
def counted() -> Iterator[Counts]:
    """Count inside; it cannot be nested."""
    result = Counts()

    def note(reason: str) -> None:
        frames = [
            f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if "/torch/" not in frame.filename and not frame.filename.startswith(str(HERE))
        ]
        result.sites[f"{reason} at {' < '.join(frames[:-4:-1])}"] += 1

    before = native.counts()
    native.reset_peak()
    allocated, _ = native.memory()
    native.on_synchronization(note)
    try:
        yield result
    finally:
        native.on_synchronization(None)
        for name, value in native.counts().items():
            setattr(result, name, value - before[name])
        result.peak = native.memory()[1] - allocated
