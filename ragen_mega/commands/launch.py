"""torchrun for the launch scripts: threads shared among the ranks, each rank bound to the CPUs near
its GPU where that can be, signals passed on to them, and silent about failures that a rank has
explained.

    python tools/launch.py [torchrun flags] [--module] script [flags of the script]

`torchrun script ...` does the same with torchrun's own report after the error of a rank, and gives
ranks 30 seconds to stop. On several nodes the nodes find each other by --nnodes, --node-rank,
--master-addr and --master-port (docs/multi-node.md).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from argparse import Namespace

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_PROBE_SECONDS = 20.0
_SECONDS_TO_END = 10.0
"""Time that ranks have to end after a second signal."""
_EXPLAINED = (1, 2)
"""Exit codes of an exception that nobody caught, and of an error in one line."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's switch. A page is faulted in by every fresh tensor, and 512 small ones cost more than a
large one; where the kernel has none, nothing changes.
"""


_num_signals = 0


class _Stopped(BaseException):
    """Not an Exception: torchrun would log it as a failure."""


def main(argv: Sequence[str]) -> int:
    """Run the ranks; returns the exit code of the first that failed, 128 + signal if one was
    killed or the launcher was told to stop, and 2 if the nodes do not find each other.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is no error while torch is imported
    # Before torch is imported: it would tell of every address that has no name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # And of its allocator, which reads this once: large tensors in huge pages of host memory.
    os.environ.setdefault(HUGE_PAGES, "1")
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    args = run.parse_args(list(argv))
    if args.numa_binding is None and can_bind():
        args.numa_binding = "node"  # host memory and copies beside the GPU of each rank
    if args.module:
        os.environ.setdefault("PYTHONSAFEPATH", "1")  # as -P, which torchrun does not pass on
    num_ranks = run.determine_local_world_size(args.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    logging.disable(logging.ERROR)  # of this process; the ranks log for themselves
    args.signals_to_handle = "SIGQUIT"  # its answer to the others is SIGKILL after 30 seconds
    for number in _FORWARDED:
        # Who starts a program by nohup wants it to outlive the terminal.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    is_one_node = args.nnodes in ("1", "1:1")
    try:
        if not is_one_node and args.rdzv_backend == "static":
            _check_meeting(args)
        with _one_node(args) if is_one_node else nullcontext():
            run.run(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            if failure.exitcode not in _EXPLAINED and failure.exitcode < 128:
                print(
                    f"error: rank {rank} ended with exit code {failure.exitcode} and without a"
                    " Python exception: a library, or an environment, has ended the process",
                    file=sys.stderr,
                )
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        hint = "; the machine may be out of memory (see dmesg)" if name == "SIGKILL" else ""
        print(f"error: rank {rank} was killed by {name}{hint}", file=sys.stderr)
        return 128 - failure.exitcode
    except (RendezvousError, DistError, ValueError) as error:
        said = str(error).partition("\n")[0]
        if not isinstance(error, ValueError):
            said = f"the nodes did not meet, or one has ended: {said}; see the output of the others"
        print(f"error: {said}", file=sys.stderr)
        return 2
    except _Stopped as stopped:
        return 128 + stopped.args[0]
    return 0


@contextmanager
def _one_node(args: Namespace) -> Iterator[None]:
    """Let torchrun start the ranks of one node without its store, which would listen on every
    interface, ask nobody for a key and unpickle what it is given. Its folder for logs, in which
    the ranks meet, is temporary unless --log-dir names one.
    """
    args.rdzv_backend = _register_one_node()
    with tempfile.TemporaryDirectory(prefix="ragen_mega_") as folder:  # mode 0700
        args.log_dir = args.log_dir or folder
        yield


@cache
def _register_one_node() -> str:
    """The name of a rendezvous of torchrun's in which a node waits for no other."""
    from torch.distributed import HashStore
    from torch.distributed.elastic import rendezvous

    class OneNode(rendezvous.RendezvousHandler):
        def __init__(self, parameters: rendezvous.RendezvousParameters) -> None:
            self._run_id = parameters.run_id

        def get_backend(self) -> str:
            return "one_node"

        def get_run_id(self) -> str:
            return self._run_id

        def next_rendezvous(self) -> rendezvous.RendezvousInfo:
            address = rendezvous.RendezvousStoreInfo("127.0.0.1", 0)  # which no rank asks
            return rendezvous.RendezvousInfo(HashStore(), 0, 1, address)

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def shutdown(self) -> bool:
            return True

    rendezvous.rendezvous_handler_registry.register("one_node", OneNode)
    return "one_node"


def _check_meeting(args: Namespace) -> None:
    """Raise ValueError where this node cannot meet the others at --master-addr. That the first one
    does not listen yet is no reason: torchrun waits for it.
    """
    host, port, last = args.master_addr, args.master_port, int(args.nnodes.rpartition(":")[2]) - 1
    if not 0 <= args.node_rank <= last:
        raise ValueError(
            f"--node-rank must be from 0 to {last} on --nnodes {args.nnodes}, not {args.node_rank}"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(
            f"--master-addr must be the name or address of the first node, and {host} is unknown"
            f" on this one ({error.strerror})"
        ) from None
    try:
        if args.node_rank == 0:
            socket.create_server(address[:2], family=family).close()
        else:
            socket.create_connection(address[:2], timeout=_PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return
    except OSError as error:
        here = f"is not an address of the first node on which port {port} is free"
        there = f"cannot be reached from node {args.node_rank}"
        raise ValueError(
            f"--master-addr {host} {there if args.node_rank else here}"
            f" ({error.strerror or error}); choose another --master-addr or --master-port, the same"
            " on all nodes"
        ) from None


def can_bind(system: Path = Path("/sys")) -> bool:
    """Whether torchrun can bind ranks to the CPUs near their GPUs, and some are nearer than others:
    it ends the job where Linux does not say where a GPU is or numactl is missing.
    """
    import torch

    devices = system / "bus" / "pci" / "devices"
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    addresses = [
        f"{one.pci_domain_id:04x}:{one.pci_bus_id:02x}:{one.pci_device_id:02x}.0" for one in gpus
    ]
    num_nodes = len([*(system / "devices" / "system" / "node").glob("node[0-9]*")])
    is_known = all((devices / address / "numa_node").exists() for address in addresses)
    return bool(addresses) and num_nodes > 1 and is_known and shutil.which("numactl") is not None


def _stop(signum: int, frame: FrameType | None) -> None:
    """Pass a signal on to the ranks, and exit after them, however long they take to write a
    checkpoint. After a second signal they have ten seconds, then they are killed: one that hangs
    would never end. SIGUSR1 is no second signal: schedulers send it to launcher and ranks alike.
    """
    global _num_signals
    _num_signals += signum != signal.SIGUSR1
    ranks = psutil.Process().children()
    job = psutil.Process().children(recursive=True)
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(signum)
    if _num_signals > 1:
        _, left = psutil.wait_procs(ranks, timeout=_SECONDS_TO_END)
        if left:
            os.write(2, f"ranks that hang, and are killed: {len(left)}\n".encode())
        for process in job if left else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
    psutil.wait_procs(ranks)
    raise _Stopped(signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
