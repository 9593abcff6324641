"""Several nodes as one job: their agreement before it begins.

torchrun says which node this is (GROUP_RANK) and hosts a store on the first one (MASTER_ADDR). A
job on one node passes through here without a word. A node that is lost later is named by the watch
of the others (`ranks/watch.py`), which end by an error or the timeout of their collective.
"""

import hashlib
import json
import os
import platform
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import ragen_kernels
import torch.distributed as dist

import ragen_mega
from ragen_mega.algorithm.tables import is_judge
from ragen_mega.config import StarPOConfig
from ragen_mega.config.recorded import flat
from ragen_mega.config.rules import Sections
from ragen_mega.config.sections.environment import TASKS, is_task_file
from ragen_mega.models.directory import MODEL_FILES
from ragen_mega.ranks import collectives, watch
from ragen_mega.ranks.launcher import GLOO_INTERFACE, loopback
from ragen_mega.report.hardware import PACKAGES, device, versions
from ragen_mega.rollout.verifier import AT_ONCE, ATTEMPTS
from ragen_mega.system.addresses import address_towards

_PATIENCE = 600.0
"""Seconds to wait for another node: file systems give every node its programs in their own time."""
_CONNECT_SECONDS = 30.0
_MINUTES_BESIDE = 10.0
"""Time for which ranks wait beyond what settings allow the slowest one."""
_MINUTES_WITHOUT_LIMIT = 7 * 24 * 60.0
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
"""Samples that two nodes compare of a file, and the bytes of a sample."""


