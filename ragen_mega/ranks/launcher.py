"""The start of ranks, and the program that started this process: torchrun, below our launcher or by
itself, or none that ranks are told of.
"""

from __future__ import annotations

import atexit
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import FrameType

from ragen_mega.system.paths import expanded

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run: a scheduler, Ctrl-C, the end of the terminal, a warning before the time
limit.
"""
PROGRAM = "ragen_mega.commands.program"
"""The module that is `ragen-mega`."""
JOB = "RAGEN_JOB"
"""The variable by which all processes of a job are known to the guardian of its launcher."""
SECONDS_TO_WAIT = 60.0
"""Time after a signal in which a rank that waits, and does not compute, has to end."""
_SECONDS_TO_STOP = "RAGEN_SECONDS_TO_STOP"
"""The variable with the time after a signal in which any rank has to end."""
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


_OTHER_LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "mpirun"),
    ("PMI_SIZE", "PMI_RANK", "mpirun"),
    ("", "PMIX_RANK", "mpirun"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun"),
    ("", "PALS_RANKID", "aprun"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "flux run"),
)
"""Variables with the number of processes, if there is one, and with the rank of this one, and the
launchers that set them.
"""
_RESERVED = 2**31
"""Numbers of Slurm's steps from here on are of the shells of sbatch and salloc."""
_THREADS = "OMP_NUM_THREADS"


def is_rank() -> bool:
    """Return whether torchrun started this process. Platforms set RANK and WORLD_SIZE too."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def seconds_to_stop() -> float:
    """Return the time after a signal in which ranks that compute have to end. Raises ValueError for
    a value of the environment that is no time.
    """
    text = os.environ.get(_SECONDS_TO_STOP, "600")
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(
            f"{_SECONDS_TO_STOP} must be a number of seconds, at least 1, not {text!r}; unset it"
        )
    return float(text)


def forget_foreign_ranks() -> None:
    """Remove from the environment what a platform says of ranks, unless torchrun said it.

    Raises ValueError where that promises other ranks, for which this process would wait in vain,
    and for a copy of a job of one node.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        refuse_copies()
    if is_rank():
        return
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if (rank, size) != ("0", "1"):
        raise ValueError(
            f"RANK ({rank}) and WORLD_SIZE ({size}) must be set by torchrun, which has not started"
            " this process; unset both, or start ranks by torchrun, ragen-mega launch or"
            " examples/pretrain_starpo.sh"
        )
    for name in _OF_A_RANK:
        os.environ.pop(name, None)


def refuse_copies() -> None:
    """Raise ValueError where srun, mpirun or another launcher has started several copies of this
    process: each would be a whole run. A shell in an allocation, or a single process, is none.
    """
    for size, rank, launcher in _OTHER_LAUNCHERS:
        if launcher == "srun" and size not in os.environ and _number("SLURM_STEP_ID") >= 0:
            size = "SLURM_NTASKS"  # which shells of sbatch and salloc have too, without a step
        if _number(size) > 1 or _number(rank) > 0:
            given = [name for name in (size, rank) if name in os.environ]
            said = ", ".join(f"{name} {os.environ[name]}" for name in given)
            raise ValueError(
                f"{launcher} has started several copies of this process ({said}), and each would be"
                " a whole run; start one, whose ranks ragen-mega starts itself, or on several nodes"
                " one `ragen-mega launch` a node (srun --ntasks-per-node=1, as in"
                " examples/slurm/train.sbatch); for runs that are apart on purpose unset these"
                " variables"
            )


def _number(variable: str) -> int:
    """Return the number in a variable, -1 if it holds none or one that Slurm reserves."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) < _RESERVED else -1


def check_process() -> None:
    """Raise ValueError for a working directory that is gone and for a number of threads that is
    none; an empty one is removed, since OpenMP complains about an empty value.
    """
    try:
        os.getcwd()
    except OSError:
        raise ValueError(
            "the working directory does not exist any more (deleted, moved or unmounted); cd to"
            " another directory"
        ) from None
    threads = os.environ.get(_THREADS, "").strip()
    if not threads:
        os.environ.pop(_THREADS, None)
    elif not all(part.strip().isdecimal() and int(part) for part in threads.split(",")):
        raise ValueError(
            f"{_THREADS} must be a number of threads, at least 1, not {threads!r}; unset it, and"
            " ranks share the processors"
        )


def control_groups(kind: str, system: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders with the limits that the control groups of this process set for a `kind` of
    resource, and those above them, in either version of control groups. `system` has /proc and
    /sys.
    """
    listed = system / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.exists() else ():
        kinds, group = line.split(":", 2)[1:]
        if not kinds or kind in kinds.split(","):
            root = system / "sys/fs/cgroup" / kinds
            # of the host, in a container of version 1: only `root` is here
            path = PurePosixPath(group)
            yield from (root / str(part).lstrip("/") for part in (path, *path.parents))


