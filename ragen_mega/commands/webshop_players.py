"""Score and success of the oracle, of WebShop's rule and of the random shopper on the same goals.

    ragen-mega webshop-players --json out.json
    ragen-mega webshop-players --option data=webshop-data --option split=test \\
        --num-goals 500 --max-turns 15 --json out.json
"""

import argparse
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from ragen_mega.commands.baselines import OPTION, parse_option
from ragen_mega.commands.command_line import JSON, command, flag
from ragen_mega.environments.reference_players import wilson_interval
from ragen_mega.environments.registry import held_out_options, make
from ragen_mega.extensions.extras import require
from ragen_mega.report.metrics import write_json

if TYPE_CHECKING:
    from ragen_mega.environments.worlds.webshop.world import WebShop

_SEED = 0  # seed of the random shopper
FLAGS = (
    flag("--num-goals", "the first N goals of the split", 256, metavar="N"),
    flag("--max-turns", "of an episode (default: the environment's)", type=int, metavar="N"),
    OPTION,
    JSON,
)


def measure(
    shopper: "WebShop", choose: Callable[["WebShop"], str], num_goals: int, num_turns: int
) -> dict[str, float]:
    """Return the mean score of a player, its success with the 95% interval, and how often its
    purchase scored above 0.
    """
    from ragen_mega.environments.worlds.webshop.players import play

    scores = []
    for seed in range(num_goals):
        shopper.reset(seed)
        scores.append(play(shopper, choose, num_turns))
    successes = sum(score >= 1.0 for score in scores)
    low, high = wilson_interval(successes, num_goals)
    return {
        "score": sum(scores) / num_goals,
        "success": successes / num_goals,
        "ci_low": low,
        "ci_high": high,
        "bought": sum(score > 0.0 for score in scores) / num_goals,
    }


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    require("webshop", "environments of WebShop")
    from ragen_mega.environments.worlds.webshop.players import optimal_actions, rule_actions

    options = held_out_options("webshop") | dict(map(parse_option, arguments.option))
    shopper = cast("WebShop", make("webshop", **options))
    num_goals = arguments.num_goals
    num_turns = shopper.max_turns if arguments.max_turns is None else arguments.max_turns
    if not 1 <= num_goals <= shopper.num_tasks:
        raise ValueError(
            f"--num-goals must be 1 to {shopper.num_tasks}, the goals of the split, not {num_goals}"
        )
    if num_turns < 1:
        raise ValueError(f"--max-turns must be at least 1, not {num_turns}")
    draw = random.Random(_SEED)
    players: dict[str, Callable[[WebShop], str]] = {
        "oracle": lambda world: optimal_actions(world, num_turns)[0],
        "rule": lambda world: rule_actions(world, num_turns)[0],
        "random": lambda world: world.random_answer(draw),
    }
    result = {
        name: measure(shopper, choose, num_goals, num_turns) for name, choose in players.items()
    }
    print(f"{shopper.shop.label}: {num_goals} goals, {num_turns} turns, {options}")
    for name, rate in result.items():
        print(f"  {name:8} score {rate['score']:.3f}  success {rate['success']:.1%}")
    if arguments.json:
        about = {"catalogue": shopper.shop.label, "max_turns": num_turns}
        write_json(arguments.json, about | {"options": options, "players": result})
