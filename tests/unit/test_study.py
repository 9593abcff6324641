"""Studies: files that are refused, intervals that hold what they promise, and equal amounts."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ragen_mega.commands import study as tool
from ragen_mega.config import StarPOConfig, parse
from ragen_mega.data.packing import minibatch_ids
from ragen_mega.environments.reference_players import wilson_interval
from ragen_mega.environments.registry import make
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning.memory import GIB, Setting, plan
from ragen_mega.planning.published import model_config
from ragen_mega.ranks.launcher import PROGRAM, SIGNALS
from ragen_mega.report.metrics import write_json
from ragen_mega.studies import runs as study_runs
from ragen_mega.studies.definitions import Study, estimate, percent
from ragen_mega.studies.runs import flags_of
from tests.support.processes import wait_until
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]
TINY = """
title = "Tiny"
source = "nowhere"
[small]
recipe = "bandit"
flags = '''--hidden-size 32 --ffn-hidden-size 64 --warm-start-first-turn-steps 20
  --warm-start-steps 10 --warm-start-trajectories 60 --num-groups 4 --group-size 4
  --minibatch-size 8 --num-steps 3 --eval-prompts 16 --eval-interval 0 --save-interval 1'''
[[arms]]
name = "low"
flags = "--lr 1e-4"
[[arms]]
name = "high"
flags = "--lr 3e-3"
[[claims]]
says = "more is more"
better = "high"
worse = "low"
set = "bandit"
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('title = "Tiny"', "", "has no title"),
        ('title = "Tiny"', 'title = "Tiny"\nseeds = 3', "knows no seeds"),
        ('name = "high"', 'name = "low"', "different names"),
        ('name = "high"', 'name = "../high"', "different names"),
        ('better = "high"', 'better = "higher"', "names no arm: higher"),
        ("[small]", "[small", "no TOML"),
        ('recipe = "bandit"', "", "has no recipe"),
        ('name = "low"', "name = 1", "an arm has name = 1; .*string"),
        (
            '"--lr 1e-4"',
            '["--lr", "1e-4"]',
            r"arm has flags = \['--lr', '1e-4'\]",
        ),
        ('"--lr 1e-4"', '"--lr \'1e-4"', r"""flags "--lr '1e-4" cannot be split"""),
        ('title = "Tiny"', 'title = "Tiny"\nmetrics = "a"', "has metrics = 'a'"),
        ('title = "Tiny"', 'title = "Tiny"\npaper = 1', "study has paper = 1; .*table"),
        ('set = "bandit"', 'set = ["bandit"]', "a claim has set = "),
    ],
)
def test_wrong_files_are_one_line(tiny: Path, old: str, new: str, said: str) -> None:
    tiny.write_text(TINY.replace(old, new, 1))
    with pytest.raises(ValueError, match=said) as error:
        Study.read(tiny, "small")
    assert "\n" not in str(error.value).strip() or "TOML" in said
    assert str(tiny) in str(error.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("arms = []", r"arms = \[\]; .*at least one"),
        ("arms = [1]", r"arms = \[1\]; .*table"),
    ],
)
def test_wrong_tables_are_one_line(tmp_path: Path, lines: str, said: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(f'title = "t"\nsource = "s"\n{lines}\n[small]\nrecipe = "bandit"\n')
    with pytest.raises(ValueError, match=said) as error:
        Study.read(path, "small")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_every_study_of_the_repository_can_be_run() -> None:
    files = sorted(tool.STUDIES.glob("*.toml"))
    assert len(files) >= 9
    for path in files:
        for preset in ("small", "paper"):
            try:
                study = Study.read(path, preset)
            except ValueError as error:
                assert "no preset [" in str(error)
                continue
            for arm in study.arms:
                parse(study_runs.flags_of(study, arm, "none"))


def shipped(preset: str) -> Iterator[tuple[Study, dict[str, StarPOConfig]]]:
    """The studies of the repository that have a preset, and the configuration of each arm."""
    for path in sorted(tool.STUDIES.glob("*.toml")):
        if preset in tomllib.loads(path.read_text()):
            study = Study.read(path, preset)
            yield study, {arm.name: parse(flags_of(study, arm, "none")) for arm in study.arms}


def test_every_arm_reaches_its_learning_rate() -> None:
    assert not [
        f"{study.name}: {name}"
        for study, arms in shipped("small")
        for name, config in arms.items()
        if config.train.lr >= 1e-9 and config.train.lr_warmup >= config.train.num_steps
    ]


@pytest.mark.parametrize("preset", ["small", "paper"])
def test_claims_are_on_sets_that_both_arms_evaluate(preset: str) -> None:
    for study, arms in shipped(preset):
        for claim in study.claims:
            for name in (claim.better, claim.worse):
                assert claim.set in arms[name].environment.evaluated, (study.name, claim.says)


def test_names_mislead_where_the_study_of_thoughts_says_so() -> None:
    study = Study.read(tool.STUDIES / "bandit_thoughts.toml", "paper")
    (claim,) = (claim for claim in study.claims if "mislead" in claim.says)
    world = make(claim.set)
    world.reset(0)
    assert {*world.facts()["arms"]} == {"Librarian", "Trader"}
    assert world.facts()["high_arm"] == "Librarian"
    for arm in study.arms:
        assert parse(flags_of(study, arm, "none")).environment.max_response_length == 500


def test_arms_of_prompts_and_samples_have_those_of_their_names() -> None:
    ((_, arms),) = (found for found in shipped("small") if found[0].name == "diversity")
    sizes = [f"{one.rollout.num_groups}x{one.rollout.group_size}" for one in arms.values()]
    assert sizes == [*arms]
    study = Study.read(tool.STUDIES / "diversity.toml", "paper")
    for arm in study.arms:
        prompts, samples = map(int, arm.name.split("x"))
        rollout = parse(flags_of(study, arm, "none")).rollout
        assert (2 * rollout.num_groups, rollout.group_size) == (prompts, samples)


@pytest.mark.parametrize(
    ("seeds", "prompts", "of_seeds", "of_prompts"),
    [(2, 256, 0.05, 0.3), (2, 256, 0.1, 0.3), (3, 256, 0.05, 0.3), (5, 64, 0.1, 0.1)],
)
def test_intervals_cover_the_truth(
    seeds: int, prompts: int, of_seeds: float, of_prompts: float
) -> None:
    """Rates with effects of seeds, of prompts, and of luck around one half."""
    generator, trials, covered = np.random.default_rng(0), 1000, 0
    for _ in range(trials):
        chances = (
            0.5
            + of_seeds * generator.standard_normal((seeds, 1))
            + of_prompts * generator.standard_normal((1, prompts))
        )
        found = estimate((generator.random((seeds, prompts)) < chances).astype(float))
        covered += found.low <= 0.5 <= found.high
    # Three standard deviations of a count with chance 0.95.
    assert covered >= trials * 0.95 - 3 * (trials * 0.95 * 0.05) ** 0.5


def test_pairing_finds_what_prompts_hide() -> None:
    """Ten points between arms whose prompts differ by thirty: told apart only in pairs."""
    generator = np.random.default_rng(1)
    prompts = 0.5 + 0.3 * generator.standard_normal((1, 40))
    a = prompts + 0.02 * generator.standard_normal((3, 40))
    b = a - 0.1 + 0.02 * generator.standard_normal((3, 40))
    assert estimate(a - b, least=-1.0).verdict == "higher"
    assert estimate(b - a, least=-1.0).verdict == "lower"
    alone = estimate(a), estimate(b)
    assert alone[0].low < alone[1].high
    assert estimate(a - a, least=-1.0).verdict == "not told apart"


def test_seeds_that_agree_by_luck_leave_the_interval_of_the_prompts() -> None:
    """Half its width is t(63) of tables; seeds that differ by 0.02 add t(1) in squares."""
    prompts = np.arange(64) / 64
    of_prompts, of_seeds = 1.99834 * prompts.std(ddof=1) / 8, 12.7062 * 0.01
    for apart, half in ((0.0, of_prompts), (0.02, math.hypot(of_prompts, of_seeds))):
        found = estimate(np.stack([prompts, prompts + apart]))
        assert found.high - found.mean == pytest.approx(half, rel=1e-4)
        assert found.seed_deviation == pytest.approx(apart / math.sqrt(2))
        less = estimate(-np.stack([prompts, prompts + apart]), least=-1.0)
        assert (less.low, less.high) == pytest.approx((-found.high, -found.low))


@pytest.mark.parametrize("seeds", [2, 5])
def test_no_interval_has_width_zero(seeds: int) -> None:
    """Rates of 0 and 1 have Wilson's interval; differences, his bound on prompts that differ."""
    ones = np.ones((seeds, 256))
    every, never, equal, far = (
        estimate(ones),
        estimate(0 * ones),
        estimate(0 * ones, least=-1.0),
        estimate(ones, least=-1.0),
    )
    low = wilson_interval(256, 256)[0]
    assert (every.low, every.high) == pytest.approx((low, 1.0)) and low < 0.99
    assert (never.low, never.high) == pytest.approx((0.0, 1 - low))
    assert (equal.low, equal.high) == pytest.approx((low - 1, 1 - low))
    assert equal.verdict == "not told apart" and far.verdict == "higher"
    third = estimate(np.full((3, 77), 0.1))  # the mean of these is not exactly 0.1
    assert third.high - third.low > 0.04


def test_one_seed_has_no_interval() -> None:
    one = estimate(np.ones((1, 8)))
    assert one.mean == 1.0 and one.verdict == "not told apart"
    assert percent(one) == "100.0% (one seed: no interval)"
    assert percent(estimate(np.ones((3, 1)))) == "100.0% (one prompt: no interval)"


def test_matched_arms_do_as_much(tmp_path: Path) -> None:
    """Half of the groups kept halves the updates; twice the groups doubles the trajectories."""
    path = tmp_path / "matched.toml"
    path.write_text(
        'title = "t"\nsource = "s"\n[small]\nrecipe = "sokoban"\nflags = "--num-steps 40"\n'
        '[[arms]]\nname = "a"\nflags = "--filter-value 1"\n'
        '[[arms]]\nname = "b"\nflags = "--filter-value 0.5"\n'
        '[[arms]]\nname = "c"\nflags = "--filter-value 1 --num-groups 64"\n'
    )
    study = Study.read(path, "small")

    def steps(arm: int, match: str) -> int:
        return parse(study_runs.flags_of(study, study.arms[arm], match)).train.num_steps

    assert [steps(arm, "none") for arm in range(3)] == [40, 40, 40]
    assert [steps(arm, "steps") for arm in range(3)] == [40, 80, 20]
    assert [steps(arm, "tokens") for arm in range(3)] == [40, 40, 20]


def test_an_arm_that_was_gone_comes_back_with_its_own_flags(tiny: Path, tmp_path: Path) -> None:
    """Its runs are still there, and are no results of other flags."""
    study, folder = Study.read(tiny, "small"), tmp_path / "runs"
    low, high = study.arms
    assert high.name == "high"
    without = replace(study, arms=(low,), claims=())
    other = replace(study, arms=(low, replace(high, flags=("--lr", "0.5"))))
    for told in (study, without, without, study, without):
        assert study_runs.claim_folder(folder, told, "none", mixed=False) is False
    with pytest.raises(ValueError, match="other study"):
        study_runs.claim_folder(folder, other, "none", mixed=False)


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("--filter-strategy none", 6),
        ("--filter-strategy top_fraction --filter-value 0.25", 1),  # whole groups: one and a half
        ("--filter-strategy top_k --filter-value 3", 3),
        ("--filter-strategy percentile_range --filter-start 0.5 --filter-value 1", 3),
        ("--filter-strategy top_p_softmax --filter-value 0.5", None),
    ],
)
def test_optimizer_steps_are_those_that_training_takes(flags: str, kept: int | None) -> None:
    words = "--recipe none --num-groups 6 --group-size 8 --minibatch-size 4 --updates-per-rollout 2"
    config = parse([*words.split(), *flags.split()])
    if kept is None:
        with pytest.raises(ValueError, match="top_p_softmax decides"):
            study_runs.optimizer_steps(config)
    else:
        drawn = minibatch_ids(kept * 8, 4, 2, torch.Generator())
        assert study_runs.optimizer_steps(config) == len([*drawn])


