"""torchrun for the launch scripts: threads shared among the ranks, each rank bound to the CPUs near
its GPU where that can be, signals passed on to them, and silent about failures that a rank has
explained.

    ragen-mega launch [torchrun flags] [--module] script [flags of the script]

`torchrun script ...` does the same with torchrun's own report after the error of a rank, and gives
ranks 30 seconds to stop. On several nodes the nodes find each other by --nnodes, --node-rank,
--master-addr and --master-port (docs/multi-node.md).
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from argparse import SUPPRESS
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from ragen_mega.commands.guardian import guarded, is_echo
from ragen_mega.ranks.launcher import SIGNALS, handle_signals, num_processors, refuse_copies
from ragen_mega.system.outputs import guard_outputs

if TYPE_CHECKING:
    from argparse import Namespace

_PROBE_SECONDS = 20.0
_last = (0, 0.0)
"""The last signal and its time."""
_EXPLAINED = (1, 2)
"""Exit codes of an exception that nobody caught, and of an error in one line."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's switch. A page is faulted in by every fresh tensor, and 512 small ones cost more than a
large one; where the kernel has none, nothing changes.
"""


class _Stopped(BaseException):
    """Stop of the launcher. It is no Exception, because torchrun would log that as a failure."""


def main(argv: Sequence[str]) -> int:
    """Run the ranks; returns the exit code of the first that failed, 128 + signal if one was
    killed or the launcher was told to stop, and 2 if the nodes do not find each other.
    """
    guard_outputs(is_needed=False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is no error while torch is imported
    # Before torch is imported: it would tell of every address that has no name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # And of its allocator, which reads this once: large tensors in huge pages of host memory.
    os.environ.setdefault(HUGE_PAGES, "1")
    try:
        # torchrun leaves a folder of its own choice behind.
        with (
            tempfile.TemporaryDirectory(prefix="ragen-", ignore_cleanup_errors=True) as folder,
            guarded(folder, SIGNALS),
        ):
            return _launch(argv, folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except _Stopped as stopped:
        return 128 + stopped.args[0]
    except UnboundLocalError as error:
        # torchrun's `prof` may be interrupted before its first line, which its `finally` relies on.
        if isinstance(error.__context__, _Stopped):
            return 128 + error.__context__.args[0]
        raise


def _launch(argv: Sequence[str], folder: str) -> int:
    """Run the ranks, with their logs in `folder`; returns as `main`."""
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    parser = run.get_args_parser()
    parser.usage = SUPPRESS  # of a hundred lines, before the error
    args = parser.parse_args(list(argv))
    if args.numa_binding is None and can_bind():
        args.numa_binding = "node"  # host memory and copies beside the GPU of each rank
    if args.module:
        os.environ.setdefault("PYTHONSAFEPATH", "1")  # as -P, which torchrun does not pass on
    num_ranks = run.determine_local_world_size(args.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_processors() // num_ranks)))
    logging.disable(logging.ERROR)  # in this process; the ranks log for themselves
    args.signals_to_handle = "SIGQUIT"  # its answer to the others is SIGKILL after 30 seconds
    args.log_dir = args.log_dir or folder
    is_alone = args.nnodes in ("1", "1:1")
    is_static = args.rdzv_backend == "static" and not args.rdzv_endpoint
    args.master_port = args.master_port or 29500  # torchrun's own, which it sets late
    try:
        if is_alone:
            refuse_copies()
        elif is_static:
            _check_rendezvous(args)
        if not (args.module or args.no_python or os.path.isfile(args.training_script)):
            raise ValueError(
                f"{args.training_script} must be a file, the script that each rank runs, and is"
                " none; mend the path, or write --module before the name of a module"
            )
        if is_alone or is_static:
            _use_private_rendezvous(args)
        else:
            handle_signals(_stop)
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
    except (RendezvousError, DistError, ValueError, OSError) as error:
        said = str(error).partition("\n")[0]
        if isinstance(error, (RendezvousError, DistError)):
            said = f"the nodes did not meet, or one has ended: {said}; see the output of the others"
        print(f"error: {said}", file=sys.stderr)
        return 2
    return 0


def _use_private_rendezvous(args: Namespace) -> None:
    """Replace torchrun's rendezvous: its stores listen on every interface and ask nobody who they
    are. On one machine there is no store, since ranks meet in a file; the store of several nodes
    listens on --master-addr alone.
    """
    from torch.distributed import HashStore, TCPStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    num_nodes = int(args.nnodes.rpartition(":")[2])
    name = f"private-{secrets.token_hex(4)}"  # a second launcher of this process has another one

    class Private(StaticTCPRendezvous):
        use_agent_store = num_nodes > 1

        def get_backend(self) -> str:
            return name

        def next_rendezvous(self) -> RendezvousInfo:
            if num_nodes == 1:
                handle_signals(_stop)
                return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))
            if self.rank == 0 and self._store is None:
                self._store = TCPStore(
                    self.master_addr,
                    self.master_port,
                    num_nodes,
                    is_master=True,
                    timeout=self.timeout,
                    multi_tenant=True,
                    master_listen_fd=_listen(self.master_addr, self.master_port).detach(),
                )
            found = super().next_rendezvous()  # waits in C++, where only the default action ends it
            handle_signals(_stop)
            return found

    def make(given: RendezvousParameters) -> Private:
        seconds = int(given.config.get("timeout", 600))  # of --rdzv-conf
        place = args.master_addr, args.master_port, args.node_rank
        return Private(*place, num_nodes, given.run_id, seconds)

    rendezvous_handler_registry.register(name, make)
    args.rdzv_backend, args.standalone = name, False  # which would choose another one


def _listen(host: str, port: int) -> socket.socket:
    """Return a listener on the address of `host` alone, unless this machine knows its own name as
    one of the loopback's, as Debian does: others would not reach it there.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    is_own_name = ip_address(address[0]).is_loopback
    return socket.create_server(("" if is_own_name else address[0], port), family=family)


