"""Multi-turn rollout without a barrier: one coroutine per trajectory, each at its own pace.

Source: StarPO, arXiv:2504.20073, section 3.1 (trajectories of at most K turns, N per initial
state). Sampled tokens are appended to the trajectory as they were sampled; the environment's
tokens are appended outside the loss mask.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from weakref import ReferenceType, ref

from ragen_mega.config import EnvironmentConfig
from ragen_mega.data.types import VERSION, Completion, SamplingParams, Trajectory, TrajectoryGroup
from ragen_mega.environments import calls
from ragen_mega.environments.episode import (
    ERROR,
    FAILED_ACTION,
    TRUNCATED_BY,
    Episode,
    TurnResult,
    failed_turn,
)
from ragen_mega.environments.pool import (
    MAX_THREADS,
    EnvironmentFailed,
    Worker,
    guarded,
    is_instant,
)
from ragen_mega.environments.protocol import Message, text_seed
from ragen_mega.rollout.context import Context
from ragen_mega.rollout.engine import EngineError, RolloutEngine, WeightsLost
from ragen_mega.rollout.renderer import ChatRenderer

FAILED_ATTEMPTS = "failed_attempts"
"""Key of the last turn's info: what ended earlier attempts at this trajectory, and their outcome
seeds.
"""
_SECONDS_TO_CLOSE = 5.0
T = TypeVar("T")

Advance = Callable[[int, bool], None]
"""Called after every turn with the number of sampled tokens and whether the trajectory is over."""


@dataclass(frozen=True, slots=True)
class Task:
    """One trajectory to sample. The tasks of a group share everything but `outcome_seed`."""

    group_id: int
    environment: str
    seed: int
    """Draws the initial state."""
    outcome_seed: int
    """Draws what is random after that."""
    board: tuple[str, ...] | None
    """Replaces the drawn initial state."""
    make_episode: Callable[[], Episode]
    """Builds an episode. Tasks that share this function reuse its episodes, one after the other."""


def tasks_for_group(
    group_id: int,
    environment: str,
    seed: int,
    make_episode: Callable[[], Episode],
    *,
    group_size: int,
    outcome_seed: int = 0,
    board: Sequence[str] | None = None,
) -> list[Task]:
    """`group_size` tasks from one initial state, with outcomes of their own.

    `outcome_seed` is the run's; those of the members are derived from it, the initial seed and
    their index in the group.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, not {group_size}")
    return [
        Task(
            group_id,
            environment,
            seed,
            text_seed(repr(("outcome", outcome_seed, environment, seed, member))),
            None if board is None else tuple(board),
            make_episode,
        )
        for member in range(group_size)
    ]


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """How trajectories are sampled; names and meaning are those of the flags."""

    max_response_length: int | None
    """Tokens of one turn; None: as the environment says."""
    max_context_length: int
    """Tokens that the policy may see, plus those it samples after them."""
    temperature: float
    seed: int
    top_p: float = 1.0
    context_window: int = 0
    """Turns that the policy sees (0: all)."""
    environment_timeout: float = EnvironmentConfig.environment_timeout
    """Seconds for one call of an environment that is not instant; 0: no limit."""
    attempts: int = 1
    """Times that a trajectory is played at most: again, with another outcome seed, if an error or
    the time limit of its environment has ended it. Evaluation plays once, for what fails counts.
    """