def test_changed_code_is_not_mixed_in(tiny: Path, tmp_path: Path) -> None:
    study = Study.read(tiny, "small")
    folder = tmp_path / "runs"
    assert study_runs.claim_folder(folder, study, "none", mixed=False) is False
    assert study_runs.claim_folder(folder, study, "none", mixed=False) is False
    state = json.loads((folder / study_runs.IDENTITY).read_text())
    (folder / study_runs.IDENTITY).write_text(json.dumps(state | {"code": "older"}))
    with pytest.raises(ValueError, match="other code"):
        study_runs.claim_folder(folder, study, "none", mixed=False)
    assert study_runs.claim_folder(folder, study, "none", mixed=True) is True
    assert study_runs.claim_folder(folder, study, "none", mixed=False) is True  # it stays said
    with pytest.raises(ValueError, match=r"match \(none, not steps\)"):
        study_runs.claim_folder(folder, study, "steps", mixed=False)
    with pytest.raises(ValueError, match="other ranks"):
        study_runs.claim_folder(folder, study, "none", mixed=False, ranks=2)
    larger = replace(study, arms=tuple(replace(arm, ranks=2) for arm in study.arms))
    with pytest.raises(ValueError, match="other ranks of study arm"):
        study_runs.claim_folder(folder, larger, "none", mixed=False)
    assert study_runs.recorded(folder, study, "none", mixed=False) == (study, "none", True)
    assert json.loads((folder / study_runs.IDENTITY).read_text())["ranks"] == 1
    state.pop("ranks")  # as before it was recorded
    (folder / study_runs.IDENTITY).write_text(json.dumps(state))
    assert study_runs.claim_folder(folder, study, "none", mixed=False, ranks=2) is False


