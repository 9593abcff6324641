"""Process groups beside the job's own, with ranks of other worlds of torch.distributed: of engines
that the user has started, or of the other part of a divided job.
"""

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_NCCL_TIMEOUT = timedelta(hours=1)
"""After it torch ends the process. Whoever waits gives up long before, and ends the group."""


def form(
    backend: str, store: dist.Store, name: str, rank: int, size: int, patience: float
) -> dist.ProcessGroup:
    """Form a group of `size` ranks, as SGLang forms its own (`init_custom_process_group`): torch
    has no public function that does it. Rank 0 is the source of broadcasts.

    Raises RuntimeError where not all come within `patience` seconds.
    """
    group, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend(backend), dist.PrefixStore(name, store),
        timeout=_NCCL_TIMEOUT if backend == "nccl" else timedelta(seconds=patience),
        group_name=name,  # type: ignore[arg-type] # torch's own alias of str
    )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {index: index for index in range(size)}
    return group


def leave(group: dist.ProcessGroup, backend: str) -> None:
    """Leave a group, though others of it may hang."""
    # NCCL's call ends kernels that wait for another rank; what waits over gloo ends by itself.
    end = c10d._abort_process_group if backend == "nccl" else dist.destroy_process_group
    with suppress(RuntimeError, ValueError):  # it may have failed
        end(group)