def collect(
    engine: RolloutEngine,
    renderer: ChatRenderer,
    tasks: Sequence[Task],
    settings: PlaySettings,
    advance: Advance | None = None,
) -> list[TrajectoryGroup]:
    """One trajectory per task, played to the end by an engine of this process. Raises as
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
    if trajectories and not any(one.num_sampled_tokens for one in trajectories):
        raise ValueError(trajectories[0].turns[0].info.get(ERROR, "no token sampled"))


def no_room(environment: str, num_tokens: int, max_context: int) -> str:
    """What is said of a first prompt that fills the context."""
    return (
        f"the first prompt of {environment} has {num_tokens} tokens and max_context_length is"
        f" {max_context}; raise --max-context-length or shorten the prompt"
    )


def in_groups(trajectories: Iterable[Trajectory]) -> list[TrajectoryGroup]:
    """The groups that they belong to, in order of the first member."""
    groups: dict[int, TrajectoryGroup] = {}
    for trajectory in trajectories:
        group = groups.setdefault(trajectory.group_id, TrajectoryGroup(trajectory.group_id, []))
        group.trajectories.append(trajectory)
    return list(groups.values())


@dataclass(slots=True)
class _Seat:
    """One open environment, which plays one trajectory after another, and its thread (if any)."""

    episode: Episode | None
    worker: Worker | None
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One play of a task. A further one has an outcome seed of its own."""

    session: int
    task: Task
    repetition: int
    """How many earlier tasks have the same group and outcome seed."""
    failures: tuple[dict[str, Any], ...] = ()
    """What ended the attempts before this one."""


