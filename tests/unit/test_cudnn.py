"""torch's cuDNN is loaded before Transformer Engine looks for one. Small libraries that are named
like cuDNN's stand for the real ones.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import ctypes
from ragen_mega.megatron import load_cudnn_of_torch
print(*load_cudnn_of_torch(), sep="\\n")
print(ctypes.CDLL(None).whose())  # the first library of the process that has this function
ctypes.CDLL("{other}", mode=ctypes.RTLD_GLOBAL)
print(ctypes.CDLL(None).whose())
"""


def build(path: Path, source: str, *flags: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(path), *flags]
    subprocess.run([*command, f"-Wl,-soname,{path.name}"], input=source, text=True, check=True)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_libraries_of_torch_come_before_those_of_the_system(tmp_path: Path) -> None:
    lib, system = tmp_path / "nvidia/cudnn/lib", tmp_path / "system"
    (tmp_path / "nvidia/cudnn/__init__.py").parent.mkdir(parents=True)
    (tmp_path / "nvidia/cudnn/__init__.py").touch()
    for folder, version in ((lib, 1), (system, 2)):
        build(folder / "libcudnn_graph.so.9", f"int whose(void) {{ return {version}; }}")
        graph = str(folder / "libcudnn_graph.so.9")
        build(
            folder / "libcudnn_adv.so.9", "int adv(void) { return 0; }", "-Wl,--no-as-needed", graph
        )
        build(folder / "libcudnn_ops.so.9", "int ops(void) { return 0; }")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(other=system / "libcudnn_graph.so.9")],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'kernels'}",
            "LD_LIBRARY_PATH": str(system),  # libcudnn_adv alone would take its graph from there
        },
        capture_output=True,
        text=True,
        check=True,
    )
    *paths, before, after = done.stdout.split()
    assert {Path(path).parent for path in paths} == {lib} and len(paths) == 3
    assert (before, after) == ("1", "1")
