"""The facts that torchrun, or a launcher of this package, gives its ranks in the environment.

No torch is imported here, because commands ask before they start ranks.
"""

import os
import resource
import socket
from contextlib import suppress
from pathlib import Path

import psutil

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names the interface by which ranks reach each other."""
_LOOPBACK = "127.0.0.1"


def is_rank() -> bool:
    """Whether a launcher has started this process as a rank.

    Raises ValueError where variables of a larger job are set and no launcher has set them: a
    process that believed them would wait for ranks that do not exist.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    stray = [name for name in alone if os.environ.get(name, alone[name]) != alone[name]]
    if stray:
        values = ", ".join(f"{name}={os.environ[name]}" for name in stray)
        raise ValueError(
            f"{values} must come from torchrun, and torchrun has not started this process; unset"
            f" {', '.join(stray)} to use this machine alone, or start one launcher on each node"
            " (docs/multi-node.md)"
        )
    return False


def keep_caches_at_home() -> None:
    """Have torch.compile keep its code under the user's home: its default, a folder of /tmp whose
    name is known beforehand, may be another user's.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "ragen_mega" / "torchinductor"
    with suppress(OSError):  # a home that cannot be written to
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def open_many_files() -> None:
    """Raise this process's limit of open files (connections among them) to what it is allowed."""
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))


def become_rank(index: int, num_ranks: int, folder: Path) -> None:
    """Make this process, a fork, rank `index` of a job on one node, as torchrun would; the ranks
    meet in `folder`, which is new and lives as long as they do.
    """
    os.environ.update(
        TORCHELASTIC_RUN_ID="forked",
        TORCHELASTIC_ERROR_FILE=str(folder / str(index) / "error.json"),
        RANK=str(index),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(num_ranks),
    )


def num_nodes() -> int:
    """The number of nodes of this job."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def node() -> int:
    """The index of this node."""
    return int(os.environ.get("GROUP_RANK", "0"))


def meeting_file() -> Path:
    """The file in which the ranks of a job on one node find each other.

    It lies in the launcher's folder for this attempt, which only its owner can open: a store that
    listens on the network lets anybody who reaches it redirect the connections of the ranks. Raises
    ValueError where the launcher has no such folder.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if error_file in ("", os.devnull):
        raise ValueError(
            "ranks of one node meet in the folder of --log-dir, and torchrun was started with"
            f" --log-dir {os.devnull}; drop that flag"
        )
    folder = Path(error_file).parents[1]  # <attempt>/<local rank>/error.json
    folder.chmod(0o700)
    return folder / "ranks"


def interfaces() -> dict[str, list[str]]:
    """Network interface -> its IP addresses."""
    families = socket.AF_INET, socket.AF_INET6
    return {
        name: [each.address for each in entries if each.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def stay_on_loopback() -> None:
    """Have gloo and NCCL listen on the loopback interface alone. Ranks of one node reach each other
    there, whatever interface a platform names for several nodes.
    """
    name = next(name for name, addresses in interfaces().items() if _LOOPBACK in addresses)
    os.environ.update({INTERFACE: name, "NCCL_SOCKET_IFNAME": name})


def own_address() -> str:
    """The address at which other ranks of the job reach this one."""
    if num_nodes() == 1:
        return _LOOPBACK
    return interfaces()[os.environ[INTERFACE].split(",")[0]][0]