def _check_rendezvous(args: Namespace) -> None:
    """Raise ValueError where this node cannot meet the others at --master-addr. That the first one
    does not listen yet is no reason: torchrun waits for it.
    """
    host, port, last = args.master_addr, args.master_port, int(args.nnodes.rpartition(":")[2]) - 1
    if not 0 <= args.node_rank <= last:
        raise ValueError(
            f"--node-rank must be from 0 to {last} on --nnodes {args.nnodes}, not {args.node_rank}"
        )
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(
            f"--master-addr must be the name or address of the first node, and {host} is unknown"
            f" on this one ({error.strerror})"
        ) from None
    try:
        if args.node_rank == 0:
            socket.create_server((str(address), port), family=family).close()
        else:
            socket.create_connection((str(address), port), timeout=_PROBE_SECONDS).close()
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
    """Return whether torchrun can bind ranks to the CPUs near their GPUs, and some are nearer than
    others: it ends the job where Linux does not say where a GPU is or numactl is missing.
    """
    import torch

    devices = system / "bus" / "pci" / "devices"
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    addresses = [
        f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}"  # type: ignore[attr-defined]  # no stub
        f":{gpu.pci_device_id:02x}.0"  # type: ignore[attr-defined]  # no stub
        for gpu in gpus
    ]
    num_nodes = len([*(system / "devices" / "system" / "node").glob("node[0-9]*")])
    is_known = all((devices / address / "numa_node").exists() for address in addresses)
    return bool(addresses) and num_nodes > 1 and is_known and shutil.which("numactl") is not None


def _stop(signum: int, frame: FrameType | None) -> None:
    """Pass a signal on to the ranks, and exit after them. Signals that arrive meanwhile are passed
    on as well. The guardian bounds the wait.
    """
    global _last
    now = time.monotonic()
    is_repeated, _last = is_echo(signum, now, *_last), (signum, now)
    if is_repeated:
        return
    ranks = psutil.Process().children()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(signum)
    ended, _ = psutil.wait_procs(ranks)
    if any(rank.returncode == -signum for rank in ended):
        os.write(2, f"stopped by {signal.Signals(signum).name} at once\n".encode())
    raise _Stopped(signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
