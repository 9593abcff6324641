"""Evaluate a run or a Hugging Face checkpoint on fixed boards, beside the random and the optimal
player.

    ragen-mega evaluate --load runs/NAME --environment frozen_lake --json out.json
    ragen-mega evaluate --load runs/NAME --environment sokoban,sokoban_large,frozen_lake
    torchrun --nproc-per-node 2 --no-python ragen-mega evaluate --load Qwen/Qwen2.5-0.5B-Instruct \\
        --environment sokoban --json out.json

A run is evaluated under its own environment settings; for a checkpoint the flags below set them.
With --samples-per-prompt above 1 it also reports pass@k.
"""

import argparse
from pathlib import Path

from ragen_mega.commands.command_line import JSON, command, flag, name_or_path
from ragen_mega.config.recorded import is_run, read_recorded
from ragen_mega.config.sections.environment import parse_shares
from ragen_mega.ranks import collectives
from ragen_mega.report.console import Console
from ragen_mega.report.metrics import write_json
from ragen_mega.run.evaluation import evaluate_sets

RULES = (
    flag("--max-turns", "default: the run's, else 5", type=int),
    flag("--max-actions-per-turn", "default: the run's, else 5", type=int),
    flag("--max-actions", "default: the run's, else 10", type=int),
    flag(
        "--prompt-style",
        "default: the run's, else full",
        choices=("full", "system", "brief", "compact"),
    ),
    flag("--max-response-length", "tokens of a turn; default: the run's, else 400", type=int),
    flag("--prompt-examples", "examples in every prompt; default: the run's, else 0", type=int),
    flag("--prompt-examples-file", "conversations that they are taken from"),
    flag("--system-prompt", "first words of the system message; default: the run's"),
    flag("--environment-options", "JSON object of options per environment; default: the run's"),
    flag("--environment-timeout", "seconds of a call; default: the run's, else 60", type=float),
    flag("--environment-processes", "in which worlds live; default: the run's, else 0", type=int),
)
"""Flags that replace the environment settings of a run."""
FLAGS = (
    flag(
        "--load",
        "a run, a Hugging Face or megatron-format directory, a .gguf file, or a hub name",
        type=name_or_path,
        required=True,
    ),
    flag("--environment", "one, or several: sokoban,frozen_lake; default: those of the run"),
    flag("--boards", "boards file (JSON lines); default: the packaged boards", type=name_or_path),
    flag("--num-prompts", "boards or seeds to start from", 256),
    flag("--samples-per-prompt", "episodes from each; gives pass@k up to it", 8),
    flag("--temperature", "of sampling", 0.5),
    flag("--seed", "of sampling", 0),
    *RULES,
    JSON,
)


def _environments(load: str) -> list[str]:
    """Return the environments that a run was trained on. Raises ValueError if `load` is no run."""
    if not is_run(Path(load)):
        raise ValueError(
            f"--environment is needed where --load is no run, as {load}; write e.g. --environment"
            " sokoban"
        )
    return list(parse_shares(read_recorded(Path(load))["environment"]["environments"]))


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    settings = [name.removeprefix("--").replace("-", "_") for name, _ in RULES]
    rules = {name: getattr(arguments, name) for name in settings}
    given = arguments.environment
    names = [name.strip() for name in given.split(",")] if given else _environments(arguments.load)
    results = evaluate_sets(
        arguments.load,
        names,
        boards=arguments.boards,
        num_prompts=arguments.num_prompts,
        samples_per_prompt=arguments.samples_per_prompt,
        temperature=arguments.temperature,
        seed=arguments.seed,
        rules={name: value for name, value in rules.items() if value is not None},
    )
    console = Console(is_writer=collectives.is_main(), num_steps=0)
    title = f"{arguments.load}, temperature {arguments.temperature}"
    sets = {name: result.to_dict() for name, result in results.items()}
    console.evaluations(title, sets)
    for name, result in results.items():
        for key, value in result.pass_at_k.items():
            console.say(f"{key}: {value:.1%}" if len(sets) == 1 else f"{name} {key}: {value:.1%}")
    if arguments.json and collectives.is_main():
        write_json(arguments.json, sets[names[0]] if len(sets) == 1 else {"sets": sets})
    collectives.stop()
