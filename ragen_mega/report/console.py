"""Console output of a run: its progress, one row per step, a table of evaluated sets, one-line
errors.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from ragen_mega.report.pace import Pace, duration
from ragen_mega.report.terminal import printable

SECONDS_BETWEEN_LINES = 20.0
"""Time without any output after which progress prints a line, if there is no terminal."""
ROWS_BETWEEN_HEADERS = 20


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the step table: the sum of the metrics `keys`, or a dash as long as none of them
    was measured.
    """

    title: str
    width: int
    form: str
    keys: tuple[str, ...]
    about: str
    instead: str = ""
    """A metric that stands for `keys` where it is measured."""

    def cell(self, metrics: Mapping[str, float]) -> str:
        """Return the text of one step, right-aligned."""
        keys = (self.instead,) if self.instead in metrics else self.keys
        values = [metrics[key] for key in keys if key in metrics]
        text = self.form.format(sum(values)) if values else "-"
        return text.rjust(self.width)


COLUMNS = (
    Column("success", 7, "{:.1%}", ("rollout/success",), "episodes of this step that were solved"),
    Column("random", 6, "{:.1%}", ("rollout/random",), "of a random player, to compare with"),
    Column("optimum", 7, "{:.1%}", ("rollout/optimum",), "of the best possible player"),
    Column("reward", 7, "{:.3f}", ("rollout/reward",), "mean reward of an episode"),
    Column(
        "grp std",
        7,
        "{:.3f}",
        ("rollout/in_group_std",),
        "how rewards from one start differ; nothing is learned from 0",
        instead="reward/in_group_std",
    ),
    Column(
        "entropy",
        7,
        "{:.3f}",
        ("actor/entropy",),
        "nats a token; a jump or a collapse is a warning",
    ),
    Column("grad", 7, "{:.3g}", ("actor/grad_norm",), "norm of the policy's gradient"),
    Column(
        "clipped",
        7,
        "{:.2%}",
        ("actor/clip_fraction_low", "actor/clip_fraction_high"),
        "tokens where the update was held back",
    ),
    Column(
        "mismatch",
        8,
        "{:.1e}",
        ("mismatch/logprob_mean_abs_diff",),
        "engine against trainer, nats a token; about 1e-6 in float32",
    ),
    Column("sec", 6, "{:.1f}", ("time/step",), "seconds of the step, evaluation aside"),
    Column("tok/s", 6, "{:.0f}", ("rollout/tokens_per_second",), "sampled tokens a second"),
)
LEFT = "time left"
"""Title of the last column."""


@dataclass(slots=True)
class Advance:
    """Something under way; `advance` counts what is done of its `total`, `turn` the turns of
    episodes.
    """

    name: str
    total: int | None
    max_turns: int = 1
    """Most turns of an episode, where episodes are played."""
    done: float = 0
    work: float = 0.0
    """Work of all counts, and the part of it that is done, where one count takes longer than
    another; 0 where all are alike.
    """
    spent: float = 0.0
    note: str = ""
    num_turns: int = 0
    num_tokens: int = 0
    num_over: int = 0
    _began: tuple[float, float] | None = None
    """Seconds, and what was done, when something was done first."""
    _report: Callable[[Advance], None] = field(default=lambda progress: None, repr=False)

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more as done; `note`, e.g. the loss, replaces the earlier one."""
        self.done += count
        self.note = note or self.note
        self._report(self)

    def turn(self, num_tokens: int, is_over: bool) -> None:
        """A turn of one of the episodes was sampled; whether it was that episode's last."""
        self.num_turns += 1
        self.num_tokens += num_tokens
        self.num_over += is_over
        self.done = max(self.num_over, self.num_turns / self.max_turns)
        self._report(self)

    @property
    def text(self) -> str:
        """The progress so far."""
        if self.num_turns:
            return (
                f"{self.num_over}/{self.total} episodes, {self.num_turns:,} turns,"
                f" {self.num_tokens:,} tokens"
            )
        done = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return " ".join(part for part in (done, self.note) if part)

    def left(self, seconds: float) -> str:
        """Return `, about 5 min left` after so many seconds, by the pace since the first time that
        something was done: before it programs are compiled and prompts are read. Nothing before a
        tenth more is done.
        """
        done, total = (self.spent, self.work) if self.work else (self.done, self.total)
        if not total or not done:
            return ""
        began, first = self._began = self._began or (seconds, done)
        if done - first < total / 10:
            return ""
        rest = (seconds - began) / (done - first) * max(0.0, total - done)
        return f", about {duration(rest)} left"