def num_processors(system: Path = Path("/")) -> int:
    """Return the processors that this process may keep busy: the processors of its affinity, or
    fewer by the quotas of its control groups, as a container has.
    """
    limits = [len(os.sched_getaffinity(0))]
    for folder in control_groups("cpu", system):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # no such file, or `max` for no quota
                text = " ".join((folder / name).read_text() for name in names)
                quota, period = map(int, text.split())
                if quota > 0 < period:
                    limits.append(quota // period)
    return max(1, min(limits))


def keep_caches_at_home() -> None:
    """Have torch.compile and Triton keep their code in the user's cache, or where that is not to be
    trusted in a new folder: their defaults, one of them a folder of /tmp whose name is known
    beforehand, may be open to others.
    """
    for name in ("torchinductor", "triton"):
        variable = f"{name.upper()}_CACHE_DIR"
        if variable not in os.environ:
            try:
                os.environ[variable] = str(cache_folder(name))
            except (OSError, ValueError):
                os.environ[variable] = folder = tempfile.mkdtemp(prefix="ragen-")
                atexit.register(shutil.rmtree, folder, ignore_errors=True)


def cache_folder(name: str) -> Path:
    """Return this program's folder of that name in the user's cache, made if it is not there, and
    closed to others whatever the umask is. Raises ValueError for a folder that others own or can
    write to, and OSError.
    """
    stated = expanded(os.environ.get("XDG_CACHE_HOME", ""))
    home = Path(stated if os.path.isabs(stated) else expanded("~/.cache"))
    folder = home.absolute() / "ragen_mega" / name
    for part in (*reversed(folder.parents), folder):
        if not part.exists():
            part.mkdir(mode=0o700, exist_ok=True)
    for part in (folder.parent, folder):
        about = part.stat()
        if about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise ValueError(
                f"the cache {part} must be yours alone to write, and is of user {about.st_uid} with"
                f" mode {about.st_mode & 0o777:o}; delete it, or set XDG_CACHE_HOME to a folder of"
                " your own"
            )
    return folder


def open_many_files() -> None:
    """Raise this process's limit of open files (connections among them) to what it is allowed."""
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))


def loopback() -> str:
    """Return the name of this machine's loopback interface. Raises ValueError if none is up."""
    import psutil

    states = psutil.net_if_stats().items()
    found = [name for name, state in states if state.isup and "loopback" in state.flags.split(",")]
    if not found:
        raise ValueError(
            "ranks of one machine need its loopback interface, and none is up;"
            " run `ip link set lo up` as root"
        )
    return found[0]


def ranks_command(num_ranks: int, script: Path | str, *flags: object) -> list[str]:
    """Return the command that runs `script`, a file or the name of a module, on that many ranks of
    this machine.
    """
    kind = () if isinstance(script, Path) else ("--module",)
    # --nnodes, because platforms set torchrun's variable for it, PET_NNODES.
    # `--`, because torchrun would take flags of the script for abbreviations of torchrun's flags.
    words = ("--nnodes", 1, "--nproc-per-node", num_ranks, *kind, "--", script, *flags)
    # -P: no file of the working directory may stand in for a module.
    return [sys.executable, "-P", "-m", "ragen_mega.commands.launch", *map(str, words)]


def run_ranks(num_ranks: int, script: Path | str, *flags: object) -> None:
    """Run `script` on that many ranks to its end, silently. If it fails, exit with the end of its
    output and its exit code. Ctrl-C ends the ranks.
    """
    words = ranks_command(num_ranks, script, *flags)
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            _, said = launcher.communicate()
        except KeyboardInterrupt:
            for _ in range(2):  # after the second one it kills a rank that hangs
                launcher.terminate()
                time.sleep(0.5)
            launcher.communicate()
            raise
    if launcher.returncode:
        print(said[-6000:], end="", file=sys.stderr)
        raise SystemExit(launcher.returncode)


def handle_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Let a handler receive SIGNALS."""
    for number in SIGNALS:
        # Who starts a program by nohup wants it to outlive the terminal.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
