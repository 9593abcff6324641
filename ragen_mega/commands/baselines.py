"""Success of the uniformly random and of the optimal player on a set of prompts.

    ragen-mega baselines --environment sokoban --json baselines.json
    ragen-mega baselines --environment frozen_lake --option success_rate=0.8 --max-turns 8 \\
        --json out.json

Prompts are the boards of --boards, else the packaged boards that match the environment, else its
held-out tasks, else seeds 123, 124, ...
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragen_mega.commands.command_line import JSON, command, flag
from ragen_mega.config import EnvironmentConfig
from ragen_mega.config.sections.environment import with_directory
from ragen_mega.environments.boards import has_packaged_boards, held_out_seeds, load_boards
from ragen_mega.environments.episode import EpisodeConfig
from ragen_mega.environments.pool import briefly
from ragen_mega.environments.processes import builder
from ragen_mega.environments.protocol import Budget, Environment
from ragen_mega.environments.reference_players import (
    EPISODES_PER_PROMPT,
    MAX_SECONDS,
    Baselines,
    Prompt,
    baselines,
)
from ragen_mega.environments.registry import ENVIRONMENTS, held_out_options
from ragen_mega.report.metrics import write_json

_DEFAULT_NUM_SEEDS = 256
BUDGET = ("max_turns", "max_actions_per_turn", "max_actions")
OPTION = flag(
    "--option",
    "environment option, may be repeated",
    [],
    type=str,
    action="append",
    metavar="NAME=VALUE",
)
FLAGS = (
    flag("--environment", f"one of {', '.join(ENVIRONMENTS.names())}", required=True),
    flag("--boards", "boards to start from", type=Path, metavar="FILE.jsonl"),
    flag("--num-prompts", "the first N boards or seeds (default: all, 256)", type=int, metavar="N"),
    *(
        flag(f"--{name.replace('_', '-')}", "of an episode; default: the environment's", type=int)
        for name in BUDGET
    ),
    OPTION,
    flag(
        "--environment-timeout",
        "seconds that the environment may take to be built or to start (0: no limit)",
        EnvironmentConfig.environment_timeout,
    ),
    flag("--environment-processes", "processes in which the environment lives (0: here)", 0),
    JSON,
)


def parse_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE; a value that is JSON becomes a number, true, false or null, any other a
    string. Raises ValueError if there is no name or no value.
    """
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"--option takes NAME=VALUE, not {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def choose_prompts(
    environment_name: str,
    environment: Environment,
    options: dict[str, Any],
    path: Path | None,
    num_prompts: int | None,
) -> tuple[list[Prompt], str]:
    """Return the prompts and where they come from. Raises ValueError if there are too few."""
    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, not {num_prompts}")
    if path is None and not has_packaged_boards(environment):
        seeds = held_out_seeds(environment_name, environment, num_prompts or _DEFAULT_NUM_SEEDS)
        return [(seed, None) for seed in seeds], f"seeds {seeds[0]} to {seeds[-1]}"
    boards = load_boards(path, environment_name, **options)
    source = f"packaged boards {boards[0].set}" if path is None else str(path)
    if num_prompts is not None and num_prompts > len(boards):
        raise ValueError(
            f"--num-prompts {num_prompts} exceeds the {len(boards)} boards of {source}; lower it"
        )
    return [(board.seed, board.rows) for board in boards[:num_prompts]], source


def text(result: Baselines, budget: Budget, source: str) -> str:
    """Return the result as text."""
    found = (
        f"unknown: no actions, tools or random_answer to draw from, or over {MAX_SECONDS:.0f} s"
        if result.random is None
        else f"{_method(result)}; of one trajectory per prompt, 95%:"
        f" {result.random_ci_low:.1%} to {result.random_ci_high:.1%}"
    )
    unsolved = "unknown: the environment has no solver" if result.optimum is None else ""
    rows = (
        ("random", result.random, found),
        ("optimum", result.optimum, unsolved or "seeing the state once per turn"),
        (
            "optimum, closed loop",
            result.optimum_closed_loop,
            unsolved or "seeing the state after every action",
        ),
    )
    lines = (
        f"  {name:22}{'-' if value is None else f'{value:.1%}':>6}   {about}"
        for name, value, about in rows
    )
    head = (
        f"{result.environment}: {result.num_prompts} prompts ({source}), {budget.max_turns} turns"
        f" of at most {budget.max_actions_per_turn} actions, {budget.max_actions} in total"
    )
    errors = [f"  counted as lost: {result.errors_say}"] if result.errors_say else []
    return "\n".join((head, *lines, *errors, *filter(None, [result.turns_say])))


def _method(result: Baselines) -> str:
    """Name the method that found the rate of the random player."""
    if result.is_exact:
        return "exact"
    is_played = result.optimum is None  # else a solver has sampled it
    return f"{EPISODES_PER_PROMPT} episodes per prompt" if is_played else "sampled"


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    options = held_out_options(arguments.environment) | dict(map(parse_option, arguments.option))
    protocol = EpisodeConfig(**{name: getattr(arguments, name) for name in BUDGET})
    name = arguments.environment
    world = EnvironmentConfig(
        environment_timeout=arguments.environment_timeout,
        environment_processes=arguments.environment_processes,
    )
    build = builder(world, name, with_directory(name, options))
    with briefly(name, build, world.environment_timeout) as (_, environment):
        prompts, source = choose_prompts(
            name, environment, options, arguments.boards, arguments.num_prompts
        )
        budget = protocol.budget(environment)
    result = baselines(name, prompts, protocol, timeout=world.environment_timeout, build=build)
    limits = {name: getattr(budget, name) for name in BUDGET}
    about = {"protocol": limits, "options": options, "prompts": source}
    if arguments.json:
        write_json(arguments.json, asdict(result) | about)
    print(text(result, budget, source))
