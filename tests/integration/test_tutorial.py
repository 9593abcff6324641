"""The tutorial's own world, trained by its own command, learns."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_world_of_the_tutorial_is_learned(tmp_path: Path, seed: int) -> None:
    """Far above the random player, whose level the warm start has."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    source = re.search(r"<<'PYTHON'\n(import random\n.*?)PYTHON\n", page, re.DOTALL)[1]
    command = re.search(r"^ragen-mega (train --environments \S+ --name digit.*)$", page, re.M)[1]
    (tmp_path / "my_world.py").write_text(source)
    program = [sys.executable, "-m", "ragen_mega.commands.program", *shlex.split(command)]
    done = subprocess.run(
        [*program, "--seed", str(seed)],
        cwd=tmp_path,
        env=os.environ
        | {"NPROC_PER_NODE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "recipe own: its limits follow from scripted play of my_world:Digit" in done.stdout
    result = json.loads((tmp_path / "runs/digit/summary.json").read_text())["sets"]
    result = result["my_world:Digit"]
    assert result["random"] == pytest.approx(1 - 0.9**5, abs=0.03)  # five digits of ten
    assert result["success"] > result["random"] + 0.15
