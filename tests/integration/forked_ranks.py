"""The ranks of a job as forks of this process, so that nothing is imported again. Tests that use it
are marked `forks`.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.context import ForkProcess as Process

from ragen_mega.megatron.initialize import shutdown


def fork_ranks(work: Callable[[], None], num_ranks: int) -> list[Process]:
    """Start `work()` on `num_ranks` processes that are ranks of one job, as torchrun would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": str(num_ranks),
        }

    def rank(index: int) -> None:
        os.environ.update(address, RANK=str(index), LOCAL_RANK=str(index))
        work()

    shutdown()  # what a test before has started in this process
    processes = [
        multiprocessing.get_context("fork").Process(target=rank, args=(index,))
        for index in range(num_ranks)
    ]
    for process in processes:
        process.start()
    return processes
