"""The README's test command fails where the style does; a choice of tests does not pay for it."""

import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def place(root: Path, *, style: int, tests: int) -> Path:
    """Make a repository with the test command, in which these are the exit codes of the style and
    of pytest. All that runs is written to `said`.
    """
    (root / "tools").mkdir()
    shutil.copy(TOOLS / "test.sh", root / "tools")
    python = root / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$2" != pytest ] || {{ echo "$*" >>{root}/said; exit {tests}; }}\n'
    )
    python.chmod(0o755)
    (root / "tools" / "setup_env.sh").write_text(
        f"setup_env() {{ REPOSITORY={root} PYTHON={python}; }}\n"
    )
    (root / "tools" / "style.sh").write_text(f"echo style >>{root}/said; exit {style}\n")
    return root / "tools" / "test.sh"


@pytest.mark.parametrize("style, tests, wanted", [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)])
def test_the_test_command_fails_where_style_or_tests_do(
    style: int, tests: int, wanted: int, tmp_path: Path
) -> None:
    command = ["bash", place(tmp_path, style=style, tests=tests)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == wanted, done.stderr
    first, second = (tmp_path / "said").read_text().splitlines()
    assert first == "style" and second.startswith("-m pytest -n auto")
    assert ("tools/style.sh has failed" in done.stderr) == bool(style)


def test_chosen_tests_run_without_the_style(tmp_path: Path) -> None:
    command = ["bash", place(tmp_path, style=1, tests=0), "tests/unit/test_x.py", "-k", "a b"]
    subprocess.run(command, check=True, capture_output=True)
    (said,) = (tmp_path / "said").read_text().splitlines()
    assert said.endswith("tests/unit/test_x.py -k a b")


@pytest.mark.parametrize("wrong", ["", "check", "format", "mypy"])
def test_the_style_fails_where_one_of_its_checks_does(wrong: str, tmp_path: Path) -> None:
    place(tmp_path, style=0, tests=0)
    shutil.copy(TOOLS / "style.sh", tmp_path / "tools")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/said\n'
        f'case "$2 $3" in *"{wrong or "none"}"*) echo found; exit 1 ;; esac\n'
    )
    command = ["bash", tmp_path / "tools" / "style.sh"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = (tmp_path / "said").read_text().splitlines()
    assert [line.split()[1:3] for line in said] == [
        ["ruff", "check"],
        ["ruff", "format"],
        ["mypy"],
    ]
    assert (done.returncode, done.stdout) == ((1, "found\n") if wrong else (0, ""))
