"""Every layout computes what one process computes, and one process what transformers computes
(tools/parity.py).
"""

import json
import sys
from pathlib import Path

import pytest

from tests.support.forked_ranks import on_ranks
from tools import parity

TOOLS = Path(__file__).parents[2] / "tools"


FAST = (
    "microbatch_of_one",
    "pp2",
    "dp2_distributed_optimizer",
    "tp2_pp2_sp_recompute",
    "dp2_tp2",
)
REST = tuple(name for name in list(parity.LAYOUTS)[1:] if name not in FAST)


@pytest.mark.forks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names", [pytest.param(FAST, id="fast"), pytest.param(REST, id="rest", marks=pytest.mark.slow)]
)
def test_layouts_agree(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun starts one layout, as it starts all for the command; the ranks of the others are
    forks, which need not import torch again.
    """
    launch, report = parity.launch, tmp_path / "parity.json"

    def start(layout: parity.Layout, directory: Path) -> None:
        if layout.name == "microbatch_of_one":
            launch(layout, directory)
        else:
            on_ranks(lambda: parity.run_layout(layout, directory), layout.num_processes)

    monkeypatch.setattr(parity, "launch", start)
    monkeypatch.setattr(sys, "argv", ["parity.py", "--json", str(report), "--layouts", *names])
    monkeypatch.syspath_prepend(str(TOOLS))
    parity.main()
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
    assert parity.choose_layouts(None, 0) == list(parity.LAYOUTS)[1:]
    assert parity.choose_layouts(None, 1) == [
        "microbatch_of_one",
        "one_microbatch",
        "recompute_full",
    ]
    assert "more processes than the 1 GPU(s) here: tp2, " in capsys.readouterr().out
    assert parity.choose_layouts(["pp2"], 2) == ["pp2"]
    with pytest.raises(SystemExit, match="error: pp2 need a GPU per process, not 1"):
        parity.choose_layouts(["recompute_full", "pp2"], 1)
