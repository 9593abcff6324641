"""Data of a run for the viewer's page, as JSON values; traces stay compressed files."""

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragen_mega.config.recorded import CONFIG_FILE
from ragen_mega.report import reader
from ragen_mega.report.metrics import EVENTS_FILE, METRICS_FILE, SUMMARY_FILE
from ragen_mega.report.provenance import alike
from ragen_mega.report.timeline import TIMELINE
from ragen_mega.report.traces import TRACES, traces

_RECORD = (CONFIG_FILE, SUMMARY_FILE, METRICS_FILE, EVENTS_FILE)
_shown: dict[tuple[Path, int], tuple[list[Any], dict[str, Any]]] = {}
"""(Directory, most numbers) -> what the files of its record were when they were read, the record.
"""


def read_run(directory: Path) -> dict[str, Any]:
    """Return everything but the traces: `name`, `config`, `summary` (None while it trains), `alike`
    (equal for runs that differ by their seed only), `metrics` {`steps`, `values`: key -> one per
    step, None where it was not measured}, `events`, the index of `traces` and whether there is a
    `timeline`.

    Raises ValueError if the directory holds no run or a damaged one, or a link to a file elsewhere.
    """
    return _record(directory) | _kept(directory)


def read_shown(directory: Path, most_numbers: int) -> dict[str, Any]:
    """Return what `read_run` does, for a page. `metrics` hold about `most_numbers`, of six digits:
    steps that lie evenly over the run, as many evaluated ones at most, and the last step;
    `num_steps` counts all. A record whose files are as they were at the last call stays in memory.
    """
    key, files = (directory, most_numbers), [directory / name for name in _RECORD]
    found = [path.exists() and path.stat() for path in files]
    stamps = [stat and (stat.st_size, stat.st_mtime_ns) for stat in found]
    if key not in _shown or _shown[key][0] != stamps:
        run = _record(directory)
        _shown[key] = stamps, run | {"metrics": _thinned(run["metrics"], most_numbers)}
    return _shown[key][1] | _kept(directory)


def _record(directory: Path) -> dict[str, Any]:
    run = reader.read_run(directory)
    keys = {key: None for record in run.metrics for key in record if key != "step"}
    return {
        "name": directory.name,
        "config": run.config,
        "summary": run.summary,
        "alike": alike(run.config),
        "metrics": {
            "steps": [record["step"] for record in run.metrics],
            "values": {key: [record.get(key) for record in run.metrics] for key in keys},
        },
        "events": run.events,
    }


def _kept(directory: Path) -> dict[str, Any]:
    kept = traces(directory / TRACES)
    for path in [directory / name for name in (*_RECORD, TIMELINE)] + [path for path, *_ in kept]:
        _check_place(directory, path)
    return {
        "timeline": (directory / TIMELINE).exists(),
        "traces": [
            {"id": path.name.removesuffix(".json.gz"), "kind": kind, "step": step, "set": name}
            for path, kind, step, name in kept
        ],
    }


def _check_place(directory: Path, path: Path) -> None:
    """Refuse a file of a run that is a link out of its directory: a page is given to others, and a
    run that came from elsewhere could name any file of the user.
    """
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ValueError(
            f"{path} leads out of {directory}; remove the link, or put a copy in its place if it is"
            " yours"
        )


def _thinned(metrics: dict[str, Any], most_numbers: int) -> dict[str, Any]:
    steps, values = metrics["steps"], metrics["values"]
    most_rows = max(1, most_numbers // max(1, len(values)))
    measured = [column for key, column in values.items() if key.startswith("eval/")]
    evaluated = [
        row for row in range(len(steps)) if any(column[row] is not None for column in measured)
    ]
    rows = sorted({*_evenly(range(len(steps)), most_rows), *_evenly(evaluated, most_rows)})
    return {
        "num_steps": len(steps),
        "steps": [steps[row] for row in rows],
        "values": {key: [_short(column[row]) for row in rows] for key, column in values.items()},
    }


def _evenly(rows: Sequence[int], most: int) -> list[int]:
    """Select about `most` rows, and the last one. The stride is a power of two, so that runs of
    different lengths have steps in common.
    """
    stride = 1
    while len(rows) > most * stride:
        stride *= 2
    return [*rows[::stride], *rows[-1:]]


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def trace_bytes(directory: Path, trace: str) -> bytes:
    """Return the compressed JSON of one trace, or of the `timeline`. Raises ValueError if the run
    has none of this name.
    """
    data = _path(directory, trace).read_bytes()
    return gzip.compress(data, mtime=0) if trace == "timeline" else data


def trace_size(directory: Path, trace: str) -> int:
    """Return the number of the bytes of a trace, as `trace_bytes` returns them."""
    return _path(directory, trace).stat().st_size


def _path(directory: Path, trace: str) -> Path:
    path = directory / (TIMELINE if trace == "timeline" else f"{TRACES}/{trace}.json.gz")
    if "/" in trace or not path.is_file():  # a name, not the way to another folder
        raise ValueError(f"{directory} has no trace {trace!r}")
    _check_place(directory, path)
    return path
