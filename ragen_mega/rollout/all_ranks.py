"""One rollout by the engines of all ranks: each plays a part, every rank gets all of it, and it
fails on all or on none.

An engine that has lost its weights gets them from all ranks, which hold a part each; the others
have played their parts then, and wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field

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
    shares = {}
    if total.prompt_tokens:
        shares["cached_share"] = total.cached_tokens / total.prompt_tokens
    return shares | {"restarts": float(total.restarts), "reissued": float(total.reissued)}


@dataclass(frozen=True, slots=True)
class _Part:
    """How far a rank has come with its part of the rollout."""

    groups: list[TrajectoryGroup] = field(default_factory=list)
    needs_weights: bool = False
    failure: Exception | None = None


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
    tasks = _own_tasks(engine, [task for group in groups for task in group])
    with Collection(engine, renderer, tasks, settings, advance=advance) as collection:
        parts = _gather(_play(collection))
        while any(part.needs_weights for part in parts):
            _gather(_send(send_again))
            parts = _gather(_play(collection))
    merged: dict[int, TrajectoryGroup] = {}
    for part in parts:
        for group in part.groups:
            whole = merged.setdefault(group.group_id, TrajectoryGroup(group.group_id, []))
            whole.trajectories.extend(group.trajectories)
    return list(merged.values())


def _own_tasks(engine: RolloutEngine, tasks: Sequence[Task]) -> Sequence[Task]:
    """The contiguous part that this rank plays, so that most groups stay whole and their common
    prompt is computed once.
    """
    place = engine.shard or EngineShard()
    if place.rank:
        return []
    index, num_engines = distributed.rank() // place.size, count_engines(engine)
    start, end = (len(tasks) * (index + i) // num_engines for i in range(2))
    return tasks[start:end]


def _play(collection: Collection) -> _Part:
    try:
        if collection.play():
            return _Part(collection.groups())
        return _Part(needs_weights=True)
    except (Interrupted, EngineError, FloatingPointError, ValueError) as error:
        return _Part(failure=_portable(error))


def _send(send_again: Callable[[], None] | None) -> _Part:
    try:
        if send_again is None:
            raise EngineError("the rollout engine has lost its weights")
        send_again()
    except EngineError as error:
        return _Part(failure=_portable(error))
    return _Part()


def _gather(mine: _Part) -> list[_Part]:
    """The parts of all ranks. Raises, on all of them, an interruption if there is one, else the
    first failure.
    """
    parts = distributed.gather_objects(mine)
    failures = [part.failure for part in parts if part.failure]
    for failure in sorted(failures, key=lambda failure: not isinstance(failure, Interrupted)):
        raise failure
    return parts


def _portable(error: Exception) -> Exception:
    """What another process can read, whatever it was made from."""
    if isinstance(error, (Interrupted, FloatingPointError)):
        return type(error)(*error.args)
    return EngineError(str(error))
