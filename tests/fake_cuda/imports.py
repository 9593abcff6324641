"""Import everything that the parts of tools/gpu_check.sh import on a GPU, on a machine without one:

    PYTHON tests/fake_cuda/imports.py SITE [MODULE...]

PYTHON has the packages of the GPU's machine, SITE what was unpacked from its archives. torch then
pretends to have a Hopper device: branches for CUDA are imported, nothing is computed. A process of
its own imports each module, by default all of MODULES. The exit code is the number that failed.
tools/simulated_box.sh makes such a machine.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
LAUNCH_SERVER = "sglang.launch_server sglang.srt.entrypoints.http_server".split()
SERVER = [*LAUNCH_SERVER, *"sglang.srt.managers.scheduler sgl_kernel torch_memory_saver".split()]
PACKAGES = "transformer_engine.pytorch megatron.core httpx2 liger_kernel cut_cross_entropy".split()
TRAINER = "ragen_mega.train ragen_mega.engines.embedded.engine ragen_kernels.triton_policy".split()
BENCHMARKS = "bench_kernels bench_step bench_update bench_reshard bench_mixture fp8_report".split()
TOOLS = [f"tools.benchmarks.{name}" for name in BENCHMARKS]
TOOLS += [f"tools.{name}" for name in "chaos learned parity sglang_probe".split()]
TESTS = ["tests/kernels", "tests/integration/test_transformer_engine.py"]
TESTS += [f"tests/integration/test_{name}.py" for name in ("offload", "sglang_engine")]
MODULES = [*SERVER, *PACKAGES, *TRAINER, *TOOLS, *TESTS]


def pretend() -> None:
    """Let torch and what asks it believe in one Hopper device."""
    import torch

    about = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132,
        total_memory=80 << 30, L2_cache_size=50 << 20, warp_size=32, gcnArchName="",
    )  # fmt: skip
    torch.version.cuda = torch.version.cuda or "13.0"
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "_is_compiled": True,
        "get_device_capability": (9, 0), "get_device_name": about.name,
        "get_device_properties": about, "mem_get_info": (79 << 30, 80 << 30),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **others: _answer)


def try_one(module: str) -> None:
    """Import it in this process, or let pytest collect it."""
    pretend()
    if "/" in module:
        import pytest

        flags = ["-o", "addopts=", "-p", "no:cacheprovider", "--collect-only", "-qq"]
        raise SystemExit(pytest.main([*flags, str(ROOT / module)]))
    __import__(module)


def stub_of_driver(folder: Path, site: Path) -> None:
    """A libcuda.so.1 with the functions that the libraries in `site` want when they are loaded;
    none of them does anything.
    """
    libraries = [str(path) for path in site.rglob("*.so")]
    command = ["nm", "--dynamic", "--undefined-only", *libraries]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+", listed)))
    (folder / "stub.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
    library = ["-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(["gcc", "-shared", "-fPIC", *library, str(folder / "stub.c")], check=True)


def main(site: str, *modules: str) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        stub_of_driver(Path(folder), Path(site))
        # the script gives servers this stand-in where the package is missing
        Path(folder, "soundfile.py").write_text("")
        own = [str(ROOT / place) for place in ("", "kernels", "tools", "tools/benchmarks")]
        paths = [site, *own, folder]
        places = {"PYTHONPATH": ":".join(paths), "RAGEN_PRETEND": "1"}
        places["LD_LIBRARY_PATH"] = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        places |= {"SGLANG_IS_FLASHINFER_AVAILABLE": "0", "NVTE_FRAMEWORK": "pytorch"}
        for module in modules or MODULES:
            done = subprocess.run(
                [sys.executable, __file__, module],
                env=os.environ | places, capture_output=True, text=True, check=False,
            )  # fmt: skip
            said = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
            print(f"{module}: {'found' if not done.returncode else said[-1]}", flush=True)
            failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.path.pop(0)  # this folder has a module `kernels`, a name that transformers looks for
    if "RAGEN_PRETEND" in os.environ:
        try_one(sys.argv[1])
    else:
        raise SystemExit(main(*sys.argv[1:]))
