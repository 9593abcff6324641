"""Run the parts of tools/gpu_check.sh inside its minutes and write one report. It needs only the
standard library, and its supervisor psutil.

tools/gpu_check.sh defines each part as a shell function and starts this program. Neighbouring parts
of PARTS marked `together` run at the same time: nothing in them is timed, and no server sleeps. All
others run alone. A part starts if at least half of its limit is left, and ends with all processes
that it started. report.json, report.md and the archive are written before the first part and after
every part, so that a machine which is taken away leaves what was done. The page sets what was
measured beside FIGURES, which were predicted before anything ran.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUPERVISOR = ROOT / "ragen_mega" / "engines" / "sglang" / "supervisor.py"
FIGURES = ROOT / "docs" / "benchmarks" / "gpu_day_predictions.json"
NOT_RUN = "not run"
NOTHING_TO_USE = 77  # exit code of a part that lacks what it should measure with
PAGE_LINES = 80
PACKED_SUFFIXES = {".log", ".json", ".jsonl", ".md", ".svg", ".xml"}
LARGEST_PACKED, LARGEST_ARCHIVE = 4 << 20, 14 << 20
"""Bytes of a file, and of all files before compression, that the archive may hold."""
GRACE = 10.0
"""Seconds between the request to end and the kill of a part that is out of time."""
RESERVE = 16 << 20
"""Bytes of a file that is removed if the disk is full, so that the report can still be written."""


@dataclass(frozen=True)
class TimedPart:
    name: str
    limit: float
    """The most seconds that it may take."""
    together: bool = False
    """Whether it may run beside its neighbours."""


PARTS = (
    TimedPart("versions", 30),
    TimedPart("step", 260),  # a fresh machine reads packages slowly
    TimedPart("step_fp8", 120),
    TimedPart("update", 200),
    TimedPart("learn", 260),
    TimedPart("repeat", 150),
    TimedPart("kernels", 100, together=True),
    TimedPart("te", 100, together=True),
    TimedPart("train", 120, together=True),
    TimedPart("endure", 300),
    TimedPart("bench", 80),
    TimedPart("reshard", 40),
    TimedPart("moe", 120),
    TimedPart("lora", 380),
    TimedPart("learn_seeds", 400),
    TimedPart("step_all", 110),
    TimedPart("bench_all", 80),
    TimedPart("fp8", 60),
    TimedPart("parity", 60),
    TimedPart("sglang", 280),
    TimedPart("apart", 150),
)
"""Parts in the order of their worth."""


class Clock:
    """The time by which all parts end: in so many seconds, or as soon as a signal asks for it."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds, 0 or less when the time is over."""
        return self.end - time.monotonic()

    def stop(self, *signal_and_frame: Any) -> None:
        """End all parts."""
        self.end = 0.0


def choose(names: Sequence[str], limits: Mapping[str, float]) -> list[TimedPart]:
    """Return the named parts in their order, by default all; `limits` replace single limits. Raises
    ValueError for a name that no part has.
    """
    known = {part.name: part for part in PARTS}
    if wrong := [name for name in (*names, *limits) if name not in known]:
        raise ValueError(f"parts are {' '.join(known)}, got {' '.join(wrong)}")
    chosen = [known[name] for name in names] or list(PARTS)
    return [TimedPart(p.name, limits.get(p.name, p.limit), p.together) for p in chosen]


def not_passed(rows: Sequence[Mapping[str, Any]], *, was_started: bool = False) -> list[str]:
    """Return the names of the parts to repeat: first those that failed, then those that were not
    run unless `was_started`.
    """
    failed = [row["part"] for row in rows if row["result"] not in ("passed", NOT_RUN)]
    return failed + [row["part"] for row in rows if row["result"] == NOT_RUN and not was_started]


