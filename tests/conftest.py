"""What every test shares: no network, one thread per process, GPU tests skipped where there is no
GPU, forks first.
"""

import os

# Before torch and transformers are imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    import tests.kernels.interpreter_shim  # noqa: F401 before transformers imports triton, which then decides for good


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The threads of a process that has trained do not survive a fork.
    items.sort(key=lambda item: item.get_closest_marker("forks") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
