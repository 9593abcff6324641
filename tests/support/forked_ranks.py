"""The ranks of a job as forks of this process, so that nothing is imported again. Tests that use it
are marked `forks`.
"""

import gc
import multiprocessing
import os
import random
import socket
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess as Process

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from ragen_mega.megatron.initialize import shutdown

PORTS = range(20_000, 32_000)
"""Below those that the kernel hands out, which could be taken before the ranks listen."""


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := random.SystemRandom().choice(PORTS)))
            except OSError:
                continue
            return port


def fork_ranks(work: Callable[[], None], num_ranks: int) -> list[Process]:
    """Start `work()` on `num_ranks` processes that are ranks of one job, as torchrun would."""
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
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
