"""A chat template is a program of whoever made the model: jinja2's sandbox bounds what it reaches,
but neither its time nor its memory. It is tried first in a process that has bounds.
"""

import multiprocessing
import resource
import signal
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_SECONDS, _BYTES = 10, 1 << 30
"""Time of a processor and memory that a few messages may take to render; milliseconds are usual."""
_SECONDS_BLOCKED = 60
_OUT_OF_MEMORY = 3
_cheap: set[str] = set()
"""Templates that have been tried."""


def check_cost(template: str, renderings: Iterable[Callable[[], object]]) -> None:
    """Raise ValueError if one of the renderings of a template takes too much time or memory
    (MemoryError), or ends the process. Their own errors, ValueError, are left to the caller, who
    renders again.
    """
    if template in _cheap:
        return
    # A new interpreter would import for seconds; other threads are of no use to the child.
    child = multiprocessing.get_context("fork").Process(target=_render, args=(renderings,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child.start()
    child.join(_SECONDS_BLOCKED)
    end = child.exitcode
    if end is None:  # it needs a lock that another thread held at the fork, and no template waits
        child.kill()
        return
    if end == -signal.SIGXCPU:
        what = f"more than {_SECONDS} s"
    elif end == _OUT_OF_MEMORY:
        what = f"more than {_BYTES >> 20} MiB"
    elif end != 0:
        what = f"a process that it ends ({signal.Signals(-end).name if end < 0 else end})"
    else:
        _cheap.add(template)
        return
    raise ValueError(
        f"the chat template takes {what} to render a short conversation; it is damaged or"
        " malicious, take that of the model's own publisher"
    )


def _render(renderings: Iterable[Callable[[], object]]) -> None:
    """Render within the bounds, in the child."""
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: _SECONDS}
    if (pages := Path("/proc/self/statm")).exists():  # on Linux
        used = int(pages.read_text().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = used + _BYTES
    for kind, value in limits.items():
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (value if most < 0 else min(value, most), most))
    try:
        for render in renderings:
            with suppress(ValueError):
                render()
    except MemoryError:
        raise SystemExit(_OUT_OF_MEMORY) from None