class _Clock(ProgressColumn):
    """Column with the pace of the run, or with a part's elapsed seconds."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        if task.fields["is_run"]:
            return Text(str(self._pace))
        seconds, left = duration(task.elapsed or 0.0), task.fields["left"]
        return Text(f"{task.fields['text']}  {seconds}{left}")


class Console:
    """Prints on the rank with `is_writer` only. A terminal gets progress bars, a file or a pipe
    plain lines.
    """

    def __init__(
        self,
        *,
        is_writer: bool,
        num_steps: int,
        evaluations: Mapping[int, int] | None = None,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_steps` of the run, 0 if there is no run; `evaluations`: after so many steps ->
        episodes that are then played here.
        """
        self._is_writer = is_writer
        self._step_width = max(4, len(str(num_steps)))
        self._rich = RichConsole(
            file=file, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._clock = clock
        self._pace = Pace(num_steps, evaluations or {}, clock)
        self._rows = 0
        self._printed = clock()
        self._bars: Progress | None = None

    def say(self, text: str | Table, style: str | None = None) -> None:
        """Print a line or a table, above the progress bars if there are any; `style` is rich's, for
        a terminal.
        """
        if self._is_writer:
            text = printable(text) if isinstance(text, str) else text
            self._rich.print(text, style=style)
            self._printed = self._clock()

    @contextmanager
    def progress(
        self, name: str, total: int | None = None, *, max_turns: int = 0
    ) -> Iterator[Advance]:
        """Show how far e.g. an `update` of `total` minibatches is, and how far the run, during the
        block. Blocks may nest. `max_turns`: episodes of so many turns are played.
        """
        progress, started = Advance(name, total, max_turns), self._clock()
        if not self._is_writer:
            yield progress
        elif self._rich.is_interactive:
            with self._bar(progress, started):
                yield progress
        else:
            progress._report = partial(self._line, started)
            yield progress
        if max_turns:
            seconds = self._clock() - started
            self._pace.played(total or 0, seconds, in_evaluation=name != "rollout")

    def resumed(self, num_done: int) -> None:
        """Count so many steps as done, by earlier processes; before the bars are on the screen."""
        self._pace.num_done = num_done

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the row of one step; before the first a legend, and the header from time to
        time.
        """
        self._pace.step_done(step + 1, metrics.get("time/step", 0.0))
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=step + 1)
        if self._rows == 0:
            self._legend()
        if self._rows % ROWS_BETWEEN_HEADERS == 0:
            titles = (column.title.rjust(column.width) for column in COLUMNS)
            self.say(" ".join(("step".rjust(self._step_width), *titles, LEFT.rjust(11))), "bold")
        self._rows += 1
        cells = (column.cell(metrics) for column in COLUMNS)
        left = self._pace.left()
        ahead = ("-" if left is None else duration(left)).rjust(11)
        self.say(" ".join((str(step).rjust(self._step_width), *cells, ahead)))

    def _legend(self) -> None:
        width = max(len(column.title) for column in COLUMNS)
        about = [(column.title, column.about) for column in COLUMNS]
        lines = [f"  {title:{width}}  {text}" for title, text in about]
        self.say("\n".join(("", *lines, "")), "dim")

    def evaluations(self, title: str, results: Mapping[str, Mapping[str, float | None]]) -> None:
        """Print the table of evaluated sets: name -> success, ci_low, ci_high, random, optimum,
        num_prompts. A dash stands for a reference player that is not known (None).
        """
        table = Table(title=title, title_justify="left")
        table.add_column("set", overflow="fold")  # the one that gives way on a narrow terminal
        for heading in ("success", "95% CI", "random", "optimum", "prompts"):
            table.add_column(heading, justify="right", no_wrap=True)
        titles = set_titles(results)
        for name, result in results.items():
            table.add_row(
                titles[name],
                f"{result['success']:.1%}",
                f"{result['ci_low']:.1%} - {result['ci_high']:.1%}",
                *(
                    "-" if result[player] is None else f"{result[player]:.1%}"
                    for player in ("random", "optimum")
                ),
                f"{result['num_prompts']:.0f}",
            )
        self.say(table)

    @contextmanager
    def _bar(self, progress: Advance, started: float) -> Iterator[None]:
        with self.open() as bars:
            assert bars is not None  # on a terminal
            task = bars.add_task(
                progress.name, total=progress.total, text=progress.text, left="", is_run=False
            )
            progress._report = lambda now: bars.update(
                task,
                completed=now.done,
                total=now.total,
                text=now.text,
                left=now.left(self._clock() - started),
            )
            try:
                yield
            finally:
                bars.remove_task(task)

    @contextmanager
    def open(self) -> Iterator[Progress | None]:
        """Keep the progress bars on the terminal during the block, the bar of the whole run first;
        the outermost block starts and stops them.
        """
        if self._bars is not None or not (self._is_writer and self._rich.is_interactive):
            yield self._bars
            return
        columns = (TextColumn("{task.description}"), BarColumn(14), _Clock(self._pace))
        self._bars = Progress(
            *columns, console=self._rich, transient=True, refresh_per_second=4, get_time=self._clock
        )
        if self._pace.num_steps:
            done = self._pace.num_done
            self._bars.add_task("run", total=self._pace.num_steps, completed=done, is_run=True)
        try:
            with self._bars:
                yield self._bars
        finally:
            self._bars = None

    def _line(self, started: float, progress: Advance) -> None:
        now = self._clock()
        left = progress.left(now - started)
        if now - self._printed >= SECONDS_BETWEEN_LINES:
            run = f" ({self._pace})" if self._pace.num_steps else ""
            self.say(f"{progress.name} {progress.text}{left}{run}")


def set_titles(names: Iterable[str]) -> dict[str, str]:
    """Return the name under which people read of each evaluated set: a file of tasks without its
    folders, unless another set would have the same.
    """
    tasks = "tasks:"
    short = {
        name: tasks + Path(name).name if name.startswith(tasks) and "/" in name else name
        for name in names
    }
    count = Counter(short.values())
    return {name: title if count[title] == 1 else name for name, title in short.items()}


def fail(message: str) -> NoReturn:
    """Leave with `error: message` on standard error and exit code 2; the message is printed once
    however many ranks of this machine fail alike.

    Whichever rank comes first prints: torchrun stops the others as soon as one has left, so no
    fixed rank can be relied on to get as far as its message.
    """
    if _is_first_to_say(message):
        # in one piece: `print` would write the end of the line by itself, behind another rank's
        sys.stderr.write(f"error: {printable(' '.join(message.split()))}\n")
        sys.stderr.flush()
    raise SystemExit(2)


def _is_first_to_say(message: str) -> bool:
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)
    if error_file == os.devnull:
        return True
    # <attempt>/<local rank>/error.json: all ranks of an attempt share torchrun's directory.
    alike = re.sub(r"\d+", "", message)  # ranks name themselves and what they measured
    marker = Path(error_file).parents[1] / f"said-{hashlib.sha256(alike.encode()).hexdigest()[:16]}"
    try:
        marker.touch(exist_ok=False)
    except OSError as error:  # others than another rank's marker: torchrun's directory may be gone
        return not isinstance(error, FileExistsError)
    return True
