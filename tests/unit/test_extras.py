"""Optional packages: the default installation works without them, and errors name their extra."""

import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ragen_mega.extensions.extras import EXTRAS, lack

MODULES = {
    extra: [use.split(":")[0].split(".")[0] for use in uses] for extra, uses in EXTRAS.items()
}
BLOCKED = [module for modules in MODULES.values() for module in modules]
WITHOUT = f"""
import sys
for module in {BLOCKED}:
    sys.modules[module] = None  # importing it raises ModuleNotFoundError
"""


def without_extras(code: str) -> str:
    """The output of `code` in a process that has no optional package."""
    done = subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_extra_installs_its_modules_and_the_default_installation_none():
    names = {"Stemmer": "PyStemmer"}
    declared = [Requirement(text) for text in requires("ragen-mega")]
    for extra, modules in MODULES.items():
        for module in modules:
            name = names.get(module, module)
            markers = [one.marker for one in declared if one.name.lower() == name.lower()]
            assert any(marker.evaluate({"extra": extra}) for marker in markers), (extra, module)
            assert not any(marker.evaluate({"extra": ""}) for marker in markers), module


def test_training_and_every_command_are_imported_without_optional_packages():
    """And on a CPU without torch's compiler, which everybody else still has."""
    without_extras(
        "from importlib import import_module\n"
        "from ragen_mega.commands.program import COMMANDS\n"
        "import ragen_mega.train\n"
        "for commands in COMMANDS.values():\n"
        "    for module, _ in commands.values():\n"
        "        import_module(f'ragen_mega.commands.{module}')\n"
        "import sys, torch\n"
        "if not torch.cuda.is_available():\n"
        "    assert 'torch._inductor.compile_fx' not in sys.modules\n"
        "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)) == 2\n"
        "assert 'torch._dynamo' in sys.modules\n"
    )


def test_what_needs_a_missing_package_names_the_extra_that_installs_it():
    said = without_extras(
        "from ragen_mega.environments.registry import make\n"
        "from ragen_mega.report.plots import headless_pyplot\n"
        "from ragen_mega.environments.adapters.mcp import McpTools\n"
        "uses = (lambda: make('webshop'), lambda: make('gymnasium:Taxi-v3'), McpTools,"
        " headless_pyplot, lambda: make('verifiers:any'))\n"
        "for use in uses:\n"
        "    try:\n"
        "        use()\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    ).splitlines()
    assert [line[line.rindex("ragen-mega[") :] for line in said] == [
        "ragen-mega[webshop]'",
        "ragen-mega[gymnasium]'",
        "ragen-mega[mcp]'",
        "ragen-mega[studies]'",
        "ragen-mega[verifiers]'",
    ]


@pytest.mark.parametrize("kind", ["folder", "package", "file"])
def test_a_namesake_in_the_working_directory_is_no_package(kind: str, tmp_path: Path) -> None:
    name = "wandb_like"
    (tmp_path / name).mkdir() if kind != "file" else (tmp_path / f"{name}.py").touch()
    if kind == "package":
        (tmp_path / name / "__init__.py").touch()
    code = (
        "from ragen_mega.extensions.extras import is_found, lack\n"
        f"print(lack('{name}:init')); print(lack('{name}.part:Thing'))\n"
        f"print(is_found('{name}')); print(lack('no_such_thing:init'))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    attribute, part, found, missing = done.stdout.splitlines()
    for said in (attribute, part):
        assert said.startswith(f"is {tmp_path / name}") and "rename that" in said
    assert (found, missing) == (str(kind != "folder"), "is not installed")


@pytest.mark.parametrize("use", [use for uses in EXTRAS.values() for use in uses])
def test_what_a_package_is_asked_for_is_in_it(use: str) -> None:
    pytest.importorskip(use.partition(":")[0].partition(".")[0])
    assert lack(use) is None
