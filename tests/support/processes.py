"""Processes that tests watch: what they are called, whether they live, waiting for them."""

import time
from collections.abc import Callable
from pathlib import Path


def command_of(pid: int) -> str:
    """Command line; empty of a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Whether the process runs or sleeps; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when it holds. How long that may take is the time limit of the test."""
    while not condition():
        time.sleep(0.02)
