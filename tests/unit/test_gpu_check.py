"""The GPU check where there is no GPU: parts fail one by one with a reason, archives are found, the report is written."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "tools" / "gpu_check.sh"), *flags]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)


def metadata(name: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_packages_are_reported_and_never_fatal(tmp_path: Path) -> None:
    archives, output = tmp_path / "archives", tmp_path / "out"
    archives.mkdir()
    output.mkdir()
    (output / "old.json").write_text("{}")
    os.utime(output / "old.json", (0, 0))
    carried = tmp_path / "METADATA"
    carried.write_text(metadata("sglang"))
    with tarfile.open(archives / "site.tar.xz", "w:xz") as archive:
        archive.add(carried, "sglang-0.0.1.dist-info/METADATA")
    with zipfile.ZipFile(archives / "flash_attn-0.0.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("flash_attn_marker.py", "")
        wheel.writestr("flash_attn-0.0.1.dist-info/METADATA", metadata("flash-attn"))
        wheel.writestr("flash_attn-0.0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("flash_attn-0.0.1.dist-info/RECORD", "")
    (archives / "broken.tar.xz").write_text("not an archive")
    done = run("--output", str(output), "--archives", str(archives), "--minutes", "4", "versions", "te", "fp8")
    report = json.loads((output / "report.json").read_text())
    assert "cannot unpack" in done.stderr and "broken.tar.xz" in done.stderr
    assert [part["part"] for part in report["parts"]] == ["versions", "te", "fp8"]
    assert "sglang 0.0.1" in report["versions"]
    if has_pip():
        assert "flash-attn 0.0.1" in report["versions"]
    failed = [part for part in report["parts"] if part["result"] != "passed"]
    assert done.returncode == len(failed)
    for part in failed[1:]:
        assert part["last_line"].startswith("transformer_engine.pytorch cannot be imported here; see tools/doctor.py")
    assert "old" not in report and not (output / ".rows.tsv").exists()
    assert (output / "report.md").read_text().count("| failed") == len(failed)


def has_pip() -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [(("kernel",), "unknown part or flag kernel"), (("--archives", "/no/such"), "--archives /no/such is no directory")],
)
def test_bad_flags_are_one_line(flags: tuple[str, ...], message: str) -> None:
    done = run(*flags)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_help_lists_the_parts() -> None:
    assert "versions kernels bench te fp8 train parity engines" in run("--help").stdout
