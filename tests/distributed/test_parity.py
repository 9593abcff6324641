"""Every layout computes what one process computes, and one process what transformers computes
(tools/parity.py).
"""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.support.forked_ranks import on_ranks
from tools import parity

TOOLS = Path(__file__).parents[2] / "tools"


FAST = (
    "shared",
    "tp2_pp2_vp2_sp_recompute",
    "dp2_tp2_sp_ep2_distributed_optimizer",
    "cp2_tp2_sp_ep2",
)
"""Together they have every kind of parallelism."""
LORA_FAST = ("lora_tp2_pp2_vp2_sp_recompute", "lora_dp2_tp2_sp_ep2_distributed_optimizer")
BASELINES = ("single", "lora_single")
REST = tuple(name for name in parity.LAYOUTS if name not in (*FAST, *LORA_FAST, *BASELINES))


@pytest.mark.forks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAST, id="fast"),
        pytest.param(LORA_FAST, id="lora", marks=pytest.mark.slow),
        pytest.param(REST, id="rest", marks=pytest.mark.slow),
    ],
)
def test_layouts_agree(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun starts one of the slow layouts, as it starts all for the command; the ranks of the
    others are forks, which need not import torch again.
    """
    launch, report = parity.launch, tmp_path / "parity.json"

    def start(layout: parity.Layout, directory: Path) -> dict[parity.Key, torch.Tensor]:
        if layout.name == "one_microbatch":
            return launch(layout, directory)
        on_ranks(lambda: parity.run_layout(layout, directory), layout.num_processes)
        return parity.read_result(layout, directory)

    monkeypatch.setattr(parity, "launch", start)
    parity.main(["--json", str(report), "--layouts", *names])
    rows = json.loads(report.read_text())
    assert [row["name"] for row in rows["layouts"]] == list(names)
    # float32 never equals float64
    assert all(0 < row["max_rel_diff_unfused"] <= 1e-4 for row in rows["layouts"])


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
    row = {"name": "x"} | {name: tolerance / 2 for name, tolerance in parity.TOLERANCES.items()}
    report = {"layouts": [row], "transformers": {"max_diff_logprobs": 0.0}}
    assert parity.is_within_tolerance(report)
    row[key] = 2 * parity.TOLERANCES[key]
    assert not parity.is_within_tolerance(report)


def test_layouts_of_more_processes_than_gpus_are_left_out_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    everything = [name for name in parity.LAYOUTS if name not in BASELINES]
    assert parity.choose_layouts(None, 0) == everything
    assert parity.choose_layouts(None, 1) == [
        "shared",
        "microbatch_of_one",
        "one_microbatch",
        "recompute_full",
        "lora_recompute_full",
    ]
    assert "than the 1 GPU(s) here: tp2" in capsys.readouterr().out
    assert parity.choose_layouts(["pp2"], 2) == ["pp2"]
    with pytest.raises(ValueError, match="pp2 need .*, not 1"):
        parity.choose_layouts(["recompute_full", "pp2"], 1)


def computed(**changes: float) -> dict:
    """What a layout of two tensors a kind may have computed."""
    keys = [
        parity.Key(kind, "qwen2", model, name)
        for kind in parity.COLUMNS
        for model, name in (("policy", "step 0"), ("critic", "step 0"))
    ]
    return {key: torch.tensor([2.0, 4.0 + changes.get(key.kind, 0.0)]) for key in keys}


@pytest.mark.parametrize("kind", list(parity.COLUMNS))
def test_differences_are_the_largest_of_their_kind(kind: str) -> None:
    """Absolute, but of gradients relative to the largest element."""
    layout, baseline = parity.LAYOUTS["pp2"], computed()
    unfused = {key: baseline[key] for key in baseline if key[:3] == ("gradient", "qwen2", "policy")}
    row = parity.compare(layout, computed(**{kind: 0.5}), baseline, unfused)
    changed = {parity.COLUMNS[kind]} | ({"max_rel_diff_unfused"} if kind == "gradient" else set())
    for column in parity.TOLERANCES:
        expected = 0.125 if "_rel_" in column else 0.5
        assert row[column] == (expected if column in changed else 0.0)


@pytest.mark.parametrize("kind", list(parity.COLUMNS))
@pytest.mark.parametrize("broken", ["layout", "baseline", "both"])
def test_nan_is_no_agreement(kind: str, broken: str) -> None:
    whole, part = computed(), computed(**{kind: math.nan})
    result, baseline = (
        part if broken in (name, "both") else whole for name in ("layout", "baseline")
    )
    row = parity.compare(parity.LAYOUTS["pp2"], result, baseline, {})
    assert math.isnan(row[parity.COLUMNS[kind]])
    report = {"layouts": [row], "transformers": {"max_diff_logprobs": 0.0}}
    assert not parity.is_within_tolerance(report)


def test_a_missing_tensor_is_no_agreement() -> None:
    baseline = computed()
    missing = {key: value for key, value in baseline.items() if key.kind != "gradient"}
    with pytest.raises(ValueError, match="pp2 computes other tensors"):
        parity.compare(parity.LAYOUTS["pp2"], missing, baseline, {})
    assert parity.compare(parity.LAYOUTS["dp2_distributed_optimizer"], missing, baseline, {})
