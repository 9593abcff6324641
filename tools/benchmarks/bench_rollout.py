"""Sampled tokens per second of the embedded engine against `transformers` generate, called once per
turn.

    python tools/benchmarks/bench_rollout.py --json out.json

Both play the same FrozenLake episodes with the same weights and sample the same number of tokens in
every turn: stop tokens are ignored, and the environment is given an empty answer, so that every
trajectory plays all its turns. The baseline is what one would write with transformers alone: all
prompts of a turn left-padded into one batch, with its key-value cache inside the turn; it computes
no log-probabilities. Tokens per CPU second are valid even on a shared machine.
"""

import argparse
import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import OUTPUTS, interleave, provenance, publish, spread, table
from peers import DeafRenderer, play_turns
from transformers import AutoModelForCausalLM

from ragen_mega.commands.command_line import command, flag
from ragen_mega.config import EnvironmentConfig, StarPOConfig
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.models.huggingface import load_tokenizer
from ragen_mega.rollout.collector import collect
from ragen_mega.rollout.player import PlaySettings
from ragen_mega.rollout.tasks import evaluation_tasks
from ragen_mega.warm_start.small_model import write_small_model

ENVIRONMENT = "frozen_lake"
FLAGS = (
    *OUTPUTS,
    flag("--load", "Hugging Face checkpoint (default: the default small model, random)", type=Path),
    flag("--bf16", "weights of both players in bfloat16, as train's --bf16", False),
    flag("--groups", "initial states", 8),
    flag("--group-size", "trajectories of each", 16),
    flag("--turns", "of a trajectory", 5),
    flag("--max-tokens", "sampled in every turn", 40),
    flag("--max-context", "tokens of a trajectory", 2048),
    flag("--prompt-style", "what a prompt repeats", "full", choices=("full", "system", "compact")),
    flag("--repeats", "whose medians count", 3),
    flag("--threads", "of torch", int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))),
)
SHAPE = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size",
)  # fmt: skip


def measure(
    arguments: argparse.Namespace, environment: EnvironmentConfig, directory: Path
) -> dict[str, Any]:
    """Return the report; both players take turns. Raises ValueError if a trajectory was cut."""
    torch.set_num_threads(arguments.threads)
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, trust_remote_code=False
    ).eval()
    model.generation_config.eos_token_id = None
    renderer = DeafRenderer(load_tokenizer(str(directory)))
    prompts = [(seed, None) for seed in range(123, 123 + arguments.groups)]
    groups = evaluation_tasks(
        environment, ENVIRONMENT, prompts, samples_per_prompt=arguments.group_size
    )
    tasks = list(itertools.chain(*groups))
    most = arguments.max_context
    engine = EmbeddedEngine(model.config, max_context=most, max_sessions=len(tasks), dtype=dtype)
    seeds, contexts = itertools.count(), list[int]()

    def play_with_engine() -> int:
        with engine.awake():
            engine.load_weights(model.state_dict().items())
            played = collect(engine, renderer, tasks, PlaySettings(most, 1.0, next(seeds)))
        trajectories = [trajectory for group in played for trajectory in group.trajectories]
        contexts[:] = map(len, trajectories)
        return sum(trajectory.num_sampled_tokens for trajectory in trajectories)

    def play_with_generate() -> int:
        return sum(map(sum, play_turns(model, renderer, tasks, arguments.max_tokens)["env_mask"]))

    def rates(play: Callable[[], int]) -> tuple[int, float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        sampled = play()
        return (
            sampled,
            sampled / (time.perf_counter() - wall),
            sampled / (time.process_time() - cpu),
        )

    # A full collection need not visit imported objects; train does the same.
    gc.collect()
    gc.freeze()
    players = {
        "embedded": partial(rates, play_with_engine),
        "transformers": partial(rates, play_with_generate),
    }
    readings = interleave(players, arguments.repeats)
    counts = {sampled for readings_of in readings.values() for sampled, _, _ in readings_of}
    if len(counts) > 1:
        raise ValueError(
            f"both must sample the same number of tokens, not {sorted(counts)}; raise --max-context"
            f" ({most}), a trajectory was cut"
        )
    wall, cpu = (
        {name: [reading[kind] for reading in of_one] for name, of_one in readings.items()}
        for kind in (1, 2)
    )
    medians = {name: statistics.median(values) for name, values in wall.items()}
    cpu_medians = {name: statistics.median(values) for name, values in cpu.items()}
    shape = {name: getattr(model.config, name) for name in SHAPE}
    return provenance() | {
        "tokens_per_second": medians,
        "ratio": medians["embedded"] / medians["transformers"],
        "tokens_per_cpu_second": cpu_medians,
        "cpu_ratio": cpu_medians["embedded"] / cpu_medians["transformers"],
        "spread": {name: spread(values) for name, values in wall.items()},
        "repeats": wall,
        "trajectories": len(tasks),
        "turns": arguments.turns,
        "sampled_tokens_per_turn": arguments.max_tokens,
        "prompt_style": arguments.prompt_style,
        "trajectory_tokens": {"mean": statistics.fmean(contexts), "max": max(contexts)},
        "threads": arguments.threads,
        "dtype": str(dtype).removeprefix("torch."),
        "model": {"parameters": model.num_parameters()} | shape,
    }


def tables(report: dict[str, Any]) -> str:
    """Return the report as text."""
    rows = [
        (name, f"{speed['median']:.0f}", f"{speed['min']:.0f} - {speed['max']:.0f}", f"{cpu:.0f}")
        for (name, speed), cpu in zip(
            report["spread"].items(), report["tokens_per_cpu_second"].values()
        )
    ]
    return (
        f"{report['trajectories']} trajectories of {report['turns']} turns,"
        f" {report['sampled_tokens_per_turn']} sampled tokens a turn, {report['dtype']},"
        f" {report['threads']} threads on {report['hardware']}\n\n"
        + table(("player", "tokens/s", "spread", "tokens/CPU s"), rows)
        + f"\n\nembedded is {report['ratio']:.2f} times as fast, {report['cpu_ratio']:.2f} times by"
        " CPU seconds"
    )


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    environment = EnvironmentConfig(
        environments=ENVIRONMENT,
        max_turns=arguments.turns,
        max_response_length=arguments.max_tokens,
        prompt_style=arguments.prompt_style,
    )
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.load or Path(scratch)
        if arguments.load is None:
            write_small_model(StarPOConfig(environment=environment), directory)
        report = measure(arguments, environment, directory)
    publish(arguments, report, tables(report), {"sampled tokens a second": report["repeats"]})


if __name__ == "__main__":
    main()
