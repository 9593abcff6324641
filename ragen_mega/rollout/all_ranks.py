"""One rollout by the engines of all ranks: each plays a part, every rank gets all of it, and it
fails on all or on none.

An engine that has lost its weights gets them from all ranks, which hold a part each; the others
have played their parts then, and wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import TypeVar

from ragen_mega.data import distributed
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.rollout.collector import Advance, Collection, PlaySettings, Task, in_groups
from ragen_mega.rollout.engine import (
    EngineCounts,
    EngineError,
    EngineShard,
    Interrupted,
    RolloutEngine,
)
from ragen_mega.rollout.renderer import ChatRenderer

T = TypeVar("T")


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


def collect_on_all_ranks(
    engine: RolloutEngine,
    renderer: ChatRenderer,
    groups: Sequence[Sequence[Task]],
    settings: PlaySettings,
    *,
    advance: Advance | None = None,
    send_again: Callable[[], None] | None = None,
) -> list[TrajectoryGroup]:
    """Play all tasks, each engine a part, on the rank that runs it, and give every rank all groups,
    in order. Collective.

    `send_again` gives all engines their weights once more; it is called on all ranks if any engine
    has lost them. Raises on all ranks alike Interrupted if `advance` did so on any, else
    FloatingPointError or EngineError if any failed.
    """
    tasks = _own_tasks(engine, [task for group in groups for task in group])

    def send() -> None:
        if send_again is None:
            raise EngineError("the rollout engine has lost its weights")
        send_again()

    with Collection(engine, renderer, tasks, settings, advance=advance) as collection:
        while not all(_on_all_ranks(collection.play)):  # an engine has lost its weights
            _on_all_ranks(send)
        parts = _on_all_ranks(collection.groups)
    return in_groups(
        trajectory for part in parts for group in part for trajectory in group.trajectories
    )


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


def _on_all_ranks(act: Callable[[], T]) -> list[T]:
    """What `act` returns on each rank. Raises, on all of them, an interruption if there is one,
    else the first failure.
    """
    result = failure = None
    try:
        result = act()
    except (Interrupted, EngineError, FloatingPointError, ValueError) as error:
        failure = _portable(error)
    results, failures = zip(*distributed.gather_objects((result, failure)))
    for error in sorted(filter(None, failures), key=lambda e: not isinstance(e, Interrupted)):
        raise error
    return list(results)


def _portable(error: Exception) -> Exception:
    """What another process can read, whatever it was made from."""
    if isinstance(error, (Interrupted, FloatingPointError)):
        return type(error)(*error.args)
    return EngineError(str(error))
