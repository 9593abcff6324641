"""Everything on megatron-core and Transformer Engine; no other package imports them."""

import ctypes
import importlib
import logging
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


def _import_without_compiler() -> None:
    """Import megatron-core on a CPU without torch's compiler, which takes a quarter of a rank's
    start: megatron-core decorates some fifty small functions, of which a CPU runs none compiled.
    """
    if torch.cuda.is_available():
        return

    def leave(function: Any = None, **_: Any) -> Any:
        return function or leave  # `@torch.compile` and `@torch.compile(dynamic=True)`

    compile_, torch.compile = torch.compile, leave  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core.models.gpt.gpt_model")
    finally:
        torch.compile = compile_


if not is_found("transformer_engine"):
    # megatron-core would take a folder of that name in the working directory for the package.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # forbids its import
elif torch.cuda.is_available():
    load_cudnn_of_torch()
_import_without_compiler()