def test_a_warm_start_is_made_once_by_the_runs_that_go_first(tiny: Path, tmp_path: Path) -> None:
    others = {"wide": "--hidden-size 64", "alike": "--warm-start-seed 0"}
    arms = "".join(f'[[arms]]\nname = "{name}"\nflags = "{others[name]}"\n' for name in others)
    tiny.write_text(TINY.replace("[[claims]]", f"{arms}[[claims]]"))
    study = Study.read(tiny, "small")

    def jobs() -> dict[str, Path | None]:
        found = study_runs.find_jobs(study, range(2), tmp_path, "none", 1, mixed=False)
        return {job.name: job.source for job in found}

    first, second = tmp_path / "low-seed0", tmp_path / "low-seed1"
    takers = {"high-seed0": first, "alike-seed0": first, "high-seed1": second, "alike-seed1": first}
    makers = dict.fromkeys(["low-seed0", "wide-seed0", "low-seed1", "wide-seed1"])
    assert list(jobs().items()) == [*makers.items(), *takers.items()]
    (tmp_path / "low-seed0").mkdir()
    (tmp_path / "low-seed0" / "summary.json").touch()
    assert jobs() == {
        name: source for name, source in (makers | takers).items() if name != "low-seed0"
    }
    taker = study_runs.Job("high-seed0", ["train"], tmp_path / "log", tmp_path / "low-seed0")
    assert taker.words() == ["train"], "nothing to take yet"
    (tmp_path / "low-seed0" / "metrics.jsonl").touch()
    assert taker.words() == ["train", "--warm-start-from", str(tmp_path / "low-seed0")]


