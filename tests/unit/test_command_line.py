"""What the tools share: flags with one-line errors, ranks that are started, and the harness of the
benchmarks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ragen_mega.commands import replay, replayed_step
from ragen_mega.commands.command_line import JSON, command, flag, parse
from ragen_mega.ranks.launcher import run_ranks
from ragen_mega.report import hardware
from ragen_mega.report.provenance import read_settings
from tests.support.refusals import refused
from tools.benchmarks import bench_kernels, harness

FLAGS = (
    flag("--count", "a number", 3),
    flag("--share", "a fraction", 0.5),
    flag("--place", "a path", Path("here")),
    flag("--quick", "a switch", False),
    flag("--name", "no default", choices=("a", "b")),
)


def test_a_flag_has_the_type_of_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--count", "7", "--share", "1", "--place", "there", "--quick", "--name", "b"]
    found = vars(parse("manual", *FLAGS, argv=given))
    expected = {"count": 7, "share": 1.0, "place": Path("there"), "quick": True, "name": "b"}
    assert found == expected | {"others": [], "argv": given} and isinstance(found["share"], float)
    defaults = vars(parse("manual", *FLAGS, argv=[]))
    assert [defaults[key] for key in ("count", "quick", "name")] == [3, False, None]
    with pytest.raises(SystemExit):
        parse("manual", *FLAGS, argv=["--help"])
    said = capsys.readouterr().out
    assert "a number (default: 3)" in said and "None" not in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--count", "many"], "invalid int value: 'many'"),
        (["--cou", "1"], "unrecognized arguments: --cou 1"),
        (["--name", "c"], "invalid choice: 'c'"),
    ],
)
def test_bad_flags_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, parse, "manual", *FLAGS, argv=argv)
    assert parse("", *FLAGS, argv=["--more", "1"], takes_others=True).others == ["--more", "1"]


@pytest.mark.parametrize("name", ["missing/out.json", "."])
def test_a_result_that_cannot_be_written_is_refused_before_it_is_computed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse("", JSON, argv=["--json", str(tmp_path / "a.json")]).json == tmp_path / "a.json"
    error = refused(capsys, parse, "", JSON, argv=["--json", str(tmp_path / name)])
    assert "existing folder" in error


def test_bad_input_is_one_line_and_a_bug_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    @command("manual", *FLAGS)
    def main(arguments: argparse.Namespace) -> int:
        if arguments.quick:
            raise KeyError("a bug")
        if arguments.count > 3:
            raise ValueError("--count must be\nlower")
        return arguments.count

    assert refused(capsys, main, ["--count", "4"]) == "error: --count must be lower\n"
    with pytest.raises(KeyError):
        main(["--quick"])
    with pytest.raises(SystemExit) as left:
        main(["--count", "1"])
    assert left.value.code == 1
    main(["--count", "0"])


def test_ranks_that_fail_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "(Path(sys.argv[1]) / os.environ['RANK']).touch()\n"
        "if sys.argv[2:]:\n"
        "    print('error: no', file=sys.stderr); sys.exit(3)\n"
    )
    run_ranks(2, script, tmp_path)
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit) as left:
        run_ranks(2, script, tmp_path, "fail")
    assert left.value.code == 3 and "error: no" in capsys.readouterr().err


def test_settings_of_a_run_need_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        read_settings(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"train": {"lr": 0.25}}))
    settings, start = read_settings(tmp_path)
    assert start is None
    assert settings["train"]["lr"] == 0.25 and "seed" in settings["train"]
    assert "max_turns" in settings["environment"]


def test_jobs_take_turns() -> None:
    order: list[str] = []

    def job(name: str) -> int:
        order.append(name)
        return len(order)

    readings = harness.interleave({"a": lambda: job("a"), "b": lambda: job("b")}, 2, warmups=1)
    assert order == ["a", "b"] * 3 and readings == {"a": [3, 5], "b": [4, 6]}


@pytest.mark.parametrize("repetitions", [0, -1])
def test_no_repetition_is_no_benchmark(repetitions: int) -> None:
    """It would be published as a result without readings."""
    with pytest.raises(ValueError, match=f"at least 1 repetition .*{repetitions}"):
        harness.interleave({"a": lambda: pytest.fail("it was run")}, repetitions, warmups=1)


def test_the_benchmark_of_kernels_starts_as_documented() -> None:
    """It finds the folder `kernels/` by itself."""
    command = [sys.executable, bench_kernels.__file__, "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "--no-peers" in done.stdout, done.stderr


def test_a_budget_leaves_no_job_of_the_kernels_out() -> None:
    given = {"device": "cpu", "small": True, "no_compile": True, "budget": 70.0}
    names = [case.name for case in bench_kernels.all_cases(argparse.Namespace(**given))]
    jobs = len({*names})
    assert len({*names[:jobs]}) == jobs < len(names)


def test_a_report_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    report = harness.provenance() | {"spread": harness.spread([3.0, 1.0, 2.0])}
    text = harness.table(("job", "s"), [("a", 2.0)])
    harness.publish(argparse.Namespace(json=out), report, text)
    assert capsys.readouterr().out == text + "\n"
    assert text.splitlines() == ["| job | s |", "| --- | --- |", "| a | 2.0 |"]
    written = json.loads(out.read_text())
    assert written == report and written["spread"] == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert written["versions"]["torch"] == importlib.metadata.version("torch")


def test_hardware_is_one_line() -> None:
    line = hardware.describe()
    assert "\n" not in line and "none" not in line and hardware.device() in line
    assert f"python {hardware.platform.python_version()}" in line


def test_the_replay_of_agents_writes_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(replayed_step, "replay_agents", lambda arguments: ["it differs", "0 of 1"])
    words = ["--run", str(tmp_path), "--step", "0", "--agent-calls"]
    with pytest.raises(SystemExit, match="1"):
        replay.main([*words, "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == {"equal": False, "said": ["it differs", "0 of 1"]}
