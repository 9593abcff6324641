"""Multi-turn rollout without a barrier: trajectories of this process, each at its own pace.

Source: StarPO, arXiv:2504.20073, section 3.1 (N trajectories per initial state).
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import ReferenceType, ref

from ragen_mega.agents.call_tree import UNTRAINED
from ragen_mega.agents.player import AgentPlayer
from ragen_mega.config.sections.agent import is_agent
from ragen_mega.data.types import Trajectory, TrajectoryGroup, in_groups
from ragen_mega.environments.episode import ERROR, FAILED_ACTION, TRUNCATED_BY, Episode
from ragen_mega.environments.pool import (
    MAX_THREADS,
    EnvironmentFailed,
    Worker,
    guarded,
    is_instant,
)
from ragen_mega.environments.protocol import text_seed
from ragen_mega.ranks.waits import here
from ragen_mega.rollout.engine import RolloutEngine, WeightsLost
from ragen_mega.rollout.player import (
    Advance,
    Attempt,
    OpenEnvironment,
    Player,
    PlaySettings,
    SharedEngine,
    Task,
)
from ragen_mega.rollout.renderer import ChatRenderer

FAILED_ATTEMPTS = "failed_attempts"
"""Key of the last turn's info: the failures that ended earlier attempts at this trajectory, and
their outcome seeds.
"""
_SECONDS_TO_CLOSE = 5.0
T = TypeVar("T")


def collect(
    engine: RolloutEngine,
    renderer: ChatRenderer,
    tasks: Sequence[Task],
    settings: PlaySettings,
    advance: Advance | None = None,
) -> list[TrajectoryGroup]:
    """Play one trajectory per task to the end with an engine of this process. Raises as
    `Collection.play` and `check_starts` do, and WeightsLost if the engine has lost its weights.
    """
    with Collection(engine, renderer, tasks, settings, advance=advance) as collection:
        if not collection.play():
            raise WeightsLost("the rollout engine has lost its weights")
        trajectories = collection.trajectories()
    check_starts(trajectories)
    return in_groups(trajectories)


def check_starts(trajectories: Sequence[Trajectory]) -> None:
    """Raise ValueError if no trajectory of a rollout could be played: its environments fail
    whatever is done.
    """
    if trajectories and not any(trajectory.num_sampled_tokens for trajectory in trajectories):
        first = trajectories[0]
        nothing = "no token sampled"
        if roles := sorted({call["role"] for call in first.turns[-1].info.get(UNTRAINED, ())}):
            nothing = (
                f"it asked for the model {' and '.join(roles)} alone, which --train-roles does not"
                " name, or with a sampling of its own, which --agent-sampling agent does not train"
            )
        reason = first.turns[0].info.get(ERROR, nothing)
        raise ValueError(
            f"none of {len(trajectories)} episodes of {first.environment} came to a first answer;"
            f" mend it. With seed {first.seed}: {reason}"
        )


@dataclass(slots=True)
class _Queue:
    """The tasks that share their environments."""

    spare: OpenEnvironment | None
    is_instant: bool
    waiting: deque[Attempt] = field(default_factory=deque)
    num_open: int = 0


class Collection(contextlib.AbstractContextManager["Collection"]):
    """Trajectories in progress, one per task, with an engine that is awake.

    The samples of a task depend only on the weights, the seed and the task, not on the order in
    which environments answer, so the tasks of a group may be collected in parts. An environment
    that raises or exceeds its time limit ends its trajectory as truncated, with the error in the
    info of the last turn; if it cannot even start, that is a turn without tokens. The trajectory is
    then played again, if `settings.attempts` allows, and takes the other's place. Leaving the
    context closes environments, ends threads and releases sessions.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        renderer: ChatRenderer,
        tasks: Sequence[Task],
        settings: PlaySettings,
        *,
        advance: Advance | None = None,
    ) -> None:
        def advanced(num_tokens: int, is_over: bool) -> None:
            here.moved()
            if advance is not None:
                advance(num_tokens, is_over)

        self._shared = SharedEngine(engine, self._pause_if_due)
        self._player = Player(self._shared, renderer, settings, advanced)
        self._agents = AgentPlayer(self._shared, renderer, settings, advanced)
        self._engine = engine
        self._settings = settings
        self._new: list[tuple[int, Task]] = []  # with their sessions; the next `play` starts them
        self._unfinished: set[int] = set()  # sessions
        self._queues: dict[Callable[[], Episode], _Queue] = {}
        self._repetitions: Counter[tuple[int, int]] = Counter()
        self._trajectories: dict[int, Trajectory] = {}  # by session, until they are taken
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._running: set[asyncio.Task[None]] = set()  # one for each environment
        self._failed: asyncio.Task[None] | None = None  # the first that has
        self._paused: asyncio.Future[None] | None = None  # done once nothing can go on
        self._workers: list[ReferenceType[Worker]] = []  # ending, or already gone
        self._meanwhile = engine.meanwhile if settings.is_ordered else _plainly
        self.add(enumerate(tasks))

    def __exit__(self, *error: object) -> None:
        _apart(self._runner.close)()  # cancels what is played, which closes the environments
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        for reference in self._workers:
            if worker := reference():
                worker.join(max(0.0, deadline - time.monotonic()))

    def add(self, tasks: Iterable[tuple[int, Task]]) -> None:
        """Add tasks with their indices, which are their sessions; the next `play` starts them."""
        self._new.extend(tasks)
        self._unfinished.update(session for session, _ in self._new)

    @property
    def unfinished(self) -> list[int]:
        """Indices of the tasks without a finished trajectory, in order."""
        return sorted(self._unfinished)

    def play(self, steps: int | None = None, *, begin_turns: bool = True) -> bool:
        """Play until every trajectory is over, or for `steps` steps of the engine, and return True.
        Without `begin_turns` only the turns that have begun are played, to their ends. Returns
        False if the engine has lost its weights: give it weights and call this again. Trajectories
        then continue where they were.

        Raises EngineError if the engine fails, FloatingPointError if its weights have diverged, and
        whatever `advance` raises.
        """
        self._shared.go_on(begin_turns=begin_turns)
        self._agents.restart_clocks()
        for session, task in self._new if begin_turns else ():
            queue = self._enqueue(session, task)
            if queue.is_instant or queue.num_open < MAX_THREADS:
                queue.num_open += 1
                running = self._runner.get_loop().create_task(self._play_in_turn(queue))
                running.add_done_callback(self._ended)
                self._running.add(running)
        if begin_turns:
            self._new.clear()
        return _apart(self._runner.run)(self._until_paused(steps))

    def drop_caches(self) -> None:
        """Let the next turn of every trajectory compute its context again."""
        for session in self.unfinished:
            self._engine.release(session)

    def trajectories(self) -> list[Trajectory]:
        """Return the finished trajectories that were not taken, in order of the tasks."""
        return [self._trajectories[index] for index in sorted(self._trajectories)]

    def take(self, indices: Sequence[int]) -> list[Trajectory]:
        """Return the finished trajectories of these tasks, of which nothing is kept."""
        taken = [self._trajectories.pop(index) for index in indices]
        for trajectory in taken:
            failures = trajectory.turns[-1].info.get(FAILED_ATTEMPTS, ())
            for seed in (trajectory.outcome_seed, *(each["outcome_seed"] for each in failures)):
                self._repetitions.pop((trajectory.group_id, seed), None)
        self._queues = {
            make: queue for make, queue in self._queues.items() if queue.num_open or queue.waiting
        }
        self._workers = [reference for reference in self._workers if reference()]
        return taken

    async def _until_paused(self, steps: int | None) -> bool:
        """Wait until nothing can go on, or for `steps` steps of the engine; return whether it still
        has its weights. Raises what has ended a trajectory.
        """
        self._paused = asyncio.Future()
        ends = (self._paused, self._engine.limit(steps))
        self._pause_if_due()
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._failed is not None:
            self._failed.result()
        return self._shared.has_weights

    def _pause_if_due(self) -> None:
        """Pause once a trajectory has failed, weights are lost, or all that run wait to begin a
        turn, also if none is left.
        """
        shared = self._shared
        is_due = self._failed or not shared.has_weights or shared.num_held == len(self._running)
        if is_due and self._paused is not None and not self._paused.done():
            self._paused.set_result(None)

    def _ended(self, running: asyncio.Task[None]) -> None:
        self._running.discard(running)
        has_failed = running.cancelled() or running.exception()  # read, so that asyncio logs none
        if has_failed and self._failed is None:
            self._failed = running
        self._pause_if_due()

    def _enqueue(self, session: int, task: Task) -> _Queue:
        """Let a task wait for an environment among those that share it; returns their queue."""
        if task.make_episode not in self._queues:
            self._queues[task.make_episode] = self._first(task)
        queue = self._queues[task.make_episode]
        # Members may share their outcome seed, but never their samples.
        key = (task.group_id, task.outcome_seed)
        num_left = self._settings.attempts - 1
        queue.waiting.append(Attempt(session, task, self._repetitions[key], num_left))
        self._repetitions[key] += 1
        return queue

    def _first(self, task: Task) -> _Queue:
        """Return a new queue with a first environment, built in the thread that will call it. If
        that fails, every trajectory tries for itself: a server may be away for a moment.
        """
        worker = Worker(self._settings.environment_timeout)
        try:
            episode = worker.build(task.environment, task.make_episode)
        except ValueError:
            return _Queue(None, is_instant=False)
        if is_instant(episode.environment):
            worker.end(lambda: None)
            return _Queue(OpenEnvironment(episode, None, self._meanwhile), is_instant=True)
        return _Queue(OpenEnvironment(episode, worker, self._meanwhile), is_instant=False)

    async def _play_in_turn(self, queue: _Queue) -> None:
        """Play the tasks of a queue until none waits; a broken environment is replaced."""
        while queue.waiting:
            with self._opened(queue) as opened:
                while queue.waiting and not opened.is_broken:
                    attempt = queue.waiting.popleft()
                    player = self._agents if is_agent(attempt.task.environment) else self._player
                    try:
                        trajectory = await player.play(attempt, opened)
                    finally:
                        self._engine.release(attempt.session)
                    info = trajectory.turns[-1].info
                    if attempt.is_repeated(info):
                        queue.waiting.appendleft(_further(attempt, trajectory))
                        continue
                    if attempt.failures:
                        info[FAILED_ATTEMPTS] = list(attempt.failures)
                    self._trajectories[attempt.session] = trajectory
                    self._unfinished.discard(attempt.session)
        queue.num_open -= 1

    @contextlib.contextmanager
    def _opened(self, queue: _Queue) -> Iterator[OpenEnvironment]:
        """Give the context an environment for this queue, which is closed on leaving."""
        opened, queue.spare = queue.spare, None
        if opened is None:
            worker = None if queue.is_instant else Worker(self._settings.environment_timeout)
            opened = OpenEnvironment(None, worker, self._meanwhile)
        try:
            yield opened
        finally:
            if opened.worker is None:
                with contextlib.suppress(EnvironmentFailed):
                    guarded(opened.close)
            else:
                opened.worker.end(opened.close)
                self._workers.append(ref(opened.worker))


def _further(attempt: Attempt, failed: Trajectory) -> Attempt:
    """Return the attempt after one that failed: its outcome seed, from which the sampling seeds
    follow, is derived from the task's and the number of the attempt.
    """
    info = failed.turns[-1].info
    known = {key: info[key] for key in (ERROR, TRUNCATED_BY, FAILED_ACTION) if key in info}
    failures = (*attempt.failures, known | {"outcome_seed": failed.outcome_seed})
    seed = text_seed(repr(("attempt", len(failures), attempt.task.outcome_seed)))
    task = replace(attempt.task, outcome_seed=seed)
    return replace(attempt, task=task, num_left=attempt.num_left - 1, failures=failures)


def _apart(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function, or one that calls it in a thread if an event loop runs here, e.g. a
    notebook's.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function

    def call(*arguments: Any) -> T:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function, *arguments).result()

    return call


async def _plainly(answer: Awaitable[T]) -> T:
    return await answer
