"""What a GPU's machine imports, where its packages and archives are: tools/simulated_box.sh makes
such a machine, and BOX names its directory.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.fake_cuda.imports import MODULES, SERVER
from tests.fake_cuda.processes import ROOT

BOX = Path(os.environ.get("BOX", ROOT / ".box"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (BOX / "site").is_dir(), reason="tools/simulated_box.sh has made no box")
@pytest.mark.parametrize("modules", [SERVER, [name for name in MODULES if name not in SERVER]])
def test_every_import_of_every_part_is_found(modules: list[str]) -> None:
    """Among them all that `sglang.launch_server` imports where CUDA is present."""
    done = subprocess.run(
        [BOX / "venv/bin/python", "tests/fake_cuda/imports.py", BOX / "site", *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert [line for line in done.stdout.splitlines() if not line.endswith(": found")] == []
    assert done.stdout.count(": found") == len(modules), done.stderr
