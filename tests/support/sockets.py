"""Which sockets processes listen on, as the kernel says."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address

import psutil


def listening(root: psutil.Process) -> set[str]:
    """The addresses on which the descendants of a process, and it, accept connections."""
    found = set()
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.Error):  # it has ended
            sockets = process.net_connections("inet")
            found |= {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    return found


def is_loopback(address: str) -> bool:
    address = ip_address(address)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@contextmanager
def all_listening(root: psutil.Process) -> Iterator[set[str]]:
    """The addresses on which they ever did until the context is left."""
    found: set[str] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.1):
            with suppress(psutil.NoSuchProcess):
                found.update(listening(root))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
