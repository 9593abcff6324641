"""Success of the uniformly random and of the optimal player on a set of prompts.

    python tools/baselines.py --environment sokoban --json baselines.json python tools/baselines.py
    --environment frozen_lake --option success_rate=0.8 --max-turns 8 --json out.json

Prompts are the boards of --boards, else the packaged boards that match the environment, else seeds
123, 124, ...
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragen_mega.environments.boards import Board, has_packaged_boards, load_boards
from ragen_mega.environments.episode import EpisodeConfig
from ragen_mega.environments.registry import make, names
from ragen_mega.environments.reference_players import Baselines, baselines

_FIRST_SEED = 123  # RAGEN's validation seed
_DEFAULT_NUM_SEEDS = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 with one line on stderr if the input is bad."""
    try:
        parsed = _parse(arguments)
        options = dict(_parse_option(text) for text in parsed.option)
        protocol = EpisodeConfig(
            max_turns=parsed.max_turns,
            max_actions_per_turn=parsed.max_actions_per_turn,
            max_actions=parsed.max_actions,
        )
        _check_output(parsed.json)
        prompts, source = _choose_prompts(
            parsed.environment, options, parsed.boards, parsed.num_prompts
        )
        result = baselines(parsed.environment, prompts, protocol, options)
        report = json.dumps(_report(result, protocol, options, source), indent=2)
        parsed.json.write_text(report + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"baselines: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(_table(result, protocol, source))
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(f"{message}; see --help")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    defaults = EpisodeConfig()
    parser = _Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--environment", required=True, help=f"one of {', '.join(names())}")
    parser.add_argument("--boards", type=Path, metavar="FILE.jsonl", help="boards to start from")
    parser.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help="the first N boards or seeds (default: all, 256)",
    )
    parser.add_argument("--max-turns", type=int, default=defaults.max_turns)
    parser.add_argument("--max-actions-per-turn", type=int, default=defaults.max_actions_per_turn)
    parser.add_argument("--max-actions", type=int, default=defaults.max_actions)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment option, may be repeated",
    )
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="file to write")
    return parser.parse_args(arguments)


def _parse_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE; a value that reads as JSON is a number, true, false or null, any other is a
    string.
    """
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"--option takes NAME=VALUE, not {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _check_output(path: Path) -> None:
    """Fail before the computation, not after it."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--json {path} must be a file in an existing folder")


def _choose_prompts(
    environment_name: str, options: dict[str, Any], path: Path | None, num_prompts: int | None
) -> tuple[list[int] | list[Board], str]:
    """The prompts and where they come from."""
    if num_prompts is not None and num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, not {num_prompts}")
    environment = make(environment_name, **options)
    if path is None and not has_packaged_boards(environment):
        count = num_prompts or _DEFAULT_NUM_SEEDS
        return (
            list(range(_FIRST_SEED, _FIRST_SEED + count)),
            f"seeds {_FIRST_SEED} to {_FIRST_SEED + count - 1}",
        )
    boards = load_boards(path, environment_name, **options)
    source = str(path) if path is not None else f"packaged boards {boards[0].set}"
    if num_prompts is not None and num_prompts > len(boards):
        raise ValueError(
            f"--num-prompts {num_prompts} exceeds the {len(boards)} boards of {source}; lower it"
        )
    return boards[:num_prompts], source


def _report(
    result: Baselines, protocol: EpisodeConfig, options: dict[str, Any], source: str
) -> dict[str, Any]:
    budget = {
        name: getattr(protocol, name)
        for name in ("max_turns", "max_actions_per_turn", "max_actions")
    }
    return {**asdict(result), "protocol": budget, "options": options, "prompts": source}


def _table(result: Baselines, protocol: EpisodeConfig, source: str) -> str:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}%"

    interval = f"{percent(result.random_ci_low)} to {percent(result.random_ci_high)}"
    return "\n".join(
        [
            (
                f"{result.environment}: {result.num_prompts} prompts ({source}),"
                f" {protocol.max_turns} turns of at most {protocol.max_actions_per_turn} actions,"
                f" {protocol.max_actions} in total"
            ),
            (
                f"  random                {percent(result.random):>6}   one trajectory per prompt,"
                f" 95%: {interval}"
            ),
            (
                f"  optimum               {percent(result.optimum):>6}   seeing the state once per"
                " turn"
            ),
            (
                f"  optimum, closed loop  {percent(result.optimum_closed_loop):>6}   seeing the"
                " state after every action"
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
