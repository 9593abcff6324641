"""The Python interface is the command line's own: the page that describes it runs as it stands."""

import ast
import doctest
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL)
    return block


def execute(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_documented_example_trains_evaluates_and_reads_in_a_running_event_loop(
    example: str, tmp_path: Path
) -> None:
    """As in a notebook; without a loop every run of the tests calls the same functions."""
    program = "import asyncio\n\nasync def cell():\n"
    program += "".join(f"    {line}\n" for line in example.splitlines()) + "\nasyncio.run(cell())\n"
    done = execute(program, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "runs/first/summary.json").read_text())
    lines = done.stdout.splitlines()
    assert str(summary["sets"]["bandit"]["success"]) in lines
    rows = [line.split() for line in lines if re.fullmatch(r"\d [\d.]+ [\d.]+", line)]
    assert [row[0] for row in rows] == ["0", "1"]
    assert re.fullmatch(r"\d+% \[\d+%, \d+%\]", lines[-1])


def test_functions_of_the_page_have_examples_that_run(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of `train` comes first and makes the run that the others read."""
    monkeypatch.chdir(tmp_path)
    functions = [
        value
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("ragen_mega")
        for name in node.names
        if inspect.isroutine(value := getattr(importlib.import_module(node.module), name.name))
    ]
    assert {"parse", "train", "evaluate", "read_run"} == {one.__name__ for one in functions}
    for function in sorted(functions, key=lambda one: one.__name__ != "train"):
        lines = doctest.DocTestParser().get_examples(function.__doc__)
        assert any(line.want for line in lines), f"{function.__name__} has no example"
        names = {function.__name__: function}
        for line in lines:
            if line.want:
                assert repr(eval(line.source, names)) == line.want.strip(), line.source
            else:
                exec(line.source, names)


def test_names_cost_no_torch() -> None:
    program = """
import sys
import ragen_mega
from ragen_mega import StarPOConfig, parse
parse(["--recipe", "sokoban"])
assert "torch" not in sys.modules, "names and flags are read without it"
try:
    ragen_mega.nothing
except AttributeError as error:
    print(error)
"""
    done = execute(program, ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "module 'ragen_mega' has no attribute 'nothing'\n"
