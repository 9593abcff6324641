"""What a person sees of a run: progress, one row per step, a table of evaluated sets,
one-line errors.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TextIO

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

SECONDS_BETWEEN_LINES = 10.0
"""Without a terminal, progress prints at most one line in this time."""
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

    def cell(self, metrics: Mapping[str, float]) -> str:
        """The text of one step, right-aligned."""
        values = [metrics[key] for key in self.keys if key in metrics]
        text = self.form.format(sum(values)) if values else "-"
        return text.rjust(self.width)


COLUMNS = (
    Column("success", 7, "{:.1%}", ("rollout/success",)),
    Column("random", 6, "{:.1%}", ("rollout/random",)),
    Column("optimum", 7, "{:.1%}", ("rollout/optimum",)),
    Column("reward", 7, "{:.3f}", ("rollout/reward",)),
    Column("grp std", 7, "{:.3f}", ("rollout/in_group_std",)),
    Column("entropy", 7, "{:.3f}", ("actor/entropy",)),
    Column("grad", 7, "{:.3g}", ("actor/grad_norm",)),
    Column("clipped", 7, "{:.2%}", ("actor/clip_fraction_low", "actor/clip_fraction_high")),
    Column("mismatch", 8, "{:.1e}", ("mismatch/logprob_mean_abs_diff",)),
    Column("sec", 6, "{:.1f}", ("time/step",)),
    Column("tok/s", 6, "{:.0f}", ("rollout/tokens_per_second",)),
)


@dataclass(slots=True)
class Advance:
    """Something under way; `advance` counts what is done of its `total`."""

    name: str
    total: int | None
    done: int = 0
    note: str = ""
    _report: Callable[[Advance], None] = field(default=lambda progress: None, repr=False)

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more as done; `note`, e.g. the loss, replaces the earlier one."""
        self.done += count
        self.note = note or self.note
        self._report(self)

    def __str__(self) -> str:
        done = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return " ".join(part for part in (self.name, done, self.note) if part)


class Console:
    """Prints on the rank with `is_writer` only. A terminal gets progress bars, a file or a pipe
    plain lines.
    """

    def __init__(
        self,
        *,
        is_writer: bool,
        num_steps: int,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_writer = is_writer
        self._step_width = max(4, len(str(num_steps)))
        self._rich = RichConsole(file=file, highlight=False, markup=False, soft_wrap=True)
        self._clock = clock
        self._rows = 0
        self._bars: Progress | None = None

    def say(self, text: str | Table) -> None:
        """Print a line or a table, above the progress bars if there are any."""
        if self._is_writer:
            self._rich.print(text)

    @contextmanager
    def progress(self, name: str, total: int | None = None) -> Iterator[Advance]:
        """Show how far e.g. a `rollout` of `total` trajectories is, during the block. Blocks may
        nest.
        """
        if not self._is_writer:
            yield Advance(name, total)
        elif self._rich.is_terminal:
            with self._bar(name, total) as progress:
                yield progress
        else:
            yield Advance(name, total, _report=self._line_writer())

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the row of one step; the header is repeated from time to time."""
        if self._rows % ROWS_BETWEEN_HEADERS == 0:
            titles = (column.title.rjust(column.width) for column in COLUMNS)
            self.say(" ".join(("step".rjust(self._step_width), *titles)))
        self._rows += 1
        cells = (column.cell(metrics) for column in COLUMNS)
        self.say(" ".join((str(step).rjust(self._step_width), *cells)))

    def evaluations(self, title: str, results: Mapping[str, Mapping[str, float | None]]) -> None:
        """Print the table of evaluated sets: name -> success, ci_low, ci_high, random, optimum,
        num_prompts. A dash stands for a reference player that is not known (None).
        """
        table = Table(title=title, title_justify="left")
        table.add_column("set", no_wrap=True)
        for heading in ("success", "95% CI", "random", "optimum", "prompts"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, result in results.items():
            table.add_row(
                name,
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
    def _bar(self, name: str, total: int | None) -> Iterator[Advance]:
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._rich,
                transient=True,
            )
            self._bars.start()
        bars = self._bars
        task = bars.add_task(name, total=total, note="")
        try:
            yield Advance(
                name,
                total,
                _report=lambda now: bars.update(task, completed=now.done, note=now.note),
            )
        finally:
            bars.remove_task(task)
            if not bars.tasks:
                bars.stop()
                self._bars = None

    def _line_writer(self) -> Callable[[Advance], None]:
        last = self._clock()

        def report(progress: Advance) -> None:
            nonlocal last
            if (now := self._clock()) - last >= SECONDS_BETWEEN_LINES:
                last = now
                self.say(str(progress))

        return report


def fail(message: str, exit_code: int = 2) -> NoReturn:
    """Leave with `error: message` on standard error, printed once however many ranks of this
    machine fail alike.

    Whichever rank comes first prints: torchrun stops the others as soon as one has left, so no
    fixed rank can be relied on to get as far as its message.
    """
    if _is_first_to_say(message):
        print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise SystemExit(exit_code)


def _is_first_to_say(message: str) -> bool:
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)
    if error_file == os.devnull:
        return True
    # <attempt>/<local rank>/error.json: these ranks' attempt has one directory of torchrun's.
    alike = re.sub(r"\d+", "", message)  # ranks name themselves and what they measured
    marker = Path(error_file).parents[1] / f"said-{hashlib.sha256(alike.encode()).hexdigest()[:16]}"
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
