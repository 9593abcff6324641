"""Boards files: fixed initial states to evaluate on, one JSON object per line.

    {"set": "sokoban_6x6_1box", "seed": 123, "board": ["######", "##P_##", ...]}

`seed` is the prompt seed that belongs to the board; other keys are ignored. The environment defines
what the rows mean: its `reset` takes the keyword `board`, and its `accepts_board(rows)` returns
whether a board has its kind and size; for a malformed board of its kind it raises ValueError that
names the broken rule. Its attribute `board_set`, if any, names the packaged set that matches its
options. The packaged sets are the rooms and lakes that RAGEN (arXiv:2504.20073)
validates on: seeds 123 to 378, without the 29 large rooms whose drawing depended on the process.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

from ragen_mega.environments.pool import EnvironmentFailed, guarded
from ragen_mega.environments.protocol import MAX_SEED, Environment
from ragen_mega.environments.registry import make
from ragen_mega.system.json_lines import json_lines

_WORLDS = Path(__file__).parent / "worlds"
_FIRST_SEED = 123  # RAGEN's validation seed


@dataclass(frozen=True, slots=True)
class Board:
    """One initial state."""

    set: str
    seed: int
    rows: tuple[str, ...]


def packaged_sets() -> list[str]:
    """Return the names of the sets that come with the package."""
    return sorted(path.stem for path in _WORLDS.glob("*/boards/*.jsonl"))


def has_packaged_boards(environment: Environment) -> bool:
    """Return whether `load_boards(None, ...)` finds boards for this environment."""
    return getattr(environment, "board_set", None) in packaged_sets()


def held_out_seeds(name: str, environment: Any, most: int) -> range:
    """Return the seeds of at most `most` initial states of environment `name` without boards: 0, 1,
    ... if it has a number of tasks, else 123 and those that follow. Raises ValueError for a number
    that is none.
    """
    num_tasks = getattr(environment, "num_tasks", None)
    if num_tasks is None:
        return range(_FIRST_SEED, _FIRST_SEED + most)
    if not isinstance(num_tasks, Integral) or num_tasks < 1:
        raise ValueError(
            f"num_tasks of environment {name} must be a positive integer, not {num_tasks!r:.60}"
        )
    return range(min(int(num_tasks), most))


def load_boards(path: str | Path | None, environment_name: str, **options: Any) -> list[Board]:
    """Return the boards in `path` (None: the packaged ones) that fit the environment
    `environment_name` with `options`.

    A file may hold several sets; boards of another kind or size are left out. Raises ValueError, in
    one line, if a line breaks a rule, the file cannot be read or nothing fits.
    """
    environment = make(environment_name, **options)
    if not hasattr(environment, "accepts_board"):
        raise ValueError(f"environment {environment_name} does not start from boards; use seeds")
    name = getattr(environment, "board_set", "boards")
    if path is None:
        if name not in packaged_sets():
            raise ValueError(
                f"no packaged boards {name} for environment {environment_name};"
                f" there are {', '.join(packaged_sets())}: pass a boards file or use seeds"
            )
        (path,) = _WORLDS.glob(f"*/boards/{name}.jsonl")
    fitting, sets = [], set()
    for number, record in _numbered_records(path):
        try:
            board = _board(record)
            if _fits(environment, board):
                fitting.append(board)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {' '.join(str(error).split())}") from error
        sets.add(board.set)
    if not fitting:
        raise ValueError(
            f"{path}: none of its boards (sets {', '.join(sorted(sets))}) fits environment"
            f" {environment_name} ({name}); choose another file or other options"
        )
    return fitting


def _fits(environment: Any, board: Board) -> bool:
    try:
        return guarded(partial(environment.accepts_board, board.rows))
    except EnvironmentFailed as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise ValueError(f"accepts_board failed: {error}") from error


def accepts(environment: Any, board: Board) -> bool:
    """Return whether an environment can start from a board, which may be of another kind."""
    try:
        return hasattr(environment, "accepts_board") and _fits(environment, board)
    except ValueError:
        return False


def _numbered_records(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        numbered = [*json_lines(path)]
    except OSError as error:
        raise ValueError(
            f"{path}: cannot read the boards file ({error}); check the path"
        ) from error
    if not numbered:
        raise ValueError(
            f"{path}: a boards file holds one JSON object a line, but this one is empty"
        )
    return numbered


def _board(record: Mapping[str, Any]) -> Board:
    missing = [key for key in ("set", "seed", "board") if key not in record]
    if missing:
        raise ValueError(
            f"a board needs the keys set, seed and board; add {', '.join(missing)}, as in"
            ' {"set": "mine", "seed": 0, "board": ["SFFF", "FHFH", "FFFH", "HFFG"]}'
        )
    name, seed, rows = record["set"], record["seed"], record["board"]
    are_rows = isinstance(rows, list) and rows and all(isinstance(r, str) and r for r in rows)
    for holds, rule in (
        (isinstance(name, str) and name.strip(), f"set must be a name, not {name!r:.60}"),
        (
            type(seed) is int and 0 <= seed <= MAX_SEED,
            f"seed must be a whole number from 0 to 2**63 - 1, not {seed!r:.60}",
        ),
        (are_rows, f"board must be a list of rows, each a non-empty string, not {rows!r:.60}"),
    ):
        if not holds:
            raise ValueError(rule)
    return Board(name, seed, tuple(rows))
