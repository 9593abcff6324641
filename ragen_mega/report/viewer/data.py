"""Data of a run for the viewer's page, as JSON values; traces stay compressed files."""

import gzip
from pathlib import Path
from typing import Any

from ragen_mega.report import reader
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
        "timeline": (directory / TIMELINE).exists(),
        "traces": [
            {"id": path.name.removesuffix(".json.gz"), "kind": kind, "step": step, "set": name}
            for path, kind, step, name in traces(directory / TRACES)
        ],
    }


def trace_bytes(directory: Path, trace: str) -> bytes:
    """Return the compressed JSON of one trace, or of the `timeline`. Raises ValueError if the run
    has none of this name.
    """
    if trace == "timeline" and (directory / TIMELINE).exists():
        return gzip.compress((directory / TIMELINE).read_bytes(), mtime=0)
    for path, *_ in traces(directory / TRACES):
        if path.name == f"{trace}.json.gz":
            return path.read_bytes()
    raise ValueError(f"{directory} has no trace {trace!r}")
