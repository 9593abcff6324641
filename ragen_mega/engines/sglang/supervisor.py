"""Runs a command so that it and all its descendants end with it, with whoever started this program,
and with this program.

A program of its own that needs the standard library and psutil: `python -I supervisor.py DIRECTORY
COMMAND...`, started with a pipe as standard input. The pipe closes when its owner dies, by whatever
signal; then DIRECTORY goes as well, since nobody else would remove it. An owner that only wants the
command to end writes a byte.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_POLL_SECONDS = 0.1
_SECONDS_TO_DIE = 30.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SHARED_MEMORY = Path("/dev/shm")
_LEFT_BEHIND = ("sem.mp-", "sgl_shm_mq_", "sglang_loads_")
"""Prefixes of shared memory that SGLang removes when it ends, but cannot when it is killed."""


def supervise(directory: str, command: list[str]) -> int:
    """Run `command` until it ends or the owner is gone; its exit status, 1 if it was killed or
    could not start.

    `directory` is removed when the owner is gone.
    """
    owner = os.getppid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    # The command's orphans become children of this process, so that all stay its descendants.
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _SIGNALS:
        signal.signal(number, _leave)
    is_owner_gone = False
    try:
        child = subprocess.Popen(  # if this process is killed the kernel kills the command
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
        while child.poll() is None:
            readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
            if readable or os.getppid() != owner:
                is_owner_gone = not (readable and os.read(0, 1))
                return 1
        return child.returncode if child.returncode >= 0 else 1
    except OSError as error:
        print(f"supervisor: cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        inodes = shared_memory(os.getpid())
        kill_descendants(os.getpid())
        remove_left_behind(inodes)
        if is_owner_gone:
            shutil.rmtree(directory, ignore_errors=True)


def _leave(signum: int, frame: FrameType | None) -> None:
    for number in _SIGNALS:  # `timeout` sends two, and the second must not interrupt the killing
        signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + signum)


def kill_descendants(root: int) -> None:
    """SIGKILL every process below `root` and those that they start meanwhile. What a driver holds
    does not end and is left.
    """
    deadline = time.monotonic() + _SECONDS_TO_DIE
    while alive := descendants(root):
        if time.monotonic() > deadline:
            pids = ", ".join(map(str, alive))
            print(f"supervisor: killed, and has not ended: {pids}", file=sys.stderr, flush=True)
            return
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def shared_memory(root: int) -> set[int]:
    """Return the inodes of the shared memory in use below `root`; by inode, because a semaphore is
    mapped under another name than its file has.
    """
    inodes = set()
    for pid in descendants(root):
        with suppress(OSError):  # it may have ended
            # address permissions offset device inode path
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in maps if f" {_SHARED_MEMORY}/" in line}
    return inodes


def remove_left_behind(inodes: set[int]) -> None:
    """Remove the shared-memory files that nobody else removes when their users are killed."""
    for name in _LEFT_BEHIND:
        for file in _SHARED_MEMORY.glob(f"{name}*"):
            with suppress(FileNotFoundError):
                if file.lstat().st_ino in inodes:
                    file.unlink()


def descendants(root: int) -> list[int]:
    """Return the processes below `root` that still run: no zombies, but processes below them."""
    # Not Process.children, which leaves out what seems older than `root` after the clock was set.
    found = {process.pid: process.info for process in psutil.process_iter(["ppid", "status"])}

    def is_below(pid: int) -> bool:
        parent = found[pid]["ppid"]
        return parent == root or (parent in found and is_below(parent))

    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return [pid for pid, about in found.items() if about["status"] not in ended and is_below(pid)]


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1], sys.argv[2:]))
