"""A whole training step against TRL's GRPOTrainer: rollout, advantages, update; one turn, and five
turns with an environment.

    python tools/benchmarks/bench_peers.py --json out.json

Same model, tokenizer, prompts, number of sampled tokens, objective, optimizer and threads. The two
are processes that take turns, a step each, so that other load affects both alike; CPU seconds are
valid even on a shared machine. Before the first step both compute loss and gradient of one batch;
they must agree. TRL lives in a separate environment, which is made where there is none.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import JSON, interleave, provenance, publish, spread, table
from peers import Settings

from ragen_mega.commands.command_line import command, flag
from ragen_mega.commands.launch import HUGE_PAGES
from ragen_mega.config import EnvironmentConfig, StarPOConfig
from ragen_mega.warm_start.small_model import write_small_model

TOOLS = Path(__file__).parent  # which holds peers.py
ENVIRONMENT = TOOLS.parents[1] / ".venv-trl"
PACKAGES = ("torch==2.13.0", "transformers==5.23.0", "jsonschema==4.26.0", "trl==1.16.0")
FLAGS = (
    JSON,
    flag("--trl-python", f"of an environment with TRL (default: {ENVIRONMENT.name}, made here)"),
    flag("--load", "Hugging Face checkpoint (default: the default small model, random)", type=Path),
    flag("--bf16", "weights of both sides in bfloat16", False),
    flag("--groups", "initial states of a step", 8),
    flag("--group-size", "trajectories of each", 16),
    flag("--turns", "of a trajectory, one case each", nargs="+", type=int, default=[1, 5]),
    flag("--max-tokens", "sampled in every turn", 61),
    flag("--max-context", "tokens of a trajectory", 1024),
    flag(
        "--prompt-style",
        "full: rules and examples in front of every state, as for a pretrained model",
        "compact",
        choices=("full", "system", "compact"),
    ),
    flag("--repeats", "whose medians count", 5),
    flag("--threads", "of torch, each side", int(os.environ.get("OMP_NUM_THREADS", 1))),
)
WARMUPS = 1
LOG_LINES = 15
CLOSE, CLOSE_BF16 = 1e-4, 2e-2
"""Relative difference of losses and gradient norms in float32, and in bfloat16."""


class Side:
    """A process that trains a step when it is asked to."""

    def __init__(self, python: str, side: str, settings: Path) -> None:
        self._python, self._side = python, side
        reading, writing = os.pipe()
        script = str(TOOLS / "peers.py")
        threads = json.loads(settings.read_text())["threads"]
        # as each is started by its users; set in the environment, the switch is for both
        launched = {HUGE_PAGES: "1"} if side == "ours" else {}
        self.log = settings.with_name(f"{side}.log")
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [python, script, side, str(settings), str(writing)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=(writing,),
                env=os.environ
                | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | launched,
            )  # fmt: skip
        os.close(writing)
        self._replies = os.fdopen(reading)

    def reply(self) -> dict[str, float]:
        """Read the next reply of the process. Raises ValueError if it ended instead."""
        if line := self._replies.readline():
            return json.loads(line)
        said = self.log.read_text(errors="replace").splitlines()  # it goes with the scratch folder
        print(*said[-LOG_LINES:], sep="\n", file=sys.stderr)
        why = f"its last words were {said[-1]}" if said else "without a word"
        if self._process.wait() == -signal.SIGKILL:
            why = "it was killed, as where memory is short; fewer --groups need less"
        raise ValueError(f"the side {self._side}, run by {self._python}, ended early: {why}")

    def step(self) -> dict[str, float]:
        """Train a step; wall-clock and CPU seconds. Raises ValueError if it ended instead."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, and what it said tells why
            print(file=self._process.stdin, flush=True)
        return self.reply()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._replies.close()


@contextlib.contextmanager
def sides(python: str, settings: Path) -> Iterator[dict[str, Side]]:
    """Start both processes, which end with the block."""
    with contextlib.ExitStack() as stack:
        started = {}
        for side, interpreter in {"ours": sys.executable, "trl": python}.items():
            started[side] = Side(interpreter, side, settings)
            stack.callback(started[side].close)
        yield started


