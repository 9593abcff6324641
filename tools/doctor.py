"""What is installed against what was tested, which fused parts are active, and what to install for
a target.

    python tools/doctor.py [--for cpu|h100] [--sglang-python PATH] [--json]

Exit code 0 if the target is ready, 1 if not. Nothing is installed or changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
REQUIRED = (
    "torch",
    "megatron-core",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "gymnasium",
    "tyro",
    "rich",
)
"""What training needs on every machine."""
H100 = {
    "torch": "2.11.0",
    "triton": "3.6.0",
    "megatron-core": "0.16.1",
    "transformer-engine": "2.11.0",
    "transformers": "5.12.1",
    "tokenizers": "0.22.2",
    "numpy": "2.3.5",
}
"""What of the h100 extra of setup.py training needs; the other packages are those of
constraints.txt.
"""
SGLANG = "0.5.17"
ASK_TRANSFORMER_ENGINE = "import torch, transformer_engine.pytorch"
ASK_SGLANG = (
    "import importlib.metadata as m, sglang.srt.server_args; print(m.version('sglang'),"
    " m.version('torch'))"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    state: str
    """`ok`; `differs` or `falls back`, with which the target still works; `missing`, with which it
    does not.
    """
    detail: str
    remedy: str = ""


def installed(name: str) -> str | None:
    """Version of a distribution, None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def tested_versions(target: str) -> dict[str, str]:
    """Distribution -> the version that was tested for `target`."""
    lines = [line.strip() for line in CONSTRAINTS.read_text().splitlines()]
    pins = {name.lower(): pin for name, _, pin in (line.partition("==") for line in lines) if pin}
    tested = {name: pins[name] for name in REQUIRED}
    return tested | (H100 if target == "h100" else {})


def check_packages(target: str) -> list[Finding]:
    """Every package that the target needs, against its tested version."""
    findings = []
    for name, tested in tested_versions(target).items():
        found = installed(name)
        if found is None:
            findings.append(
                Finding(name, "missing", f"tested: {tested}", f"pip install '{name}=={tested}'")
            )
        elif Version(found).public == tested:
            findings.append(Finding(name, "ok", found))
        else:
            findings.append(
                Finding(
                    name, "differs", f"{found}, tested: {tested}", f"pip install '{name}=={tested}'"
                )
            )
    return findings


def check_gpu(target: str) -> list[Finding]:
    """The devices that torch sees, and whether they are of the target's architecture."""
    if find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        state, remedy = (
            ("missing", "a driver and a CUDA build of torch")
            if target == "h100"
            else ("falls back", "")
        )
        return [Finding("CUDA device", state, "none: everything runs on the CPU over gloo", remedy)]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    is_hopper = torch.cuda.get_device_capability() >= (9, 0)
    detail = f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}"
    if target == "h100" and not is_hopper:
        return [
            Finding(
                "CUDA device",
                "missing",
                f"{detail}: FP8 needs compute capability 9.0",
                "a Hopper GPU or newer",
            )
        ]
    return [Finding("CUDA device", "ok", detail)]


def apex_finding() -> Finding:
    """NVIDIA's apex is told by its compiled extension; the package of that name on PyPI is about
    something else.
    """
    if find_spec("amp_C") is not None:
        return Finding("apex", "ok", "NVIDIA's, with its extensions")
    if (found := installed("apex")) is not None and "Pyramid" in (
        metadata("apex")["Summary"] or ""
    ):
        return Finding(
            "apex", "differs", f"{found} is an unrelated web toolkit", "pip uninstall apex"
        )
    return Finding(
        "apex",
        "falls back",
        "not there; Transformer Engine or torch take its place, nothing is lost",
    )


def loaded(finding: Finding, statement: str) -> Finding:
    """The finding, or `missing` if a fresh interpreter cannot execute `statement`.

    megatron-core imports Transformer Engine wherever it is installed; if a library of it does not
    load, nothing starts.
    """
    answer = subprocess.run(
        [sys.executable, "-c", statement], capture_output=True, text=True, timeout=600, check=False
    )
    if answer.returncode == 0:
        return finding
    last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
    remedy = "install what it asks for, or uninstall it"
    return Finding(finding.name, "missing", f"installed, but does not load: {last}", remedy)


