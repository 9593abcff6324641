"""What foretells success and collapse: correlations that are known, of rows and of runs on disk."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from ragen_mega.commands import study as tool
from ragen_mega.config import parse
from ragen_mega.studies import signals
from ragen_mega.studies.runs import warm_start_key
from ragen_mega.studies.signals import (
    SIGNALS,
    Run,
    correlation,
    groups_of,
    read_runs,
    with_collapse,
)

STEPS, FALL, WARNED = 60, 40, 10
"""Success of a run that collapses falls at this step, and its entropy rises so many before."""
SEEDS = 12


def test_one_stratum_is_spearman() -> None:
    draw = np.random.default_rng(0)
    outcome = draw.integers(4, size=50).astype(float)  # with ties
    signal = outcome + draw.normal(0, 2, 50)
    missing = signal.copy()
    missing[::7] = np.nan
    kept = ~np.isnan(missing)
    for values, used in ((signal, np.ones(50, bool)), (missing, kept)):
        found = correlation(values, outcome, [0] * 50, list(range(50)))
        assert found.value == pytest.approx(spearmanr(values[used], outcome[used]).statistic)
        assert found.num_rows == found.num_groups == used.sum()


def test_what_strata_differ_by_does_not_count() -> None:
    """Within each of six studies the signal helps; studies with more of it succeed less."""
    draw = np.random.default_rng(1)
    study = np.repeat(np.arange(6), 20)
    helped = draw.normal(size=120)
    signal, outcome = helped + 10 * study, helped + draw.normal(0, 0.5, 120) - 10 * study
    rows = list(range(120))
    assert correlation(signal, outcome, [0] * 120, rows).high < -0.9
    within = correlation(signal, outcome, study.tolist(), rows)
    each = [spearmanr(signal[study == one], outcome[study == one]).statistic for one in range(6)]
    assert within.value == pytest.approx(np.mean(each))  # strata of one size without ties
    assert within.low > 0.5 and within.holds(comparisons=1000)
    few = correlation(signal, outcome, study.tolist(), [row % 8 for row in rows])
    assert few.low > 0.5 and few.holds(comparisons=6)  # of coins, 8 agree once in 128
    assert not few.holds(comparisons=7)
    constant = np.where(study == 5, 1.0, outcome)
    assert correlation(signal, constant, study.tolist(), rows).num_rows == 100
    assert correlation(signal, outcome, study.tolist(), study.tolist()) is None
    assert correlation(study * 1.0, outcome, study.tolist(), rows) is None


@pytest.mark.parametrize("strength", [0.0, 0.6])
def test_intervals_cover_the_truth(strength: float) -> None:
    """Normal pairs, two runs to a group, whose rank correlation is 6 / pi asin(strength / 2)."""
    draw, truth = np.random.default_rng(2), 6 / math.pi * math.asin(strength / 2)
    groups, covered = np.repeat(np.arange(30), 2).tolist(), 0
    for _ in range(200):
        x, noise = draw.normal(size=(2, 60))
        found = correlation(x, strength * x + math.sqrt(1 - strength**2) * noise, [0] * 60, groups)
        covered += found.low <= truth <= found.high
    assert covered >= 200 * 0.95 - 3 * math.sqrt(200 * 0.95 * 0.05)


def write_run(folder: Path, arm: str, seed: int, *, collapses: bool) -> None:
    """A run whose entropy foretells its collapse, and whose first entropies its success."""
    draw, run = np.random.default_rng(100 * seed + collapses), folder / f"{arm}-seed{seed}"
    run.mkdir(parents=True)
    start = draw.uniform(0.5, 1.5)
    lines = []
    for step in range(STEPS):
        is_down, is_warned = step >= FALL, step >= FALL - WARNED
        lines.append(
            {
                "step": step,
                "rollout/success": 0.1 if collapses and is_down else 0.7 + 0.05 * (step % 2),
                "rollout/entropy": start + 5 * (collapses and is_warned),
                "actor/grad_norm": draw.normal(),
                "rollout/entropy_variance": None,
                **({"collapse/score": start} if step % 10 == 0 else {}),
            }
        )
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = parse(["--environments", "bandit", "--seed", str(seed)]).to_dict()
    (run / "config.json").write_text(json.dumps(config))
    sets = {"bandit": {"success": 0.9 - 0.3 * start}, "bandit_test": {"success": draw.uniform()}}
    (run / "summary.json").write_text(json.dumps({"sets": sets}))


@pytest.fixture
def studies(tmp_path: Path) -> Path:
    folder = tmp_path / "studies"
    for seed in range(SEEDS):
        write_run(folder / "known-small", "stays", seed, collapses=False)
        write_run(folder / "known-small", "falls", seed, collapses=True)
    return folder


def test_the_page_tells_what_is_known(
    studies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(studies / "known-small" / "stays-seed0", studies / "other-small" / "same-seed0")
    assert not tool.main(["--signals", str(studies), "--reports", str(tmp_path / "out")])
    text = capsys.readouterr().out
    assert (tmp_path / "out" / "signals.md").read_text().rstrip() == text.rstrip()
    assert "24 different runs, of which 12 collapse" in text
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line.startswith("| `")
    }
    found = json.loads((tmp_path / "out" / "signals.json").read_text())
    final = found["final_success"]["rollout/entropy"]
    assert final["all runs"]["value"] == pytest.approx(-1)
    assert rows["`rollout/entropy`"][0].startswith("**")  # of the second table
    assert final["same study and arm"]["num_groups"] == SEEDS
    assert "`rollout/entropy_variance`" not in rows
    early = found["collapse"]["rollout/entropy"]
    assert early["10 steps ahead, same step"]["value"] == pytest.approx(1)
    # Of both arms of every seed, steps from which one collapses within ten, until it has.
    assert early["10 steps ahead, same step"]["num_rows"] == 2 * SEEDS * 10
    assert early["10 steps ahead, within runs"]["value"] > 0.9
    assert early["20 steps ahead, same step"]["value"] < 0.9  # at first there is no sign yet
    noise = found["collapse"]["actor/grad_norm"]["10 steps ahead, same step"]
    assert noise["low"] < 0 < noise["high"]
    assert {run["collapsed_at"] for run in found["runs"]} == {None, FALL + 1}
    assert (tmp_path / "out" / "signals.svg").stat().st_size > 1000


def test_levels_are_those_known_at_a_step(studies: Path) -> None:
    run = read_runs(studies, warm_start_key)[0][0]
    levels, score = run.levels(), SIGNALS.index("collapse/score")
    entropy = run.signals[:, SIGNALS.index("rollout/entropy")]
    assert np.isnan(levels[:4]).all()
    assert levels[30, SIGNALS.index("rollout/entropy")] == pytest.approx(entropy[26:31].mean())
    assert levels[9, score] == run.signals[0, score]  # measured at 0 and 10 only
    assert np.isnan(run.early()[SIGNALS.index("rollout/entropy_variance")])


@pytest.mark.parametrize("unplayed", [0, 4])
def test_a_run_has_collapsed_where_it_stays_below_its_best(unplayed: int) -> None:
    """Also one with steps that played nothing and so have no success."""
    draw = np.random.default_rng(3)
    ends = set()
    for _ in range(40):
        values = np.full((60, len(SIGNALS)), np.nan)
        levels = np.repeat(draw.uniform(0.2, 0.8, 6), 10)
        success = np.clip(levels + draw.normal(0, 0.05, 60), 0, 1)
        success[draw.choice(60, unplayed, replace=False)] = np.nan
        values[:, SIGNALS.index(signals.SUCCESS)] = success
        means = {step: np.nanmean(success[step - 9 : step + 1]) for step in range(9, 60)}
        best = max(means.values())
        expected = [
            step >= 9 and all(means[later] < best - 0.1 for later in range(step, 60))
            for step in range(60)
        ]
        assert Run("s", "a", 0, values, 0.0, "").collapsed().tolist() == expected
        ends.add(expected[-1])
    assert ends == {False, True}


def test_too_little_is_refused(studies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(SEEDS):
        shutil.rmtree(studies / "known-small" / f"falls-seed{seed}")
    shutil.rmtree(studies / "known-small" / "stays-seed0")
    with pytest.raises(SystemExit):
        tool.main(["--signals", str(studies), "--reports", str(studies)])
    said = capsys.readouterr().err
    assert "need at least 12 different finished ones" in said and "has 11" in said
    short = Run("s", "a", 0, np.zeros((8, len(SIGNALS))), 0.0, "")
    assert not any(one for of in with_collapse([short] * 12).values() for one in of.values())


def test_runs_that_share_a_start_or_a_block_are_one_group() -> None:
    nothing = np.zeros((1, len(SIGNALS)))
    runs = [
        Run(study, "a", seed, nothing, 0.0, start)
        for study, seed, start in (
            ("s", 0, "x"), ("t", 0, "y"), ("u", 0, "z"), ("s", 1, "w"), ("t", 0, "x"),
            ("v", 0, "w"),
        )
    ]  # fmt: skip
    first, second, alone, other, link, last = groups_of(runs)
    assert first == second == link and other == last and len({first, alone, other}) == 3


def test_studies_of_one_warm_start_are_no_independent_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(10):
        study = tmp_path / "studies" / f"study{number}-small"
        for arm, seed in (("stays", 2 * number), ("falls", 2 * number + 1)):
            write_run(study, arm, seed, collapses=arm == "falls")
            run = (study / f"{arm}-seed{seed}").rename(study / f"{arm}-seed0")
            config = parse(["--environments", "bandit", "--lr", f"{number + 1}e-4"]).to_dict()
            (run / "config.json").write_text(json.dumps(config))
    runs, _ = read_runs(tmp_path / "studies", warm_start_key)
    assert len(runs) == 20 and len(set(groups_of(runs))) == 1
    assert not tool.main(["--signals", str(tmp_path / "studies"), "--reports", str(tmp_path)])
    assert "Too few groups of runs differ." in capsys.readouterr().out
    found = json.loads((tmp_path / "signals.json").read_text())
    assert not any(one for of in found["final_success"].values() for one in of.values())


def test_settings_of_another_version_change_nothing(
    studies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def page() -> str:
        assert not tool.main(["--signals", str(studies), "--reports", str(tmp_path)])
        return capsys.readouterr().out

    before = page()
    run = studies / "known-small" / "falls-seed3"
    config = json.loads((run / "config.json").read_text())
    del config["train"]["critic_lr"]
    config["train"]["of_another_version"] = config["of_another_version"] = {"a": 1}
    (run / "config.json").write_text(json.dumps(config))
    assert page() == before
    (run / "summary.json").write_text('{"sets": {}}')
    with pytest.raises(SystemExit):
        page()
    assert f"{run}: summary.json has no 'bandit'" in capsys.readouterr().err