def measure(python: str, settings: Settings, scratch: Path, repeats: int) -> dict[str, Any]:
    """Measure one case. Raises ValueError if the two do not compute the same."""
    file = scratch / "settings.json"
    file.write_text(json.dumps(dataclasses.asdict(settings)))
    with sides(python, file) as both:
        compared = {name: side.reply() for name, side in both.items()}
        close = CLOSE_BF16 if settings.bf16 else CLOSE
        for what in ("loss", "grad_norm"):
            ours, theirs = (compared[name][what] for name in ("ours", "trl"))
            if not math.isclose(ours, theirs, rel_tol=close, abs_tol=1e-6):
                raise ValueError(
                    f"{what} of one batch must agree within {close}, not {ours} (ours) and"
                    f" {theirs} (TRL); the steps would not be comparable"
                )
        steps = {name: side.step for name, side in both.items()}
        readings = interleave(steps, repeats, warmups=WARMUPS)
    expected = settings.groups * settings.group_size * settings.turns * settings.max_tokens
    for name, repetitions in readings.items():
        if wrong := {reading["num_sampled"] for reading in repetitions} - {expected}:
            raise ValueError(
                f"a step of {name} must sample {expected} tokens, not {wrong.pop()}; the steps are"
                " not comparable"
            )
    clocks = {
        clock: {
            name: [reading[clock] for reading in repetitions]
            for name, repetitions in readings.items()
        }
        for clock in ("wall", "cpu")
    }
    spreads = {
        clock: {name: spread(values) for name, values in sides.items()}
        for clock, sides in clocks.items()
    }
    ratios = {
        clock: medians["trl"]["median"] / medians["ours"]["median"]
        for clock, medians in spreads.items()
    }
    return (
        {"turns": settings.turns, "compared": compared, "ratio": ratios}
        | spreads
        | {"repeats": clocks}
    )


def _has_trl(python: Path) -> bool:
    found = "from importlib.metadata import version; print(version('trl'))"
    return (
        python.exists()
        and subprocess.run([python, "-c", found], capture_output=True).returncode == 0
    )


def trl_python(named: str | None) -> str:
    """Return the Python of TRL's environment, which is made if none is named and there is none with
    it.
    """
    python = ENVIRONMENT / "bin" / "python"
    if named is None and not _has_trl(python):  # there may be one whose making was cut short
        print(f"making {ENVIRONMENT} with {', '.join(PACKAGES)}", flush=True)
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return named or str(python)


def tables(report: dict[str, Any]) -> str:
    """Return the report as text."""
    rows = [
        (
            case["turns"],
            name,
            *(
                f"{clock['median']:.2f} ({clock['min']:.2f} - {clock['max']:.2f})"
                for clock in (case["wall"][name], case["cpu"][name])
            ),
            *(f"{case['ratio'][clock]:.2f}" if name == "ours" else "" for clock in ("wall", "cpu")),
        )
        for case in report["cases"]
        for name in ("ours", "trl")
    ]
    head = ("turns", "trainer", "s / step", "CPU s / step", "TRL / ours", "by CPU seconds")
    return (
        f"{report['trajectories']} trajectories, {report['prompt_style']} prompts,"
        f" {report['max_tokens']} sampled tokens a turn,"
        f" {'bfloat16' if report['bf16'] else 'float32'}, {report['threads']} threads on"
        f" {report['hardware']}\n\n" + table(head, rows)
    )


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    python = trl_python(arguments.trl_python)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = arguments.load or scratch / "model"
        if arguments.load is None:
            environment = EnvironmentConfig(prompt_style=arguments.prompt_style)
            write_small_model(StarPOConfig(environment=environment), model)
        names = (
            "threads", "bf16", "groups", "group_size", "max_tokens", "max_context", "prompt_style",
        )  # fmt: skip
        common = {name: getattr(arguments, name) for name in names}
        steps = WARMUPS + arguments.repeats
        report = provenance() | common | {"trl": PACKAGES[-1], "cases": []}
        report["trajectories"] = arguments.groups * arguments.group_size
        for turns in arguments.turns:
            settings = Settings(str(model), folder, turns=turns, num_steps=steps, **common)
            case = measure(python, settings, scratch, arguments.repeats)
            report["cases"].append(case)
            print(f"{turns} turns: TRL / ours {case['ratio']['wall']:.2f}", flush=True)
    publish(arguments, report, tables(report))


if __name__ == "__main__":
    main()
