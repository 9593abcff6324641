"""The libraries of the fake device, made once for each version of torch, and Transformer Engine's
Python: `python tests/fake_cuda/build.py`. The results are in `build/fake_cuda/`.

Prints the reason where that is impossible: no compiler, a torch that has CUDA already, no package
index. The tests that need it then skip.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / "build" / "fake_cuda"
ACCELERATOR, DEVICE = "libcudart.so.13", "fake_cuda_device.so"
"""The first has the name of CUDA's runtime, which the servers' memory saver needs by that name."""
TRANSFORMER_ENGINE = ("transformer_engine==2.11.0", "einops==0.8.1")
"""Its Python and what that imports; the wheel of this name holds no native code (0.7 MB)."""
TRANSFORMER_ENGINE_FOLDER = "RAGEN_TE_PYTHON"
"""Environment variable: a folder that holds Transformer Engine's Python, instead of the index."""


def libraries() -> Path:
    """Where the libraries for this torch and these sources are, or would be."""
    sources = b"".join((HERE / name).read_bytes() for name in ("accelerator.cpp", "device.cpp"))
    key = f"torch-{version('torch')}-{sys.implementation.cache_tag}-{platform.machine()}"
    return CACHE / f"{key}-{hashlib.sha256(sources).hexdigest()[:12]}"


def transformer_engine() -> Path | None:
    """The folder with Transformer Engine's Python, None if there is none."""
    if named := os.environ.get(TRANSFORMER_ENGINE_FOLDER):
        return Path(named)
    folder = CACHE / "-".join(TRANSFORMER_ENGINE).replace("==", "-")
    return folder if folder.exists() else None


def obstacle() -> str | None:
    """Why there is no fake device for this torch, None if there is one."""
    if not (libraries() / DEVICE).exists():
        return "the fake CUDA device is not built: python tests/fake_cuda/build.py says why"
    return None


def build() -> None:
    """Make what is missing. Raises RuntimeError with the reason where that is impossible."""
    import torch

    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if platform.system() != "Linux":
        raise RuntimeError("the fake CUDA device needs Linux")
    if torch.version.cuda is not None:
        raise RuntimeError("the fake CUDA device needs torch's CPU build; this one has CUDA")
    if compiler is None:
        raise RuntimeError("the fake CUDA device needs a C++20 compiler; install g++ or set CXX")
    with _made(libraries()) as folder:
        if folder:
            _compile(compiler, Path(torch.__file__).parent, folder)


def _compile(compiler: str, torch: Path, folder: Path) -> None:
    includes = (
        torch / "include",
        torch / "include/torch/csrc/api/include",
        sysconfig.get_path("include"),
    )
    command = [
        compiler,
        "-O1",
        "-std=c++20",
        "-shared",
        "-fPIC",
        *(f"-I{path}" for path in includes),
    ]
    _run([*command, str(HERE / "accelerator.cpp"), "-o", str(folder / ACCELERATOR)])
    _run(
        [
            *command,
            f"-DTORCH_EXTENSION_NAME={Path(DEVICE).stem}",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            str(HERE / "device.cpp"),
            *("-o", str(folder / DEVICE)),
            *(f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
            f"-Wl,-rpath,{torch / 'lib'}",
        ]
    )


def fetch_transformer_engine() -> None:
    """Unpack Transformer Engine's Python. Raises RuntimeError where there is no package index."""
    if os.environ.get(TRANSFORMER_ENGINE_FOLDER):
        return
    with _made(CACHE / "-".join(TRANSFORMER_ENGINE).replace("==", "-")) as folder:
        if folder:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            options = ["--no-deps", "--only-binary", ":all:", "--target", str(folder)]
            _run([*pip, *options, *TRANSFORMER_ENGINE])


@contextmanager
def _made(target: Path) -> Iterator[Path | None]:
    """A new folder that becomes `target` when all has gone well, None if `target` is there.

    Of two that run at the same time, the second discards its work and takes the first one's.
    """
    if target.exists():
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix=".making_", dir=target.parent))
    try:
        yield folder
        try:
            folder.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"{Path(command[0]).name} failed ({done.returncode}): {last}")


if __name__ == "__main__":
    for make in (build, fetch_transformer_engine):
        try:
            make()
        except RuntimeError as error:
            print(f"fake CUDA: {error}; the tests that need it are skipped", file=sys.stderr)
