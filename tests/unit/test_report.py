"""The report of finished runs: what is averaged, and where it says that they ran."""

from __future__ import annotations

import json
import shutil
import statistics
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from ragen_mega.commands import report
from ragen_mega.commands.command_line import report_folder
from ragen_mega.config import parse
from ragen_mega.report.markdown import table
from ragen_mega.report.plots import headless_pyplot
from ragen_mega.report.viewer.data import read_run
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]


def finished(
    directory: Path,
    success: dict[str, float],
    *flags: str,
    hardware: str | None = "a CPU",
    drop: tuple[str, str] | None = None,
) -> Path:
    """A run directory as a finished run leaves it; `drop` is a flag that did not exist then."""
    directory.mkdir(parents=True)
    config: dict[str, Any] = parse([*flags, "--name", directory.name]).to_dict()
    if drop:
        del config[drop[0]][drop[1]]
    (directory / "config.json").write_text(json.dumps(config))
    rows = [{"step": step, "rollout/success": 0.1 * step, "actor/entropy": 1.0} for step in (0, 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {
        name: {
            "success": value, "ci_low": 0.0, "ci_high": 1.0, "random": 0.2, "optimum": None,
            "num_prompts": 16, "reward": value - 0.25,
        }
        for name, value in success.items()
    }  # fmt: skip
    summary = {"sets": sets, "warm_start": sets, "steps": 2, "seconds": 60.0}
    summary |= {"hardware": hardware} if hardware else {}
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def read(*runs: Path) -> list[dict[str, Any]]:
    return [row for run in runs for row in report.rows_of(read_run(run))]


def test_runs_that_differ_by_their_seed_are_averaged_each_set_by_itself(tmp_path: Path) -> None:
    values = ({"bandit": 0.5, "sokoban": 0.1}, {"bandit": 0.75, "sokoban": 0.4})
    runs = [
        finished(tmp_path / f"run{seed}", value, "--seed", str(seed))
        for seed, value in enumerate(values)
    ]
    for mean in report.means(read(*runs)):
        expected = [value[mean["set"]] for value in values]
        assert mean["mean"] == pytest.approx(sum(expected) / 2) and mean["runs"] == ["run0", "run1"]
        assert mean["standard_deviation"] == pytest.approx(statistics.stdev(expected))
    assert len(report.means(read(*runs))) == 2


@pytest.mark.parametrize(
    ("flags", "is_averaged"),
    [
        ((), True),
        (("--seed", "3", "--output", "elsewhere", "--save-interval", "7"), True),
        (("--hidden-size", "64"), False),
        (("--load", "another/model"), False),
        (("--lr", "0.5"), False),
    ],
)
def test_only_the_same_model_under_the_same_settings_is_averaged(
    flags: tuple[str, ...], is_averaged: bool, tmp_path: Path
) -> None:
    runs = [
        finished(tmp_path / "a", {"bandit": 0.5}),
        finished(tmp_path / "b", {"bandit": 1}, *flags),
    ]
    assert bool(report.means(read(*runs))) == is_averaged


def test_runs_that_take_the_warm_start_of_their_seed_differ_by_the_seed(tmp_path: Path) -> None:
    """As every arm of a study but the first does."""
    taken = [("arm-seed1", 1, "low-seed1"), ("arm-seed12", 12, "low-seed12")]
    others = [("other", 3, "high-seed3"), ("odd", 4, "low-seed1"), ("own", 5, None)]
    runs = [
        finished(tmp_path / name, {"bandit": 0.5}, "--seed", str(seed), *start)
        for name, seed, source in (*taken, *others)
        for start in [("--warm-start-from", f"studies/s/{source}") if source else ()]
    ]
    (mean,) = report.means(read(*runs))
    assert mean["runs"] == ["arm-seed1", "arm-seed12"]


def test_a_run_older_than_a_flag_has_its_default(tmp_path: Path) -> None:
    old = finished(tmp_path / "old", {"bandit": 0.5}, drop=("train", "critic_lr"))
    same = finished(tmp_path / "same", {"bandit": 1.0})
    other = finished(tmp_path / "other", {"bandit": 0.0}, "--critic-lr", "0.5")
    (mean,) = report.means(read(old, same, other))
    assert mean["runs"] == ["old", "same"] and mean["mean"] == 0.75


def test_a_run_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    """As overlapping patterns of a shell do, or copied; mean and deviation are over two runs."""
    first = finished(tmp_path / "first", {"bandit": 0.5})
    second = finished(tmp_path / "second", {"bandit": 0.75}, "--seed", "1")
    copied = shutil.copytree(second, tmp_path / "copied")
    named = (first, second, tmp_path / "second" / ".." / "first", copied)
    flags = ("--output", str(tmp_path / "out"), "--title", "mine")
    report.main([*map(str, named), *flags])
    found = json.loads((tmp_path / "out" / "mine.json").read_text())
    assert len(found["runs"]) == 2
    (mean,) = found["means"]
    assert mean["mean"] == 0.625
    assert mean["standard_deviation"] == pytest.approx(statistics.stdev((0.5, 0.75)))


def test_hardware_is_that_of_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [finished(tmp_path / "new", {"bandit": 0.5}, hardware="another machine")]
    flags = ("--output", str(tmp_path / "out"), "--title", "mine")
    report.main([*map(str, runs), *flags])
    text = (tmp_path / "out" / "mine.md").read_text()
    assert text.splitlines()[2] == "another machine" and "Mean" not in text
    assert "| steps | minutes without warm start |" in text and "| 16 | 2 | 1.0 |" in text
    assert text in capsys.readouterr().out and (tmp_path / "out" / "mine.svg").exists()
    runs.append(finished(tmp_path / "old", {"bandit": 0.5}, hardware=None))
    (runs[1] / "events.jsonl").write_text('{"step": 1, "text": "entropy fell"}\n')
    report.main([*map(str, runs), *flags])
    text = (tmp_path / "out" / "mine.md").read_text()
    assert "another machine: new" in text and "unknown hardware: old" in text
    assert text.endswith("\n## Warnings\n\n- old, step 1: entropy fell\n")
    result = json.loads((tmp_path / "out" / "mine.json").read_text())
    assert result["hardware"] == "another machine, unknown hardware"
    assert [row["run"] for row in result["runs"]] == ["new", "old"]


@pytest.mark.parametrize("other", [{}, {"random": 0.3}, {"optimum": None}])
def test_the_plot_has_the_players_of_its_curves_and_evaluations_where_they_were_played(
    other: dict[str, float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs on two environments: the players of the mean, if both runs have the same, and the
    evaluation after step 1 at 2 steps.
    """
    for number in range(2):
        run = finished(tmp_path / f"run{number}", {"bandit": 0.5, "sokoban": 0.1})
        players = {"random": 0.25, "optimum": 0.75} | (other if number else {})
        rows = [
            {"step": step, "rollout/success": 0.3} | {f"rollout/{k}": v for k, v in players.items()}
            for step in (0, 1)
        ]
        rows[0]["eval/initial_success"], rows[1]["eval/success"] = 0.1, 0.4
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn: list[Any] = []
    monkeypatch.setattr(headless_pyplot(), "close", drawn.append)
    report.main([*(str(tmp_path / f"run{n}") for n in range(2)), "--output", str(tmp_path / "o")])
    lines = drawn[0].axes[0].lines
    evaluated = [line for line in lines if line.get_marker() == "o"]
    assert [line.get_xydata().tolist() for line in evaluated] == 2 * [[[0, 0.1], [2, 0.4]]]
    found = {line.get_label(): line.get_ydata()[0] for line in lines}
    for player, rate in {"random": 0.25, "optimum": 0.75}.items():
        assert found.get(player) == (None if player in other else rate)


def test_a_set_that_a_resume_added_has_no_warm_start(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", {"bandit": 0.5, "sokoban": 0.25})
    path = run / "summary.json"
    summary = json.loads(path.read_text())
    del summary["warm_start"]["sokoban"]
    path.write_text(json.dumps(summary))
    rows = read(run)
    assert [(row["set"], row["warm_start"]) for row in rows] == [("bandit", 0.5), ("sokoban", None)]
    assert "| run | sokoban | 25.0% (0.0% - 100.0%) | - | 20.0% | - |" in report.markdown("a", rows)


@pytest.mark.parametrize("title", ["a/b", "../mine", "", "."])
def test_a_title_that_is_no_name_of_a_file_is_one_line(
    title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = finished(tmp_path / "run", {"bandit": 0.5}), tmp_path / "reports" / "here"
    with pytest.raises(SystemExit) as left:
        report.main([str(run), "--title", title, "--output", str(output)])
    assert left.value.code == 2 and "--title names files" in capsys.readouterr().err
    assert not output.parent.exists()


@pytest.mark.parametrize(
    ("names", "title"), [(["a-1"], "a-1"), (["a-1", "a-2"], "a"), (["a", "b"], "report")]
)
def test_a_report_is_called_as_its_runs(names: list[str], title: str, tmp_path: Path) -> None:
    runs = [str(finished(tmp_path / name, {"bandit": 0.5})) for name in names]
    report.main([*runs, "--output", str(tmp_path / "out")])
    assert (tmp_path / "out" / f"{title}.md").read_text().startswith(f"# {title}\n")


def test_a_bar_in_a_name_stays_in_its_cell() -> None:
    said = table(("run", "success"), [("a|b", "1%")])
    assert said.splitlines()[-1] == r"| a\|b | 1% |"


def test_a_report_lies_beside_the_runs_and_in_the_repository_among_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(tmp_path / "runs" / "run", {"bandit": 0.5})
    monkeypatch.chdir(tmp_path)
    report.main(["runs/run", "--title", "mine"])
    assert "written to reports/mine.md" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "reports"}
    monkeypatch.chdir(ROOT)
    assert report_folder("docs/results", tmp_path) == Path("docs/results")


def test_a_report_holds_no_control_characters_of_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither on the terminal nor in the page: these write to the clipboard, and reorder words."""
    run = finished(tmp_path / "run", {"bandit": 0.5}, hardware="a\x9b2J CPU")
    said = "\x1b]52;c;ZXZpbA==\x07 \u202enrut\u202c \u061c"
    (run / "events.jsonl").write_text(json.dumps({"step": 1, "text": said}) + "\n")
    report.main([str(run), "--output", str(tmp_path / "out"), "--title", "mine"])
    page, printed = (tmp_path / "out" / "mine.md").read_text(), capsys.readouterr().out
    controls = {mark for mark in page + printed if unicodedata.category(mark) in ("Cc", "Cf")}
    assert controls == {"\n"} and page in printed
    assert r"- run, step 1: \x1b]52;c;ZXZpbA==\x07 \u202enrut\u202c \u061c" in page


def test_an_unfinished_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished(tmp_path / "run", {"bandit": 0.5})
    (run / "summary.json").unlink()
    argv = [str(run), "--title", "mine", "--output", str(tmp_path)]
    assert "has not finished" in refused(capsys, report.main, argv)
