"""How large the viewer's page of a run is, and how long a real browser takes to open it.

    python tools/bench_page.py runs/NAME [runs/OTHER ...]

Each reading opens the file in a fresh, headless Chromium. First paint: text is there. Ready: the
overview's plot is drawn, and keys work. CPU seconds are those of the page's main thread, which
other load on the machine does not lengthen. Needs playwright and a Chromium (CHROMIUM, or on PATH).
"""

import argparse
import os
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import interleave

from ragen_mega.commands.command_line import JSON, command, flag
from ragen_mega.report.markdown import table
from ragen_mega.report.metrics import write_json
from ragen_mega.report.viewer.page import write_page

READY = ".plot .main-svg"
QUIET = ("--disable-gpu", "--no-first-run", "--disable-background-networking")


def read(browser: Any, address: str) -> dict[str, float]:
    """What one opening of the page takes."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(address)
    page.locator(READY).first.wait_for()
    ready = page.evaluate("performance.now()")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    result = {
        "first_paint_seconds": paint / 1e3,
        "ready_seconds": ready / 1e3,
        "cpu_seconds": found["TaskDuration"],
        "script_cpu_seconds": found["ScriptDuration"],
        "nodes": found["Nodes"],
        "heap_megabytes": found["JSHeapUsedSize"] / 1e6,
        "traces_decoded": page.evaluate("cache.size"),
    }
    context.close()
    return result


@command(
    __doc__,
    ("runs", {"nargs": "+", "type": Path, "help": "run directories"}),
    flag("--repeats", "how often the page is opened", 5),
    JSON,
)
def main(arguments: argparse.Namespace) -> None:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        raise ValueError("opening a page needs playwright; pip install -e '.[test]'") from None
    names = (os.environ.get("CHROMIUM", "chromium"), "chromium-browser", "chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        raise ValueError("there is no Chromium on PATH; install one, or name it in CHROMIUM")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        target = Path(folder, "view.html")
        left_out = write_page(arguments.runs, target)
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=[*QUIET, *sandbox])
        opened = {"page": partial(read, browser, target.as_uri())}
        readings = interleave(opened, arguments.repeats)["page"]
        browser.close()
        size = target.stat().st_size / 1e6
    medians = {key: statistics.median(one[key] for one in readings) for key in readings[0]}
    print(f"{size:.1f} MB, {left_out} traces left out; medians of {arguments.repeats} openings:")
    print(table(("", "median"), [(key, f"{value:.4g}") for key, value in medians.items()]))
    if arguments.json:
        write_json(arguments.json, {"megabytes": size, "medians": medians, "readings": readings})


if __name__ == "__main__":
    raise SystemExit(main())
