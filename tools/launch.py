"""torchrun for the launch scripts: threads shared among the ranks, each rank bound to the CPUs near
its GPU, and silent about failures that a rank has explained.

    python tools/launch.py [torchrun flags] script [flags of the script]

`torchrun script ...` does the same with torchrun's own report behind the error of a rank.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(argv: Sequence[str]) -> int:
    """Run the ranks; returns the exit code of the first that failed, 128 + signal if one was
    killed.
    """
    args = run.parse_args(list(argv))
    if torch.cuda.is_available() and args.numa_binding is None:
        args.numa_binding = "node"  # host memory and copies beside the GPU of each rank
    num_ranks = run.determine_local_world_size(args.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    logging.disable(logging.ERROR)  # of this process; the ranks log for themselves
    try:
        run.run(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        hint = "; the machine may be out of memory (see dmesg)" if name == "SIGKILL" else ""
        print(f"error: rank {rank} was killed by {name}{hint}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
