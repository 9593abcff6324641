"""The ranks of a job as forks of this process, so that nothing is imported again. Tests that use it
are marked `forks`.
"""

import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess as Process

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch.distributed import TCPStore

from ragen_mega.megatron.initialize import shutdown

_FORK = multiprocessing.get_context("fork")


def fork_ranks(work: Callable[[], None], num_ranks: int) -> list[Process]:
    """Start `work()` on `num_ranks` processes that are ranks of one job, as torchrun would: their
    store is a process of its own, whose port listens before anybody is told of it. It lives as long
    as the first of the processes returned.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }

    def serve() -> None:
        # Not in this process: a fork beside the store's threads may inherit a lock that one holds.
        listening = listener.detach()  # which the store closes
        _store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening
        )
        multiprocessing.parent_process().join()  # or until it is killed

    def rank(index: int) -> None:
        listener.close()
        faulthandler.register(signal.SIGUSR1, file=2)  # see join_ranks
        os.environ.update(address, RANK=str(index), LOCAL_RANK=str(index))
        work()

    shutdown()  # what a test before has started in this process
    # What is left of it is destroyed here or never: a fork has not the threads that it waits for.
    RotaryEmbedding.forward.cache_clear()  # which keeps models alive, with their process groups
    gc.collect()
    gc.freeze()
    store = _FORK.Process(target=serve, daemon=True)
    processes = [_FORK.Process(target=rank, args=(index,)) for index in range(num_ranks)]
    for process in [store, *processes]:
        process.start()
    gc.unfreeze()
    listener.close()
    weakref.finalize(processes[0], store.kill)
    return processes


def join_ranks(processes: list[Process]) -> None:
    """Wait until all have ended well; where one has not, end the others, which would wait for it,
    and fail. Where the test's time is over, ranks that still run say where they are.
    """
    try:
        while alive := [process.sentinel for process in processes if process.is_alive()]:
            wait(alive)  # never of an empty list, which would wait for ever
            if any(process.exitcode for process in processes):
                break
    finally:
        running = [process for process in processes if process.is_alive()]
        if running and not any(process.exitcode for process in processes):  # the time is over
            for process in running:
                os.kill(process.pid, signal.SIGUSR1)
            time.sleep(1)
        for process in processes:
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def on_ranks(work: Callable[[], None], num_ranks: int) -> None:
    """Run `work()` on forked ranks to its end."""
    join_ranks(fork_ranks(work, num_ranks))
