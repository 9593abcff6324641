"""What every test shares: no network, one thread per process, GPU tests skipped where there is no
GPU, forks first, an end to tests that hang.
"""

import os

# Before torch and transformers are imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import importlib.util
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

gc.disable()  # until all is collected: what modules and tests make stays

# What draws examples passes on a busy machine too.
settings.register_profile(
    "patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

IS_FAKE = "fake_cuda_device" in sys.modules
"""Whether the CUDA devices come from tests/fake_cuda."""

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    # Before transformers imports triton, which then decides for good.
    import tests.kernels.interpreter_shim  # noqa: F401

POISONED = {
    f"test_{name}"
    for name in "cpu_attention embedded_engine embedded_kernels exchange forest kv_cache"
    " memory_plan objective offload policy precision resharding returns rows switches"
    " tensor_parallel".split()
}
"""Files whose tests run with `poisoned_memory`: what they test allocates without writing."""
SECONDS_TO_CLEAN_UP = 60.0
"""Of a test whose time is over."""
MAX_WORKERS = 8
"""Of `-n auto`: each imports torch and megatron-core anew, and some tests start four ranks."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores, because a third of the time tests wait for servers, ranks and time
    limits; none beside this process where tests would share a GPU.
    """
    cores = len(os.sched_getaffinity(0))
    return 0 if torch.cuda.is_available() or cores == 1 else min(cores + 1, MAX_WORKERS)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Let pytest-timeout fail a test again and again after its time: once is not enough where the
    end of a `with` or a `finally` then waits for what hangs.
    """
    if limit := signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, limit, SECONDS_TO_CLEAN_UP)
    return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Forks first: neither CUDA nor the threads of a process that has trained survive a fork.

    Workers take whole files from the front, so those that fork, which take longest, come first. A
    worker may train in one file and fork in the next: `fork_ranks` sees to what is left.
    """
    items.sort(key=lambda item: item.get_closest_marker("forks") is None)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.get_closest_marker("silicon") and IS_FAKE:
            item.add_marker(pytest.mark.skip(reason="needs real kernels"))


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody has written holds NaN, or the largest integer, whatever the allocator
    finds, so that reading it shows on every machine. Forked ranks inherit this.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)  # without which nothing is filled
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _poison_where_memory_is_reused(request: pytest.FixtureRequest) -> None:
    if request.path.stem in POISONED:
        request.getfixturevalue("poisoned_memory")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Torch's number of threads in a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
