"""Run the parts of tools/gpu_check.sh inside its minutes and write one report; standard library only.

tools/gpu_check.sh defines each part as a shell function and starts this program. Neighbouring parts
of PARTS marked `together` run at the same time: nothing in them is timed, and no server sleeps. All
others run alone. A part starts if at least half of its limit is left, and ends with all processes
that it started. report.json, report.md and the archive are written after every part, so that a
machine which is taken away leaves what was done.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUPERVISOR = ROOT / "ragen_mega" / "engines" / "sglang" / "supervisor.py"
PREDICTED = ROOT / "docs" / "benchmarks" / "gpu_day_predicted.json"
PAGE_LINES = 60
PACKED_SUFFIXES = {".log", ".json", ".jsonl", ".md", ".svg", ".xml"}
LARGEST_PACKED, LARGEST_ARCHIVE = 4 << 20, 14 << 20
"""Bytes of a file, and of all files before compression, that the archive may hold."""
GRACE = 5.0
"""Seconds between the request to end and the kill of a part that is out of time."""


@dataclass(frozen=True)
class Part:
    name: str
    limit: float
    """The most seconds that it may take."""
    together: bool = False
    """Whether it may run beside its neighbours."""


PARTS = (
    Part("versions", 30),
    Part("kernels", 100, together=True),
    Part("te", 100, together=True),
    Part("train", 100, together=True),
    Part("bench", 80),
    Part("step", 190),
    Part("reshard", 40),
    Part("fp8", 100),
    Part("sgl_train", 120),
    Part("parity", 60),
    Part("engines", 40),
    Part("sglang", 280),
)
"""In the order of their worth."""


def choose(names: Sequence[str], limits: Mapping[str, float]) -> list[Part]:
    """The named parts in their order, by default all; `limits` replace single limits. Raises
    ValueError for a name that no part has.
    """
    known = {part.name: part for part in PARTS}
    if wrong := [name for name in (*names, *limits) if name not in known]:
        raise ValueError(f"parts are {' '.join(known)}, got {' '.join(wrong)}")
    chosen = [known[name] for name in names] or list(PARTS)
    return [Part(p.name, limits.get(p.name, p.limit), p.together) for p in chosen]


def not_passed(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the parts to repeat: first those that failed, then those that were not reached."""
    names = [row["part"] for row in rows if row["result"] not in ("passed", "no time left")]
    return names + [row["part"] for row in rows if row["result"] == "no time left"]


