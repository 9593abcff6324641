"""Processes that find the fake device: their environment, and an interpreter for servers, which are
started without the variables of whoever starts them.
"""

import os
import shlex
import sys
from pathlib import Path

from tests.fake_cuda.build import HERE

ROOT = HERE.parents[1]


def environment(num_devices: int, **others: str) -> dict[str, str]:
    """For a process that finds this many CUDA devices, and for those that it starts; `others` are
    further variables.
    """
    paths = (HERE / "site", ROOT, ROOT / "kernels", os.environ.get("PYTHONPATH"))
    python_path = os.pathsep.join(str(path) for path in paths if path)
    fake = {"RAGEN_FAKE_CUDA": str(num_devices), "PYTHONPATH": python_path}
    return os.environ | fake | others


def write_python(folder: Path, shared: Path) -> Path:
    """A program in `folder` that is this interpreter with one CUDA device, whose memory it shares
    with all that name the folder `shared`, and with the stand-in for SGLang.
    """
    shared.mkdir(exist_ok=True)
    program = folder / "python"
    paths = ":".join(map(str, (HERE / "site", ROOT, ROOT / "kernels")))
    program.write_text(
        "#!/usr/bin/env bash\n"
        f"export RAGEN_FAKE_CUDA=1 RAGEN_FAKE_CUDA_SHARED={shlex.quote(str(shared))}\n"
        f"export PYTHONPATH={shlex.quote(paths)}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    program.chmod(0o755)
    return program
