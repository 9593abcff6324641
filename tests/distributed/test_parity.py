"""Every layout computes what one process computes, and one process what transformers computes
(tools/parity.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import parity as tool

TOOL = Path(__file__).parents[2] / "tools" / "parity.py"


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
    row = {"name": "x"} | {name: tolerance / 2 for name, tolerance in tool.TOLERANCES.items()}
    report = {"layouts": [row], "transformers": {"max_diff_logprobs": 0.0}}
    assert tool.is_within_tolerance(report)
    row[key] = 2 * tool.TOLERANCES[key]
    assert not tool.is_within_tolerance(report)


def test_layouts_of_more_processes_than_gpus_are_left_out_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tool.choose_layouts(None, 0) == list(tool.LAYOUTS)[1:]
    assert tool.choose_layouts(None, 1) == ["microbatch_of_one", "one_microbatch", "recompute_full"]
    assert "more processes than the 1 GPU(s) here: tp2, " in capsys.readouterr().out
    assert tool.choose_layouts(["pp2"], 2) == ["pp2"]
    with pytest.raises(ValueError, match="pp2 need a GPU per process, not 1"):
        tool.choose_layouts(["recompute_full", "pp2"], 1)


def computed(**changes: float) -> dict:
    """What a layout of two tensors a kind may have computed."""
    keys = [
        tool.Key(kind, "qwen2", model, name)
        for kind in tool.COLUMNS
        for model, name in (("policy", "step 0"), ("critic", "step 0"))
    ]
    return {key: torch.tensor([2.0, 4.0 + changes.get(key.kind, 0.0)]) for key in keys}


@pytest.mark.parametrize("kind", list(tool.COLUMNS))
def test_differences_are_the_largest_of_their_kind(kind: str) -> None:
    """Absolute, but of gradients relative to the largest element."""
    layout, baseline = tool.LAYOUTS["pp2"], computed()
    unfused = {key: baseline[key] for key in baseline if key[:3] == ("gradient", "qwen2", "policy")}
    row = tool.compare(layout, computed(**{kind: 0.5}), baseline, unfused)
    changed = {tool.COLUMNS[kind]} | ({"max_rel_diff_unfused"} if kind == "gradient" else set())
    for column in tool.TOLERANCES:
        expected = 0.125 if "_rel_" in column else 0.5
        assert row[column] == (expected if column in changed else 0.0)


def test_a_missing_tensor_is_no_agreement() -> None:
    baseline = computed()
    missing = {key: value for key, value in baseline.items() if key.kind != "gradient"}
    with pytest.raises(ValueError, match="pp2 computes other tensors than expected"):
        tool.compare(tool.LAYOUTS["pp2"], missing, baseline, {})
    assert tool.compare(tool.LAYOUTS["dp2_distributed_optimizer"], missing, baseline, {})