def run_block(parts: Sequence[TimedPart], output: Path, clock: Clock) -> list[dict[str, Any]]:
    """Run the parts at the same time; a row for each. No process outlives its part."""
    rows, running = {}, {}
    for part in parts:
        has_device = part.name == "versions" or os.environ.get("HAS_GPU")
        if not has_device or clock.left() < part.limit / 2:
            reason = "no time was left" if has_device else "there is no CUDA device"
            rows[part.name] = row_of(part, NOT_RUN, 0.0, reason)
            continue
        try:
            running[part.name] = (part, start(part, output), time.monotonic())
        except OSError as error:
            rows[part.name] = row_of(part, "failed to start", 0.0, str(error))
    while running:
        for name, (part, process, started) in [*running.items()]:
            now, result = time.monotonic(), None
            if (code := process.poll()) is not None:
                result = {0: "passed", NOTHING_TO_USE: NOT_RUN}.get(code, f"failed ({code})")
            elif now > started + part.limit or clock.left() < 0:
                stop(process)
                result = "out of time"
            if result:
                del running[name]
                last = last_line(output / f"{name}.log")
                rows[name] = row_of(part, result, now - started, last)
        time.sleep(0.1)
    return [rows[part.name] for part in parts]


def start(part: TimedPart, output: Path) -> subprocess.Popen[bytes]:
    """Run the part under the supervisor, which ends all that the part started, sessions of their
    own included, when it is asked to end and when the part has ended.
    """
    command = [sys.executable, "-I", str(SUPERVISOR), str(output / ".none"), "bash", "-c"]
    # a part that failed in an earlier call goes without settings that are suspected
    has_failed = part.name in os.environ.get("AGAIN", "").split()
    cautious = {"TORCHDYNAMO_DISABLE": "1"} if has_failed else {}
    with open(output / f"{part.name}.log", "wb") as log:
        return subprocess.Popen(
            [*command, part.name],
            stdin=_OPEN[0],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=os.environ | cautious,
        )


_OPEN = os.pipe()
"""A pipe that never ends, as standard input of the supervisor: its end would mean ours."""


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def row_of(part: TimedPart, result: str, seconds: float, last: str) -> dict[str, Any]:
    """Return a row of the report."""
    about = {"part": part.name, "result": result, "seconds": round(seconds), "limit": part.limit}
    return about | {"last_line": last}


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, fit for a table."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return "no log"
    words = [line for line in lines if line.strip()]
    return words[-1].strip().replace("|", "/").replace("\t", " ")[:160] if words else "no output"


def collect(rows: Sequence[Mapping[str, Any]], output: Path, started: float) -> dict[str, Any]:
    """Return the report: rows, versions and the JSON files that were written since `started`."""
    log = output / "versions.log"
    report: dict[str, Any] = {
        "date": time.strftime("%F", time.gmtime()),
        "commit": os.environ.get("COMMIT", "unknown"),
        "parts": list(rows),
    }
    if log.exists():
        report["versions"] = log.read_text(errors="replace").splitlines()
    for path in sorted(output.glob("*.json")):
        if path.name != "report.json" and path.stat().st_mtime >= started:
            try:
                report[path.stem] = json.loads(path.read_text())
            except ValueError as error:
                report[path.stem] = {"unreadable": str(error)}
    return report


def page(report: Mapping[str, Any]) -> str:
    """Return the report in at most PAGE_LINES lines."""
    predictions = json.loads(FIGURES.read_text())
    lines = ["# GPU check", "", f"{report['date']}, commit {report['commit']}", ""]
    lines += [f"| figure | predicted, {predictions['hardware']} | measured |", "|---|---|---|"]
    for row in predictions["figures"]:
        found = show(measured(report, row["where"]))
        lines.append(f"| {row['figure']} | {show(row['predicted'])} | {found} |")
    lines += ["", "| part | result | seconds | last line |", "|---|---|---|---|"]
    lines += [
        f"| {row['part']} | {row['result']} | {row['seconds']} | {row['last_line']} |"
        for row in report["parts"]
    ]
    room = PAGE_LINES - len(lines) - 1
    if versions := report.get("versions"):  # several in a line, so that all have room
        words = textwrap.wrap(", ".join(versions), 200)
        lines += ["", *words[: max(0, room)]]
    return "\n".join(lines[:PAGE_LINES]) + "\n"