def blocks(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts that run at the same time, in order."""
    keys = {id(part): "together" if part.together else part.name for part in parts}
    return [[*group] for _, group in groupby(parts, key=lambda part: keys[id(part)])]


def run_block(parts: Sequence[Part], output: Path, deadline: float) -> list[dict[str, Any]]:
    """Run the parts at the same time; a row for each. No process outlives its part."""
    rows, running = {}, {}
    for part in parts:
        left = deadline - time.monotonic()
        if left < part.limit / 2:
            rows[part.name] = row_of(part, "no time left", 0.0, "")
            continue
        try:
            running[part.name] = (part, start(part, output), time.monotonic())
        except OSError as error:
            rows[part.name] = row_of(part, "failed to start", 0.0, str(error))
    while running:
        for name, (part, process, started) in [*running.items()]:
            now, result = time.monotonic(), None
            if (code := process.poll()) is not None:
                result = "passed" if code == 0 else f"failed ({code})"
            elif now > min(started + part.limit, deadline):
                stop(process)
                result = "out of time"
            if result:
                del running[name]
                last = last_line(output / f"{name}.log")
                rows[name] = row_of(part, result, now - started, last)
        time.sleep(0.1)
    return [rows[part.name] for part in parts]


def start(part: Part, output: Path) -> subprocess.Popen[bytes]:
    """The part under the supervisor, which ends all that the part started, sessions of their own
    included, when it is asked to end and when the part has ended.
    """
    command = [sys.executable, "-I", str(SUPERVISOR), str(output / ".none"), "bash", "-c"]
    with open(output / f"{part.name}.log", "wb") as log:
        return subprocess.Popen(
            [*command, part.name], stdin=_OPEN[0], stdout=log, stderr=log, cwd=ROOT
        )


_OPEN = os.pipe()
"""A pipe that never ends, as standard input of the supervisor: its end would mean ours."""


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(2 * GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def row_of(part: Part, result: str, seconds: float, last: str) -> dict[str, Any]:
    """A row of the report."""
    about = {"part": part.name, "result": result, "seconds": round(seconds), "limit": part.limit}
    return about | {"last_line": last}


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, fit for a table."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return "no log"
    words = [line for line in lines if line.strip()]
    return words[-1].strip().replace("|", "/").replace("\t", " ")[:160] if words else "no output"


def collect(rows: Sequence[Mapping[str, Any]], output: Path, started: float) -> dict[str, Any]:
    """The report: rows, versions and the JSON files that were written since `started`."""
    log = output / "versions.log"
    report: dict[str, Any] = {
        "date": time.strftime("%F", time.gmtime()),
        "commit": os.environ.get("COMMIT", "unknown"),
        "versions": log.read_text(errors="replace").splitlines() if log.exists() else [],
        "parts": list(rows),
    }
    for path in sorted(output.glob("*.json")):
        if path.name != "report.json" and path.stat().st_mtime >= started:
            try:
                report[path.stem] = json.loads(path.read_text())
            except ValueError as error:
                report[path.stem] = {"unreadable": str(error)}
    return report


def find(report: Any, path: Sequence[Any]) -> float | None:
    """The number at `path`: keys, indices, or conditions {key: value} that choose from a list."""
    for key in path:
        try:
            if isinstance(key, dict):
                report = next(row for row in report if key.items() <= {**row}.items())
            else:
                report = report[key]
        except (KeyError, IndexError, TypeError, StopIteration):
            return None
    return report if isinstance(report, int | float) else None


def compare(report: Mapping[str, Any], predicted: Mapping[str, Any]) -> list[str]:
    """Lines of a table of measured figures beside predicted ones."""
    lines = ["| figure | measured | predicted H100 | predicted H200 |", "|---|---|---|---|"]
    for figure in predicted["figures"]:
        value = find(report, figure["path"])
        said = "-" if value is None else f"{value * figure.get('scale', 1):.3g}"
        h100, h200 = figure["h100"], figure["h200"]
        lines.append(f"| {figure['name']} | {said} | {h100} | {h200} |")
    return lines


def page(report: Mapping[str, Any]) -> str:
    """The report in at most PAGE_LINES lines."""
    lines = ["# GPU check", "", f"{report['date']}, commit {report['commit']}", ""]
    lines += ["| part | result | seconds | last line |", "|---|---|---|---|"]
    lines += [
        f"| {row['part']} | {row['result']} | {row['seconds']} | {row['last_line']} |"
        for row in report["parts"]
    ]
    if PREDICTED.exists():
        lines += ["", *compare(report, json.loads(PREDICTED.read_text()))]
    room = PAGE_LINES - len(lines) - 3
    if report["versions"] and room > 0:
        lines += ["", "```", *report["versions"][:room], "```"]
    return "\n".join(lines[:PAGE_LINES]) + "\n"


def write(report: Mapping[str, Any], output: Path, archive: Path | None) -> None:
    """report.json, report.md and the archive; a full disk costs a line of standard error."""
    texts = {"report.json": json.dumps(report, indent=1) + "\n", "report.md": page(report)}
    try:
        for name, text in texts.items():
            replace(output / name, text)
        if archive:
            pack(output, archive)
    except OSError as error:
        print(f"cannot write the report: {error}; it is printed at the end", file=sys.stderr)


def replace(path: Path, text: str) -> None:
    """Write all or nothing."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def pack(output: Path, archive: Path) -> None:
    """Reports, numbers and logs, no weights; the smallest files first, as far as they fit."""
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


def main(arguments: Sequence[str]) -> int:
    """OUTPUT ARCHIVE DEADLINE STARTED AGAIN [PART...]; returns the number of parts that failed.

    ARCHIVE may be empty; DEADLINE is the seconds that are left, STARTED the time of the script's
    start; AGAIN is `again` or empty.
    """
    output, archive = Path(arguments[0]), Path(arguments[1]) if arguments[1] else None
    deadline, started = time.monotonic() + float(arguments[2]), float(arguments[3])
    limits = {
        name: float(seconds)
        for name, _, seconds in (word.partition("=") for word in os.environ["SHARES"].split())
    }
    names, earlier = list(arguments[5:]), []
    if arguments[4] and (output / "report.json").exists():
        earlier = json.loads((output / "report.json").read_text())["parts"]
        names = names or not_passed(earlier)
        os.environ["AGAIN"] = " ".join(
            row["part"] for row in earlier if row["result"] not in ("passed", "no time left")
        )
        if not names:
            print("all parts have passed; name those to repeat")
            return 0
    rows: list[dict[str, Any]] = []
    report = collect(rows, output, started)
    write(report, output, archive)
    for block in blocks(choose(names, limits)):
        for row in run_block(block, output, deadline):
            rows.append(row)
            print(f"{row['part']}: {row['result']}, {row['seconds']} s", flush=True)
        kept = [row for row in earlier if row["part"] not in {new["part"] for new in rows}]
        report = collect(kept + rows, output, 0 if earlier else started)
        write(report, output, archive)
    print(page(report), end="")
    return sum(row["result"] != "passed" for row in rows)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
