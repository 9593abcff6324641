"""One rollout by the engines of all ranks: each plays a part, every rank gets the whole, and either
all ranks fail or none.

If an engine has lost its weights, all ranks, each of which holds a part, send them again; by then
the other engines have played their parts, and wait.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import TypeVar

from ragen_mega.data import distributed
from ragen_mega.data.compact import compact, expand
from ragen_mega.data.types import Trajectory, TrajectoryGroup
from ragen_mega.rollout.collector import Advance, Collection, PlaySettings, Task, in_groups
from ragen_mega.rollout.engine import (
    EngineCounts,
    EngineError,
    EngineShard,
    Interrupted,
    RolloutEngine,
)
from ragen_mega.rollout.renderer import ChatRenderer

_STEPS_BETWEEN_DEALS = 32
T = TypeVar("T")


def count_engines(engine: RolloutEngine) -> int:
    """Engines of this job, of which `engine` is one."""
    return distributed.world_size() // (engine.shard or EngineShard()).size


def engine_metrics(engine: RolloutEngine) -> dict[str, float]:
    """What all engines have done since the last call. Collective.

    cached_share: share of prompt tokens found in the cache; missing if there were none. imbalance:
    decoding steps of the busiest engine over the mean of all; missing if they are unknown.
    restarts: servers that replaced a lost one. reissued: requests that were repeated because of
    that.
    """
    counts = [EngineCounts(*each) for each in distributed.gather_objects(astuple(engine.counts))]
    total = EngineCounts(*map(sum, zip(*map(astuple, counts))))
    engine.counts = EngineCounts()
    shares = {}
    if total.prompt_tokens:
        shares["cached_share"] = total.cached_tokens / total.prompt_tokens
    if total.steps:
        most = max(each.steps for each in counts)
        shares["imbalance"] = most * count_engines(engine) / total.steps
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
    """Play all tasks, on the ranks that run engines, and give every rank all groups, in order.
    Collective.

    Tasks without a slot wait in one queue. Every few decoding steps they are dealt to the engines
    with room, and somewhat more than there are slots, so that no slot is idle until the next deal.
    The deal depends only on the engines' steps, so the batches of a rollout are reproducible.
    `send_again` gives all engines their weights again; it is called on all ranks if any engine has
    lost them. Raises the same on all ranks: Interrupted if `advance` did on any, else
    FloatingPointError or EngineError if any failed.
    """
    tasks = [task for group in groups for task in group]
    slots = distributed.gather_objects(engine.num_slots)
    waiting, played = deque(range(len(tasks))), [list[int]() for _ in slots]
    unfinished = [0] * len(slots)

    def send() -> None:
        if send_again is None:
            raise EngineError("the rollout engine has lost its weights")
        send_again()

    with Collection(engine, renderer, (), settings, advance=advance) as collection:

        def play() -> tuple[bool, int]:
            has_weights = collection.play(_STEPS_BETWEEN_DEALS if waiting else None)
            return has_weights, collection.num_unfinished

        is_over = False
        while not is_over:
            rooms = [num + num // 4 - left for num, left in zip(slots, unfinished)]
            parts = [[waiting.popleft() for _ in range(num)] for num in deal(len(waiting), rooms)]
            collection.add(tasks[index] for index in parts[distributed.rank()])
            for mine, part in zip(played, parts):
                mine += part
            have_weights, unfinished = zip(*_on_all_ranks(play))
            if not all(have_weights):
                _on_all_ranks(send)
            else:
                is_over = not any(unfinished) and not waiting
        found = exchange(collection.trajectories())
    order = {
        index: trajectory
        for mine, part in zip(played, found)
        for index, trajectory in zip(mine, part, strict=True)
    }
    return in_groups(order[index] for index in range(len(tasks)))


def exchange(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    """The trajectories of every rank, in rank order, on every rank. Collective."""
    if distributed.world_size() == 1:
        return [trajectories]
    parts = distributed.gather_objects(compact(trajectories))
    mine = distributed.rank()
    return [trajectories if rank == mine else expand(part) for rank, part in enumerate(parts)]


def deal(num_waiting: int, rooms: Sequence[int]) -> list[int]:
    """How many waiting tasks each rank takes next: each task goes to the rank with the most room
    left, the first one in a tie.
    """
    shares = [0] * len(rooms)
    for _ in range(min(num_waiting, sum(max(0, room) for room in rooms))):
        shares[max(range(len(rooms)), key=lambda rank: rooms[rank] - shares[rank])] += 1
    return shares


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
    """The error in a form that another process can unpickle."""
    if isinstance(error, (Interrupted, FloatingPointError)):
        return type(error)(*error.args)
    return EngineError(str(error))