@dataclass(slots=True)
class _Kind:
    """The tasks that share their environments."""

    spare: _Seat | None
    is_instant: bool
    waiting: deque[_Attempt] = field(default_factory=deque)
    num_players: int = 0


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
        self._engine = engine
        self._renderer = renderer
        self._num_tasks = 0
        self._new: list[tuple[int, Task]] = []  # with their sessions; the next `play` starts them
        self._unfinished: set[int] = set()  # sessions
        self._kinds: dict[Callable[[], Episode], _Kind] = {}
        self._repetitions: Counter[tuple[int, int]] = Counter()
        self._settings = settings
        self._advance = advance or (lambda num_tokens, is_over: None)
        self._trajectories: dict[int, Trajectory] = {}  # by session, until they are taken
        self._runner = asyncio.Runner()
        self._players: set[asyncio.Task[None]] = set()  # those that have not ended
        self._failed: asyncio.Task[None] | None = None  # the first player that has
        self._over: asyncio.Future[None] | None = None  # done once none is left or one has failed
        self._lost: asyncio.Future[None] | None = None
        self._sent_again = asyncio.Event()
        self._turns = asyncio.Event()  # set while new turns may begin
        self._held: asyncio.Future[None] | None = None  # done once all players wait for that
        self._num_held = 0
        self._workers: list[ReferenceType[Worker]] = []  # ending, or already gone
        # An embedded engine decides between its decoding steps when outside answers count.
        self._meanwhile = getattr(engine, "meanwhile", _plainly)
        self.add(tasks)

    def __exit__(self, *error: object) -> None:
        _apart(self._runner.close)  # cancels running players, which closes their environments
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        for reference in self._workers:
            if worker := reference():
                worker.join(max(0.0, deadline - time.monotonic()))

    def add(self, tasks: Iterable[Task]) -> None:
        """Add tasks, which the next `play` starts."""
        for session, task in enumerate(tasks, self._num_tasks):
            self._new.append((session, task))
            self._unfinished.add(session)
            self._num_tasks += 1

    @property
    def num_unfinished(self) -> int:
        """Tasks without a finished trajectory."""
        return len(self._unfinished)

    @property
    def unfinished(self) -> list[int]:
        """Their indices, in order."""
        return sorted(self._unfinished)

    def play(self, steps: int | None = None) -> bool:
        """Play until every trajectory is over, or for `steps` steps of the engine, and return True.
        Returns False if the engine has lost its weights: give it weights and call this again.
        Trajectories then continue where they were.

        Raises EngineError if the engine fails, FloatingPointError if its weights have diverged, and
        whatever `advance` raises.
        """
        return _apart(self._runner.run, self._play(steps))

    def hold(self) -> bool:
        """Play the turns that have begun to their ends, and return True; the next `play` begins
        further ones. Returns False and raises as `play` does.
        """
        return _apart(self._runner.run, self._finish_turns())

    def drop_caches(self) -> None:
        """Let the next turn of every trajectory compute its context again."""
        for session in self.unfinished:
            self._engine.release(session)

    def trajectories(self) -> list[Trajectory]:
        """The finished trajectories that were not taken, in order of the tasks."""
        return [self._trajectories[index] for index in sorted(self._trajectories)]

    def take(self, indices: Sequence[int]) -> list[Trajectory]:
        """The finished trajectories of these tasks, of which nothing is kept."""
        taken = [self._trajectories.pop(index) for index in indices]
        for one in taken:
            failures = one.turns[-1].info.get(FAILED_ATTEMPTS, ()) if one.turns else ()
            for seed in (one.outcome_seed, *(each["outcome_seed"] for each in failures)):
                self._repetitions.pop((one.group_id, seed), None)
        self._kinds = {
            make: kind for make, kind in self._kinds.items() if kind.num_players or kind.waiting
        }
        self._workers = [reference for reference in self._workers if reference()]
        return taken

    async def _finish_turns(self) -> bool:
        self._wake_for_weights()
        self._turns.clear()
        self._held = asyncio.Future()
        self._check_held()
        self._engine.limit(None)
        return await self._until(self._held)

    def _check_held(self) -> None:
        num_players = sum(kind.num_players for kind in self._kinds.values())
        if not self._turns.is_set() and self._num_held == num_players and not self._held.done():
            self._held.set_result(None)

    async def _play(self, steps: int | None) -> bool:
        self._wake_for_weights()
        self._turns.set()
        self._seat_new()
        return await self._until(self._engine.limit(steps))

    def _wake_for_weights(self) -> None:
        """Wake the players that wait for weights: the engine has them."""
        self._sent_again.set()
        self._lost, self._sent_again = asyncio.Future(), asyncio.Event()

    async def _until(self, end: asyncio.Future[None]) -> bool:
        """Let players go on until `end`, all are over, one fails or the engine loses its weights;
        returns whether it still has them. Raises what a player has raised.
        """
        if self._players and self._failed is None:
            self._over = asyncio.Future()
            ends = [self._over, self._lost, end]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._failed is not None:
            self._failed.result()
        return not self._lost.done()

    def _ended(self, player: asyncio.Task[None]) -> None:
        self._players.discard(player)
        has_failed = player.cancelled() or player.exception()  # read, so that asyncio logs none
        if has_failed and self._failed is None:
            self._failed = player
        if (self._failed or not self._players) and not self._over.done():
            self._over.set_result(None)

    def _seat_new(self) -> None:
        """Start a player for every new task; at most `MAX_THREADS` players of a kind that needs
        threads, which take one task after another.
        """
        for session, task in self._new:
            if task.make_episode not in self._kinds:
                self._kinds[task.make_episode] = self._first(task)
            kind = self._kinds[task.make_episode]
            # Members may share their outcome seed, but never their samples.
            key = (task.group_id, task.outcome_seed)
            kind.waiting.append(_Attempt(session, task, self._repetitions[key]))
            self._repetitions[key] += 1
            if kind.is_instant or kind.num_players < MAX_THREADS:
                kind.num_players += 1
                player = asyncio.create_task(self._play_in_turn(kind))
                self._players.add(player)
                player.add_done_callback(self._ended)
        self._new.clear()

    def _first(self, task: Task) -> _Kind:
        """A new kind, with a first environment, built in the thread that will call it. If that
        fails, every player tries for itself: a server may be away for a moment.
        """
        worker = Worker(self._settings.environment_timeout)
        try:
            episode = worker.build(task.environment, task.make_episode)
        except ValueError:
            return _Kind(None, is_instant=False)
        if is_instant(episode.environment):
            worker.end(lambda: None)
            return _Kind(_Seat(episode, None), is_instant=True)
        return _Kind(_Seat(episode, worker), is_instant=False)

    async def _play_in_turn(self, kind: _Kind) -> None:
        """Play tasks of one kind until none waits; a broken environment is replaced."""
        while kind.waiting:
            with self._seat(kind) as seat:
                while kind.waiting and not seat.is_broken:
                    attempt = kind.waiting.popleft()
                    try:
                        trajectory = await self._sample(attempt, seat)
                    finally:
                        self._engine.release(attempt.session)
                    if self._is_repeated(attempt, trajectory.turns[-1].info):
                        kind.waiting.appendleft(_further(attempt, trajectory))
                        continue
                    if attempt.failures:
                        trajectory.turns[-1].info[FAILED_ATTEMPTS] = list(attempt.failures)
                    self._trajectories[attempt.session] = trajectory
                    self._unfinished.discard(attempt.session)
        kind.num_players -= 1
        self._check_held()

    @contextlib.contextmanager
    def _seat(self, kind: _Kind) -> Iterator[_Seat]:
        """An environment of this kind, which is closed on leaving."""
        seat, kind.spare = kind.spare, None
        if seat is None:
            worker = None if kind.is_instant else Worker(self._settings.environment_timeout)
            seat = _Seat(None, worker)
        try:
            yield seat
        finally:
            if seat.worker is None:
                with contextlib.suppress(EnvironmentFailed):
                    guarded(partial(_close, seat))
            else:
                seat.worker.end(partial(_close, seat))
                self._workers.append(ref(seat.worker))

    def _is_repeated(self, attempt: _Attempt, info: dict[str, Any]) -> bool:
        """Whether another attempt follows one whose last turn has this info."""
        is_failed = ERROR in info and info.get(TRUNCATED_BY) != "context"
        return is_failed and len(attempt.failures) + 1 < self._settings.attempts

    async def _sample(self, attempt: _Attempt, seat: _Seat) -> Trajectory:
        """Render, generate, append, respond; until the episode ends or the context is full."""
        settings, renderer, task = self._settings, self._renderer, attempt.task
        max_context = settings.max_context_length
        trajectory = Trajectory(
            group_id=task.group_id,
            environment=task.environment,
            seed=task.seed,
            outcome_seed=task.outcome_seed,
            weight_version=self._engine.weight_version,
        )
        try:
            messages = await self._start(task, seat)
            context = Context(renderer, seat.episode, settings.context_window)
            trajectory.append_observation(context.begin(messages))
        except EnvironmentFailed as error:
            return self._unplayed(attempt, trajectory, failed_turn(error).info)
        if len(trajectory) >= max_context:
            why = no_room(task.environment, len(trajectory), max_context)
            info = failed_turn(EnvironmentFailed(why)).info | {TRUNCATED_BY: "context"}
            return self._unplayed(attempt, trajectory, info)
        max_tokens = seat.episode.max_response_length
        stream = ("sampling", settings.seed, task.group_id, task.outcome_seed, attempt.repetition)
        while True:
            sampling = SamplingParams(
                max_tokens=min(max_tokens, max_context - len(context.tokens)),
                temperature=settings.temperature,
                top_p=settings.top_p,
                stop_token_ids=renderer.stop_token_ids,
                seed=text_seed(repr((*stream, len(trajectory.turns)))),
            )
            completion = await self._generate(context.tokens[:], sampling, attempt.session)
            turn = trajectory.append_action(completion)
            if self._engine.weight_version != trajectory.weight_version:
                turn.info[VERSION] = self._engine.weight_version
            context.answer(completion.tokens)
            turn.info["finish_reason"] = completion.finish_reason
            turn.info["max_tokens"] = sampling.max_tokens
            result = await self._respond(seat, renderer.decode_action(completion.tokens))
            turn.reward = result.reward
            turn.info.update(result.info)
            trajectory.terminated, trajectory.truncated = result.terminated, result.truncated
            is_over = not result.messages
            if not is_over:
                observation, afresh = context.go_on(result.messages)
                if len(context.tokens) >= max_context:
                    turn.info["context_overflow"] = trajectory.truncated = is_over = True
                    turn.info[TRUNCATED_BY] = "context"
            is_done = is_over and not self._is_repeated(attempt, turn.info)
            self._advance(len(completion.tokens), is_done)
            if is_over:
                return trajectory
            trajectory.append_observation(observation, afresh=afresh)
            if afresh:  # its cache belongs to another prompt
                self._engine.release(attempt.session)

    def _unplayed(
        self, attempt: _Attempt, trajectory: Trajectory, info: dict[str, Any]
    ) -> Trajectory:
        """The trajectory of an environment that could not start: nothing was sampled."""
        nothing = self._renderer.start([Message("user", "")])
        trajectory = trajectory.without_tokens()
        trajectory.append_observation(nothing)
        turn = trajectory.append_action(Completion([], [], "abort"))
        turn.info.update(info)
        trajectory.truncated = True
        self._advance(0, not self._is_repeated(attempt, info))
        return trajectory

    async def _start(self, task: Task, seat: _Seat) -> list[Message]:
        def start() -> list[Message]:
            seat.episode = seat.episode or task.make_episode()
            if self._settings.max_response_length is not None:
                seat.episode.max_response_length = self._settings.max_response_length
            return seat.episode.start(task.seed, outcome_seed=task.outcome_seed, board=task.board)

        try:
            return await self._ask(seat, start)
        except EnvironmentFailed as error:
            seat.is_broken = True
            raise EnvironmentFailed(
                f"environment {task.environment} cannot start from seed {task.seed}: {error}",
                is_late=error.is_late,
            ) from error

    async def _respond(self, seat: _Seat, text: str) -> TurnResult:
        """The environment's answer; if the call fails, the end of the trajectory."""
        try:
            return await self._ask(seat, partial(seat.episode.respond, text))
        except EnvironmentFailed as error:
            seat.is_broken = True
            return failed_turn(error, seat.episode.action)

    async def _ask(self, seat: _Seat, function: Callable[[], T]) -> T:
        if seat.worker is None:
            return guarded(function)
        return await self._meanwhile(seat.worker.call(function))

    async def _generate(
        self, tokens: list[int], sampling: SamplingParams, session: int
    ) -> Completion:
        if not self._turns.is_set():
            self._num_held += 1
            self._check_held()
            await self._turns.wait()
            self._num_held -= 1
        while True:
            lost, sent_again = self._lost, self._sent_again
            try:
                return await self._engine.generate(tokens, sampling, session=session)
            except WeightsLost:
                if not lost.done():
                    lost.set_result(None)
                # Does not wait if the weights have come again since the request.
                await sent_again.wait()
            except (RuntimeError, MemoryError, OSError) as error:
                raise EngineError(
                    f"the rollout engine failed: {type(error).__name__}: {error}"
                ) from error


def _further(attempt: _Attempt, failed: Trajectory) -> _Attempt:
    """The attempt after one that failed: its outcome seed, from which the sampling seeds follow, is
    derived from that of the task and the number of the attempt.
    """
    failures = (*attempt.failures, _failure(failed))
    seed = text_seed(repr(("attempt", len(failures), attempt.task.outcome_seed)))
    return replace(attempt, task=replace(attempt.task, outcome_seed=seed), failures=failures)


def _failure(trajectory: Trajectory) -> dict[str, Any]:
    """What is kept of an attempt that was repeated."""
    info = trajectory.turns[-1].info
    known = {key: info[key] for key in (ERROR, TRUNCATED_BY, FAILED_ACTION) if key in info}
    return known | {"outcome_seed": trajectory.outcome_seed}


def _apart(function: Callable[..., T], *args: Any) -> T:
    """Call a function where no event loop runs: here, or in a thread, e.g. from a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function(*args)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result()


async def _plainly(answer: Awaitable[T]) -> T:
    return await answer


def _close(seat: _Seat) -> None:
    if seat.episode is not None:
        calls.close(seat.episode.environment)