def check_fused_parts(target: str) -> list[Finding]:
    """What is fast when it is there: its absence costs time, never correctness."""
    on_gpu = any(
        finding.name == "CUDA device" and finding.state == "ok" for finding in check_gpu(target)
    )

    def part(name: str, distribution: str, module: str, instead: str) -> Finding:
        found = installed(distribution)
        if found is None or find_spec(module) is None:
            return Finding(name, "falls back", instead)
        if not on_gpu:
            return Finding(
                name,
                "falls back",
                f"{distribution} {found} is installed, no CUDA device; {instead}",
            )
        return Finding(name, "ok", f"{distribution} {found}")

    local = "megatron-core's local layers, no FP8"
    engine = part("Transformer Engine layers", "transformer-engine", "transformer_engine", local)
    return [
        loaded(engine, ASK_TRANSFORMER_ENGINE) if find_spec("transformer_engine") else engine,
        part(
            "flash-attention",
            "flash-attn",
            "flash_attn",
            "cuDNN through Transformer Engine, or torch",
        ),
        part("Triton kernels", "triton", "triton", "their references in plain torch"),
        apex_finding(),
    ]


def check_sglang(target: str, python: str | None) -> list[Finding]:
    """SGLang in the interpreter that would run its server, asked by starting it."""
    chosen = (
        python
        or os.environ.get("RAGEN_SGLANG_PYTHON")
        or (sys.executable if target == "h100" else None)
    )
    absent = "missing" if target == "h100" or python else "falls back"
    remedy = (
        "bash tools/setup_sglang_cpu.sh"
        if target == "cpu"
        else f"pip install 'sglang=={SGLANG}' or --sglang-python"
    )
    if chosen is None:
        return [
            Finding("SGLang", absent, "no interpreter named; the embedded engine samples", remedy)
        ]
    if target == "cpu":
        environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    else:
        environment = dict(os.environ)
    try:
        answer = subprocess.run(
            [chosen, "-c", ASK_SGLANG],
            capture_output=True,
            text=True,
            timeout=600,
            env=environment,
            check=False,
        )
    except OSError as error:
        return [Finding("SGLang", absent, f"{chosen} cannot run: {error.strerror}", remedy)]
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return [Finding("SGLang", absent, f"{chosen}: {last}", remedy)]
    found, its_torch = answer.stdout.split()[-2:]
    state = "ok" if found == SGLANG else "differs"
    return [
        Finding(
            "SGLang",
            state,
            f"{found} with torch {its_torch} in {chosen}",
            "" if state == "ok" else remedy,
        )
    ]


def examine(target: str, sglang_python: str | None) -> dict[str, list[Finding]]:
    """All findings, by heading."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    supported = (3, 11) <= sys.version_info[:2] < (3, 14)
    interpreter = Finding(
        "Python",
        "ok" if supported else "missing",
        python,
        "" if supported else "Python 3.11 to 3.13",
    )
    return {
        "packages": [interpreter, *check_packages(target)],
        "device": check_gpu(target),
        "fused parts": check_fused_parts(target),
        "rollout engine": check_sglang(target, sglang_python),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--for", dest="target", choices=("cpu", "h100"), default="cpu", help="what to be ready for"
    )
    parser.add_argument(
        "--sglang-python",
        help="Python of the environment with SGLang (default RAGEN_SGLANG_PYTHON)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    arguments = parser.parse_args()
    report = examine(arguments.target, arguments.sglang_python)
    missing = [
        finding.name
        for findings in report.values()
        for finding in findings
        if finding.state == "missing"
    ]
    if arguments.json:
        print(
            json.dumps(
                {"target": arguments.target, "ready": not missing}
                | {
                    heading: [asdict(finding) for finding in findings]
                    for heading, findings in report.items()
                },
                indent=1,
            )
        )
    else:
        for heading, findings in report.items():
            print(f"{heading}:")
            for finding in findings:
                remedy = f"  -> {finding.remedy}" if finding.remedy else ""
                print(f"  {finding.name:<26} {finding.state:<10} {finding.detail}{remedy}")
        print(
            f"not ready for {arguments.target}: {', '.join(missing)}"
            if missing
            else f"ready for {arguments.target}"
        )
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
