"""Numbers of a run: aggregation within a step, and the files of a run directory (JSONL, JSON,
TensorBoard, W&B).
"""

import html
import json
import math
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from ragen_mega.config.recorded import CONFIG_FILE, STARTS, flat, read_json, read_recorded
from ragen_mega.report.markdown import table
from ragen_mega.report.provenance import append_start
from ragen_mega.storage.integrity import cut_lines, sync, write_whole
from ragen_mega.storage.run_directory import (
    METRICS_FILE,
    SUMMARY_FILE,
    begin,
    claim,
    put_back,
)
from ragen_mega.system.paths import named

HEADLINES = ("eval/success", "rollout/success")
"""Metrics that TensorBoard shows in its table of hyperparameters."""
EVENTS_FILE = "events.jsonl"
IDLENESS_FILE = "idleness.jsonl"
"""File of a run directory: a line a step with the seconds of every rank, by part, and a sentence.
"""
WANDB_ID = "wandb_id"
"""File of a run directory: the id under which W&B knows the run."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A value that is averaged with the others of its step, in proportion to `weight` (e.g. a
    number of tokens).
    """

    value: SupportsFloat
    weight: SupportsFloat = 1.0


@dataclass(frozen=True, slots=True)
class Sum:
    """A value that is added to the others of its step, e.g. seconds or tokens."""

    value: SupportsFloat


@dataclass(frozen=True, slots=True)
class Max:
    """A value of which the largest of the step is kept."""

    value: SupportsFloat


Reducible = SupportsFloat | Mean | Sum | Max
Settings = Mapping[str, Mapping[str, Any]]
"""Section -> name -> value."""
Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]
"""(Name, titles of the columns, rows.)"""


