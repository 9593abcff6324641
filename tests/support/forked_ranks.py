"""The ranks of a job as forks of this process, so that nothing is imported again. Tests that use it
are marked `forks`.
"""

import gc
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess as Process
from weakref import WeakKeyDictionary

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch.distributed import TCPStore

from ragen_mega.megatron.initialize import shutdown

_STORES: WeakKeyDictionary[Process, TCPStore] = WeakKeyDictionary()
"""The first rank of each job -> what its ranks meet in, which lives as long as that."""


def fork_ranks(work: Callable[[], None], num_ranks: int) -> list[Process]:
    """Start `work()` on `num_ranks` processes that are ranks of one job, as torchrun would: their
    store is this process's, which listens on a port before anybody is told of it.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }

    def rank(index: int) -> None:
        os.environ.update(address, RANK=str(index), LOCAL_RANK=str(index))
        work()

    shutdown()  # what a test before has started in this process
    # What is left of it is destroyed here or never: a fork has not the threads that it waits for.
    RotaryEmbedding.forward.cache_clear()  # which keeps models alive, with their process groups
    gc.collect()
    gc.freeze()
    processes = [
        multiprocessing.get_context("fork").Process(target=rank, args=(index,))
        for index in range(num_ranks)
    ]
    for process in processes:
        process.start()
    gc.unfreeze()
    _STORES[processes[0]] = store
    return processes


def join_ranks(processes: list[Process]) -> None:
    """Wait until all have ended well; where one has not, end the others, which would wait for it,
    and fail.
    """
    while alive := [process.sentinel for process in processes if process.is_alive()]:
        wait(alive)  # never of an empty list, which would wait for ever
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def on_ranks(work: Callable[[], None], num_ranks: int) -> None:
    """Run `work()` on forked ranks to its end."""
    join_ranks(fork_ranks(work, num_ranks))
