"""Several nodes as one job: their agreement before it begins, and the detection of lost nodes.

torchrun says which node this is (GROUP_RANK) and hosts a store on the first one (MASTER_ADDR). A
job on one node passes through here without a word.
"""

import hashlib
import os
import platform
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import ragen_kernels
import torch.distributed as dist

import ragen_mega
from ragen_mega.config import StarPOConfig
from ragen_mega.ranks import collectives
from ragen_mega.ranks.launcher import GLOO_INTERFACE, loopback
from ragen_mega.report.console import fail
from ragen_mega.report.hardware import PACKAGES, device, versions
from ragen_mega.rollout.engine import Interrupted
from ragen_mega.storage.run_directory import Finished

PATIENCE = 300.0
"""Seconds without a sign of life after which a node counts as gone. A library that reads a large
file without letting other threads run gives none meanwhile.
"""
PATIENCE_AT_START = 600.0
"""Patience for the first sign of life: file systems give every node its programs in their own time.
"""
_PERIOD = 2.0
_CONNECT_SECONDS = 30.0


def num_nodes() -> int:
    """Return the number of nodes of this job."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def node() -> int:
    """Return the index of this node."""
    return int(os.environ.get("GROUP_RANK", "0"))


def _is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _here() -> str:
    return f"node {node()} ({platform.node()})"


# Detection of lost nodes


def watched() -> AbstractContextManager[None]:
    """Watch the other nodes during the block: this node ends with one line and exit code 2 once
    another node has failed or does not answer, and the others do if this one fails. A rank that
    waits in a collective for a machine without power would wait for its timeout, half an hour.
    """
    return nullcontext() if num_nodes() == 1 else _Watch()


def _connect() -> dist.Store:
    """Return a connection of its own to the job's store: one waits for one answer at a time. Raises
    DistError.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait = timedelta(seconds=_CONNECT_SECONDS)
    store = dist.TCPStore(host, port, timeout=wait, wait_for_workers=False)
    return dist.PrefixStore(f"nodes_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class _Watch:
    """Two threads of a node's first rank: one talks to the store and may block there, the other
    ends the process.
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lost: str | None = None
        self._answers = 0
        self._signs: dict[int, tuple[int, float]] = {}
        """Signs of life on node 0, which judges the others: node -> their number, and the time of
        the last.
        """

    def __enter__(self) -> None:
        try:
            self._store = _connect()
        except dist.DistError:
            place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            fail(f"node 0 cannot be reached at {place}: it has ended, or has another name")
        if _is_first_of_node():
            for work in (self._exchange_heartbeats, self._judge):
                self._threads += [threading.Thread(target=work, daemon=True, name="nodes")]
                self._threads[-1].start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._is_over.set()
        for thread in self._threads:  # one that came back from the store without Python aborts
            thread.join(_CONNECT_SECONDS)
        if isinstance(error, (Interrupted, Finished)):  # as all ranks have agreed
            return
        has_failed = error is not None and getattr(error, "code", True)
        with suppress(dist.DistError):  # node 0 may have ended before
            last_words = "lost" if has_failed else f"done_{node()}"
            _connect().set(last_words, f"{_here()} has ended, and says why")

    def _exchange_heartbeats(self) -> None:
        while self._lost is None and not self._is_over.is_set():
            try:
                self._store.add(f"alive_{node()}", 1)
                if node() == 0 and (silent := self._silent_nodes()):
                    self._store.set("lost", f"node {silent[0]} does not answer")
                if self._store.check(["lost"]):
                    self._lost = self._store.get("lost").decode()
            except dist.DistError:  # the launcher of node 0 has closed the store
                self._lost = "node 0 has ended"
            self._answers += 1
            self._is_over.wait(_PERIOD)

    def _silent_nodes(self) -> list[int]:
        now, silent = time.monotonic(), []
        for other in range(1, num_nodes()):
            count = self._store.add(f"alive_{other}", 0)
            before, since = self._signs.setdefault(other, (0, now))
            if count > before:
                self._signs[other] = count, now
            elif now - since > (PATIENCE if count else PATIENCE_AT_START):
                silent += [] if self._store.check([f"done_{other}"]) else [other]
        return silent

    def _judge(self) -> None:
        before, silent = 0, 0.0  # by sleeps, since a clock goes on while no thread may run
        while self._lost is None:
            if self._is_over.wait(_PERIOD):
                return
            silent = 0.0 if self._answers > before else silent + _PERIOD
            before = self._answers
            if silent > PATIENCE:
                self._lost = "node 0 does not answer"
        if not self._is_over.is_set():
            text = f"error: {self._lost}; --resume goes on from the last checkpoint\n"
            with suppress(OSError):
                os.write(2, text.encode())
            os._exit(2)  # the other threads wait for the lost node


# Agreement of the nodes of a job


def join_job(config: StarPOConfig) -> None:
    """Join the job. Raises ValueError unless all its nodes reach each other, run the same program
    with the same settings, and share the directory of the run. Collective.
    """
    if num_nodes() == 1:
        return collectives.start()
    choose_interface()
    collectives.start()
    check_agreement(config)


def choose_interface() -> None:
    """Have gloo listen on the interface by which this node reaches node 0, unless the environment
    names one. gloo itself takes the address of the host's name, which is often the loopback's.

    Raises ValueError if this node is not reached by it, or the next one is not.
    """
    master = os.environ["MASTER_ADDR"]
    addresses = _addresses()
    named = os.environ.get(GLOO_INTERFACE)
    was_named = named is not None
    if named is None:
        local = _address_towards(master)
        named = next(name for name, those in addresses.items() if local in those)
        os.environ[GLOO_INTERFACE] = named
    name = named.split(",")[0]
    there = ", ".join(other for other, those in addresses.items() if those)
    remedy = f"set {GLOO_INTERFACE} to the interface that all nodes share (here are {there})"
    if not addresses.get(name):
        raise ValueError(f"{GLOO_INTERFACE} {name} must be an interface with an address; {remedy}")
    if name == loopback():
        reason = f"{GLOO_INTERFACE} names" if was_named else f"--master-addr {master} leads to"
        raise ValueError(
            f"ranks of several nodes need an interface that others reach, and on {_here()}"
            f" {reason} the loopback's; {remedy}"
        )
    if _is_first_of_node():
        _reach_next(addresses[name][0], f"its interface {name}; {remedy}")


def own_address() -> str:
    """Return the address on which ranks of the other nodes, if there are any, reach this one."""
    if num_nodes() == 1:
        return "127.0.0.1"
    return _addresses()[os.environ[GLOO_INTERFACE].split(",")[0]][0]


def _addresses() -> dict[str, list[str]]:
    """Return interface -> its IP addresses."""
    families = socket.AF_INET, socket.AF_INET6
    return {
        name: [entry.address for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def _address_towards(host: str) -> str:
    """Return the address of this machine that connections to `host` come from."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def _reach_next(address: str, through: str) -> None:
    """Connect to the next node, and wait for the one before; each finds the other's address in the
    store.
    """
    store, following = _connect(), (node() + 1) % num_nodes()
    store.set_timeout(timedelta(seconds=PATIENCE_AT_START))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        listener.settimeout(PATIENCE_AT_START)
        store.set(f"address_{node()}", f"{address} {listener.getsockname()[1]}")
        host, port = store.get(f"address_{following}").decode().split()
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            raise ValueError(
                f"{_here()} cannot reach node {following} at {host} ({error.strerror or error})"
                f" through {through}"
            ) from None
        listener.accept()[0].close()


_REMEDIES = {
    "flags": "start all nodes with the same flags",
    "code": "give all nodes the same files",
    "packages": "give all nodes the same environment",
    "hardware": "ask for nodes of one kind",
}
"""Parts of a node in which all nodes must agree -> remedy where they do not."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that one node reports."""

    host: str
    num_ranks: int
    parts: dict[str, dict[str, Any]]
    """Part of `_REMEDIES` -> names in it and their values. The names of code are the modules that
    are loaded from this package and from the working directory, with digests of their sources.
    """


def check_agreement(config: StarPOConfig) -> None:
    """Raise ValueError, on all ranks, unless all nodes run the same program with the same settings
    and share the directory of the run. Collective.
    """
    facts = describe(config) if _is_first_of_node() else None
    everyone = [each for each in collectives.gather_objects(facts) if each is not None]
    if error := disagreement(everyone):
        raise ValueError(error)
    for each in everyone:
        if config.parallel.placement == "colocated":
            config.rollout.num_engines(collectives.world_size(), each.num_ranks)
    _check_shared(config.run_directory.parent, [each.host for each in everyone])


def describe(config: StarPOConfig) -> Facts:
    """Collect the facts of this node."""
    packages = [Path(module.__path__[0]) for module in (ragen_mega, ragen_kernels)]

    def is_ours(file: Path) -> bool:
        is_own = file.is_relative_to(Path.cwd()) and "site-packages" not in file.parts
        return is_own or any(file.is_relative_to(package) for package in packages)

    files = {
        name: Path(file)
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) and is_ours(Path(file))
        if Path(file).is_file()
    }
    return Facts(
        host=platform.node(),
        num_ranks=int(os.environ["LOCAL_WORLD_SIZE"]),
        parts={
            "flags": {
                f"{section}.{name}": value
                for section, values in config.to_dict().items()
                for name, value in values.items()
            },
            "code": {
                name: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
                for name, path in files.items()
            },
            "packages": versions((*PACKAGES, "tokenizers", "safetensors", "numpy")),
            "hardware": {"device": device()},
        },
    )


