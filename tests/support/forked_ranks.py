"""The ranks of a job as forks of this process, so that nothing is imported again. Tests that use it
are marked `forks`.
"""

import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess as Process
from pathlib import Path

import torch._dynamo  # noqa: F401 every optimizer imports it, for 1 s
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from numba.core.registry import cpu_target

import ragen_mega.engines.embedded.engine  # noqa: F401 else every run does, for 1 s
from ragen_mega.megatron.initialize import shutdown

_FORK = multiprocessing.get_context("fork")
for tables in (cpu_target.typing_context, cpu_target.target_context):
    tables.refresh()  # numba would do so at each rank's first call


def fork_ranks(work: Callable[[], None], num_ranks: int) -> list[Process]:
    """Start `work()` on `num_ranks` processes that are ranks of one job, as torchrun would. The
    folder in which they meet lives as long as the first of the processes returned.
    """
    folder = tempfile.mkdtemp(prefix="forked-ranks-")

    def rank(index: int) -> None:
        faulthandler.register(signal.SIGUSR1, file=2)  # see join_ranks
        os.environ |= {  # what torchrun would tell
            "TORCHELASTIC_RUN_ID": "forks",
            "TORCHELASTIC_ERROR_FILE": f"{folder}/{index}/error.json",
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(num_ranks),
        }
        work()

    shutdown()  # what a test before has started in this process
    # What is left of it is destroyed here or never: a fork has not the threads that it waits for.
    RotaryEmbedding.forward.cache_clear()  # which keeps models alive, with their process groups
    gc.collect()
    if not gc.get_freeze_count():  # or every collection would go through all imports
        gc.freeze()  # once: what is frozen and later forgotten would keep its threads for good
    processes = [_FORK.Process(target=rank, args=(index,)) for index in range(num_ranks)]
    for process in processes:
        process.start()
    weakref.finalize(processes[0], shutil.rmtree, folder, ignore_errors=True)
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
        kill_ranks(processes)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def wait_for(path: Path, processes: list[Process]) -> None:
    """Return when the path exists, until which no rank may end."""
    while not path.exists():
        assert all(process.is_alive() for process in processes)
        time.sleep(0.01)


def kill_ranks(processes: list[Process]) -> None:
    for process in processes:
        process.kill()
        process.join()


def on_ranks(work: Callable[[], None], num_ranks: int) -> None:
    """Run `work()` on forked ranks to its end."""
    join_ranks(fork_ranks(work, num_ranks))
