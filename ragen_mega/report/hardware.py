"""Origin of measured numbers: the processor or GPU of this machine, and the versions of the
libraries that compute. torch is imported where it is asked, since that takes seconds.
"""

import os
import platform
from collections.abc import Iterable
from pathlib import Path

from ragen_mega.extensions.extras import installed

PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "sglang", "transformers")


def device() -> str:
    """Return the GPUs that torch sees, else the processor with its usable cores."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python, CUDA and `packages`, `none` for an absent package. An SGLang
    server may run in another environment with other versions.
    """
    import torch

    interpreter = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    return interpreter | {name: installed(name) or "none" for name in packages}


def describe() -> str:
    """Return the device and versions of the installed packages, in one line."""
    there = (f"{name} {found}" for name, found in versions().items() if found != "none")
    return f"{device()}; {', '.join(there)}"