@pytest.mark.parametrize("changed", ["w.py", "w_texts.py", "rows.jsonl"])
def test_a_changed_file_of_the_user_is_not_mixed_in(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A world, what it imports, or a file of tasks with a score of the user's module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    files = {"w.py": "from w_texts import TEXT\ndef score(*_): return 1.0\n"}
    files |= {"w_texts.py": "TEXT = 1\n", "rows.jsonl": '{"prompt": "1+1", "answer": "2"}\n'}
    for name, text in files.items():
        Path(name).write_text(text)
    Path("beside.py").touch()
    flags = "--tasks rows.jsonl --score w:score"
    more = f'flags = """{flags}"""\n[[arms]]\nname = "more"\nflags = """{flags}"""\n'
    text = TINY.partition("[[claims]]")[0].replace('flags = "--lr 3e-3"', more)
    Path("own.toml").write_text(text)
    study, folder = Study.read(Path("own.toml"), "small"), tmp_path / "runs"
    importlib.import_module("w")
    try:
        assert not study_runs.claim_folder(folder, study, "none", mixed=False)
        known = json.loads((folder / study_runs.IDENTITY).read_text())["files"]
        assert known.keys() == files.keys()
        Path("beside.py").write_text("unused = 1\n")
        assert not study_runs.claim_folder(folder, study, "none", mixed=False)

        def source(mixed: bool) -> Path | None:
            (*_, job) = study_runs.find_jobs(study, [0], folder, "none", 1, mixed=mixed)
            assert job.name == "more-seed0"
            return job.source

        assert source(mixed=False) == folder / "high-seed0"
        Path(changed).write_text(files[changed] + "\n")
        with pytest.raises(ValueError, match=f"holds results of other {changed} "):
            study_runs.claim_folder(folder, study, "none", mixed=False)
        assert source(study_runs.claim_folder(folder, study, "none", mixed=True)) is None
    finally:
        for name in ("w", "w_texts"):
            sys.modules.pop(name, None)


def finish(run: Path, random: float = 0.25, optimum: float | None = 1.0) -> None:
    """What a report reads of a finished run."""
    run.mkdir(parents=True)
    told = {"success": 0.5, "prompt_success": [1.0, 0.0, 1.0, 0.0], "random": random}
    write_json(
        run / "summary.json", {"sets": {"bandit": told | {"optimum": optimum}}, "seconds": 6}
    )
    (run / "metrics.jsonl").touch()


def report_on(path: Path, folder: Path, *flags: str, preset: str = "small") -> dict[str, Any]:
    """The JSON of `--report` on folder/runs."""
    where = ("--output", folder / "runs", "--reports", folder / "reports", "--preset", preset)
    tool.main([*map(str, (path, "--report", *where, *flags))])
    name = path.stem if preset == "small" else f"{path.stem}_{preset}"
    return json.loads((folder / "reports" / f"{name}.json").read_text())


@pytest.fixture
def two_presets(tiny: Path, tmp_path: Path) -> Path:
    """A study of both presets; its runs belong to the small one."""
    tiny.write_text(TINY.replace("[[arms]]", '[paper]\nrecipe = "bandit"\n[[arms]]', 1))
    study_runs.claim_folder(tmp_path / "runs", Study.read(tiny, "small"), "none", mixed=False)
    return tiny


def test_a_report_has_all_seeds_that_there_are(two_presets: Path, tmp_path: Path) -> None:
    for name in ("low-seed100", "low-seed101", "high-seed7", "higher-seed3"):
        finish(tmp_path / "runs" / name)
    (tmp_path / "runs" / "low-seed9").mkdir()  # unfinished
    (tmp_path / "runs" / "low-seed100.log").touch()
    found = report_on(two_presets, tmp_path)
    assert [*found["runs"]] == ["low-seed100", "low-seed101", "high-seed7"]
    found = report_on(two_presets, tmp_path, "--seeds", "1", "--first-seed", "101")
    assert [*found["runs"]] == ["low-seed101"]


def test_a_report_of_runs_whose_flags_are_refused_now(two_presets: Path, tmp_path: Path) -> None:
    finish(tmp_path / "runs" / "low-seed0")
    for path in (two_presets, tmp_path / "runs" / "study.json"):
        path.write_text(path.read_text().replace("3e-3", "-1"))
    assert [*report_on(two_presets, tmp_path)["runs"]] == ["low-seed0"]


def test_a_report_says_what_arms_have_the_same_of(tiny: Path, tmp_path: Path) -> None:
    """The flags on the page have the number of steps that the first arm alone takes."""
    study_runs.claim_folder(tmp_path / "runs", Study.read(tiny), "tokens", mixed=False)
    finish(tmp_path / "runs" / "low-seed0")
    for flags in (("--match", "tokens"), ()):
        assert report_on(tiny, tmp_path, *flags)["match"] == "tokens"
        text = (tmp_path / "reports" / "tiny.md").read_text()
        assert "as many sampled trajectories as the first one (`--match tokens`)" in text


def test_a_report_leaves_the_record_as_it_is(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes further flags from there; what contradicts it is refused, or said to be mixed."""
    study, record = Study.read(tiny), tmp_path / "runs" / study_runs.IDENTITY
    run = replace(study, flags=(*study.flags, "--lr-warmup", "1"))
    study_runs.claim_folder(tmp_path / "runs", run, "tokens", mixed=False)
    finish(tmp_path / "runs" / "low-seed0")
    before = record.read_bytes()
    for flags in ((), ("--flags", "--lr-warmup 1")):
        found = report_on(tiny, tmp_path, *flags)
        assert found["study"]["flags"] == [*run.flags] and not found["is_mixed"]
    for flags, said in (
        (("--match", "steps"), "match (tokens, not steps); "),
        (("--flags", "--lr-warmup 2"), "--lr-warmup 2)"),
    ):
        capsys.readouterr()  # what the reports before have printed
        error = refused(capsys, report_on, tiny, tmp_path, *flags)
        assert said in error and "delete" not in error
        assert report_on(tiny, tmp_path, "--mixed", *flags)["is_mixed"]
    assert record.read_bytes() == before


def test_a_preset_is_not_reported_as_another(
    two_presets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(tmp_path / "runs" / "low-seed0")
    with pytest.raises(SystemExit):
        report_on(two_presets, tmp_path, preset="paper")
    assert "preset (small, not paper); give the --preset" in capsys.readouterr().err


def test_other_numbers_of_prompts_are_one_line(
    two_presets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("low-seed0", "low-seed1", "high-seed0", "high-seed1"):
        finish(tmp_path / "runs" / name)
    path = tmp_path / "runs" / "high-seed1" / "summary.json"
    summary = json.loads(path.read_text())
    summary["sets"]["bandit"]["prompt_success"] = [1.0, 0.0]
    write_json(path, summary)
    with pytest.raises(SystemExit):
        report_on(two_presets, tmp_path)
    assert "bandit high-seed1 has 2" in capsys.readouterr().err
    assert not (tmp_path / "reports").exists()


def test_presets_have_pages_of_their_own(two_presets: Path, tmp_path: Path) -> None:
    finish(tmp_path / "runs" / "low-seed0")
    report_on(two_presets, tmp_path)
    (tmp_path / "runs" / study_runs.IDENTITY).unlink()
    paper = Study.read(two_presets, "paper")
    study_runs.claim_folder(tmp_path / "runs", paper, "none", mixed=False)
    assert report_on(two_presets, tmp_path, preset="paper")["study"]["preset"] == "paper"
    pages = {path.name for path in (tmp_path / "reports").iterdir()}
    names = ("tiny", "tiny_paper")
    assert pages == {f"{name}.{kind}" for name in names for kind in ("md", "json", "svg")}
    text = (tmp_path / "reports" / "tiny_paper.md").read_text()
    assert text.startswith("# Tiny\n") and "(tiny_paper.svg)" in text
    assert "Preset `small`" in (tmp_path / "reports" / "tiny.md").read_text()


def test_a_claim_that_nothing_measures_is_said_to_be_not_run(
    two_presets: Path, tmp_path: Path
) -> None:
    """Its arm has not finished, or its set, e.g. for a slip of the pen, is not evaluated."""
    page, row = tmp_path / "reports" / "tiny.md", "| more is more | {} | high - low | {} |"
    finish(tmp_path / "runs" / "low-seed0")
    report_on(two_presets, tmp_path)
    assert row.format("bandit", "- | not run") in page.read_text()
    finish(tmp_path / "runs" / "high-seed0")
    report_on(two_presets, tmp_path)
    assert "not run" not in page.read_text() and "| more is more | bandit |" in page.read_text()
    two_presets.write_text(two_presets.read_text().replace('set = "bandit"', 'set = "bandti"'))
    report_on(two_presets, tmp_path)
    assert row.format("bandti", "- | not run") in page.read_text()


def test_a_report_of_nothing_leaves_nothing(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "holds no study" in refused(capsys, report_on, tiny, tmp_path)
    assert not (tmp_path / "runs").exists()


def test_players_stand_beside_arms_of_other_rules(two_presets: Path, tmp_path: Path) -> None:
    runs, page = tmp_path / "runs", tmp_path / "reports" / "tiny.md"
    finish(runs / "low-seed0")
    finish(runs / "high-seed0")
    same = report_on(two_presets, tmp_path)["sets"]["bandit"]
    assert (same["random"], same["optimum"]) == (0.25, 1.0)
    assert "| random player | 25.0% |" in page.read_text()
    finish(runs / "high-seed1", 0.125, None)
    finish(runs / "low-seed1")
    (runs / "high-seed0" / "summary.json").unlink()
    other = report_on(two_presets, tmp_path)["sets"]["bandit"]
    assert other["random"] is None and other["optimum"] is None
    assert [other["arms"][arm]["random"] for arm in ("low", "high")] == [0.25, 0.125]
    assert [other["arms"][arm]["optimum"] for arm in ("low", "high")] == [1.0, None]
    lines = page.read_text().splitlines()
    assert not any(line.startswith("| random player") for line in lines)
    head, low, high = (
        next(line for line in lines if line.startswith(start))
        for start in ("| arm |", "| low |", "| high |")
    )
    assert head.endswith(
        "| random player | optimum player | Mtokens | minutes without warm start |"
    )
    assert "| 25.0% | 100.0% | 0.00 | 0.1 |" in low and "| 12.5% | - | 0.00 | 0.1 |" in high


def test_ranks_that_do_not_fit_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, lines = tmp_path / "runs", tmp_path / "lines.txt"
    words = ["staleness", "--slurm", str(lines), "--output", str(runs)]
    assert "arm fresh: rollout_ranks (1)" in refused(capsys, tool.main, words)
    assert not runs.exists()
    tool.main([*words, "--ranks", "2"])
    assert len(lines.read_text().splitlines()) == 21


def run_study(tiny: Path, folder: Path, *flags: str) -> list[str]:
    where = ("--output", folder / "runs", "--reports", folder / "reports", *flags)
    return [sys.executable, "-m", PROGRAM, "study", str(tiny), *map(str, where)]


@pytest.mark.parametrize("failure", ["bytes", "program", "log"])
def test_a_run_that_fails_in_any_way_leaves_the_others(
    failure: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its output is no text, its program is not there, or its log cannot be written."""
    said = r"import sys; sys.stdout.buffer.write(b'\xff\xfe'); sys.exit(3)"
    command = ["/no/such/program"] if failure == "program" else [sys.executable, "-c", said]
    log = tmp_path / ("none/bad.log" if failure == "log" else "bad.log")
    after = [sys.executable, "-c", f"open({str(tmp_path / 'done')!r}, 'w')"]
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # handlers of this process stay
    runner = study_runs.Runner(
        [
            study_runs.Job("bad", command, log, None),
            study_runs.Job("good", after, tmp_path / "good.log", None),
        ]
    )
    runner.run(1)
    assert (runner.failed, runner.done) == (["bad"], 2)
    assert (tmp_path / "done").exists()
    assert "bad failed" in capsys.readouterr().out


class SlowPool(ThreadPoolExecutor):
    """The first run has begun, and been stopped, before the second worker is there."""

    def submit(self, *work: Any, **more: Any) -> Future:
        begun = super().submit(*work, **more)
        time.sleep(1.0)
        return begun


class DeafPool(ThreadPoolExecutor):
    """No signal interrupts the main thread from then on, as one does not that comes just before the
    thread waits: the process gets it, and handles it when the thread runs next.
    """

    def submit(self, *work: Any, **more: Any) -> Future:
        begun = super().submit(*work, **more)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return begun


def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *signals: list[signal.Signals]) -> int:
    """The exit code of a study whose run ends at the second SIGTERM: the first signals come once
    the run is there, the next ones after its first SIGTERM.
    """
    stubborn = "trap 'trap - TERM; echo first' TERM; echo up; while true; do sleep 0.1; done"
    log, handlers = tmp_path / "slow.log", [*map(signal.getsignal, SIGNALS)]

    def find_jobs(*_: Any, **__: Any) -> list[study_runs.Job]:
        threading.Thread(target=stop).start()
        return [study_runs.Job("slow", ["bash", "-c", stubborn], log, None)]

    def stop() -> None:
        for line, numbers in zip(("up", "first"), signals, strict=True):
            wait_until(lambda line=line: log.exists() and line in log.read_text())
            for number in numbers:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(tool, "find_jobs", find_jobs)
    try:
        with pytest.raises(SystemExit) as left:
            tool.main(["staleness", "--ranks", "2", "--output", str(tmp_path / "runs")])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    assert [*map(signal.getsignal, SIGNALS)] == handlers
    return left.value.code


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, SlowPool, DeafPool])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_study_that_is_stopped_says_by_what_and_passes_a_second_signal_on(
    number: signal.Signals, pool: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_runs, "ThreadPoolExecutor", pool)
    second = signal.SIGTERM if number == signal.SIGUSR1 else number
    before = signal.signal(number, signal.SIG_DFL)  # nohup lets these tests ignore SIGHUP
    try:
        assert stopped(tmp_path, monkeypatch, [number], [second]) == 128 + number
    finally:
        signal.signal(number, before)


