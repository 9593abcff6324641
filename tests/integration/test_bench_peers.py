"""A small comparison with the real TRL, where there is an environment that has it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.benchmarks import bench_peers

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("RAGEN_TRL_PYTHON")
FLAGS = "--groups 2 --group-size 4 --max-tokens 6 --repeats 1 --threads 1 --turns 1 3"


@pytest.mark.parametrize(("end", "why"), [("exit 1", "were the end$"), ("kill -9 $$", "memory")])
@pytest.mark.parametrize("ask", [bench_peers.Side.reply, bench_peers.Side.step])
def test_a_side_that_ends_early_is_heard(
    ask: Callable[[bench_peers.Side], dict],
    end: str,
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its log is in a folder that ends with the benchmark, so that naming it would not help."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho the cause\necho the end\n" + end)
    python.chmod(0o755)
    (tmp_path / "settings.json").write_text(json.dumps({"threads": 1}))
    side = bench_peers.Side(str(python), "trl", tmp_path / "settings.json")
    side._process.wait()
    try:
        with pytest.raises(ValueError, match=f"trl, .*{python}.* {why}"):
            ask(side)
    finally:
        side.close()
    assert capsys.readouterr().err == "the cause\nthe end\n"


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="RAGEN_TRL_PYTHON names no Python that has TRL")
def test_both_train_and_agree_on_loss_and_gradient(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "tools/benchmarks" / "bench_peers.py"), *FLAGS.split()]
    command += ["--trl-python", PYTHON, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for case, turns in zip(json.loads(out.read_text())["cases"], (1, 3), strict=True):
        ours, theirs = (case["compared"][name] for name in ("ours", "trl"))
        assert case["turns"] == turns and ours["grad_norm"] > 0
        for what, value in ours.items():
            assert value == pytest.approx(theirs[what], rel=1e-5, abs=1e-7)
        assert all(
            case[clock][name]["min"] > 0 for clock in ("wall", "cpu") for name in case[clock]
        )
