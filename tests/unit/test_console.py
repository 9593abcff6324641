"""What a run prints, to a pipe and to a terminal, and that an error is one line however many ranks
meet it.
"""

import io
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ragen_mega.report.console import (
    COLUMNS,
    ROWS_BETWEEN_HEADERS,
    Console,
    fail,
    set_titles,
)
from ragen_mega.report.metrics import Metrics
from ragen_mega.report.step_metrics import collapse_signals
from ragen_mega.report.terminal import command_line

METRICS = {
    "rollout/success": 0.3125, "rollout/random": 0.212, "rollout/optimum": 0.477,
    "rollout/reward": 0.25, "rollout/in_group_std": 0.4, "actor/entropy": 1.5,
    "actor/grad_norm": 0.75, "actor/clip_fraction_low": 0.01, "actor/clip_fraction_high": 0.02,
    "mismatch/logprob_mean_abs_diff": 3e-6, "time/step": 4.2, "rollout/tokens_per_second": 1234.0,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def lines_of(output: io.StringIO) -> list[str]:
    """What was printed below the legend."""
    lines = output.getvalue().splitlines()
    return lines[len(COLUMNS) + 2 :]


def test_the_spread_is_of_what_the_terms_of_the_reward_pay():
    """A run that learns from a term showed 0.000 where failures alone differ by it."""
    (column,) = (column for column in COLUMNS if column.title == "grp std")
    assert column.cell(METRICS).strip() == "0.400"
    assert column.cell(METRICS | {"reward/in_group_std": 0.7}).strip() == "0.700"
    for logged, seen in ((METRICS, 0.4), (METRICS | {"reward/in_group_std": 0.7}, 0.7)):
        metrics = Metrics()
        for key, value in logged.items():
            metrics.add(key.partition("/")[0], {key.partition("/")[2]: value})
        assert collapse_signals(metrics)["reward_std"] == seen


def test_a_step_is_one_row_under_its_headings_and_a_legend():
    output = io.StringIO()
    Console(is_writer=True, num_steps=8, file=output, clock=lambda: 0.0).step(7, METRICS)
    header, row = lines_of(output)
    assert (
        row.split() == "7 31.2% 21.2% 47.7% 0.250 0.400 1.500 0.75 3.00% 3.0e-06 4.2 1234 -".split()
    )
    assert len(header) == len(row)
    legend = output.getvalue().splitlines()[1 : len(COLUMNS) + 1]
    for column, line in zip(COLUMNS, legend, strict=True):
        end = header.index(column.title) + len(column.title)
        assert row[:end].endswith(column.cell(METRICS).strip())
        assert line.startswith(f"  {column.title} ") and line.endswith(column.about)


def test_what_was_not_measured_is_a_dash_and_a_lost_number_is_seen():
    output = io.StringIO()
    Console(is_writer=True, num_steps=1, file=output).step(0, {"actor/entropy": float("nan")})
    assert lines_of(output)[1].split()[:12] == ["0", *"-----", "nan", *"-----"]


def test_names_are_printed_as_they_are() -> None:
    output = io.StringIO()
    Console(is_writer=True, num_steps=1, file=output).say("mine:Ledger: [red] 50%")
    assert output.getvalue().splitlines()[-1] == "mine:Ledger: [red] 50%"


def test_headings_are_repeated_and_the_legend_is_not():
    output = io.StringIO()
    console = Console(is_writer=True, num_steps=200, file=output)
    for step in range(ROWS_BETWEEN_HEADERS + 1):
        console.step(step, METRICS)
    lines = lines_of(output)
    headers = [number for number, line in enumerate(lines) if "success" in line]
    assert headers == [0, ROWS_BETWEEN_HEADERS + 1]


def test_other_ranks_are_silent():
    output = Terminal()
    console = Console(is_writer=False, num_steps=1, file=output)
    console.say("x")
    console.step(0, METRICS)
    console.evaluations("x", {})
    with console.progress("rollout", total=3) as phase:
        phase.advance(2)
        assert phase.done == 2
    assert output.getvalue() == ""


def test_without_a_terminal_a_phase_prints_plain_lines_and_not_too_many():
    output, now = io.StringIO(), [0.0]
    console = Console(is_writer=True, num_steps=0, file=output, clock=lambda: now[0])
    with console.progress("warm start", total=100) as phase:
        for step in range(100):
            now[0] += 0.6
            if step == 50:
                console.say("something else")  # counts as a sign of life
            phase.advance(note=f"loss {step}")
    assert output.getvalue().splitlines() == [
        "warm start 34/100 loss 33, about 40 s left",
        "something else",
        "warm start 85/100 loss 84, about 9 s left",
    ]
    assert "\x1b" not in output.getvalue()


def test_the_first_of_many_turns_says_nothing_about_the_time_left() -> None:
    """It took the prompts of all 256 episodes, of which each has up to ten turns."""
    console = Console(is_writer=False, num_steps=0)
    with console.progress("evaluate", total=256, max_turns=10) as phase:
        phase.turn(num_tokens=14, is_over=False)
        assert phase.left(21.0) == ""
        for _ in range(255):
            phase.turn(num_tokens=14, is_over=False)
        assert phase.left(40.0) == ""
        for _ in range(256):
            phase.turn(num_tokens=14, is_over=False)
        assert phase.left(59.0) == ", about 3 min left"  # eight further rounds of 19 s


@pytest.mark.parametrize("output", [io.StringIO(), Terminal()])
def test_a_long_rollout_shows_its_turns_and_the_run(output):
    """Nothing has ended yet, and it is seen that something happens."""
    now = [0.0]
    console = Console(is_writer=True, num_steps=10, file=output, clock=lambda: now[0])
    console.step(2, {"time/step": 300.0})  # the first of the process compiles, and does not count
    console.step(3, {"time/step": 60.0})
    with console.open(), console.progress("rollout", total=4, max_turns=5) as rollout:
        for _ in range(8):
            now[0] += 3.0
            rollout.turn(100, False)
        assert rollout.done == 8 / 5
        rollout.turn(100, True)
        now[0] += 30.0
        rollout.turn(0, True)
        assert rollout.done == 2
        deadline = time.monotonic() + 30  # bars are drawn by a thread
        while "2/4 episodes, 10 turns, 900 tokens" not in output.getvalue():
            assert time.monotonic() < deadline, output.getvalue()
            time.sleep(0.05)
    assert "4 of 10 steps, 54 s so far, about 5 min left" in output.getvalue()


@pytest.mark.parametrize("output", [io.StringIO(), Terminal()])
def test_a_resumed_run_counts_the_steps_before_it(output):
    now = [0.0]
    console = Console(is_writer=True, num_steps=8, file=output, clock=lambda: now[0])
    console.resumed(5)
    with console.open() as bars, console.progress("rollout", total=2) as rollout:
        now[0] += 30.0
        rollout.advance()
        assert bars is None or bars.tasks[0].completed == 5
    assert bars or output.getvalue() == "rollout 1/2 (5 of 8 steps, 30 s so far)\n"


def test_a_terminal_gets_bars_also_nested_ones_and_they_leave_no_trace():
    output = Terminal()
    console = Console(is_writer=True, num_steps=1, file=output)
    with console.progress("rollout", total=4) as rollout, console.progress("update") as update:
        rollout.advance(3)
        update.advance(note="loss 0.5")
        console.say("above [the] bars")
    text = output.getvalue()
    assert "rollout" in text and "above [the] bars" in text and "\x1b[" in text
    with console.progress("update"):
        pass
    # Each display hides the cursor once, the nested bar shares its parent's, and none is left
    # running.
    assert output.getvalue().count("\x1b[?25l") == output.getvalue().count("\x1b[?25h") == 2


def test_an_error_in_a_phase_ends_its_bar():
    console = Console(is_writer=True, num_steps=1, file=Terminal())
    with pytest.raises(KeyError), console.progress("rollout"):
        raise KeyError
    with console.progress(
        "rollout"
    ):  # a second live display would be refused while the first is on
        pass


def test_table_of_evaluated_sets():
    output = io.StringIO()
    result = {
        "success": 0.41,
        "ci_low": 0.352,
        "ci_high": 0.471,
        "random": 0.212,
        "optimum": 0.477,
        "num_prompts": 256,
    }
    Console(is_writer=True, num_steps=1, file=output).evaluations(
        "boards", {"frozen_lake_4x4_p0.8": result}
    )
    (row,) = [line for line in output.getvalue().splitlines() if "frozen_lake_4x4_p0.8" in line]
    assert [cell.strip() for cell in row.split("\u2502")][1:-1] == [
        "frozen_lake_4x4_p0.8",
        "41.0%",
        "35.2% - 47.1%",
        "21.2%",
        "47.7%",
        "256",
    ]


def test_a_file_of_tasks_is_named_without_its_folders_where_no_other_set_is_alike():
    alone = ["tasks:/work/runs/chain.jsonl", "tasks:other.jsonl", "gymnasium:ns/Taxi-v3"]
    assert list(set_titles(alone).values()) == [
        "tasks:chain.jsonl",
        "tasks:other.jsonl",
        "gymnasium:ns/Taxi-v3",
    ]
    alike = ["tasks:a/chain.jsonl", "tasks:b/chain.jsonl"]
    assert set_titles(alike) == {name: name for name in alike}
    output = io.StringIO()
    numbers = dict.fromkeys(("success", "ci_low", "ci_high", "random", "optimum"), 1.0)
    Console(is_writer=True, num_steps=1, file=output).evaluations(
        "x", {alone[0]: numbers | {"num_prompts": 4}}
    )
    assert "tasks:chain.jsonl" in output.getvalue() and "/work" not in output.getvalue()


def test_a_long_name_cuts_no_other_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    output, name = io.StringIO(), "gymnasium:my_module_with_a_long_name:CliffWalking-v1"
    result = dict.fromkeys(("success", "ci_low", "ci_high", "random", "optimum"), 1.0)
    Console(is_writer=True, num_steps=1, file=output).evaluations(
        "256 boards", {name: result | {"num_prompts": 256}}
    )
    said = output.getvalue()
    for heading in ("success", "95% CI", "random", "optimum", "prompts"):
        assert heading in said
    assert "100.0% - 100.0%" in said and max(map(len, said.splitlines())) <= 80
    folded = "".join(line[1:].split("\u2502")[0].strip() for line in said.splitlines())
    assert name in folded


def test_ranks_of_one_torchrun_say_each_error_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import os
            from ragen_mega.report.console import fail
            fail("all fail alike" if os.environ["RANK"] != "2" else "rank 2 has its own")
            """)
    )
    (tmp_path / "attempt").mkdir()
    ranks = []
    for rank in range(4):
        error_file = tmp_path / "attempt" / str(rank) / "error.json"
        environment = {"RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error_file)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, script], stderr=subprocess.PIPE, text=True, env=environment
            )
        )
    lines = sorted(line for rank in ranks for line in rank.communicate()[1].splitlines())
    assert lines == ["error: all fail alike", "error: rank 2 has its own"]
    assert [rank.returncode for rank in ranks] == [2, 2, 2, 2]


def test_an_error_is_said_without_the_folder_of_torchrun(tmp_path, monkeypatch, capsys) -> None:
    """It is in /tmp, and may have been removed in a long run."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "0" / "error.json"))
    with pytest.raises(SystemExit):
        fail("the rule")
    assert capsys.readouterr().err == "error: the rule\n"


def test_control_characters_are_shown_as_text_on_a_terminal(capsys) -> None:
    """A world, a model or a judge may send them: a title, a clipboard, a line that is lost."""
    hostile = "a\x1b]0;title\x07b\x9b2Jc\rd\u202ee"
    output = Terminal()
    Console(is_writer=True, num_steps=1, file=output).say(hostile)
    with pytest.raises(SystemExit):
        fail(hostile)
    for said in (output.getvalue(), capsys.readouterr().err):
        assert "a\\x1b]0;title\\x07b\\x9b2Jc" in said and "\\u202ee" in said


@pytest.mark.parametrize(("path", "said"), [("on", ""), ("off", "source {}/activate; ")])
def test_a_command_can_be_typed_whether_or_not_its_environment_is_active(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "bin"
    scripts.mkdir()
    (scripts / "activate").touch()
    (scripts / "ragen-mega").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", str(scripts) if path == "on" else "/nowhere")
    assert command_line("view", "runs/a") == f"{said.format('bin')}ragen-mega view runs/a"
