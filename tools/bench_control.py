"""What ranks tell each other in a step besides trajectories and tensors, by the number of ranks:
bytes and processor time of one rank, measured with processes that hold no model.

    python tools/bench_control.py [--ranks 4 8 16 32 64] [--json OUT] [--markdown OUT]

Linux, as root: the ranks are forks in a network namespace of their own, whose loopback counts their
bytes alone. Processor time is that of the busiest rank; the wall clock of 64 processes on few cores
would say nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from benchmark import OUTPUTS, provenance, publish, table

from ragen_mega.commands.command_line import command, flag
from ragen_mega.data import distributed
from ragen_mega.data.launcher import as_rank
from ragen_mega.report.metrics import RunLogger
from ragen_mega.rollout.all_ranks import engine_metrics
from ragen_mega.rollout.engine import EngineCounts
from ragen_mega.run.placement import ACTOR, Colocated, Phase
from ragen_mega.run.run import fingerprint
from ragen_mega.run.stop import StopSignal
from ragen_mega.storage.checkpoints import CheckpointWriter

NUM_PARAMETERS = 150
"""Of a rank: 12 in each of 12 layers, and some."""
NUM_POSITIONS = 65_536
"""Of a step's batch, whose per-token results every rank gets."""
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET, linux/sched.h
_REPEATS = 5


def parts(directory: Path) -> dict[str, Callable[[], object]]:
    """The collective calls of a step, as the run makes them."""
    parameters = [torch.full((8,), float(index)) for index in range(NUM_PARAMETERS)]
    engine = SimpleNamespace(counts=EngineCounts(), shard=None)
    memory = SimpleNamespace(
        offload=lambda *kinds: None, restore=lambda *kinds: None, away=dict, on_device=dict
    )
    placement = Colocated("none")
    placement.add(ACTOR, memory)
    logger = RunLogger(
        directory / "run", is_writer=distributed.is_main(), tensorboard=False, overwrite=True
    )
    writer = CheckpointWriter(directory / "checkpoints", {}, keep_last=1, keep_best=False)
    rows, saves = itertools.count(), itertools.count()

    def ledger() -> None:
        with placement.handover():
            placement.enter(Phase.ROLLOUT)
        placement.take_ledger()

    def stage(temporary: Path) -> Callable[[], Path]:
        def write() -> Path:
            path = temporary / f"rank_{distributed.rank():05d}.safetensors"
            path.write_bytes(b"")
            return path

        return write

    def save() -> None:
        writer.save(next(saves), stage, {}, None)
        writer.wait()

    row = {f"metric/{index}": float(index) for index in range(80)}
    return {
        "whether to stop": StopSignal().agreed,
        "fingerprint of the weights": lambda: fingerprint(parameters),
        "counts of the engines": lambda: engine_metrics(engine),
        "memory at the phase changes": ledger,
        "row of metrics, by rank 0": lambda: distributed.on_main(
            lambda: logger.log(next(rows), row)
        ),
        "per-token results of 65,536 positions": lambda: distributed.sum_over_ranks(
            torch.zeros(NUM_POSITIONS)
        ),
        "checkpoint of empty files": save,
    }


def measure(directory: Path) -> dict[str, tuple[float, float]]:
    """Part -> bytes that a rank receives and milliseconds that the busiest one computes, a call."""
    found = {}
    num_ranks = distributed.world_size()
    for name, work in {"barrier": distributed.barrier, **parts(directory)}.items():
        work()
        distributed.barrier()
        received, computed = _received(), time.process_time()
        for _ in range(_REPEATS):
            work()
        busy = torch.tensor([time.process_time() - computed])
        distributed.barrier()
        received = _received() - received
        dist.all_reduce(busy, op=dist.ReduceOp.MAX)
        found[name] = received / num_ranks / _REPEATS, 1e3 * float(busy) / _REPEATS
        distributed.barrier()
    # Every measurement has one more barrier, which closes it; that of barriers is _REPEATS + 1.
    ends = found.pop("barrier")[0] / (_REPEATS + 1)
    return {name: (size - ends, busy) for name, (size, busy) in found.items()}


def _received() -> int:
    """Bytes that the loopback of this namespace has carried."""
    (line,) = (row for row in Path("/proc/net/dev").read_text().splitlines() if " lo:" in row)
    return int(line.partition(":")[2].split()[0])


def _rank(index: int, num_ranks: int, directory: Path, answer: Connection) -> None:
    os.environ.update(as_rank(index, num_ranks, directory))
    torch.set_num_threads(1)
    distributed.start()
    with redirect_stdout(None):
        found = measure(directory)
    if index == 0:
        answer.send(found)
    distributed.stop()


def run_ranks(num_ranks: int) -> dict[str, tuple[float, float]]:
    """`measure` on forked ranks."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(index, num_ranks, Path(folder), there))
            for index in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise ValueError(f"a rank of {num_ranks} has failed; its own error says why")
        return here.recv()


def enter_network() -> None:
    """Go to a network namespace of this process's own. Raises OSError where that is forbidden."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "needs a network namespace; run it as root on Linux")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def growth(sizes: list[int], values: list[float]) -> float:
    """The power of the number of other ranks by which values grow, from first to last; NaN where
    one of them is not above 0.
    """
    if min(values[0], values[-1]) <= 0:
        return math.nan
    return math.log(values[-1] / values[0]) / math.log((sizes[-1] - 1) / (sizes[0] - 1))


@command(
    __doc__,
    flag("--ranks", "numbers of ranks", type=int, nargs="+", default=[4, 8, 16, 32, 64]),
    *OUTPUTS,
)
def main(arguments: argparse.Namespace) -> None:
    sizes = sorted({*arguments.ranks})
    if len(sizes) < 2 or sizes[0] < 2:
        raise ValueError(
            "--ranks must be two different numbers of ranks or more, each above 1, not"
            f" {arguments.ranks}"
        )
    enter_network()
    found = [run_ranks(size) for size in sizes]
    tables = []
    for which, unit, digits in ((0, "kB a rank receives", 2), (1, "ms of a rank", 2)):
        rows = [
            [
                name,
                *(f"{one[name][which] / (1e3 if which == 0 else 1):.{digits}f}" for one in found),
                f"{growth(sizes, [one[name][which] for one in found]):.2f}",
            ]
            for name in found[0]
        ]
        tables.append(table([unit, *map(str, sizes), "exponent"], rows))
    report = provenance() | {"ranks": sizes, "parts": found}
    panels = {
        title: {name: [one[name][which] for one in found] for name in found[0]}
        for which, title in enumerate(("bytes that a rank receives", "ms of the busiest rank"))
    }
    publish(arguments, report, "\n\n".join(tables), panels)


if __name__ == "__main__":
    main()
