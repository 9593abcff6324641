"""Evaluate a run or a Hugging Face checkpoint on fixed boards, beside the random and the optimal
player.

    python tools/evaluate.py --load runs/NAME --environment frozen_lake --json out.json
    torchrun --nproc-per-node 2 tools/evaluate.py --load Qwen/Qwen2.5-0.5B-Instruct \\
        --environment sokoban --json out.json

A run is evaluated under its own environment settings; for a checkpoint the flags below say them.
With --samples-per-prompt above 1 it also reports pass@k.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from command_line import JSON, command, flag, read_settings

from ragen_mega.config import EnvironmentConfig, RolloutConfig, StarPOConfig
from ragen_mega.data import distributed
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.megatron.weights import CheckpointReader
from ragen_mega.models.huggingface import load_config, load_tokenizer, local_directory
from ragen_mega.report.console import Console
from ragen_mega.report.metrics import write_json
from ragen_mega.rollout.evaluate import EvaluationResult, evaluate
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import evaluation_boards
from ragen_mega.run.run import FINAL_EXPORT

SETTINGS = (
    flag("--max-turns", "default: the run's, else 5", type=int),
    flag("--max-actions-per-turn", "default: the run's, else 5", type=int),
    flag("--max-actions", "default: the run's, else 10", type=int),
    flag("--prompt-style", "default: the run's, else full", choices=("full", "system", "compact")),
    flag("--environment-options", "JSON object of options per environment; default: the run's"),
)
"""Flags that replace the environment settings of a run."""
FLAGS = (
    flag(
        "--load", "a run, a Hugging Face or megatron-format directory, or a hub name", required=True
    ),
    flag("--environment", "e.g. bandit, frozen_lake, sokoban", required=True),
    flag("--boards", "boards file (JSON lines); default: the 256 packaged boards"),
    flag("--num-prompts", "boards or seeds to start from", 256),
    flag("--samples-per-prompt", "episodes from each; gives pass@k up to it", 8),
    flag("--temperature", "of sampling", 0.5),
    flag("--seed", "of sampling", 0),
    *SETTINGS,
    JSON,
)


def settings(arguments: argparse.Namespace) -> tuple[Path, EnvironmentConfig, RolloutConfig]:
    """Checkpoint directory, environment and rollout settings of what is to be evaluated."""
    environment, rollout = EnvironmentConfig(environments=arguments.environment), RolloutConfig()
    directory = Path(arguments.load)
    if (directory / FINAL_EXPORT).exists():
        config = StarPOConfig.from_dict(read_settings(directory))
        environment, rollout = config.environment, config.rollout
        options = json.loads(environment.environment_options)
        kept = {name: of for name, of in options.items() if name == arguments.environment}
        environment = replace(
            environment, environments=arguments.environment, environment_options=json.dumps(kept)
        )
        directory /= FINAL_EXPORT
    else:
        directory = local_directory(arguments.load)
    names = [name.removeprefix("--").replace("-", "_") for name, _ in SETTINGS]
    given = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    return directory, replace(environment, **given), rollout


def run(arguments: argparse.Namespace) -> EvaluationResult:
    """Load the engine and play. Raises ValueError on bad input."""
    directory, environment, rollout = settings(arguments)
    name, samples = arguments.environment, arguments.samples_per_prompt
    boards = evaluation_boards(environment, name, arguments.boards)
    if arguments.num_prompts < 1 or samples < 1:
        raise ValueError(
            f"num_prompts ({arguments.num_prompts}) and samples_per_prompt ({samples}) must be"
            " positive"
        )
    hf, reader = load_config(str(directory)), CheckpointReader(directory)
    num_prompts = min(len(boards), arguments.num_prompts) if boards else arguments.num_prompts
    per_rank = -(-num_prompts * samples // distributed.world_size())
    engine = EmbeddedEngine(
        hf, max_context=rollout.max_context_length, max_sessions=min(per_rank, 256)
    )
    console = Console(is_writer=distributed.is_main(), num_steps=0)
    with engine.awake(), console.phase("evaluate", per_rank) as progress:
        engine.load_weights((tensor_name, reader(tensor_name)) for tensor_name in reader.names())
        result = evaluate(
            engine,
            ChatRenderer(load_tokenizer(str(directory)), think=environment.think),
            environment,
            name,
            boards=boards,
            num_prompts=arguments.num_prompts,
            samples_per_prompt=samples,
            temperature=arguments.temperature,
            max_tokens=rollout.max_response_length,
            max_context=rollout.max_context_length,
            seed=arguments.seed,
            advance=progress.advance,
        )
    title = f"{arguments.load}, temperature {arguments.temperature}"
    console.evaluations(title, {name: result.to_dict()})
    for key, value in result.pass_at_k.items():
        console.say(f"{key}: {value:.1%}")
    return result


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    distributed.start()
    result = run(arguments)
    if arguments.json and distributed.is_main():
        write_json(arguments.json, result.to_dict())
    distributed.stop()


if __name__ == "__main__":
    main()