def test_a_study_outlives_its_terminal_where_nohup_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = [signal.SIGHUP, signal.SIGTERM], [signal.SIGTERM]
        assert stopped(tmp_path, monkeypatch, *signals) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_warning_of_a_scheduler_is_no_second_signal() -> None:
    """It would end the runs without a checkpoint."""
    sent = []
    runner = study_runs.Runner([])
    runner._running["one"] = SimpleNamespace(terminate=lambda: sent.append("SIGTERM"))
    for name, num_sent in [("USR1", 1), ("USR1", 1), ("TERM", 2), ("USR1", 2), ("HUP", 3)]:
        runner._stop(signal.Signals[f"SIG{name}"], None)
        assert len(sent) == num_sent
    assert runner.stopped_by == signal.SIGUSR1


@pytest.mark.slow
def test_a_stopped_study_goes_on(tiny: Path, tmp_path: Path) -> None:
    """Stopped while its first run trains: the run ends with a checkpoint, and the same command
    finishes all.
    """
    words = run_study(tiny, tmp_path, "--seeds", "2", "--jobs", "2")
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: any((tmp_path / "runs").glob("*/metrics.jsonl")))
    process.send_signal(signal.SIGINT)
    assert "goes on" in process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert any((tmp_path / "runs").glob("*/checkpoints/*"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "reports" / "tiny.json").read_text())
    assert len(report["runs"]) == 4
    text = (tmp_path / "reports" / "tiny.md").read_text()
    assert "| more is more | bandit | high - low |" in text and "random player" in text
    assert (tmp_path / "reports" / "tiny.svg").stat().st_size > 1000
    for seed in range(2):
        low, high = (tmp_path / "runs" / f"{arm}-seed{seed}" for arm in ("low", "high"))
        starts = [run / "warm_start" / "model.safetensors" for run in (low, high)]
        assert starts[0].read_bytes() == starts[1].read_bytes()
        taken = json.loads((high / "config.json").read_text())["warm_start"]["warm_start_from"]
        assert taken == str(low)


