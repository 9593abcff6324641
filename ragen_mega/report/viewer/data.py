"""Data of a run for the viewer's page, as JSON values; traces stay compressed files."""

import gzip
from pathlib import Path
from typing import Any

from ragen_mega.config.recorded import read_object, read_recorded
from ragen_mega.report.metrics import (
    EVENTS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    read_metrics,
)
from ragen_mega.report.provenance import alike
from ragen_mega.report.timeline import TIMELINE
from ragen_mega.report.traces import TRACES, traces


def read_run(directory: Path) -> dict[str, Any]:
    """Return everything but the traces: `name`, `config`, `summary` (None while it trains), `alike`
    (equal for runs that differ by their seed only), `metrics` {`steps`, `values`: key -> one per
    step, None where it was not measured}, `events`, the index of `traces` and whether there is a
    `timeline`.

    Raises ValueError if the directory holds no run or a damaged one.
    """
    config = read_recorded(directory)
    records = read_metrics(directory / METRICS_FILE) if _has(directory, METRICS_FILE) else []
    keys = {key: None for record in records for key in record if key != "step"}
    return {
        "name": directory.name,
        "config": config,
        "summary": read_object(directory / SUMMARY_FILE) if _has(directory, SUMMARY_FILE) else None,
        "alike": alike(config),
        "metrics": {
            "steps": [record["step"] for record in records],
            "values": {key: [record.get(key) for record in records] for key in keys},
        },
        "events": read_metrics(directory / EVENTS_FILE) if _has(directory, EVENTS_FILE) else [],
        "timeline": _has(directory, TIMELINE),
        "traces": [
            {"id": path.name.removesuffix(".json.gz"), "kind": kind, "step": step, "set": name}
            for path, kind, step, name in traces(directory / TRACES)
        ],
    }


def trace_bytes(directory: Path, trace: str) -> bytes:
    """Return the compressed JSON of one trace, or of the `timeline`. Raises ValueError if the run
    has none of this name.
    """
    if trace == "timeline" and _has(directory, TIMELINE):
        return gzip.compress((directory / TIMELINE).read_bytes(), mtime=0)
    for path, *_ in traces(directory / TRACES):
        if path.name == f"{trace}.json.gz":
            return path.read_bytes()
    raise ValueError(f"{directory} has no trace {trace!r}")


def _has(directory: Path, name: str) -> bool:
    return (directory / name).exists()
