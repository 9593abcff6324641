"""Traces of a step for people to read: a few groups, token by token, in one compressed JSON file
that a browser can open directly.

    <run>/traces/step_00000012.json.gz              what was trained on, or not
    <run>/traces/eval_00000030_frozen_lake.json.gz  the same initial states at every evaluation

A trace is `{step, environment, strings, groups: [{id, environment, seed, kept, members}]}`. A
member has `tokens` (indices into `strings`), `turns`, `kept` (whether it was trained on; of a
group: whether any member was), `channels` (a number for every sampled token, in order) and, where
the environment draws itself, `pictures` before and after every turn.
"""

import gzip
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ragen_mega.config import EnvironmentConfig
from ragen_mega.config.recorded import read_json
from ragen_mega.data.types import TokenBatch, Trajectory, TrajectoryGroup
from ragen_mega.environments import calls
from ragen_mega.environments.pool import EnvironmentFailed, briefly, guarded, is_instant
from ragen_mega.environments.registry import make
from ragen_mega.rollout.endings import cause
from ragen_mega.storage.integrity import write_whole

TRACES = "traces"
_NAME = re.compile(r"(step|eval)_(\d{8})(?:_(.+))?\.json\.gz")
_CHANNELS = {
    "old_logprobs": "trainer log-probability",
    "entropies": "entropy",
    "teacher_log_ratios": "teacher log-ratio",
    "advantages": "advantage",
    "values": "value",
    "returns": "return",
}
"""Fields of a batch that a trace holds for every sampled token, and their names in the viewer."""
_MOST_BYTES_OF_A_CHARACTER = 4  # in UTF-8; each may be a token
_REMEMBERED = 2**16  # texts of tokens
Board = Sequence[str] | None
Rows = Mapping[int, int]
"""Identity of a trajectory -> its place in the batch."""


