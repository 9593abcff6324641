"""One rollout by the engines of all ranks: each plays a part, every rank gets all of it, and it
fails on all or on none.

An engine that has lost its weights gets them from all ranks, which hold a part each; the others
have played their parts then, and wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from ragen_mega.data import distributed
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.rollout.collector import Collection, PlaySettings, Task
from ragen_mega.rollout.engine import (
    EngineCounts,
    EngineError,
    EngineShard,
    Interrupted,
    RolloutEngine,
)
from ragen_mega.rollout.renderer import ChatRenderer

Part = list[TrajectoryGroup] | Exception | None
"""What a rank has: the groups that it played, why it cannot, or an engine without weights."""


def count_engines(engine: RolloutEngine) -> int:
    """Engines of this job, of which `engine` is one."""
    return distributed.world_size() // (engine.shard or EngineShard()).size


def engine_metrics(engine: RolloutEngine) -> dict[str, float]:
    """What all engines have done since the last call. Collective.

    cached_share: of the prompts' tokens, those that were not computed again; missing where none was
    asked. restarts: servers that replaced a lost one. reissued: requests that were asked again for
    that.
    """
    total = EngineCounts(*map(sum, zip(*distributed.gather_objects(astuple(engine.counts)))))
    engine.counts = EngineCounts()
    shares = (
        {"cached_share": total.cached_tokens / total.prompt_tokens} if total.prompt_tokens else {}
    )
    return shares | {"restarts": float(total.restarts), "reissued": float(total.reissued)}


def collect_on_all_ranks(
    engine: RolloutEngine,
    renderer: ChatRenderer,
    groups: Sequence[Sequence[Task]],
    settings: PlaySettings,
    *,
    advance: Callable[[], None] | None = None,
    send_again: Callable[[], None] | None = None,
) -> list[TrajectoryGroup]:
    """Play all tasks, each engine a part, on the rank that runs it, and give every rank all groups,
    in order. Collective.

    `send_again` gives all engines their weights once more; it is called on all ranks if any engine
    has lost them. Raises on all ranks alike Interrupted if `advance` did so on any, else
    FloatingPointError or EngineError if any failed.
    """
    place = engine.shard or EngineShard()
    index, num_engines = distributed.rank() // place.size, count_engines(engine)
    # Contiguous parts, so that most groups stay whole and their common prompt is computed once.
    tasks = [task for group in groups for task in group]
    part = (
        tasks[len(tasks) * index // num_engines : len(tasks) * (index + 1) // num_engines]
        if place.rank == 0
        else []
    )
    meeting = _Meeting(send_again)
    mine: Part
    try:
        with Collection(engine, renderer, part, settings, advance=advance) as collection:
            while not collection.play():
                meeting.ask_for_weights()
            mine = collection.groups()
    except (Interrupted, EngineError, FloatingPointError, ValueError) as error:
        if meeting.is_over:
            raise  # all ranks know
        mine = error
    merged: dict[int, TrajectoryGroup] = {}
    for groups_of_rank in meeting.attend(mine):
        for group in groups_of_rank:
            merged.setdefault(
                group.group_id, TrajectoryGroup(group.group_id, [])
            ).trajectories.extend(group.trajectories)
    return list(merged.values())


class _Meeting:
    """Where ranks wait for each other until all have played their parts or one has failed."""

    def __init__(self, send_again: Callable[[], None] | None) -> None:
        self._send_again = send_again
        self.is_over = False

    def ask_for_weights(self) -> None:
        """Returns when this rank's engine has its weights again. Raises as `attend` does."""
        self.attend(None)

    def attend(self, mine: Part) -> list[Any]:
        """The parts of all ranks. Raises the first failure, on all ranks."""
        while True:
            parts = distributed.gather_objects(
                _portable(mine) if isinstance(mine, Exception) else mine
            )
            if failures := [part for part in parts if isinstance(part, Exception)]:
                self.is_over = True
                raise next(
                    (failure for failure in failures if isinstance(failure, Interrupted)),
                    failures[0],
                )
            if None not in parts:
                return parts
            try:
                if self._send_again is None:
                    raise EngineError("the rollout engine has lost its weights")
                self._send_again()
            except EngineError as error:
                mine = error
            if mine is None:
                return []


def _portable(error: Exception) -> Exception:
    """What another process can read, whatever it was made from."""
    if isinstance(error, (Interrupted, FloatingPointError)):
        return type(error)(*error.args)
    return EngineError(str(error))
