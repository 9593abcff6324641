"""The packages that setup.py names: one set for Hopper that the ranges of the base install admit,
and no impostor.
"""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def named_in_setup(keyword: str) -> dict | list:
    """The literal that setup.py passes for `keyword`."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (value,) = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == keyword
    )
    return ast.literal_eval(value)


BASE = {canonicalize_name(r.name): r for r in map(Requirement, named_in_setup("install_requires"))}
EXTRAS = {
    name: list(map(Requirement, entries))
    for name, entries in named_in_setup("extras_require").items()
}
H100 = {canonicalize_name(r.name): r for r in EXTRAS["h100"]}


def pinned(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", requirement
    return specifier.version


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


def test_the_bounds_that_the_pinned_libraries_state() -> None:
    """From their metadata: megatron-core 0.16.1 on Transformer Engine, SGLang 0.5.17 on torch and
    transformers.
    """
    assert Requirement("transformer-engine>=2.9.0a0,<2.12.0").specifier.contains(
        pinned(H100["transformer-engine"])
    )
    stated = {
        "megatron-core": "0.16.1",
        "sglang": "0.5.17",
        "torch": "2.11.0",
        "transformers": "5.12.1",
        "flash-attn": "2.8.3",
    }
    assert {name: pinned(H100[name]) for name in stated} == stated


def test_apex_is_never_asked_of_pypi() -> None:
    """The project of that name there is a web toolkit."""
    names = {
        canonicalize_name(r.name)
        for r in [*BASE.values(), *(r for extra in EXTRAS.values() for r in extra)]
    }
    assert "apex" not in names


def test_the_doctor_asks_for_the_same_versions() -> None:
    spec = importlib.util.spec_from_file_location("doctor", ROOT / "tools" / "doctor.py")
    doctor = sys.modules["doctor"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(doctor)
    assert doctor.H100 == {name: pinned(H100[name]) for name in doctor.H100}
    assert doctor.SGLANG == pinned(H100["sglang"])
