"""One rollout by the engines of all ranks: each plays a part, every rank gets the whole as
`exchange.gather_to_main` says, and either all ranks fail or none.

If an engine has lost its weights, all ranks, each of which holds a part, send them again; by then
the other engines have played their parts, or the steps until the next deal, and wait.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple
from typing import Any

from ragen_mega.data.exchange import gather_to_main
from ragen_mega.data.types import TrajectoryGroup, in_groups
from ragen_mega.ranks import collectives
from ragen_mega.rollout.collector import Collection
from ragen_mega.rollout.engine import (
    EngineCounts,
    EngineError,
    EngineShard,
    Interrupted,
    RolloutEngine,
)
from ragen_mega.rollout.player import Advance, PlaySettings, Task
from ragen_mega.rollout.renderer import ChatRenderer

_STEPS_BETWEEN_DEALS = 32


def count_engines(engine: RolloutEngine) -> int:
    """Return the number of engines of this job, of which `engine` is one."""
    return collectives.world_size() // (engine.shard or EngineShard()).size


def engine_metrics(engine: RolloutEngine) -> dict[str, float]:
    """Return the metrics of all engines since the last call. Collective.

    cached_share: share of prompt tokens found in the cache; missing if there were none. imbalance:
    decoding steps of the busiest engine over the mean of all; missing if they are unknown.
    restarts: servers that replaced a lost one. reissued: requests that were repeated because of
    that.
    """
    counts = [EngineCounts(*each) for each in collectives.gather_objects(astuple(engine.counts))]
    total = EngineCounts(*map(sum, zip(*map(astuple, counts))))
    engine.counts = EngineCounts()
    shares = {}
    if total.prompt_tokens:
        shares["cached_share"] = total.cached_tokens / total.prompt_tokens
    if total.steps:
        most = max(each.steps for each in counts)
        shares["imbalance"] = most * count_engines(engine) / total.steps
    return shares | {"restarts": float(total.restarts), "reissued": float(total.reissued)}


class JointCollection(AbstractContextManager["JointCollection"]):
    """Trajectories in progress on the engines of all ranks, which are awake and have their weights.
    Methods are collective.

    Tasks without a slot wait in one queue. Every few decoding steps they are dealt to the engines
    with room, and somewhat more than there are slots, so that no slot is idle until the next deal.
    What a task samples does not depend on the engine that plays it.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        renderer: ChatRenderer,
        settings: PlaySettings,
        *,
        advance: Advance | None = None,
        send_again: Callable[[], None] | None = None,
    ) -> None:
        """`send_again` gives all engines their weights again; it is called on all ranks if any
        engine has lost them, and raises on all or on none.
        """
        self._collection = Collection(engine, renderer, (), settings, advance=advance)
        self._send_again = send_again
        self._slots = collectives.gather_objects(engine.num_slots)
        self._num_tasks = 0
        self._waiting: deque[tuple[int, Task]] = deque()
        # For every rank: its tasks that were not taken, and the unfinished ones among them.
        self._dealt: list[set[int]] = [set() for _ in self._slots]
        self._unfinished: list[set[int]] = [set() for _ in self._slots]

    def __exit__(self, *error: object) -> None:
        self._collection.__exit__(*error)

    def add(self, groups: Sequence[Sequence[Task]]) -> range:
        """Add tasks, which the next `play` begins; returns their indices."""
        first, tasks = self._num_tasks, [task for group in groups for task in group]
        self._num_tasks += len(tasks)
        self._waiting.extend(enumerate(tasks, first))
        return range(first, self._num_tasks)

    @property
    def unfinished(self) -> set[int]:
        """Tasks without a finished trajectory."""
        return {index for index, _ in self._waiting}.union(*self._unfinished)

    def play(self, is_enough: Callable[[set[int]], bool] | None = None) -> None:
        """Play until all tasks are finished, or `is_enough(unfinished)` says so, which is asked
        every few decoding steps.

        Raises the same on all ranks: Interrupted if `advance` did on any, else FloatingPointError
        or EngineError if any failed.
        """
        while (left := self.unfinished) and not (is_enough and is_enough(left)):
            self._deal()
            steps = _STEPS_BETWEEN_DEALS if self._waiting or is_enough else None
            with on_all_ranks() as parts:
                parts.append((self._collection.play(steps), self._collection.unfinished))
            self._note(parts)

    def take(self, tasks: Iterable[int]) -> list[TrajectoryGroup]:
        """Return the groups of finished tasks, in order, and keep them no longer; see `share`."""
        wanted = set(tasks)
        indices = [sorted(wanted & dealt) for dealt in self._dealt]
        found = gather_to_main(self._collection.take(indices[collectives.rank()]))
        self._dealt = [dealt - wanted for dealt in self._dealt]
        order = {
            index: trajectory
            for own, part in zip(indices, found, strict=True)
            for index, trajectory in zip(own, part, strict=True)
        }
        return in_groups(order[index] for index in sorted(wanted))

    def finish_turns(self) -> None:
        """Let the turns that have begun end; the next `play` begins further ones. Raises as `play`
        does.
        """
        have_weights = False
        while not have_weights:
            with on_all_ranks() as parts:
                parts.append(
                    (self._collection.play(begin_turns=False), self._collection.unfinished)
                )
            have_weights = self._note(parts)

    def drop_caches(self) -> None:
        """Let the next turns of unfinished trajectories compute their contexts again."""
        self._collection.drop_caches()

    def _deal(self) -> None:
        """Give waiting tasks to the ranks with room."""
        rooms = [
            num + num // 4 - len(unfinished)
            for num, unfinished in zip(self._slots, self._unfinished, strict=True)
        ]
        for rank, num in enumerate(deal(len(self._waiting), rooms)):
            part = [self._waiting.popleft() for _ in range(num)]
            self._dealt[rank].update(index for index, _ in part)
            if rank == collectives.rank():
                self._collection.add(part)

    def _note(self, parts: Sequence[tuple[bool, list[int]]]) -> bool:
        """Note for every rank whether its engine has weights, and which tasks are unfinished.
        Returns False if an engine has lost its weights; all have got them again.
        """
        have_weights = all(has_weights for has_weights, _ in parts)
        self._unfinished = [set(unfinished) for _, unfinished in parts]
        if not have_weights:
            if self._send_again is None:
                raise EngineError("the rollout engine has lost its weights")
            self._send_again()
        return have_weights


def deal(num_waiting: int, rooms: Sequence[int]) -> list[int]:
    """Return the number of waiting tasks that each rank takes next: each task goes to the rank with
    the most room left, the first one in a tie.
    """
    shares = [0] * len(rooms)
    for _ in range(min(num_waiting, sum(max(0, room) for room in rooms))):
        shares[max(range(len(rooms)), key=lambda rank: rooms[rank] - shares[rank])] += 1
    return shares


@contextmanager
def on_all_ranks() -> Iterator[list[Any]]:
    """Give the context a list, which on leaving holds what all ranks have put into theirs. If the
    context fails on a rank, raise on all ranks: an interruption if there is one, else the first
    failure. No rank may wait for others in the context, unless none can fail before that.
    """
    said: list[Any] = []
    failure: Exception | None = None
    try:
        yield said
    except (Interrupted, FloatingPointError) as error:
        failure = error
    except (EngineError, ValueError) as error:
        failure = EngineError(str(error))
    results, failures = zip(*collectives.gather_objects((said, failure)), strict=True)
    for worst in sorted(filter(None, failures), key=lambda e: not isinstance(e, Interrupted)):
        raise worst from None
    said[:] = [answer for result in results for answer in result]
