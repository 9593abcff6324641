"""Record a command in a terminal as a picture that plays by itself: an SVG file with animations.

    pip install pyte==0.8.2
    python tools/record_terminal.py --output docs/pictures/bandit.svg -- \\
        bash examples/pretrain_starpo.sh --recipe bandit

Each line of the screen is one text element for each time span in which it does not change, so that
the file stays small. Where animations are not shown, the last screen stands.
"""

import argparse
import fcntl
import html
import os
import pty
import select
import shlex
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ragen_mega.commands.command_line import command, flag

CHARACTER, LINE, MARGIN, TOP = 7.8, 17, 14, 48
"""Pixels: width and height of a character, left margin, and the baseline of the first line."""
SECONDS_OF_FRAME, HOLD = 0.1, 5.0
COLOURS = {
    "red": "#e06c75",
    "green": "#98c379",
    "brown": "#e5c07b",  # pyte's name of yellow
    "blue": "#61afef",
    "magenta": "#c678dd",
    "cyan": "#56b6c2",
    "white": "#abb2bf",
    "black": "#5c6370",
}

FLAGS = (
    flag("--output", "SVG file to write", "terminal.svg"),
    flag("--columns", "of the terminal", 108),
    flag("--rows", "of the terminal; the picture is as high as the last line that is used", 60),
    flag("--speed", "seconds of the command that a second of the picture shows", 1.0),
    ("command", {"nargs": "+", "metavar": "-- COMMAND", "help": "to run"}),
)


class Span(NamedTuple):
    """Characters of a line in one style; `colour` is a hexadecimal number or `default`."""

    text: str
    colour: str
    bold: bool


Line = tuple[Span, ...]


def record(words: Sequence[str], columns: int, rows: int) -> Iterator[tuple[float, list[Line]]]:
    """Run a command; yields (seconds since its start, lines of the screen), for each frame in which
    the screen has changed. Raises SystemExit with the status of a command that fails.
    """
    import pyte

    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns), LINES=str(rows))
        os.execvp(words[0], list(words))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    start, shown = time.monotonic(), 0.0
    while True:
        ready, _, _ = select.select([terminal], [], [], SECONDS_OF_FRAME)
        now = time.monotonic() - start
        if screen.dirty and now - shown >= SECONDS_OF_FRAME:
            yield now, lines_of(screen)
            screen.dirty.clear()
            shown = now
        if ready:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # the command has ended and closed its terminal
                data = b""
            if not data:
                break
            stream.feed(data)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status:
        sys.exit(f"{shlex.join(words)} ended with status {status}")
    yield time.monotonic() - start, lines_of(screen)


def lines_of(screen: Any) -> list[Line]:
    """Return the lines of a `pyte.Screen`; lines of spaces are empty tuples."""
    lines = []
    for row in range(screen.lines):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        while cells and cells[-1].data == " ":
            cells.pop()
        styled = groupby(cells, key=lambda cell: (cell.fg, cell.bold))
        lines.append(tuple(Span("".join(c.data for c in run), *style) for style, run in styled))
    return lines


def text_of(line: Line) -> str:
    """Return the tspan elements of a line."""
    elements, column = [], 0
    for span in line:
        colour = COLOURS.get(span.colour, f"#{span.colour}" if len(span.colour) == 6 else "")
        style = f' fill="{colour}"' * bool(colour) + ' font-weight="bold"' * span.bold
        place = f'x="{MARGIN + CHARACTER * column:g}" textLength="{CHARACTER * len(span.text):g}"'
        if span.text.strip():
            elements.append(f"<tspan {place}{style}>{html.escape(span.text, quote=False)}</tspan>")
        column += len(span.text)
    return "".join(elements)


def animated(line: Line, row: int, begin: float, end: float, duration: float) -> str:
    """Return the text element of a line that stands from `begin` to `end`, both of the picture's
    `duration` seconds; the last screen is visible without animations too.
    """
    last = end >= duration
    times = [(0.0, "hidden")] * (begin > 0) + [(begin, "visible")] + [(end, "hidden")] * (not last)
    values = ";".join(value for _, value in times)
    keys = ";".join(f"{moment / duration:.4f}" for moment, _ in times)
    hidden = "" if last else ' visibility="hidden"'
    animate = (
        f'<animate attributeName="visibility" calcMode="discrete" values="{values}"'
        f' keyTimes="{keys}" dur="{duration:g}s" repeatCount="indefinite"/>'
    )
    element = f'<text y="{TOP + LINE * row}"{hidden}>{text_of(line)}'
    return f"{element}{animate if len(times) > 1 else ''}</text>"


def picture(frames: Sequence[tuple[float, list[Line]]], columns: int, speed: float) -> str:
    """Return the SVG of the frames, which plays `speed` times as fast as they were recorded and
    shows the last one for some seconds more.
    """
    played = frames[-1][0] / speed
    duration = round(played + HOLD)
    height = max(row for _, lines in frames for row, line in enumerate(lines) if line) + 1
    width, bottom = round(2 * MARGIN + CHARACTER * columns), TOP + LINE * height
    elements = []
    for row in range(height):
        spans = groupby(frames, key=lambda frame: frame[1][row])
        starts = [(next(run)[0] / speed, line) for line, run in spans]
        ends = [moment for moment, _ in starts[1:]] + [float(duration)]
        for (begin, line), end in zip(starts, ends):
            if line:
                elements.append(animated(line, row, begin, end, duration))
    caption = f"{frames[-1][0]:.0f} s, played in {played:.0f} s"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom}"'
            f' width="{width}" xml:space="preserve">',
            "<style>text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#d6d9df;"
            "white-space:pre}</style>",
            f'<rect width="{width}" height="{bottom}" rx="8" fill="#16181d" stroke="#5c6370"/>',
            f'<text x="{width // 2}" y="22" text-anchor="middle" opacity=".6">{caption}</text>',
            *elements,
            "</svg>\n",
        ]
    )


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    words, columns = arguments.command, arguments.columns
    prompt: Line = (Span(f"$ {shlex.join(words)}", "default", False),)
    frames = [(0.0, [prompt, *[()] * arguments.rows])]
    for moment, lines in record(words, columns, arguments.rows):
        frames.append((moment, [prompt, *lines]))
    Path(arguments.output).write_text(picture(frames, columns, arguments.speed))


if __name__ == "__main__":
    main()
