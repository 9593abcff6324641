"""Everything on megatron-core and Transformer Engine; no other package imports them."""

import ctypes
import importlib
import logging
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch

from ragen_mega.extensions.extras import is_found

# megatron-core says at import that Transformer Engine and Apex are absent, and on a CPU that CUDA
# settings are missing.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
logging.getLogger("megatron.core").setLevel(logging.ERROR)


def load_cudnn_of_torch() -> list[str]:
    """Load every library of the cuDNN package that torch was installed with; returns their paths.

    Transformer Engine prefers the cuDNN of CUDA_HOME or of the system. If torch has another
    version, the two mix in one process and the first attention fails with
    CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED. Libraries that are loaded already come first.
    """
    try:
        found = find_spec("nvidia.cudnn")
    except ModuleNotFoundError:  # torch without CUDA, or with the system's
        return []
    folders = found.submodule_search_locations if found else None
    paths = [str(path) for folder in folders or () for path in Path(folder).glob("lib/*.so.*")]
    # The others need these two, which the loader would look for in LD_LIBRARY_PATH first.
    order = ("libcudnn_graph", "libcudnn_ops")
    for path in sorted(paths, key=lambda path: [part not in path for part in order]):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return paths


def _import_megatron_core() -> None:
    """Import what this package needs of megatron-core. It hands some fifty small functions to
    torch.compile while it is imported. None of them runs compiled on a CPU, where importing the
    compiler would take a quarter of a rank's start.
    """
    compiled = torch.compile
    if not torch.cuda.is_available():
        torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core.models.gpt.gpt_model")
    finally:
        torch.compile = compiled


if not is_found("transformer_engine"):
    # megatron-core would take a folder of that name in the working directory for the package.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # forbids its import
elif torch.cuda.is_available():
    load_cudnn_of_torch()
_import_megatron_core()
