"""Pretend nodes of a cluster on this machine: Linux namespaces, each with its own address, host
name, processes, /tmp and /dev/shm; everything else of the file system is shared.

    python -m tests.support.pretend_nodes SHARED MODULE [flags of the module]
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.context import ForkProcess as Process
from pathlib import Path

import psutil
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
PORT = 29500
INTERFACE = "eth0"
"""Name of the interface by which the nodes reach each other."""
_OF_THIS_MACHINE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_ERROR_FILE")
"""Variables that a test before may have left in this process, and that say nothing of a node."""
_DETACHED = 2
"""MNT_DETACH of umount2(2)."""
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
_UP = """
set -e
mount --make-rprivate /
hostname "$1"
mkdir -p "$2/tmp"
for kept in "${@:3}"; do
    mkdir -p "$2$kept"
    mount --bind "$kept" "$2$kept"
done
mount --rbind "$2/tmp" /tmp
mount -t tmpfs -o size=4g tmpfs /dev/shm
ip link set lo up
echo ready
read -r address  # once the cable is plugged in
ip address add "$address" dev eth0
ip link set eth0 up
echo up
exec cat  # until the test is gone, however it ends
"""


def reason_against() -> str | None:
    """Why this machine cannot pretend to have nodes, None if it can."""
    for program in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(program) is None:
            return f"needs the program {program}"
    command = ["unshare", *_NAMESPACES, "--fork", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    tried = subprocess.run(command, capture_output=True, text=True)
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Node:
    """One pretend node, from its start until `kill`."""

    def __init__(self, index: int, shared: Path, stack: ExitStack) -> None:
        """`shared` is what it shares of /tmp, beside this repository and the interpreter."""
        self.address = f"10.77.0.{index + 1}"
        self.name = f"node{index}"
        self._private = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=shared.parent)))
        kept = {
            str(path.resolve())
            for path in (shared, ROOT, Path(sys.prefix), Path(sys.base_prefix))
            if path.resolve().is_relative_to("/tmp")
        }
        self._holder = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "bash", "-c", _UP, "node",
             self.name, str(self._private), *sorted(kept)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._expect("ready")
        (first,) = psutil.Process(self._holder.pid).children()
        self.pid = first.pid
        """Of its first process, whose end ends all others."""
        stack.callback(self.kill)

    def plug_in(self) -> None:
        """Give it its address, once its end of the cable is there."""
        self._holder.stdin.write(f"{self.address}/24\n")
        self._holder.stdin.flush()
        self._expect("up")

    def start(
        self, *command: object, output: int | None = subprocess.PIPE, **environment: str
    ) -> "subprocess.Popen[str]":
        """Start a command on the node, with these variables beside the variables of this process.
        Its output, of both kinds, is read from its `stdout`, or goes where `output` says.
        """
        inside = ["nsenter", "--target", str(self.pid), *_NAMESPACES, f"--wd={os.getcwd()}"]
        return subprocess.Popen(
            [*inside, *map(str, command)],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={name: value for name, value in os.environ.items() if name not in _OF_THIS_MACHINE}
            | environment,
        )

    def enter(self) -> None:
        """Move this thread, and what it forks, to the node; its process ids stay those outside.
        Once for a node, which `start` can no longer use then.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        for name in ("net", "uts", "ipc", "mnt"):
            with open(f"/proc/{self.pid}/ns/{name}") as namespace:
                if libc.setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter {name} of {self.name}")
        # The node's /proc knows the node's process ids alone; below it lies the /proc of outside.
        if libc.umount2(b"/proc", _DETACHED):
            raise OSError(ctypes.get_errno(), f"cannot take /proc from {self.name}")
        os.chdir(ROOT)

    def listens_on(self, port: int) -> set[str]:
        """Addresses on which something on this node listens, as in /proc/net/tcp."""
        rows = [
            line.split()
            for kind in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.pid}/net/{kind}").read_text().splitlines()[1:]
        ]
        places = [row[1].split(":") for row in rows if row[3] == "0A"]  # LISTEN
        return {address for address, number in places if int(number, 16) == port}

    def kill(self) -> None:
        """Power off: SIGKILL for every process on it. Safe to call again."""
        self._holder.communicate()  # ends its first process

    def _expect(self, line: str) -> None:
        said = self._holder.stdout.readline()
        assert said == f"{line}\n", f"{self.name} did not come up"

    def unplug(self) -> None:
        """From now on nothing that it sends arrives, and nothing reaches it."""
        command = ["nsenter", "--target", str(self.pid), "--net", "ip", "link", "set", INTERFACE]
        subprocess.run([*command, "down"], check=True)


@contextmanager
def two_nodes(shared: Path) -> Iterator[list[Node]]:
    """Two nodes with a cable between them; `shared` is on both. At the end all their processes are
    killed.
    """
    with ExitStack() as stack:
        nodes = [Node(index, shared, stack) for index in range(2)]
        ends = [
            argument for node in nodes for argument in ("name", INTERFACE, "netns", str(node.pid))
        ]  # of either node
        subprocess.run(
            ["ip", "link", "add", *ends[:4], "type", "veth", "peer", *ends[4:]], check=True
        )
        for node in nodes:
            node.plug_in()
        yield nodes


def fork_on_nodes(nodes: list[Node], work: Callable[[], None]) -> list[Process]:
    """Start `work()` on a rank of each node, as launchers there would, but by forks of this
    process, so that nothing is imported again.
    """
    from tests.support.forked_ranks import fork_ranks  # which imports all that a run does

    def rank() -> None:
        index = int(os.environ["RANK"])
        nodes[index].enter()
        for name in _OF_THIS_MACHINE:
            os.environ.pop(name, None)
        os.environ.update(
            MASTER_ADDR=nodes[0].address,
            MASTER_PORT=str(PORT),
            TORCHELASTIC_USE_AGENT_STORE="True",
            GROUP_RANK=str(index),
            GROUP_WORLD_SIZE=str(len(nodes)),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
        )
        host = nodes[0].address if index else "0.0.0.0"
        store = dist.TCPStore(host, PORT, is_master=not index, wait_for_workers=False)
        work()
        if index:
            return store.set("has_ended", "")
        store.wait(["has_ended"])  # as a launcher waits for the others

    return fork_ranks(rank, len(nodes))


def launcher(
    index: int, master: str, script: Path | str, *flags: object, ranks: int = 1
) -> list[object]:
    """The command that runs `script`, a file or the name of a module, on ranks of one node."""
    meeting = ("--node-rank", index, "--master-addr", master, "--master-port", PORT)
    program = (sys.executable, "-m", "ragen_mega.commands.launch")
    kind = () if isinstance(script, Path) else ("--module",)
    words = ("--nnodes", 2, "--nproc-per-node", ranks, *meeting, *kind)
    return [*program, *words, "--", script, *flags]


def main(shared: str, module: str, *flags: str) -> int:
    """Run a module on a rank of each of two nodes, and return the larger exit code."""
    with two_nodes(Path(shared)) as nodes:
        started = [
            node.start(*launcher(index, nodes[0].address, module, *flags), output=1)
            for index, node in enumerate(nodes)
        ]
        return max(abs(process.wait()) for process in started)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
