"""Record what a command shows in a terminal as one animated SVG, which a browser plays by itself.

    python tools/record_terminal.py --output docs/pictures/bandit.svg \\
        bash examples/pretrain_starpo.sh --recipe bandit

Flags of this tool come before the command. The picture is the real output, letter by letter; only
its time is compressed, and its title says from what. Rows that are replaced (progress bars) are
drawn at most --frames times. A viewer that does not animate shows the last screen.
"""

import fcntl
import os
import pty
import select
import shlex
import struct
import subprocess
import termios
import time
from argparse import REMAINDER, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from ragen_mega.commands.command_line import command, flag

try:
    import pyte
except ModuleNotFoundError:
    raise SystemExit("error: a recording needs pyte; pip install -e '.[test]'") from None

SAMPLE = 0.05
"""Seconds between two samples of the screen while output arrives."""
HOLD = 5.0
"""Seconds for which the last screen stays before the picture begins again."""
CELL, LINE, SIZE, MARGIN = 7.8, 17, 13, 14
"""Width and height of a cell, size of the letters, distance to the frame, in pixels."""
PAPER, INK = "#16181d", "#d6d9df"
PALETTE = {
    "black": "#5c6370",
    "red": "#f0717b",
    "green": "#98c379",
    "brown": "#e5c07b",
    "blue": "#61afef",
    "magenta": "#c678dd",
    "cyan": "#56b6c2",
    "white": INK,
    "brightblack": "#7f848e",
}
"""Terminal colour, as pyte calls it, to what is drawn on the dark ground. Others come as RRGGBB."""

Run = tuple[int, str, str]
"""Column, text and colour of neighbouring cells that look alike."""
Row = tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """The screen as of `seconds` after the command's start."""

    seconds: float
    rows: tuple[Row, ...]


def record(words: Sequence[str], *, columns: int, rows: int) -> list[Frame]:
    """Run a command in a terminal of that size and return its screens, the last included.

    Raises ValueError if the command fails.
    """
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {shlex.join(words)}\r\n".encode())
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    start = time.monotonic()
    child = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    frames = [Frame(0.0, _rows(screen))]
    while output := _read(ours, SAMPLE):
        stream.feed(output)
        frames.append(Frame(time.monotonic() - start, _rows(screen)))
    os.close(ours)
    if child.wait():
        raise ValueError(
            f"the command ended with code {child.returncode}; the last lines were:"
            f" {' / '.join(line for line in text(frames[-1])[-3:])}"
        )
    return frames


def _read(terminal: int, seconds: float) -> bytes:
    """What arrives until the terminal is silent or `seconds` have passed since its first byte;
    nothing once all who write to it have ended.
    """
    output, end = b"", None
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        if not select.select([terminal], [], [], left)[0]:
            return output
        try:
            arrived = os.read(terminal, 65536)
        except OSError:  # on Linux: the other side is closed
            arrived = b""
        if not arrived:
            return output
        output += arrived
        end = end or time.monotonic() + seconds


def _rows(screen: pyte.Screen) -> tuple[Row, ...]:
    rows = []
    for line in range(screen.lines):
        cells = [screen.buffer[line][column] for column in range(screen.columns)]
        while cells and cells[-1].data == " ":
            cells.pop()
        runs, column = [], 0
        for colour, alike in groupby(cells, key=lambda cell: cell.fg):
            letters = "".join(cell.data for cell in alike)
            runs.append((column, letters, colour))
            column += len(letters)
        rows.append(tuple(runs))
    while rows and not rows[-1]:
        rows.pop()
    return tuple(rows)


def text(frame: Frame) -> list[str]:
    """The lines of a screen."""
    return ["".join(letters for _, letters, _ in row) for row in frame.rows]


def thin(frames: Sequence[Frame], count: int) -> list[Frame]:
    """The last of the frames in each of `count` equal parts of the time; first and last stay."""
    end = frames[-1].seconds
    kept = [frames[0]]
    for _, part in groupby(frames[1:], key=lambda frame: int(count * frame.seconds / end - 1e-9)):
        *_, last = part
        kept.append(last)
    return kept


def draw(frames: Sequence[Frame], *, title: str, columns: int, seconds: float) -> str:
    """The SVG that plays `frames` in `seconds` and then holds the last one."""
    speed = seconds / (frames[-1].seconds or 1.0)
    height = max(len(frame.rows) for frame in frames)
    wide, high = round(columns * CELL + 2 * MARGIN), (height + 1) * LINE + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}"'
        ' xml:space="preserve">',
        f"<style>text{{font:{SIZE}px ui-monospace,Menlo,Consolas,monospace;fill:{INK};"
        "white-space:pre}</style>",
        f'<rect width="{wide}" height="{high}" rx="8" fill="{PAPER}" stroke="{PALETTE["black"]}"/>',
        f'<text x="{wide / 2:g}" y="{MARGIN + 8}" text-anchor="middle"'
        f' opacity=".6">{escape(title)}</text>',
    ]
    for line in range(height):
        seen = [(frame.seconds * speed, frame.rows[line : line + 1]) for frame in frames]
        changes = [next(alike) for _, alike in groupby(seen, key=lambda moment: moment[1])]
        ends = [start for start, _ in changes[1:]] + [None]
        for (start, row), end in zip(changes, ends, strict=True):
            if row and row[0]:
                y = (line + 2) * LINE + MARGIN
                parts.append(_text(row[0], y, start, end, seconds + HOLD))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(row: Row, y: int, start: float, end: float | None, cycle: float) -> str:
    """One row as it looks from `start` to `end` (None: to the end) of each `cycle` seconds."""
    spans = "".join(
        f'<tspan x="{MARGIN + column * CELL:g}" textLength="{len(letters) * CELL:g}"'
        f"{_fill(colour)}>{escape(letters)}</tspan>"
        for column, letters, colour in row
        if letters.strip()
    )
    moments = [(0.0, "hidden")] * (start > 0) + [(start / cycle, "visible")]
    moments += [(end / cycle, "hidden")] if end is not None else []
    values, times = ";".join(v for _, v in moments), ";".join(f"{t:.4f}" for t, _ in moments)
    hidden = ' visibility="hidden"' if end is not None else ""
    return (
        f'<text y="{y}"{hidden}>{spans}<animate attributeName="visibility" calcMode="discrete"'
        f' values="{values}" keyTimes="{times}" dur="{cycle:g}s" repeatCount="indefinite"/></text>'
    )


def _fill(colour: str) -> str:
    if colour == "default":
        return ""
    return f' fill="{PALETTE[colour] if colour in PALETTE else "#" + colour}"'


@command(
    __doc__,
    flag("--output", "the picture", type=Path, required=True),
    flag("--columns", "width of the terminal in cells", 108),
    flag("--rows", "height of the terminal in cells; what scrolls out is lost", 50),
    flag("--seconds", "for how long the picture plays", 24.0),
    flag("--frames", "how often a row can change at most", 60),
    flag("words", "the command", nargs=REMAINDER),
)
def main(arguments: Namespace) -> None:
    if not arguments.words:
        raise ValueError("name a command behind the flags, e.g. bash examples/pretrain_starpo.sh")
    frames = record(arguments.words, columns=arguments.columns, rows=arguments.rows)
    took = f"{frames[-1].seconds:.0f} s, played in {arguments.seconds:.0f} s"
    picture = draw(
        thin(frames, arguments.frames),
        title=took,
        columns=arguments.columns,
        seconds=arguments.seconds,
    )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(picture)


if __name__ == "__main__":
    main()
