"""Evaluate a run or a Hugging Face checkpoint on fixed boards, beside the random and the optimal
player.

    python tools/evaluate.py --load runs/NAME --environment frozen_lake --json out.json torchrun
    --nproc-per-node 2 tools/evaluate.py --load Qwen/Qwen2.5-0.5B-Instruct --environment sokoban
    --json out.json

A run is evaluated under its own environment settings; for a checkpoint the flags below say them.
With --samples-per-prompt above 1 it also reports pass@k.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from ragen_mega.config import EnvironmentConfig, RolloutConfig, StarPOConfig
from ragen_mega.data import distributed
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.megatron.weights import CheckpointReader
from ragen_mega.models.huggingface import load_config, load_tokenizer, local_directory
from ragen_mega.report.console import Console, fail
from ragen_mega.report.metrics import CONFIG_FILE, write_json
from ragen_mega.rollout.collector import PlaySettings
from ragen_mega.rollout.evaluate import EvaluationResult, evaluate
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import evaluation_boards
from ragen_mega.run.run import FINAL_EXPORT


def settings(arguments: argparse.Namespace) -> tuple[Path, EnvironmentConfig, RolloutConfig]:
    """Checkpoint directory, environment and rollout settings of what is to be evaluated."""
    environment, rollout = EnvironmentConfig(environments=arguments.environment), RolloutConfig()
    directory = Path(arguments.load)
    if (directory / CONFIG_FILE).exists() and (directory / FINAL_EXPORT).exists():
        config = StarPOConfig.from_dict(json.loads((directory / CONFIG_FILE).read_text()))
        environment, rollout = config.environment, config.rollout
        options = json.loads(environment.environment_options)
        kept = (
            {arguments.environment: options[arguments.environment]}
            if arguments.environment in options
            else {}
        )
        environment = dataclasses.replace(
            environment, environments=arguments.environment, environment_options=json.dumps(kept)
        )
        directory = directory / FINAL_EXPORT
    else:
        directory = local_directory(arguments.load)
    given = {
        name: getattr(arguments, name)
        for name in (
            "max_turns",
            "max_actions_per_turn",
            "max_actions",
            "prompt_style",
            "environment_options",
        )
        if getattr(arguments, name) is not None
    }
    return directory, dataclasses.replace(environment, **given), rollout


def run(arguments: argparse.Namespace) -> EvaluationResult:
    """Load the engine and play. Raises ValueError on bad input."""
    distributed.start()
    directory, environment, rollout = settings(arguments)
    name = arguments.environment
    boards = evaluation_boards(environment, name, arguments.boards)
    if arguments.num_prompts < 1 or arguments.samples_per_prompt < 1:
        raise ValueError(
            f"num_prompts ({arguments.num_prompts}) and samples_per_prompt"
            f" ({arguments.samples_per_prompt}) must be positive"
        )
    hf = load_config(str(directory))
    reader = CheckpointReader(directory)
    num_prompts = min(len(boards), arguments.num_prompts) if boards else arguments.num_prompts
    per_rank = -(-num_prompts * arguments.samples_per_prompt // distributed.world_size())
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
            PlaySettings(
                rollout.max_response_length,
                rollout.max_context_length,
                arguments.temperature,
                arguments.seed,
                environment_timeout=environment.environment_timeout,
            ),
            boards=boards,
            num_prompts=arguments.num_prompts,
            samples_per_prompt=arguments.samples_per_prompt,
            advance=progress.advance,
        )
    console.evaluations(
        f"{arguments.load}, temperature {arguments.temperature}", {name: result.to_dict()}
    )
    for key, value in result.pass_at_k.items():
        console.say(f"{key}: {value:.1%}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--load",
        required=True,
        help="a run, a Hugging Face or megatron-format directory, or a hub name",
    )
    parser.add_argument("--environment", required=True, help="e.g. bandit, frozen_lake, sokoban")
    parser.add_argument(
        "--boards", help="boards file (JSON lines); default: the 256 packaged boards"
    )
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument(
        "--samples-per-prompt",
        type=int,
        default=8,
        help="episodes from each; gives pass@k up to it",
    )
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-turns", type=int, help="default: the run's, else 5")
    parser.add_argument("--max-actions-per-turn", type=int, help="default: the run's, else 5")
    parser.add_argument("--max-actions", type=int, help="default: the run's, else 10")
    parser.add_argument(
        "--prompt-style",
        choices=("full", "system", "compact"),
        help="default: the run's, else full",
    )
    parser.add_argument(
        "--environment-options", help="JSON object of options per environment; default: the run's"
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    try:
        result = run(arguments)
    except (ValueError, OSError) as error:
        fail(str(error))
    if arguments.json and distributed.is_main():
        write_json(arguments.json, result.to_dict())
    distributed.stop()


if __name__ == "__main__":
    main()
