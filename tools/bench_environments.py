"""Wall time of a rollout with slow environments against its critical path.

    python tools/bench_environments.py --json out.json

Every call of an environment sleeps for a time drawn uniformly from --seconds: anew for each call,
or once for each environment, of which some are then always slow. All trajectories play all turns
and sample the same number of tokens. The ideal is the time of the slowest trajectory if it never
waited for another one: its own calls as they were measured, and its own decoding steps at the speed
at which the engine decodes the same rollout when environments take no time. Both are measured in
turn, so that other load on the machine affects them alike.
"""

import argparse
import gc
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmark import OUTPUTS, interleave, provenance, publish, table
from peers import DeafRenderer
from transformers import AutoModelForCausalLM

from ragen_mega.commands.command_line import command, flag
from ragen_mega.config import EnvironmentConfig, StarPOConfig
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.models.huggingface import load_tokenizer
from ragen_mega.rollout.collector import PlaySettings, collect, tasks_for_group
from ragen_mega.warm_start.small_model import write_small_model

FLAGS = (
    *OUTPUTS,
    flag("--environments", "that are open at a time, one trajectory each", 256),
    flag("--seconds", "shortest and longest call", [0.05, 0.5], type=float, nargs=2),
    flag("--turns", "of a trajectory", 5),
    flag("--max-tokens", "sampled in every turn", 20),
    flag("--repeats", "of each", 3),
    flag("--threads", "of torch", 1),
)
KINDS = {"every call": True, "every environment": False}
"""What a latency is drawn for."""
SECONDS = (
    "ideal_seconds", "wall_seconds", "decoding_seconds", "decoding_cpu_seconds", "cpu_seconds",
)  # fmt: skip


class Sleeper:
    """Takes its time for every call."""

    actions = ("on",)

    def __init__(
        self, seconds: tuple[float, float], is_per_call: bool, spent: dict[int, float]
    ) -> None:
        """`spent`: outcome seed -> seconds of all calls of that episode, kept here."""
        self._seconds, self._is_per_call, self._spent = seconds, is_per_call, spent

    def reset(self, seed: int, outcome_seed: int) -> str:
        self._episode, self._draw = outcome_seed, random.Random(outcome_seed)
        self._latency = self._draw.uniform(*self._seconds)
        self._spent[outcome_seed] = 0.0
        return self._answer()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self._answer(), 0.0, False, False, {}

    def _answer(self) -> str:
        begin = time.perf_counter()
        if self._is_per_call:
            self._latency = self._draw.uniform(*self._seconds)
        time.sleep(self._latency)
        self._spent[self._episode] += time.perf_counter() - begin
        return "Still on?"


class Instant(Sleeper):
    """Answers at once, in the thread of the rollout."""

    is_instant = True

    def _answer(self) -> str:
        return "Still on?"


class SaysOn(DeafRenderer):
    """Every answer is the one action, whatever was sampled."""

    def decode_action(self, tokens: Sequence[int]) -> str:
        return "</think><answer>on</answer>"


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The report. Raises ValueError if an episode is not played to its end."""
    torch.set_num_threads(arguments.threads)
    gc.collect()
    gc.freeze()  # as the program does before it trains
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    renderer = SaysOn(load_tokenizer(str(directory)))
    turns, num_tasks = arguments.turns, arguments.environments
    rules = EpisodeConfig(
        max_turns=turns, max_actions_per_turn=1, max_actions=turns, prompt_style="compact"
    )
    max_context = turns * (arguments.max_tokens + 64) + 64
    engine = EmbeddedEngine(model.config, max_context=max_context, max_sessions=num_tasks)
    seconds, seeds = tuple(arguments.seconds), itertools.count()

    def play(kind: type[Sleeper], is_per_call: bool) -> dict[str, float]:
        spent: dict[int, float] = {}
        settings = PlaySettings(arguments.max_tokens, max_context, 1.0, next(seeds))
        tasks = tasks_for_group(
            0,
            "sleeper",
            0,
            lambda: Episode(kind(seconds, is_per_call, spent), rules),
            group_size=num_tasks,
        )
        with engine.awake():
            engine.load_weights(model.state_dict().items())
            wall, cpu = time.perf_counter(), time.process_time()
            (group,) = collect(engine, renderer, tasks, settings)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        lengths = {one.num_sampled_tokens for one in group.trajectories}
        if lengths != {turns * arguments.max_tokens}:
            raise ValueError(f"every trajectory must play {turns} whole turns, not {lengths}")
        return {"wall": wall, "cpu": cpu, "slowest": max(spent.values())}

    readings = interleave(
        {"none": partial(play, Instant, True)}
        | {name: partial(play, Sleeper, is_per_call) for name, is_per_call in KINDS.items()},
        arguments.repeats,
        warmups=1,
    )
    plays = [
        {
            "latency_of": name,
            "ideal_seconds": slow["slowest"] + alone["wall"],
            "wall_seconds": slow["wall"],
            "share_of_ideal": (slow["slowest"] + alone["wall"]) / slow["wall"],
            "cpu_share": slow["cpu"] / slow["wall"],
            "decoding_seconds": alone["wall"],
            "cpu_seconds": slow["cpu"],
            "decoding_cpu_seconds": alone["cpu"],
        }
        for name in KINDS
        for slow, alone in zip(readings[name], readings["none"], strict=True)
    ]
    sizes = ("environments", "seconds", "turns", "max_tokens", "threads")
    return provenance() | {name: getattr(arguments, name) for name in sizes} | {"plays": plays}


def text(report: dict[str, Any]) -> str:
    """The report as text."""
    rows = [
        (
            one["latency_of"],
            *(f"{one[key]:.2f}" for key in SECONDS),
            *(f"{one[key]:.0%}" for key in ("cpu_share", "share_of_ideal")),
        )
        for one in report["plays"]
    ]
    low, high = (f"{1e3 * seconds:.0f}" for seconds in report["seconds"])
    head = (
        "latency drawn for", "ideal s", "wall s", "decoding alone s", "its CPU s", "CPU s", "CPU",
        "share of ideal",
    )  # fmt: skip
    return (
        f"{report['environments']} environments of {low} to {high} ms, {report['turns']} turns of"
        f" {report['max_tokens']} tokens, on {report['hardware']}\n\n" + table(head, rows)
    )


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        environment = EnvironmentConfig(environments="bandit", prompt_style="compact")
        write_small_model(StarPOConfig(environment=environment), Path(scratch))
        report = measure(arguments, Path(scratch))
    shares = {
        name: [one["share_of_ideal"] for one in report["plays"] if one["latency_of"] == name]
        for name in KINDS
    }
    publish(arguments, report, text(report), {"share of the ideal": shares})


if __name__ == "__main__":
    main()
