"""Loops that numba compiles for a processor, and the threads that share their items.

numba's cache on disk knows a compiled function by the file that it stands in, and would keep one
whose helper has changed in another file. So a kernel calls compiled helpers of its own file, and of
`tiles.py`, whose text is part of every kernel's stamp.
"""

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from ragen_mega.ranks.launcher import cache_folder

Reals = NDArray[np.float32 | np.float64]
Integers = NDArray[np.int64]

EXACT = {"contract"}
"""Multiplications and additions may be fused."""
ANY_ORDER = {"contract", "reassoc", "nsz", "arcp"}
"""Sums may be taken in any order. NaN is allowed, because it has to reach the results."""


def jit(*, fastmath: Iterable[str]) -> Callable[[Callable], Callable]:
    """Compile at the first call, once for each dtype, and keep the result in the user's cache;
    where that cannot be trusted or written, for this process only.
    """

    def compile_lazily(function: Callable) -> Callable:
        flags = set(fastmath)
        try:
            settings = vars(numba.config)  # its import reads them from the process's environment
            settings["CACHE_DIR"] = settings["CACHE_DIR"] or str(cache_folder("numba"))
            compiled = numba.njit(
                function, cache=True, nogil=True, fastmath=flags, error_model="numpy"
            )
        except (RuntimeError, OSError, ValueError):  # numba: "no locator available"
            return numba.njit(function, nogil=True, fastmath=flags, error_model="numpy")
        index = compiled._cache._cache_file  # type: ignore[attr-defined]  # no public name
        index._source_stamp = (index._source_stamp, _helpers())
        return compiled

    return compile_lazily


@functools.cache
def _helpers() -> str:
    """Return the text of the helpers of all kernels."""
    return Path(__file__).with_name("tiles.py").read_text()


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="compiled")


def in_parts(kernel: Callable[..., None], count: int, *arguments: Any) -> None:
    """Run kernel(first, last, *arguments) over the items [0, count) in as many threads as torch
    has.
    """
    parts = min(torch.get_num_threads(), count)
    if parts <= 1:
        kernel(0, count, *arguments)
        return
    runs = list(pairwise(count * part // parts for part in range(parts + 1)))
    others: list[Future[None]] = [
        _threads(parts - 1).submit(kernel, *run, *arguments) for run in runs[1:]
    ]
    kernel(*runs[0], *arguments)
    for other in others:
        other.result()
