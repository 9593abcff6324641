"""Show runs in a browser: what agents thought and did at any step, and every curve.

    ragen-mega view runs/NAME [runs/OTHER ...]     # one HTML file that opens from the disk
    ragen-mega view runs/NAME --step 20            # and names the address of a step in it
    ragen-mega view runs/NAME --serve              # a page that follows a run while it trains

The file needs no network and no program but a browser. Runs keep some groups of every step and
eight prompts of every evaluation for it (--trace-groups of the training).
"""

import argparse
import contextlib
from pathlib import Path

from ragen_mega.commands.command_line import check_together, command, flag
from ragen_mega.report.viewer import MOST_MEGABYTES


def trace_of(run: Path, step: int) -> str:
    """Return the name of the trace of a step. Raises ValueError if the run kept no trace of this
    step, since the page would open at another one.
    """
    from ragen_mega.report.viewer.data import read_run

    kept = {
        trace["step"]: trace["id"] for trace in read_run(run)["traces"] if trace["kind"] == "step"
    }
    if not kept:
        raise ValueError(f"{run} kept no trajectories of any step; train with --trace-groups 4")
    if step not in kept:
        nearest = min(kept, key=lambda kept_step: abs(kept_step - step))
        raise ValueError(
            f"{run} kept no trajectories of step {step}; give --step {nearest}, the nearest of"
            f" {len(kept)} that it kept"
        )
    return kept[step]


@command(
    __doc__,
    ("runs", {"nargs": "+", "type": Path, "help": "run directories"}),
    flag("--output", "the file (default: view.html in the first run)", type=Path),
    flag("--step", "open at the trajectories of this step", type=int),
    flag("--max-megabytes", "leave trajectories out, evenly, above this", MOST_MEGABYTES),
    flag("--serve", "serve the page on 127.0.0.1 instead, and follow the runs", False),
    flag("--port", "of --serve; 0 takes a free one", 0),
)
def main(arguments: argparse.Namespace) -> None:
    check_together(
        (
            arguments.serve and arguments.output,
            "--output is the file that --serve writes none of; drop one of them",
        ),
        (
            arguments.port and not arguments.serve,
            f"--port {arguments.port} does nothing without --serve; add it, or drop --port",
        ),
    )
    # Only here, for it brings torch, which takes seconds.
    from ragen_mega.report.viewer.page import make_server, write_page

    step = None if arguments.step is None else trace_of(arguments.runs[0], arguments.step)
    where = f"#view=trajectories&one=0,{step},0,0" if step else ""
    if arguments.serve:
        with make_server(arguments.runs, arguments.port) as server:
            print(f"http://127.0.0.1:{server.server_port}/{where}  (Ctrl-C ends it)", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
        return
    target = arguments.output or arguments.runs[0] / "view.html"
    left_out = write_page(arguments.runs, target, most_megabytes=arguments.max_megabytes, keep=step)
    if left_out:
        print(
            f"{left_out} steps of trajectories are left out to stay below"
            f" {arguments.max_megabytes:g} MB; raise --max-megabytes for more"
        )
    print(f"{target.resolve().as_uri()}{where}")
