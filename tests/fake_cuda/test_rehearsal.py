"""Tests that need a CUDA device, on the fake one: the tests of `tests/cuda` and those marked `gpu`,
each group in a separate process, because torch must find the device when it is imported; and every
part of tools/gpu_check.sh.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from ragen_mega.report.metrics import read_metrics
from tests.fake_cuda import build
from tests.fake_cuda.processes import ROOT, environment, write_python

LAYERS = "tests/integration/test_transformer_engine.py"
OFFLOAD = "tests/integration/test_offload.py"
PINNED = f"{OFFLOAD}::test_host_memory_is_pinned_and_as_large_as_what_it_holds"
LIFE = "tests/unit/test_sglang_life.py"
# without a GPU they take the CPU's branches, here CUDA's: buffers on the device, IPC handles
WEIGHTS = [
    "tests/unit/test_sglang_weights.py",
    f"{LIFE}::test_memory_is_taken_by_statements",
    f"{LIFE}::test_what_a_lost_server_costs",
]
ENGINE = "tests/integration/test_sglang_engine.py"
FAST = ["-m", "not silicon and not slow"]
GROUPS = {
    "waits": ["tests/cuda/test_fake_device.py", "tests/cuda/test_step_waits.py", *FAST],
    "steps": ["tests/cuda", PINNED, *WEIGHTS, *FAST],
    "layers": [LAYERS, *FAST],
    "slow": ["tests/cuda", LAYERS, "-m", "slow and not silicon"],
    # what holds for the real server holds for its stand-in on CUDA
    "engine": [ENGINE, "-k", "follow_transformers or greedy or cannot_be_generated"],
}
"""The tests of each are run by one process. Layers have a separate process: after the steps they
took several times as long.
"""
PARTS = (
    "versions step step_fp8 update learn repeat kernels te train endure bench reshard moe"
    " lora learn_seeds step_all bench_all fp8 parity sglang apart"
).split()

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, fake or real"),
    pytest.mark.skipif(build.obstacle() is not None, reason=build.obstacle() or ""),
]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "group",
    [
        "waits",
        *(pytest.param(group, marks=pytest.mark.slow) for group in GROUPS if group != "waits"),
    ],
)
def test_passes_on_the_fake_device(group: str, tmp_path: Path) -> None:
    if group in ("layers", "slow") and build.transformer_engine() is None:
        pytest.skip("there is no Transformer Engine: python tests/fake_cuda/build.py says why")
    shared = tmp_path / "shared"
    server = write_python(tmp_path, shared)
    # of the limits on time only this test's
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-o", "timeout=1500"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *GROUPS[group]],
        cwd=ROOT,
        env=environment(4, RAGEN_FAKE_CUDA_SHARED=str(shared), RAGEN_SGLANG_PYTHON=str(server)),
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout[-6000:] + done.stderr[-2000:]
    assert done.returncode == 0, said
    (last,) = done.stdout.strip().splitlines()[-1:]
    may_skip = build.transformer_engine() is None
    assert re.search(r"[1-9]\d* passed", last) and (may_skip or "skipped" not in last), said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_full_disk_is_no_bus_error(tmp_path: Path) -> None:
    """Processes of one device map a file each, which must have its room on the disk."""
    script = f"""
        mount -t tmpfs -o size=64k tmpfs {tmp_path} || exit 99
        dd if=/dev/zero of={tmp_path}/filled bs=1k 2>/dev/null
        exec {sys.executable} -c "import torch; torch.ones(9, device='cuda')"
    """
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script],
        env=environment(1, RAGEN_FAKE_CUDA_SHARED=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 99:
        pytest.skip("this machine mounts no disk")
    assert done.returncode == 1 and "No space left on device" in done.stderr, done


@pytest.mark.slow
@pytest.mark.timeout(9000)
def test_the_gpu_check_passes(tmp_path: Path) -> None:
    """The script as it runs on a GPU, with its own environment, ranks and servers, and small
    shapes; every part does what it is for, and what is worth keeping is in one file.
    """
    if build.transformer_engine() is None:
        pytest.skip("there is no Transformer Engine: python tests/fake_cuda/build.py says why")
    python, output = write_python(tmp_path, tmp_path / "shared"), tmp_path / "out"
    command = ["bash", "tools/gpu_check.sh", "--small", "--minutes", "150", "--output", str(output)]
    done = subprocess.run(
        [*command, "--pack", str(tmp_path / "kept.tar.gz"), *PARTS],
        cwd=ROOT,
        env=environment(
            1,
            SITE=str(build.HERE / "site"),
            PYTHON=str(python),
            SHARES=" ".join(f"{part}=2500" for part in PARTS),
            RAGEN_FAKE_CUDA_GIB="16",  # the plan counts 4.5 for CUDA, NCCL and an engine alone
            RAGEN_FAKE_CUDA_SHARED=str(tmp_path / "shared"),
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "".join(log.read_text()[-3000:] for log in output.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    report = json.loads((output / "report.json").read_text())
    assert [(part["part"], part["result"]) for part in report["parts"]] == [
        (part, "passed") for part in PARTS
    ]
    assert report["reshard"]["checksums_equal"]
    with tarfile.open(tmp_path / "kept.tar.gz") as kept:
        names = {name.removeprefix("./") for name in kept.getnames()}
    runs = [path.parent for path in sorted(output.glob("runs/*/metrics.jsonl"))]
    assert {"report.json", "report.md", "reshard.json", *(f"{part}.log" for part in PARTS)} <= names
    assert {f"runs/{run.name}/metrics.jsonl" for run in runs} <= names
    assert not any("checkpoint" in name or name.endswith(".safetensors") for name in names)
    assert report["bench_kernels"]["results"]
    lengths = {run.name: len(read_metrics(run / "metrics.jsonl")) for run in runs}
    tasks = {f"{task}_{seed}" for task in ("lookup", "reverse") for seed in range(3)}
    assert lengths == {"endure": 9} | dict.fromkeys({*tasks, "train", "apart"}, 3) | {
        "repeat_once": 6,
        "repeat_twice": 6,
    }
    assert report["endure"]["server_restarts"] == 1 and not report["endure"]["problems"]
    assert report["repeat"]["repetition"]["cost_percent"] > -100
    assert report["update_peer"]["planned_gib"] > 0
    assert report["sglang_probe"]["attempts"][-1]["error"] is None
    for log in ("te", "sglang", "kernels"):
        assert re.search(r"[1-9]\d* passed", (output / f"{log}.log").read_text())