def num_nodes() -> int:
    """Return the number of nodes of this job."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def node() -> int:
    """Return the index of this node."""
    return int(os.environ.get("GROUP_RANK", "0"))


def join_job(config: StarPOConfig) -> None:
    """Join the job. Raises ValueError, on all ranks, unless all its nodes reach each other, run the
    same program with the same settings, and share the directory of the run. Collective.
    """
    if num_nodes() > 1:
        _agree(config)
    interface, num_samplers = _interface_of_engines(config), config.parallel.rollout_ranks
    collectives.start(minutes_to_wait(config), interface=interface, num_samplers=num_samplers)
    about = collectives.rank(), collectives.world_size(), config.parallel.report_waits_after
    watch.begin(collectives.board(), *about)


def minutes_to_wait(config: Sections) -> float:
    """Return the minutes for which ranks wait for one that still plays, or for rank 0, which asks
    the judges; a week if either has no limit.
    """
    world, rollout = config.environment, config.rollout
    turn, agent = world.environment_timeout, config.agent.agent_timeout
    if not (turn and agent):
        return _MINUTES_WITHOUT_LIMIT
    episode = max(agent, turn * (1 + world.expected_turns))
    num_attempts = ATTEMPTS * sum(map(is_judge, config.advantage.reward_terms))
    verdicts = turn * num_attempts * -(-rollout.num_groups * rollout.group_size // AT_ONCE)
    slowest = max(2 * episode, verdicts)  # an episode that is late is played once more
    return max(collectives.MINUTES_TO_WAIT, _MINUTES_BESIDE + slowest / 60)


def _interface_of_engines(config: StarPOConfig) -> str | None:
    """Return the interface by which a job on one node reaches engines on others; None for none.
    Engines and ranks then also agree on NCCL's memory, which SGLang sets so.
    """
    if not (given := config.rollout.given_engines):
        return None
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    try:
        local = address_towards(given[0].rpartition(":")[0])
    except OSError as error:
        raise ValueError(
            f"engine_addresses names {given[0]}, which this machine does not find"
            f" ({error.strerror}); correct --engine-addresses"
        ) from None
    name = next((name for name, those in _addresses().items() if local in those), None)
    if name is None:
        raise ValueError(
            f"engine_addresses names {given[0]}, and connections to it come from {local}, which is"
            f" none of this machine's addresses; {_remedy()}"
        )
    return None if name == loopback() or num_nodes() > 1 else name


def _agree(config: StarPOConfig) -> None:
    store, directory = _connect(), config.run_directory.parent.absolute()
    with ExitStack() as stack:

        def listen() -> tuple[str, int]:
            choose_interface()
            family = socket.AF_INET6 if ":" in own_address() else socket.AF_INET
            listener = stack.enter_context(socket.create_server((own_address(), 0), family=family))
            return own_address(), listener.getsockname()[1]

        places = _exchange(store, "place", listen)
        _exchange(store, "path", lambda: _reach(*places[(node() + 1) % num_nodes()]))
    nodes = _exchange(store, "facts", lambda: describe(config))
    if error := disagreement(nodes):
        raise ValueError(error)
    num_ranks = [each["num_ranks"] for each in nodes]
    if config.parallel.placement == "colocated":
        for each in num_ranks:
            config.rollout.num_engines(sum(num_ranks), each)
    mark = directory / f".nodes-{nodes[0]['token']}"
    rule = f"the run directory must be on storage that all nodes share, and {directory}"

    def write() -> None:
        try:
            mark.mkdir(mode=0o700, parents=True, exist_ok=True)
            (mark / str(node())).touch()
        except OSError as error:
            raise ValueError(f"{rule} is not ({error.strerror}); choose another --output") from None

    def look() -> None:
        for index, each in enumerate(nodes):
            if not (mark / str(index)).exists():
                raise ValueError(
                    f"{rule} is not that of node {index} ({each['host']}), which has written there;"
                    " choose another --output"
                )

    try:
        _exchange(store, "written", write)
        _exchange(store, "seen", look)
    finally:
        shutil.rmtree(mark, ignore_errors=True)


def _connect() -> dist.Store:
    """Return a connection of its own to the job's store: one waits for one answer at a time. Raises
    DistError.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait = timedelta(seconds=_CONNECT_SECONDS)
    store = dist.TCPStore(host, port, timeout=wait, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=_PATIENCE))
    return dist.PrefixStore(f"nodes_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _exchange(store: dist.Store, name: str, work: Callable[[], Any]) -> list[Any]:
    """Return the result of `work` on the first rank of every node, as JSON has it. Raises
    ValueError, the same on all ranks, if it raised one or an OSError on a node, or if a node does
    not come.
    """
    try:
        said = [work(), None]
    except (ValueError, OSError) as error:
        said = [None, f"node {node()} ({platform.node()}): {error}"]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        store.set(f"{name}_{node()}", json.dumps(said))
    results = []
    for index in range(num_nodes()):
        try:
            result, problem = json.loads(store.get(f"{name}_{index}"))
        except dist.DistError:
            raise ValueError(
                f"all nodes must start the job, and node {index} has not come within"
                f" {_PATIENCE:g} s; look at its output, and at that of node 0"
            ) from None
        if problem:
            raise ValueError(problem)
        results.append(result)
    return results


def choose_interface() -> None:
    """Have gloo listen on the interface by which this node reaches node 0, unless the environment
    names one. gloo itself takes the address of the host's name, which is often the loopback's.

    Raises ValueError if other nodes cannot reach this node by it.
    """
    master, addresses = os.environ["MASTER_ADDR"], _addresses()
    named = os.environ.get(GLOO_INTERFACE)
    reason = f"{GLOO_INTERFACE} names" if named else f"--master-addr {master} leads to"
    if not named:
        local = address_towards(master)
        named = next((name for name, those in addresses.items() if local in those), local)
        os.environ[GLOO_INTERFACE] = named
    name = named.split(",")[0]
    if not addresses.get(name):
        raise ValueError(
            f"{GLOO_INTERFACE} {name} must be an interface with an address; {_remedy()}"
        )
    if name == loopback():
        raise ValueError(
            f"ranks of several nodes need an interface that others reach, and {reason} the"
            f" loopback's; {_remedy()}"
        )


def _remedy() -> str:
    there = ", ".join(name for name, those in _addresses().items() if those)
    return f"set {GLOO_INTERFACE} to the interface that all nodes share (here are {there})"


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


def _reach(host: str, port: int) -> None:
    """Connect to the next node. Raises ValueError."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ValueError(
            f"cannot reach node {(node() + 1) % num_nodes()} at {host} ({error.strerror or error});"
            f" {_remedy()}"
        ) from None


_REMEDIES = {
    "flags": "start all nodes with the same flags",
    "code": "give all nodes the same files",
    "files": "give all nodes the same files, or name a folder that they share",
    "packages": "give all nodes the same environment",
    "hardware": "ask for nodes of one kind",
}
"""Facts in which all nodes must agree -> remedy where they do not."""


def describe(config: StarPOConfig) -> dict[str, Any]:
    """Collect the facts of this node, each a dictionary of names and values. The code is in
    the modules that are loaded from this package and from the working directory.
    """
    packages = [Path(module.__path__[0]) for module in (ragen_mega, ragen_kernels)]

    def is_ours(file: Path) -> bool:
        is_own = file.is_relative_to(Path.cwd()) and "site-packages" not in file.parts
        return is_own or any(file.is_relative_to(package) for package in packages)

    files = {
        name: Path(file)
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) and is_ours(Path(file))
    }
    return {
        "host": platform.node(),
        "num_ranks": int(os.environ["LOCAL_WORLD_SIZE"]),
        "token": secrets.token_hex(8),
        "flags": flat(config.to_dict()),
        "code": {
            name: hashlib.sha256(file.read_bytes()).hexdigest()[:12]
            for name, file in files.items()
            if file.is_file()
        },
        "files": _files(config),
        "packages": versions((*PACKAGES, "tokenizers", "safetensors", "numpy")),
        "hardware": {"device": device()},
    }


def _files(config: StarPOConfig) -> dict[str, str]:
    """Return a map: setting -> digest of the file or the model that it names, which ranks of all
    nodes read.
    """
    read = config.model, config.lora, config.environment, config.warm_start, config.evaluation
    named = {name: path for section in read for name, path in section.paths().items()}
    named.pop("teacher_load", None)  # may hold several
    named |= {f"teacher_load {name}".strip(): path for name, path in config.model.teachers.items()}
    named |= {
        name: name.removeprefix(TASKS)
        for name in config.environment.evaluated
        if is_task_file(name)
    }
    return {name: _sampled(Path(path)) for name, path in named.items()}


def _sampled(path: Path) -> str:
    """Return a digest of names, sizes and some bytes: to read all of a model takes minutes, and
    weights that were trained further differ everywhere.
    """
    if not path.exists():
        return "not there"
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file == path or file.suffix in MODEL_FILES:
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as opened:
                for place in range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
                    opened.seek(place)
                    digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def disagreement(nodes: Sequence[dict[str, Any]]) -> str | None:
    """Describe the difference of the first node that differs from node 0, with the remedy; None if
    all agree. Modules that only one of two nodes has loaded do not count.
    """
    first = nodes[0]
    for index, other in enumerate(nodes[1:], start=1):
        for part, remedy in _REMEDIES.items():
            for name, ours in first[part].items():
                if (theirs := other[part].get(name, ours)) != ours:
                    return (
                        f"all nodes must have the same {part}: {name} is {ours} on node 0"
                        f" ({first['host']}) and {theirs} on node {index} ({other['host']});"
                        f" {remedy}"
                    )
    return None
