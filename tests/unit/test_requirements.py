"""The packages that setup.py names, as the installation recorded them: one set for Hopper that the
ranges of the base install admit, and no impostor.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import metadata, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ragen_mega.commands import doctor

ROOT = Path(__file__).parents[2]


STATED = [*map(Requirement, requires("ragen-mega"))]
BASE = {canonicalize_name(r.name): r for r in STATED if r.marker is None}
EXTRAS = {
    name: [r for r in STATED if r.marker is not None and r.marker.evaluate({"extra": name})]
    for name in metadata("ragen-mega").get_all("Provides-Extra")
}
H100 = {canonicalize_name(r.name): r for r in EXTRAS["h100"]}


def bare(requirements: Iterable[Requirement]) -> list[Requirement]:
    """The requirements without the marker that names their extra."""
    copies = [Requirement(str(requirement)) for requirement in requirements]
    for copy in copies:
        copy.marker = None
    return copies


def pinned(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", requirement
    return specifier.version


@pytest.mark.parametrize("name", sorted(BASE))
def test_the_doctor_misses_every_requirement(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda asked: None if asked == name else "1.0")
    for target in ("cpu", "h100"):
        found = doctor.check_packages(target)
        assert [each.name for each in found if each.state == "missing"] == [name]


@pytest.mark.parametrize("name", sorted(H100))
def test_the_h100_set_is_pinned_within_the_base_ranges(name: str) -> None:
    version = pinned(H100[name])
    assert name not in BASE or BASE[name].specifier.contains(version), (
        f"{BASE[name]} does not admit {version}"
    )


def test_the_h100_set_names_what_the_gpu_path_needs() -> None:
    assert {
        "torch",
        "triton",
        "megatron-core",
        "transformer-engine",
        "sglang",
        "transformers",
        "numpy",
    } <= set(H100)
    assert H100["transformer-engine"].extras == {"core_cu13", "pytorch"}
    (triton,) = (requirement for requirement in EXTRAS["test"] if requirement.name == "triton")
    assert triton.specifier.contains(pinned(H100["triton"]))  # what is tested without a GPU


def admits(stated: Iterable[str], extras: tuple[str, ...] = ("",)) -> list[str]:
    """Names of the H100 set for which a library states bounds; fails where a pin is outside."""
    found = []
    for requirement in map(Requirement, stated):
        name, marker = canonicalize_name(requirement.name), requirement.marker
        if name in H100 and (marker is None or any(marker.evaluate({"extra": e}) for e in extras)):
            assert requirement.specifier.contains(pinned(H100[name])), requirement
            found.append(name)
    return found


def test_megatron_core_admits_the_h100_set() -> None:
    """By the metadata of what is installed here, of the same version."""
    assert version("megatron-core") == pinned(H100["megatron-core"])
    assert {"torch", "transformer-engine"} <= set(admits(requires("megatron-core"), ("", "dev")))


@pytest.mark.skipif(
    "RAGEN_SGLANG_PYTHON" not in os.environ,
    reason="RAGEN_SGLANG_PYTHON names no Python with SGLang",
)
def test_sglang_admits_the_h100_set() -> None:
    """By the metadata in its own environment, of the same version."""
    ask = (
        "import json, importlib.metadata as m;"
        "print(json.dumps([m.version('sglang'), m.requires('sglang')]))"
    )
    command = [os.environ["RAGEN_SGLANG_PYTHON"], "-c", ask]
    found, stated = json.loads(subprocess.check_output(command, text=True))
    assert found == pinned(H100["sglang"])
    assert {"torch", "transformers"} <= set(admits(stated))


def test_apex_is_never_asked_of_pypi() -> None:
    """The project of that name there is a web toolkit."""
    names = {
        canonicalize_name(r.name)
        for r in [*BASE.values(), *(r for extra in EXTRAS.values() for r in extra)]
    }
    assert "apex" not in names


CONSTRAINTS = {
    canonicalize_name(name): pin
    for name, _, pin in (
        line.partition("==") for line in (ROOT / "constraints-h100.txt").read_text().split("\n")
    )
    if pin and not name.startswith("#")
}


def test_the_constraints_are_those_of_the_h100_set() -> None:
    assert {name: CONSTRAINTS[name] for name in H100} == {n: pinned(r) for n, r in H100.items()}
    assert CONSTRAINTS.keys() >= BASE.keys() and "flash-attn" not in CONSTRAINTS
    assert doctor.tested_versions("h100").items() <= CONSTRAINTS.items()
    assert doctor.SGLANG == CONSTRAINTS["sglang"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_h100_set_resolves_to_its_constraints(tmp_path: Path) -> None:
    """From PyPI, by its metadata, with the extras that the tests need. Without Transformer Engine's
    torch extension, a source package whose requirements take a compiler and torch to find; they are
    named here.
    """
    environment, asked = tmp_path / "environment", tmp_path / "asked.txt"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run([environment / "bin" / "pip", "install", "-q", "uv"], check=True)
    extension = ("einops", "onnx", "onnxscript")
    names = ("webshop", "gymnasium", "mcp", "studies")
    optional = [r for name in names for r in bare(EXTRAS[name])]
    asked.write_text(
        "\n".join(map(str, [*BASE.values(), *bare(H100.values()), *optional, *extension]))
    )
    asked.write_text(asked.read_text().replace("[core_cu13,pytorch]", "[core_cu13]"))
    flags = (
        "--python-version 3.12 --python-platform x86_64-manylinux_2_34 --no-header --no-annotate"
    )
    command = [environment / "bin" / "uv", "pip", "compile", *flags.split(), "-q"]
    command += ["--constraint", ROOT / "constraints-h100.txt", asked]
    resolved = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = (line.partition("==") for line in resolved.splitlines())
    assert {canonicalize_name(name): pin for name, _, pin in lines} == CONSTRAINTS
