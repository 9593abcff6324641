"""Every layout computes what one process computes, and one process what transformers computes
(tools/parity.py).
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "parity.py"


def load_tool():
    spec = importlib.util.spec_from_file_location("parity", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(900)
def test_layouts_agree(tmp_path: Path) -> None:
    report = tmp_path / "parity.json"
    layouts = [
        "microbatch_of_one",
        "pp2",
        "dp2_distributed_optimizer",
        "tp2_pp2_sp_recompute",
        "dp2_tp2",
    ]
    done = subprocess.run(
        [sys.executable, str(TOOL), "--json", str(report), "--layouts", *layouts],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(report.read_text())
    assert [row["name"] for row in rows["layouts"]] == layouts
    assert rows["transformers"]["max_diff_logprobs"] <= 1e-4
    assert all(
        0 < row["max_rel_diff_unfused"] <= 1e-4 for row in rows["layouts"]
    )  # float32 never equals float64


@pytest.mark.parametrize(
    "key",
    [
        "max_diff_logprobs",
        "max_diff_loss",
        "max_rel_diff_gradients",
        "max_diff_parameters",
        "max_rel_diff_unfused",
    ],
)
def test_a_difference_fails(key: str) -> None:
    tool = load_tool()
    row = {"name": "x"} | {name: tolerance / 2 for name, tolerance in tool.TOLERANCES.items()}
    report = {"layouts": [row], "transformers": {"max_diff_logprobs": 0.0}}
    assert tool.is_within_tolerance(report)
    row[key] = 2 * tool.TOLERANCES[key]
    assert not tool.is_within_tolerance(report)


def test_layouts_of_more_processes_than_gpus_are_left_out_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool = load_tool()
    assert tool.choose_layouts(None, 0) == list(tool.LAYOUTS)[1:]
    assert tool.choose_layouts(None, 1) == ["microbatch_of_one", "one_microbatch", "recompute_full"]
    assert "more processes than the 1 GPU(s) here: tp2, " in capsys.readouterr().out
    assert tool.choose_layouts(["pp2"], 2) == ["pp2"]
    with pytest.raises(SystemExit, match="error: pp2 need a GPU per process, not 1"):
        tool.choose_layouts(["recompute_full", "pp2"], 1)
