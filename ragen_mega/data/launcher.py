"""What started this process: torchrun, below the launch script or by itself, or nobody that ranks
are told of.
"""

import os
import resource
from contextlib import suppress
from pathlib import Path

GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""The variables that name the interface on which ranks listen."""
_OF_A_RANK = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
)


def is_rank() -> bool:
    """Whether torchrun started this process. Platforms set RANK and WORLD_SIZE without it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def as_rank(index: int, num_ranks: int, folder: Path | str) -> dict[str, str]:
    """The variables that tell a process what torchrun would: that it is this rank of a job on one
    machine, whose ranks meet in `folder`.
    """
    return {
        "TORCHELASTIC_RUN_ID": "forks",
        "TORCHELASTIC_ERROR_FILE": str(Path(folder) / str(index) / "error.json"),
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(num_ranks),
    }


def forget_foreign_ranks() -> None:
    """Remove from the environment what a platform says of ranks, unless torchrun said it.

    Raises ValueError where that promises other ranks, for which this process would wait in vain.
    """
    if is_rank():
        return
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if (rank, size) != ("0", "1"):
        raise ValueError(
            f"RANK ({rank}) and WORLD_SIZE ({size}) must be set by torchrun, which has not started"
            " this process; unset both, or start ranks by torchrun, tools/launch.py or"
            " examples/pretrain_starpo.sh"
        )
    for name in _OF_A_RANK:
        os.environ.pop(name, None)


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


def loopback() -> str:
    """The name of this machine's loopback interface. Raises ValueError if none is up."""
    import psutil

    states = psutil.net_if_stats().items()
    found = [name for name, state in states if state.isup and "loopback" in state.flags.split(",")]
    if not found:
        raise ValueError(
            "ranks of one machine need its loopback interface, and none is up;"
            " run `ip link set lo up` as root"
        )
    return found[0]
