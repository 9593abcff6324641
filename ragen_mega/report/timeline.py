"""When each rank did what, as a file that https://ui.perfetto.dev and chrome://tracing open: a list
of complete events of the Trace Event Format, one a line.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragen_mega.storage.integrity import cut_lines, write_whole

TIMELINE = "timeline.json"
_END = b"\n]\n"
Span = tuple[str, float, float]
"""(What was done, when it began in seconds since 1970, its seconds.)"""


def append_spans(path: Path, step: int, ranks: Sequence[Sequence[Span]]) -> None:
    """Add what the ranks, in their order, did in a step; spans of a rank may nest. Raises
    OSError.
    """
    events = [
        _event("X", rank, name, step=step) | {"ts": round(1e6 * begin), "dur": round(1e6 * seconds)}
        for rank, spans in enumerate(ranks)
        for name, begin, seconds in spans
    ]
    if not path.exists():
        names = [
            _event("M", rank, "thread_name", name=f"rank {rank}") for rank in range(len(ranks))
        ]
        lines = ",\n".join(json.dumps(event) for event in (*names, *events))
        write_whole(path, b"[\n" + lines.encode() + _END)
    elif events:
        with path.open("r+b") as file:
            file.seek(-len(_END), 2)
            file.write("".join(f",\n{json.dumps(event)}" for event in events).encode() + _END)


def drop_spans(path: Path, step: int) -> None:
    """Delete what an earlier process wrote for this step and later ones, which come again, and a
    line that it could not finish.
    """
    if not path.exists():
        return

    def stays(line: bytes) -> bool:
        try:
            event = json.loads(line.rstrip(b",\n"))
        except ValueError:
            return False  # the bracket, or what a kill has left
        return event["args"].get("step", -1) < step

    cut_lines(path, stays, _END)


def _event(kind: str, rank: int, what: str, **about: Any) -> dict[str, Any]:
    return {"name": what, "ph": kind, "pid": 0, "tid": rank, "args": about}
