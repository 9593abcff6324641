"""The notebook of the documentation runs as it stands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ragen_mega import read_run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebook_trains_twice_and_reads_what_it_trained(tmp_path: Path) -> None:
    """The cells run one after another in one process, as a notebook runs them."""
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    path = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "compared.svg").stat().st_size > 1000
    first, brief = (read_run(tmp_path / "runs" / name) for name in ("first", "brief"))
    assert first.summary and brief.summary
    assert [row["step"] for row in first.metrics] == list(range(8))
    assert "reward/my_reward:brief" in brief.metrics[-1]

    # The traces tell the same as the exact files of rollouts.
    last = [episode for episode in first.episodes("step") if episode["step"] == 7]
    groups = first.rollout(7)
    members = [member for group in groups for member in group.trajectories][: len(last)]
    assert [episode["reward"] for episode in last] == pytest.approx(
        [member.total_reward for member in members], rel=1e-3
    )
    assert [episode["success"] for episode in last] == [member.success for member in members]
    assert {episode["kind"] for episode in first.episodes()} == {"step", "eval"}
    answer, prompt = (last[0]["turns"][0][part] for part in ("answer", "prompt"))
    assert "<answer>" in answer and "<|im_start|>" in prompt and answer not in prompt
