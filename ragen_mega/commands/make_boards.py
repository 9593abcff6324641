"""Draw boards for evaluation that were not used to choose any recipe.

    ragen-mega make-boards --environment sokoban --first-seed 5000 --output fresh.jsonl
    ragen-mega evaluate --load runs/NAME --environment sokoban --boards fresh.jsonl

Seeds below 100000 belong to neither the warm start nor training. Boards that are among the packaged
ones are left out.
"""

import argparse
import json
from typing import Any

from ragen_mega.commands.command_line import command, flag, target
from ragen_mega.config.sections.environment import json_object
from ragen_mega.environments.boards import has_packaged_boards, load_boards
from ragen_mega.environments.registry import make
from ragen_mega.environments.worlds.frozen_lake.world import FrozenLake
from ragen_mega.environments.worlds.sokoban.world import Sokoban
from ragen_mega.report.terminal import shown

_WARM_START_SEEDS = 100_000


def draw_boards(
    name: str, options: dict[str, Any], first_seed: int, count: int
) -> list[dict[str, Any]]:
    """`count` lines of a boards file, one per seed from `first_seed` on. Raises ValueError if the
    environment has no boards, or too few.
    """
    environment = make(name, **options)
    if not isinstance(environment, (Sokoban, FrozenLake)):
        raise ValueError(
            f"environment {name} does not start from boards; choose sokoban or frozen_lake"
        )
    if first_seed < 0 or count < 1 or first_seed + 2 * count > _WARM_START_SEEDS:
        raise ValueError(
            f"seeds {first_seed} to {first_seed + 2 * count} must lie in [0, {_WARM_START_SEEDS}),"
            " which is neither played in the warm start nor in training; lower --first-seed or"
            " --num-boards"
        )
    packaged = load_boards(None, name, **options) if has_packaged_boards(environment) else []
    seen, lines = {board.rows for board in packaged}, []
    for seed in range(first_seed, _WARM_START_SEEDS):
        environment.reset(seed)
        rows = (
            environment.lake.rows()
            if isinstance(environment, FrozenLake)
            else environment.room.rows()
        )
        if rows not in seen:
            seen.add(rows)
            lines.append({"set": environment.board_set, "seed": seed, "board": list(rows)})
        if len(lines) == count:
            return lines
    raise ValueError(
        f"environment {name} has {len(lines)} boards under the seeds {first_seed} to"
        f" {_WARM_START_SEEDS - 1}, not {count}; lower --num-boards"
    )


@command(
    __doc__,
    flag("--environment", "sokoban or frozen_lake", required=True),
    flag("--environment-options", "JSON object of the environment's options", "{}"),
    flag("--first-seed", "of the boards", 5000),
    flag("--num-boards", "to draw", 256),
    flag("--output", "boards file (JSON lines) to write", type=target, required=True),
)
def main(arguments: argparse.Namespace) -> None:
    options = json_object("environment_options", arguments.environment_options)
    lines = draw_boards(arguments.environment, options, arguments.first_seed, arguments.num_boards)
    arguments.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines)} boards of {lines[0]['set']} in {shown(arguments.output)}")
