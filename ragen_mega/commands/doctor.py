"""Compare the installed packages with the tested ones, list the active fused parts, and say which
packages a target needs.

    ragen-mega doctor [--for cpu|h100] [--sglang-python PATH] [--json]

Exit code 0 if the target is ready, 1 if not. Nothing is installed or changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from ragen_mega.commands.command_line import command, flag, name_or_path
from ragen_mega.extensions.extras import installed, lack
from ragen_mega.system.paths import expanded

_CONFIG = Path(__file__).parents[1] / "config"
CONSTRAINTS = {"cpu": _CONFIG / "constraints.txt", "h100": _CONFIG / "constraints-h100.txt"}
REQUIRED = (
    "torch",
    "megatron-core",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "numba",
    "jsonschema",
    "regex",
    "httpx2",
    "psutil",
    "rich",
    "tensorboard",
    "plotly",
)
"""Requirements of setup.py, without extras; also for a clone that is not installed, of which no
metadata tells them.
"""
ON_H100 = ("triton", "transformer-engine")
"""Packages that training on an H100 needs in addition."""
SGLANG = "0.5.17"
SECONDS_TO_ANSWER = 600.0
ASK_TRANSFORMER_ENGINE = "import torch, transformer_engine.pytorch"
ASK_SGLANG = (
    "import importlib.metadata as m, sglang.srt.server_args; print(m.version('sglang'),"
    " m.version('torch'))"
)
PARTS = (
    (
        "Transformer Engine layers",
        "transformer-engine",
        "transformer_engine",
        "megatron-core's local layers, no FP8",
    ),
    (
        "flash-attention",
        "flash-attn",
        "flash_attn",
        "cuDNN's attention through Transformer Engine on Hopper, where nothing is lost, or torch's;"
        " pip install 'ragen-mega[flash]' builds it for an hour or more, for GPUs before Hopper",
    ),
    ("Triton kernels", "triton", "triton", "their references in plain torch"),
)
"""Part, distribution, module, and its fallback where it is absent or there is no GPU."""


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

    def __str__(self) -> str:
        remedy = f"  -> {self.remedy}" if self.remedy else ""
        return f"  {self.name:<26} {self.state:<10} {self.detail}{remedy}"


def ask(python: str, statement: str, **environment: str) -> tuple[str, str]:
    """(output, error) of a statement in a fresh interpreter; one of them is empty, the error is its
    last line.
    """
    try:
        answer = subprocess.run(
            [python, "-c", statement],
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_ANSWER,
            env=os.environ | environment,
            check=False,
        )
    except OSError as error:
        return "", f"{python} cannot run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return "", f"{python} gives no answer within {SECONDS_TO_ANSWER:g} s"
    if answer.returncode == 0:
        return answer.stdout, ""
    return "", (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]


def tested_versions(target: str) -> dict[str, str]:
    """Return a map: distribution -> the version that was tested for `target`."""
    lines = [line.strip() for line in CONSTRAINTS[target].read_text().splitlines()]
    pins = {name.lower(): pin for name, _, pin in (line.partition("==") for line in lines) if pin}
    names = REQUIRED + (ON_H100 if target == "h100" else ())
    if missing := [name for name in names if name not in pins]:
        raise ValueError(
            f"{CONSTRAINTS[target]} must pin {', '.join(missing)}; if it holds a path alone, a"
            " symbolic link was lost: put the file of that path in its place"
        )
    return {name: pins[name] for name in names}


def check_packages(target: str) -> list[Finding]:
    """Return every package that the target needs, against its tested version."""

    def judge(name: str, tested: str, found: str | None) -> Finding:
        if found is not None and found.partition("+")[0] == tested:
            return Finding(name, "ok", found)
        state, detail = ("differs", f"{found}, ") if found else ("missing", "")
        return Finding(name, state, f"{detail}tested: {tested}", f"pip install '{name}=={tested}'")

    return [judge(name, pin, installed(name)) for name, pin in tested_versions(target).items()]


def check_gpu(target: str) -> list[Finding]:
    """Return the devices that torch sees, and whether they are of the target's architecture."""
    if lack("torch:cuda"):
        return []
    import torch

    if not torch.cuda.is_available():
        none = Finding("CUDA device", "falls back", "none: everything runs on the CPU over gloo")
        remedy = "a driver and a CUDA build of torch"
        return [replace(none, state="missing", remedy=remedy) if target == "h100" else none]
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
    found = Finding("CUDA device", "ok", f"{count} x {name}, CUDA {torch.version.cuda}")
    if target == "cpu" or torch.cuda.get_device_capability() >= (9, 0):
        return [found]
    detail = f"{found.detail}: FP8 needs compute capability 9.0"
    return [replace(found, state="missing", detail=detail, remedy="a Hopper GPU or newer")]


