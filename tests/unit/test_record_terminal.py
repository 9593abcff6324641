"""A recording shows what the terminal showed: the same letters in the same places, each as long as
it was there.
"""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "record_terminal.py"
SVG = "{http://www.w3.org/2000/svg}"
PROGRAM = r"""
import time
print("first line", flush=True)
for done in range(3):
    print(f"\rat {done} of 2", end="", flush=True)
    time.sleep(0.3)
print("\n\x1b[31mred <&> \x1b[0mend")
print("replaced\n\x1b[1A\x1b[2Kin its place")
"""
LAST = ["first line", "at 2 of 2", "red <&> end", "in its place"]


def record(output: Path, *words: str, frames: int = 60) -> subprocess.CompletedProcess:
    flags = ["--output", str(output), "--columns", "60", "--rows", "9", "--seconds", "8"]
    flags += ["--frames", str(frames)]
    return subprocess.run(
        [sys.executable, str(TOOL), *flags, *words], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[ElementTree.Element]:
    """The texts of a recording, each with its animation."""
    folder = tmp_path_factory.mktemp("recording")
    (folder / "program.py").write_text(PROGRAM)
    picture = folder / "pictures" / "run.svg"
    done = record(picture, sys.executable, str(folder / "program.py"))
    assert done.returncode == 0, done.stderr
    return texts(picture)


def texts(picture: Path) -> list[ElementTree.Element]:
    found = ElementTree.parse(picture).getroot().iter(f"{SVG}text")
    return [row for row in found if row.find(f"{SVG}animate") is not None]


def letters(row: ElementTree.Element) -> str:
    return "".join(span.text or "" for span in row.iter(f"{SVG}tspan"))


def shown(row: ElementTree.Element) -> tuple[float, float]:
    """From when until when, as shares of the cycle."""
    times = [float(time) for time in row.find(f"{SVG}animate").get("keyTimes").split(";")]
    values = row.find(f"{SVG}animate").get("values").split(";")
    start = times[values.index("visible")]
    return start, ([*times[values.index("visible") + 1 :], 1.0])[0]


def test_without_animation_the_last_screen_stands_there(rows: list[ElementTree.Element]) -> None:
    still = [row for row in rows if row.get("visibility") != "hidden"]
    heights = [float(row.get("y")) for row in still]
    assert heights == sorted(set(heights))
    lines = [letters(row) for row in still]
    assert lines[-len(LAST) :] == LAST
    assert lines[0].startswith("$ ")


def test_a_row_that_changes_is_shown_one_after_the_other(rows: list[ElementTree.Element]) -> None:
    progress = [row for row in rows if letters(row).startswith("at ")]
    assert [letters(row) for row in progress] == ["at 0 of 2", "at 1 of 2", "at 2 of 2"]
    assert len({row.get("y") for row in progress}) == 1
    moments = [shown(row) for row in progress]
    for (start, end), (following, _) in zip(moments, moments[1:], strict=False):
        assert 0 < start < end == following
    assert moments[-1][1] == 1.0


def test_a_row_that_changes_often_is_drawn_so_many_times_at_most(tmp_path: Path) -> None:
    code = (
        "import time\nfor i in range(40): print(f'\\rat {i}', end='', flush=True); time.sleep(0.06)"
    )
    assert record(tmp_path / "run.svg", sys.executable, "-c", code, frames=4).returncode == 0
    seen = [letters(row) for row in texts(tmp_path / "run.svg") if letters(row).startswith("at ")]
    assert 2 <= len(seen) <= 4 and seen[-1] == "at 39"


def test_colours_are_those_of_the_terminal(rows: list[ElementTree.Element]) -> None:
    (row,) = (row for row in rows if letters(row) == "red <&> end")
    spans = [(span.text, span.get("fill") is None) for span in row.iter(f"{SVG}tspan")]
    assert spans == [("red <&> ", False), ("end", True)]


def test_a_command_that_fails_leaves_no_picture(tmp_path: Path) -> None:
    done = record(tmp_path / "run.svg", "bash", "-c", "echo why; exit 3")
    assert done.returncode == 2 and not (tmp_path / "run.svg").exists()
    assert done.stderr.count("\n") == 1 and "code 3" in done.stderr and "why" in done.stderr