def disagreement(nodes: Sequence[Facts]) -> str | None:
    """Describe the difference of the first node that differs from node 0, with the remedy; None if
    all agree. Modules that only one of two nodes has loaded do not count.
    """
    first = nodes[0]
    for index, other in enumerate(nodes[1:], start=1):
        for part, remedy in _REMEDIES.items():
            for name, ours in first.parts[part].items():
                theirs = other.parts[part].get(name, ours)
                if theirs != ours:
                    return (
                        f"all nodes must have the same {part}: {name} is {ours} on node 0"
                        f" ({first.host}) and {theirs} on node {index} ({other.host}); {remedy}"
                    )
    return None


def _check_shared(directory: Path, hosts: list[str]) -> None:
    """Raise ValueError unless what each node writes in `directory` is there for rank 0."""

    def make() -> Path:
        token = directory.absolute() / f".nodes-{secrets.token_hex(8)}"
        token.mkdir(mode=0o700, parents=True)
        return token

    token = collectives.on_main(make)
    failure = None
    if _is_first_of_node():
        try:
            (token / str(node())).touch()
        except OSError as error:
            failure = error.strerror
    failures = collectives.gather_objects(failure)

    def look() -> None:
        missing = [index for index in range(len(hosts)) if not (token / str(index)).exists()]
        shutil.rmtree(token)
        if missing:
            index = missing[0]
            why = next(filter(None, failures), "what it writes there does not arrive")
            raise ValueError(
                f"the run directory must be on storage that all nodes share: {directory.absolute()}"
                f" of node 0 ({hosts[0]}) is not that of node {index} ({hosts[index]}): {why};"
                " choose another --output"
            )

    collectives.on_main(look)