def loaded(finding: Finding, statement: str) -> Finding:
    """Return the finding, or `missing` if a fresh interpreter cannot execute `statement`.

    megatron-core imports Transformer Engine wherever it is installed; if a library of it does not
    load, nothing starts.
    """
    if not (error := ask(sys.executable, statement)[1]):
        return finding
    detail = f"installed, but does not load: {error}"
    return Finding(finding.name, "missing", detail, "install what it asks for, or uninstall it")


def check_fused_parts(target: str) -> list[Finding]:
    """Check the optional parts: their absence costs time, never correctness."""
    on_gpu = any(finding.state == "ok" for finding in check_gpu(target))

    def judge(name: str, distribution: str, module: str, instead: str) -> Finding:
        if (found := installed(distribution)) is None or find_spec(module) is None:
            return Finding(name, "falls back", instead)
        if on_gpu:
            return Finding(name, "ok", f"{distribution} {found}")
        there = f"{distribution} {found} is installed, no CUDA device"
        return Finding(name, "falls back", f"{there}; {instead}")

    engine, *others = (judge(*part) for part in PARTS)
    if installed("transformer-engine"):
        engine = loaded(engine, ASK_TRANSFORMER_ENGINE)
    return [engine, *others]


def check_sglang(target: str, python: str | None) -> list[Finding]:
    """SGLang in the interpreter that would run its server, asked by starting it."""
    on_h100 = target == "h100"
    named = expanded(os.environ.get("RAGEN_SGLANG_PYTHON", ""))
    chosen = python or named or (sys.executable if on_h100 else "")
    absent = Finding(
        "SGLang",
        "missing" if on_h100 or python else "falls back",
        "no interpreter named; the embedded engine samples",
        f"pip install 'sglang=={SGLANG}' or --sglang-python"
        if on_h100
        else "bash tools/setup_sglang_cpu.sh of a clone",
    )
    if not chosen:
        return [absent]
    answer, error = ask(chosen, ASK_SGLANG, **({} if on_h100 else {"SGLANG_USE_CPU_ENGINE": "1"}))
    if error:
        return [replace(absent, detail=error if chosen in error else f"{chosen}: {error}")]
    found, its_torch = answer.split()[-2:]
    detail = f"{found} with torch {its_torch} in {chosen}"
    if found != SGLANG:
        return [replace(absent, state="differs", detail=detail)]
    return [Finding("SGLang", "ok", detail)]


def examine(target: str, sglang_python: str | None) -> dict[str, list[Finding]]:
    """Return all findings, by heading."""
    interpreter = Finding("Python", "ok", f"{sys.version_info.major}.{sys.version_info.minor}")
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        interpreter = replace(interpreter, state="missing", remedy="Python 3.11 to 3.13")
    return {
        "packages": [interpreter, *check_packages(target)],
        "device": check_gpu(target),
        "fused parts": check_fused_parts(target),
        "rollout engine": check_sglang(target, sglang_python),
    }


@command(
    __doc__,
    flag("--for", "what to be ready for", "cpu", dest="target", choices=("cpu", "h100")),
    flag(
        "--sglang-python",
        "of the environment with SGLang (default: RAGEN_SGLANG_PYTHON)",
        type=name_or_path,
    ),
    flag("--json", "print JSON instead of lines", False),
)
def main(arguments: argparse.Namespace) -> int:
    report = examine(arguments.target, arguments.sglang_python)
    everything = [finding for findings in report.values() for finding in findings]
    missing = [finding.name for finding in everything if finding.state == "missing"]
    if arguments.json:
        found = {heading: [*map(asdict, findings)] for heading, findings in report.items()}
        print(json.dumps({"target": arguments.target, "ready": not missing} | found, indent=1))
    else:
        for heading, findings in report.items():
            print(f"{heading}:", *findings, sep="\n")
        verdict = f"not ready for {arguments.target}: {', '.join(missing)}"
        print(verdict if missing else f"ready for {arguments.target}")
    return 1 if missing else 0