def test_the_pretrained_study_is_the_papers() -> None:
    """Model, batch, lengths and arms of arXiv:2504.20073, on a GPU that they fit on."""
    study = Study.read(tool.STUDIES / "pretrained.toml", "paper")
    games, kinds = ("bandit", "sokoban", "frozen_lake"), ("ppo", "grpo", "starpo-s")
    assert [arm.name for arm in study.arms] == [f"{g}-{kind}" for g in games for kind in kinds]
    for arm in study.arms:
        game, _, kind = arm.name.partition("-")
        config = parse(study_runs.flags_of(study, arm, "none"))
        rollout, train, loss = config.rollout, config.train, config.loss
        assert config.model.load == "Qwen/Qwen2.5-0.5B-Instruct" and config.parallel.bf16
        assert (rollout.num_groups, rollout.group_size, train.minibatch_size) == (8, 16, 32)
        assert (train.num_steps, train.updates_per_rollout, train.lr) == (200, 1, 1e-6)
        assert [*config.environment.shares] == [game] and loss.entropy_coef == 0.001
        one_shot = game == "bandit"
        assert config.environment.expected_response_length == (500 if one_shot else 400)
        assert config.environment.expected_turns == (1 if one_shot else 5)
        assert config.advantage.uses_critic == (kind != "grpo")
        robust = kind == "starpo-s"
        assert config.filter.num_kept(8) == (2 if robust else 8)
        assert (loss.clip_ratio_low, loss.clip_ratio_high) == (0.2, 0.28 if robust else 0.2)
        terms = (config.advantage.kl_reward_coef, loss.kl_coef)
        assert terms == {"ppo": (0.001, 0), "grpo": (0, 0.001), "starpo-s": (0, 0)}[kind]
        shape = ModelShape.of(model_config(config.model.load))
        phases = plan(shape, Setting.from_config(config, 1)).values()
        assert max(sum(terms.values()) for terms in phases) < 72 * GIB, "of an H100's 80"


def test_a_study_may_get_more_arms_and_another_text(tiny: Path, tmp_path: Path) -> None:
    folder, more = tmp_path / "runs", TINY.replace("nowhere", "somewhere")
    study_runs.claim_folder(folder, Study.read(tiny), "none", mixed=False)
    more += '[[arms]]\nname = "more"\nflags = ""\n'
    tiny.write_text(more)
    assert not study_runs.claim_folder(folder, Study.read(tiny), "none", mixed=False)
    tiny.write_text(more.replace("--lr 1e-4", "--lr 2e-4"))
    with pytest.raises(ValueError, match="other study"):
        study_runs.claim_folder(folder, Study.read(tiny), "none", mixed=False)


def test_a_report_keeps_the_code_of_the_runs(tiny: Path, tmp_path: Path) -> None:
    study, identity = Study.read(tiny), tmp_path / "runs" / study_runs.IDENTITY
    study_runs.claim_folder(identity.parent, study, "none", mixed=False)
    state = json.loads(identity.read_text()) | {"code": "older"}
    identity.write_text(json.dumps(state))
    assert study_runs.recorded(identity.parent, study, None, mixed=False)[2] is False
    assert json.loads(identity.read_text()) == state
