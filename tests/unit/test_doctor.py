"""The doctor on this machine, and in front of packages that are not what their names say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ragen_mega.commands import doctor
from ragen_mega.ranks.launcher import PROGRAM
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", PROGRAM, "doctor", *flags],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_this_machine_is_ready_for_the_cpu() -> None:
    answer = run("--for", "cpu")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.endswith("ready for cpu\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_gpu_is_not_ready_for_h100() -> None:
    answer = run("--for", "h100", "--json", "--sglang-python", "/no/such/python")
    report = json.loads(answer.stdout)
    assert answer.returncode == 1 and report["ready"] is False
    findings = {
        finding["name"]: finding
        for heading, part in report.items()
        if isinstance(part, list)
        for finding in part
    }
    assert findings["CUDA device"]["state"] == findings["SGLang"]["state"] == "missing"
    assert "/no/such/python cannot run" in findings["SGLang"]["detail"]
    assert findings["torch"]["remedy"] == "pip install 'torch==2.11.0'"


def test_versions_are_compared_without_their_build(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.tested_versions("cpu") | {"torch": "2.13.0+cpu", "numpy": "2.2.0", "rich": None}
    monkeypatch.setattr(doctor, "installed", found.get)
    states = {finding.name: finding.state for finding in doctor.check_packages("cpu")}
    assert (states["torch"], states["numpy"], states["rich"]) == ("ok", "differs", "missing")


def test_pins_whose_symlink_was_lost_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unpacked archive, or a checkout on Windows, has a file with the link's target."""
    lost = tmp_path / "constraints.txt"
    lost.write_text("../../constraints.txt")
    monkeypatch.setitem(doctor.CONSTRAINTS, "cpu", lost)
    said = refused(capsys, doctor.main, [])
    assert f"{lost} must pin torch" in said and "symbolic link" in said


def test_sglang_is_asked_in_its_own_interpreter(tmp_path: Path) -> None:
    (finding,) = doctor.check_sglang("cpu", sys.executable)
    assert finding.state == "missing" and "sglang" in finding.detail
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'a warning'\necho 0.5.17 2.13.0+cpu\n")
    python.chmod(0o700)
    assert doctor.check_sglang("cpu", str(python))[0].state == "ok"


def test_an_interpreter_that_hangs_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o700)
    monkeypatch.setattr(doctor, "SECONDS_TO_ANSWER", 0.1)
    (finding,) = doctor.check_sglang("cpu", str(python))
    assert finding.state == "missing" and "no answer within 0.1 s" in finding.detail


def test_it_works_where_nothing_else_is_installed() -> None:
    program = f"from {doctor.__name__} import check_packages; print(*check_packages('cpu'))"
    answer = subprocess.run(
        [sys.executable, "-S", "-c", program],  # without the folder of installed packages
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert answer.stdout.count("missing") == len(doctor.REQUIRED), answer.stderr


def test_a_library_that_does_not_load_is_told() -> None:
    fine = doctor.Finding("Transformer Engine layers", "ok", "transformer-engine 2.11.0")
    assert doctor.loaded(fine, "import json") is fine
    broken = doctor.loaded(fine, "raise OSError('libcudnn.so.9: cannot open shared object file')")
    assert broken.state == "missing" and "libcudnn.so.9" in broken.detail