class TraceWriter:
    """Writes the traces of a run. Not collective: one rank writes."""

    def __init__(
        self,
        directory: Path,
        decode: Callable[[list[int]], str],
        config: EnvironmentConfig,
        say: Callable[[str], None],
    ) -> None:
        """`decode`: token ids -> text, special tokens included; `say` is told once why an
        environment that draws itself has no pictures.
        """
        self.directory = directory
        # Nearly always single tokens, and mostly ones that were there before.
        self._decode = lru_cache(_REMEMBERED)(lambda tokens: decode([*tokens]))
        self._config = config
        self._undrawn: set[str] = set()  # environments that need not be built again to know it
        self._say, self._reported = say, set[str]()

    def write_step(
        self,
        step: int,
        groups: Sequence[TrajectoryGroup],
        kept: Sequence[TrajectoryGroup] = (),
        batch: TokenBatch | None = None,
    ) -> None:
        """Write the trace of a step: it played `groups` and trained on the groups `kept`, packed in
        this order in `batch`. Raises OSError.
        """
        trained = (id(member) for group in kept for member in group.trajectories)
        rows = {identity: row for row, identity in enumerate(trained)}
        boards = [None] * len(groups)
        options = partial(self._config.training_options, step=step)
        self._write(f"step_{step:08d}", step, groups, boards, options, rows, batch)

    def write_evaluation(
        self, step: int, name: str, groups: Sequence[TrajectoryGroup], boards: Sequence[Board]
    ) -> None:
        """Write the trace of an evaluation of environment `name` after `step` steps, each group
        from its board (None: from its seed). Raises OSError.
        """
        file = f"eval_{step:08d}_{name.replace('/', '.')}"
        self._write(file, step, groups, boards, self._config.evaluation_options)

    def drop_from(self, step: int) -> None:
        """Delete the traces of an earlier process for step `step` and later, which come again."""
        for path, kind, of_step, _ in traces(self.directory):
            if of_step > step or (kind, of_step) == ("step", step):
                path.unlink()

    def _write(
        self,
        name: str,
        step: int,
        groups: Sequence[TrajectoryGroup],
        boards: Sequence[Board],
        options: Callable[[str], Mapping[str, Any]],
        rows: Rows = MappingProxyType({}),
        batch: TokenBatch | None = None,
    ) -> None:
        strings: dict[str, int] = {}
        entries = []
        for group, board in zip(groups, boards, strict=True):
            first = group.trajectories[0]
            drawn = self._pictures(group.trajectories, board, options(first.environment))
            members = [
                self._member(member, strings)
                | {
                    "kept": id(member) in rows,
                    "channels": _channels(member, batch, rows.get(id(member))),
                    "pictures": shown,
                }
                for member, shown in zip(group.trajectories, drawn, strict=True)
            ]
            entries.append(
                {
                    "id": group.group_id,
                    "environment": first.environment,
                    "seed": first.seed,
                    "kept": any(member["kept"] for member in members),
                    "members": members,
                }
            )
        trace = {"step": step, "strings": list(strings), "groups": entries}
        text = json.dumps(trace, separators=(",", ":"), default=str)
        if "NaN" in text or "Infinity" in text:  # perhaps as numbers, which a browser cannot read
            text = json.dumps(read_json(text), separators=(",", ":"))
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{name}.json.gz"
        write_whole(path, gzip.compress(text.encode(), compresslevel=4, mtime=0))

    def _member(self, trajectory: Trajectory, strings: dict[str, int]) -> dict[str, Any]:
        total, *rewards = _short([trajectory.total_reward, *(t.reward for t in trajectory.turns)])
        return {
            "tokens": [
                strings.setdefault(text, len(strings)) for text in self._texts(trajectory.tokens)
            ],
            "turns": [
                {
                    "start": turn.start,
                    "end": turn.end,
                    "reward": reward,
                    "info": _info_as_text(turn.info),
                }
                for turn, reward in zip(trajectory.turns, rewards)
            ],
            "reward": total,
            "success": trajectory.success,
            "terminated": trajectory.terminated,
            "truncated": trajectory.truncated,
            "truncated_by": cause(trajectory),
            "outcome_seed": str(trajectory.outcome_seed),  # more digits than JavaScript keeps
            "weight_version": trajectory.weight_version,
        }

    def _pictures(
        self, trajectories: Sequence[Trajectory], board: Board, options: Mapping[str, Any]
    ) -> list[list[str]]:
        """Draw the pictures of each trajectory of a group."""
        name, drawn = trajectories[0].environment, None
        if name not in self._undrawn:
            timeout = self._config.environment_timeout
            drawn = pictures(
                trajectories, board, options, timeout=timeout, say=partial(self._miss, name)
            )
        if drawn is None:
            self._undrawn.add(name)
        return drawn or [[] for _ in trajectories]

    def _miss(self, name: str, why: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self._say(f"pictures of {name} are missing in the viewer: {why}")

    def _texts(self, tokens: Sequence[int]) -> Iterator[str]:
        """Yield the text of each token; a character of several tokens belongs to its last token."""
        pending: list[int] = []
        for index, token in enumerate(tokens):
            pending.append(token)
            text = self._decode(tuple(pending))
            if not text.endswith("\ufffd") or index + 1 == len(tokens):
                pending = []
                yield text
            elif len(pending) == _MOST_BYTES_OF_A_CHARACTER:  # the first begins none
                yield self._decode((pending.pop(0),))
            else:
                yield ""


def traces(directory: Path) -> list[tuple[Path, str, int, str | None]]:
    """(file, "step" or "eval", step, environment of an evaluation), in order of the steps."""
    paths = directory.iterdir() if directory.is_dir() else ()
    found = [(path, _NAME.fullmatch(path.name)) for path in paths]
    named = [(path, name[1], int(name[2]), name[3]) for path, name in found if name]
    return sorted(named, key=lambda item: (item[2], item[1], item[0]))


def pictures(
    trajectories: Sequence[Trajectory],
    board: Board,
    options: Mapping[str, Any],
    *,
    timeout: float = 0.0,
    say: Callable[[str], None],
) -> list[list[str]] | None:
    """Draw every trajectory of a group at its start and after each turn, as `render()` of the
    environment does it: text, or SVG. The result is None for an environment without pictures, or
    one that cannot be built within `timeout` seconds (0: no limit). The trajectories are replayed
    for it, so only instant environments have pictures. `say` receives the reason why an environment
    with a `render` is not drawn.
    """
    name = trajectories[0].environment
    try:
        with briefly(name, partial(make, name, **options), timeout) as (_, world):
            if not callable(getattr(world, "render", None)):
                return None
            if not is_instant(world):
                say("render() is called where the class declares is_instant = True")
                return None
            return [_replayed(world, trajectory, board, say) for trajectory in trajectories]
    except ValueError as error:
        say(str(error))
        return None  # not worth waiting for the next one


def _replayed(
    world: Any, trajectory: Trajectory, board: Board, say: Callable[[str], None]
) -> list[str]:
    def play() -> list[str]:
        calls.reset(world, trajectory.seed, outcome_seed=trajectory.outcome_seed, board=board)
        drawn = [_drawn(world)]
        for turn in trajectory.turns:
            for action in turn.info.get("actions", ()):
                calls.step(world, action)
            drawn.append(_drawn(world))
        return drawn

    try:
        return guarded(play)
    except EnvironmentFailed as error:
        say(str(error))
        return []  # a picture is not worth a failed run


def _drawn(world: Any) -> str:
    picture = world.render()
    if not isinstance(picture, str):
        raise TypeError(f"render must return text or SVG (str), not {picture!r:.60}")
    return picture


def _info_as_text(info: Mapping[str, Any]) -> dict[str, Any]:
    """`info` with actions as texts: an object may hold NaN, which is no JSON for a browser."""
    actions = info.get("actions", ())
    return {**info, "actions": [a if isinstance(a, str) else json.dumps(a) for a in actions]}


def _channels(
    trajectory: Trajectory, batch: TokenBatch | None, row: int | None
) -> dict[str, list[float | None]]:
    """Name in the viewer -> number of every sampled token; the batch's numbers if the batch has the
    trajectory as its `row`.
    """
    sampled = [at for turn in trajectory.turns for at in range(turn.start, turn.end)]
    channels = {"engine log-probability": [trajectory.rollout_logprobs[at] for at in sampled]}
    if batch is not None and row is not None:
        span = slice(*batch.cu_seqlens[row : row + 2].tolist())
        for field, name in _CHANNELS.items():
            if (values := getattr(batch, field)) is not None:
                channels[name] = values[span][batch.turn_ids[span] >= 0].tolist()
    return {name: _short(values) for name, values in channels.items()}


def _short(values: Sequence[float]) -> list[float | None]:
    """Return four significant digits, which is enough to read."""
    short = map(float, ("%.4g " * len(values) % tuple(values)).split())
    return [value if math.isfinite(value) else None for value in short]