def measured(report: Any, where: str) -> Any:
    """Return what `where`, a path of keys and of numbers in lists, leads to in the report; NOT_RUN
    if there is nothing.
    """
    for key in where.split("/"):
        try:
            report = report[int(key) if isinstance(report, list) else key]
        except (KeyError, IndexError, TypeError):
            return NOT_RUN
    return report


def show(value: Any) -> str:
    """Return a cell of the page: three digits of a number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (
        f"{value:,.0f}"
        if is_number and value >= 1000
        else f"{value:.3g}"
        if is_number
        else f"{value}"
    )


def write(report: Mapping[str, Any], output: Path, archive: Path | None) -> None:
    """report.json, report.md and the archive; on a full disk with the room that was reserved."""
    for _ in range(2):
        try:
            replace(output / "report.json", json.dumps(report, indent=1) + "\n")
            replace(output / "report.md", page(report))
            if archive:
                pack(output, archive)
            return
        except OSError as error:
            print(f"cannot write the report: {error}", file=sys.stderr, flush=True)
            (output / ".reserve").unlink(missing_ok=True)


def replace(path: Path, text: str) -> None:
    """Write all or nothing."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def pack(output: Path, archive: Path) -> None:
    """Pack reports, numbers and logs, no weights; the smallest files first, as far as they fit."""
    part, total = archive.with_name(archive.name + ".part"), 0
    files = [path for path in output.rglob("*") if path.suffix in PACKED_SUFFIXES]
    files = [path for path in files if path.is_file() and "checkpoints" not in path.parts]
    with tarfile.open(part, "w:gz") as packed:
        for path in sorted(files, key=lambda path: path.stat().st_size):
            name, size = path.relative_to(output), path.stat().st_size
            if name.parts[0] == "small" or size > LARGEST_PACKED or total + size > LARGEST_ARCHIVE:
                continue
            packed.add(path, f"./{name}")
            total += size
    shutil.move(part, archive)


def read_earlier(path: Path) -> dict[str, Any]:
    """Return the report of an earlier call; without parts if there is none or it was cut short."""
    with suppress(OSError, ValueError, KeyError):
        report: dict[str, Any] = json.loads(path.read_text())
        return report | {"parts": list(report["parts"])}
    return {"parts": []}


def main(arguments: Sequence[str]) -> int:
    """OUTPUT ARCHIVE SECONDS STARTED AGAIN [PART...]; returns the number of parts that failed.

    ARCHIVE may be empty; SECONDS are those that are left, STARTED the time of the script's start;
    AGAIN is `again` or empty.
    """
    output, archive = Path(arguments[0]), Path(arguments[1]) if arguments[1] else None
    clock, started = Clock(float(arguments[2])), float(arguments[3])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, clock.stop)
    earlier = read_earlier(output / "report.json") if arguments[4] else {"parts": []}
    names = [*arguments[5:]] or not_passed(earlier["parts"])
    os.environ["AGAIN"] = " ".join(not_passed(earlier["parts"], was_started=True))
    if earlier["parts"] and not names:
        print("all parts have passed; name those to repeat")
        return 0
    limits = [word.partition("=") for word in os.environ["SHARES"].split()]
    try:
        parts = choose(names, {name: float(seconds) for name, _, seconds in limits})
    except ValueError as error:
        print(f"error: SHARES and parts: {error}", file=sys.stderr)
        return 2
    with suppress(OSError):
        (output / ".reserve").write_bytes(bytes(RESERVE))
    rows = {part.name: row_of(part, NOT_RUN, 0.0, "its turn did not come") for part in parts}
    kept = [row for row in earlier["parts"] if row["part"] not in rows]
    blocks = [[*block] for _, block in groupby(parts, lambda part: part.together or part.name)]
    for block in [[], *blocks]:  # the first report says what was about to be done
        for row in run_block(block, output, clock):
            rows[row["part"]] = row
            print(f"{row['part']}: {row['result']}, {row['seconds']} s", flush=True)
        report = earlier | collect([*kept, *rows.values()], output, started)
        write(report, output, archive)
    (output / ".reserve").unlink(missing_ok=True)
    print(page(report), end="")
    return sum(row["result"] != "passed" for row in rows.values())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
