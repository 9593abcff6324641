"""Tests that need a CUDA device, on the fake one: the tests of `tests/cuda` and those marked `gpu`,
each group in one process of its own, because torch must find the device when it is imported.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ragen_mega.report.metrics import read_metrics
from tests.fake_cuda import build

ROOT = build.HERE.parents[1]
LAYERS = "tests/integration/test_transformer_engine.py"
ON_A_GPU = ["-m", "gpu and not silicon and not slow"]
GROUPS = {
    "steps": ["tests/cuda", "tests/integration/test_offload.py", *ON_A_GPU],
    "layers": [LAYERS, "-k", "not learns", *ON_A_GPU],
    "learning": [LAYERS, "-k", "learns", *ON_A_GPU],
    # without a GPU they take the CPU's branches, here CUDA's: buffers on the device, IPC handles
    "weights": ["tests/unit/test_sglang_life.py", "tests/unit/test_sglang_weights.py"],
}

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, fake or real"),
    pytest.mark.skipif(build.obstacle() is not None, reason=build.obstacle() or ""),
]


def environment(num_devices: int) -> dict[str, str]:
    """For a process that finds this many CUDA devices, and for those that it starts."""
    paths = (build.HERE / "startup", ROOT, ROOT / "kernels", os.environ.get("PYTHONPATH"))
    return os.environ | {
        "RAGEN_FAKE_CUDA": str(num_devices),
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
    }


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "group", ["steps", "layers", "weights", pytest.param("learning", marks=pytest.mark.slow)]
)
def test_passes_on_the_fake_device(group: str) -> None:
    if LAYERS in GROUPS[group] and build.transformer_engine() is None:
        pytest.skip("there is no Transformer Engine: python tests/fake_cuda/build.py says why")
    options = ["-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *GROUPS[group]],
        cwd=ROOT,
        env=environment(num_devices=4),
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout[-6000:] + done.stderr[-2000:]
    assert done.returncode == 0, said
    (last,) = done.stdout.strip().splitlines()[-1:]
    may_skip = build.transformer_engine() is None
    assert re.search(r"[1-9]\d* passed", last) and (may_skip or "skipped" not in last), said


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_gpu_check_trains(tmp_path: Path) -> None:
    """The script as it runs on a GPU: its own environment, ranks by torchrun, three steps in each
    precision from the warm start to the export, a report.
    """
    done = subprocess.run(
        [
            "bash",
            "tools/gpu_check.sh",
            "--output",
            str(tmp_path),
            "--minutes",
            "20",
            "versions",
            "train",
        ],
        cwd=ROOT,
        env=environment(num_devices=1)
        | {
            "SITE": str(build.HERE / "startup"),
            "PYTHON": sys.executable,
            "SHARES": "versions=200 train=1000",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert [part["result"] for part in parts] == ["passed", "passed"]
    for name in ("float32", "bf16"):
        assert len(read_metrics(tmp_path / "runs" / name / "metrics.jsonl")) == 3
