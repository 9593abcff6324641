"""Train an agent by StarPO, on NPROC_PER_NODE ranks of this machine (default: one for each GPU;
without GPUs two where there are two cores).

    ragen-mega train --recipe sokoban --seed 1
    torchrun --nproc-per-node 4 --no-python ragen-mega train --tensor-model-parallel-size 2

A rank of torchrun trains; without one this starts the ranks.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile

from ragen_mega.config.cli import DEFAULT_RECIPE
from ragen_mega.environments.processes import end_hosts
from ragen_mega.ranks.launcher import PROGRAM, check_process, is_rank, num_processors, ranks_command
from ragen_mega.report.console import fail
from ragen_mega.run.check import check_flags
from ragen_mega.system.imports import importing
from ragen_mega.system.outputs import guard_outputs, waiting


def main(argv: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is no error while modules are imported
    if is_rank():
        run_rank(argv)
        return
    asked = os.environ.get("NPROC_PER_NODE") or str(default_ranks())
    if not asked.isdecimal() or int(asked) == 0:
        fail(f"NPROC_PER_NODE must be a number of ranks, at least 1, not {asked!r}; unset it")
    if finished := check_flags(argv, int(asked), int(asked)):
        print(finished)
        return
    end_hosts()
    os.execv(sys.executable, ranks_command(int(asked), PROGRAM, "train", *argv))


def run_rank(argv: Sequence[str]) -> None:
    """Train in this process, which may be a rank of torchrun. Flags are checked before torch is
    imported.
    """
    guard_outputs(is_needed=False)
    try:
        check_process()
    except ValueError as error:
        fail(str(error))
    ranks = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    check_flags(argv, *ranks)
    sys.argv = ["ragen-mega", "train", *argv]  # the run records this command

    with waiting("importing torch and megatron-core"), importing():
        from ragen_mega.run.stop import end_process
        from ragen_mega.train import main as train

    try:
        train(argv, recipe=DEFAULT_RECIPE)
    except SystemExit as end:  # after an error or a signal, in the midst of the job
        end_process(int(end.code or 0))


def default_ranks() -> int:
    """Return the ranks for this machine: one for each GPU that CUDA_VISIBLE_DEVICES leaves; without
    a GPU two, data-parallel, where there are two cores.
    """
    gpus = 0
    if program := shutil.which("nvidia-smi"):  # which lists all GPUs
        listed = subprocess.run([program, "--list-gpus"], capture_output=True, text=True)
        gpus = sum(line.startswith("GPU") for line in listed.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible is not None:

        def is_one(name: str) -> bool:
            return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < gpus)

        # CUDA ignores everything behind the first that is none
        gpus = sum(1 for _ in takewhile(is_one, map(str.strip, visible.split(","))))
    return gpus or min(2, num_processors())