class Metrics:
    """The numbers of one step under keys `stage/name`; several values of one key are averaged
    unless they are `Sum` or `Max`.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {}

    def add(
        self, stage: str, values: Mapping[str, Reducible] | None = None, /, **named: Reducible
    ) -> None:
        """Add values under `stage/`. Raises ValueError if a key changes how it is reduced within
        the step.
        """
        for name, value in {**(values or {}), **named}.items():
            reducible = value if isinstance(value, (Mean, Sum, Max)) else Mean(value)
            terms = self._values.setdefault(f"{stage}/{name}", [])
            if terms and type(terms[0]) is not type(reducible):
                raise ValueError(
                    f"{stage}/{name} was added as {type(terms[0]).__name__} and now as"
                    f" {type(reducible).__name__}; reduce one key in one way within a step"
                )
            terms.append(reducible)

    def has(self, stage: str) -> bool:
        """Return whether anything was added under `stage/`."""
        return any(key.startswith(f"{stage}/") for key in self._values)

    def result(self) -> dict[str, float]:
        """Return a map: key -> reduced value, in the order of first appearance; a mean over no
        weight is NaN.
        """
        return {key: _reduce(terms) for key, terms in self._values.items()}


def _reduce(terms: Sequence[Any]) -> float:
    values = [float(term.value) for term in terms]
    if isinstance(terms[0], Sum):
        return sum(values)
    if isinstance(terms[0], Max):  # a maximum must not hide a NaN
        return math.nan if any(map(math.isnan, values)) else max(values)
    weights = [float(term.weight) for term in terms]
    # A weight of zero means that nothing was measured: its value, often NaN, must not count.
    total = sum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
    return total / sum(weights) if any(weights) else math.nan


def write_json(path: Path | str, value: Mapping[str, Any]) -> None:
    """Write one JSON object; a reader finds the old file or the whole new one. Non-finite numbers
    become null.
    """
    text = json.dumps(_finite(value, where=Path(path).name), indent=2, allow_nan=False) + "\n"
    write_whole(Path(path), text.encode())


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return the objects of a `metrics.jsonl`, one per step. A last line that a kill cut short is
    left out.

        >>> [row["step"] for row in read_metrics("runs/quick/metrics.jsonl")]
        [0]

    Raises ValueError if any other line is not a JSON object with a `step`.
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = read_json(line)
            records.append(record | {"step": int(record["step"])})
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise ValueError(
                    f"{path} line {number} must be a JSON object with a step, not {line[:60]!r};"
                    " restore or delete the file"
                ) from None
    return records


class RunLogger:
    """The directory of one run: `config.json`, `metrics.jsonl`, `summary.json`, TensorBoard files,
    W&B if asked for.

    Only the process with `is_writer` touches the disk; on the others every method does nothing, so
    that callers need no condition. If there is no run yet, `resume` begins one, so that a launcher
    can use the same command every time.

    Raises ValueError if the directory holds another run and neither `resume` nor `overwrite` is
    given, or if it holds something else.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        is_writer: bool,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self._is_writer = is_writer
        self._settings: Settings = {}
        self._tables: list[Table] = []
        self._uses_tensorboard = tensorboard
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._open_files = ExitStack()
        if not is_writer:
            return
        claim(self.directory, resume=resume, overwrite=overwrite)
        with self._unless_refused():
            if wandb_project is not None:
                self._open_wandb(wandb_project, resume)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Enclose the last checks that may refuse the run: the run that it replaces is deleted
        after them, and is restored if one raises.
        """
        with self._unless_refused():
            yield
        if self._is_writer:
            begin(self.directory)

    @contextmanager
    def _unless_refused(self) -> Iterator[None]:
        with ExitStack() as refused:
            if self._is_writer:
                refused.callback(put_back, self.directory)
                refused.callback(self.close)
            yield
            refused.pop_all()

    def _open_wandb(self, project: str, resume: bool) -> None:
        import wandb

        id_file = self.directory / WANDB_ID
        if not id_file.exists():  # names of runs are not unique
            write_whole(id_file, secrets.token_hex(8).encode())
        self._wandb = wandb.init(
            project=project,
            name=self.directory.name,
            id=id_file.read_text(),
            dir=str(self.directory),
            resume="allow" if resume else None,
        )
        self._open_files.callback(self._wandb.finish)

    def write_config(self, settings: Settings, start: Mapping[str, Any]) -> None:
        """Write the settings, and append this start of the run to the earlier ones."""
        if self._is_writer:
            path = self.directory / CONFIG_FILE
            before = read_recorded(self.directory) if path.exists() else {}
            write_json(path, append_start(before, settings, start))
            self._settings = settings
            if self._wandb is not None:
                self._wandb.config.update({**settings, STARTS: start}, allow_val_change=True)

    def show(self, name: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Have a table in TensorBoard (as text) and W&B, with the next step that is logged."""
        if self._is_writer:
            self._tables.append((name, head, rows))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step, flushed. Non-finite values become null with a warning."""
        if not self._is_writer:
            return
        values = _finite(metrics, where=f"step {step}")
        self._append(METRICS_FILE, {"step": step, **values})
        finite = {key: value for key, value in values.items() if value is not None}
        if self._uses_tensorboard:
            self._open_tensorboard(step)
            for key, value in finite.items():
                self._tensorboard.add_scalar(key, value, step)
            for name, head, rows in self._tables:
                cells = ([_shown(cell) for cell in row] for row in rows)
                self._tensorboard.add_text(name, table(head, cells), step)
        if self._wandb is not None:
            from wandb import Table as Shown

            tables = {name: Shown([*head], [*map(list, rows)]) for name, head, rows in self._tables}
            self._wandb.log(finite | tables, step=step)
        self._tables = []

    def sync(self) -> None:
        """Return when the disk has the rows: a checkpoint must not outlive its rows."""
        if self._is_writer and (self.directory / METRICS_FILE).exists():
            sync(self.directory / METRICS_FILE)

    def note(self, step: int, text: str) -> None:
        """Append something that happened in a step, e.g. a warning, to events.jsonl."""
        if self._is_writer:
            self._append(EVENTS_FILE, {"step": step, "text": text})

    def idle(self, step: int, ranks: Sequence[Mapping[str, float]], text: str) -> None:
        """Append how the ranks have spent a step."""
        if self._is_writer:
            rows = [{part: round(value, 4) for part, value in rank.items()} for rank in ranks]
            self._append(IDLENESS_FILE, {"step": step, "text": text, "ranks": rows})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append a line and flush it, so that a killed run leaves whole lines."""
        path = self.directory / name
        with named(path), path.open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def drop_from(self, step: int) -> None:
        """Delete the rows of an earlier process for this step and later ones."""
        if not self._is_writer:
            return
        for name in (METRICS_FILE, EVENTS_FILE, IDLENESS_FILE):
            path = self.directory / name
            if path.exists():
                _drop_rows(path, step)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the final results; the presence of the file marks the run as finished."""
        if self._is_writer:
            write_json(self.directory / SUMMARY_FILE, summary)
            if self._wandb is not None:
                self._wandb.summary.update(dict(summary))

    def close(self) -> None:
        """Flush and close every file; idempotent."""
        self._open_files.close()

    def _open_tensorboard(self, first_step: int) -> None:
        """Open TensorBoard's files with the first step of this process that is logged."""
        if self._tensorboard is not None:
            return
        # Slow to import, and only one rank needs it.
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._tensorboard = self._open_files.enter_context(
            SummaryWriter(str(self.directory / "tensorboard"), purge_step=first_step, flush_secs=10)
        )
        for summary in hparams(_flat(self._settings), dict.fromkeys(HEADLINES, 0.0)):
            self._tensorboard.file_writer.add_summary(summary)


def _drop_rows(path: Path, step: int) -> None:
    """Delete the rows, which are in the order of steps, for this step and later ones. Raises as
    `read_metrics` does.
    """

    def stays(line: bytes) -> bool:
        try:
            return int(read_json(line.decode(errors="replace"))["step"]) < step
        except (ValueError, TypeError, KeyError):
            read_metrics(path)  # raises unless a kill has cut the last line short
            return False

    cut_lines(path, stays)


def _flat(settings: Settings) -> dict[str, Any]:
    """Flatten hyperparameters for TensorBoard: section.name -> number, switch or text."""
    return {
        key: value if isinstance(value, (bool, int, float)) else str(value)
        for key, value in flat(settings).items()
    }


def _shown(cell: Any) -> str:
    """Escape a value for a Markdown cell."""
    return html.escape(str(cell)).replace("|", "&#124;").replace("\n", "<br>")


def _finite(values: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return a copy with non-finite floats, also nested ones, as None; one warning names them."""
    lost: list[str] = []

    def clean(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: clean(f"{key}/{name}", item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(f"{key}[{index}]", item) for index, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            lost.append(f"{key} = {value}".removeprefix("/"))
            return None
        return value

    cleaned = clean("", values)
    if lost:
        message = f"non-finite values of {where} are written as null: {', '.join(lost)}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return cleaned
