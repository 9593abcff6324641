"""Multi-turn rollout without a barrier: one coroutine per trajectory, each at its own pace.

Source: StarPO, arXiv:2504.20073, section 3.1 (trajectories of at most K turns, N per initial
state). What the policy samples is appended to the trajectory as it was sampled; what the
environment says is appended unmasked.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragen_mega.config import EnvironmentConfig
from ragen_mega.data.types import Completion, SamplingParams, Trajectory, TrajectoryGroup
from ragen_mega.environments.episode import Episode, Message, TurnResult
from ragen_mega.environments.pool import EnvironmentFailed, TimeLimit
from ragen_mega.rollout.engine import EngineError, RolloutEngine, WeightsLost
from ragen_mega.rollout.renderer import ChatRenderer

ERROR = "error"
"""Key of a turn's info under which a trajectory that its environment ended says why."""


@dataclass(frozen=True, slots=True)
class Task:
    """One trajectory to sample. The tasks of a group share everything but `outcome_seed`."""

    group_id: int
    environment: str
    seed: int
    """Draws the initial state."""
    outcome_seed: int
    """Draws what is random after it."""
    board: tuple[str, ...] | None
    """Replaces the drawn initial state."""
    make_episode: Callable[[], Episode]
    """A fresh episode; called once per trajectory."""


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

    `outcome_seed` is the run's; the members' are derived from it, the initial seed and their place
    in the group.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, not {group_size}")
    return [
        Task(
            group_id,
            environment,
            seed,
            _stable_seed("outcome", outcome_seed, environment, seed, member),
            None if board is None else tuple(board),
            make_episode,
        )
        for member in range(group_size)
    ]


def collect(
    engine: RolloutEngine,
    renderer: ChatRenderer,
    tasks: Sequence[Task],
    *,
    max_tokens: int,
    max_context: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int,
    environment_timeout: float = EnvironmentConfig.environment_timeout,
    advance: Callable[[], None] | None = None,
    send_again: Callable[[], None] | None = None,
) -> list[TrajectoryGroup]:
    """Sample one trajectory per task with an engine that is awake; groups in order of their first
    task.

    `max_tokens` bounds one turn and `max_context` the trajectory, in tokens; `advance` is called
    when one ends. What a task samples depends on the weights, `seed` and the task alone, not on the
    other tasks: the tasks of a group may be collected in parts. An environment that raises or takes
    longer than `environment_timeout` seconds for a turn (0: any time) ends its trajectory as
    truncated, with the error in the info of the last turn. Raises ValueError if an episode cannot
    start or its first prompt leaves no room to answer, and EngineError if the engine fails. An
    engine that has lost its weights gets them by `send_again`, and trajectories go on from where
    they are.
    """
    if not tasks:
        return []
    limit = TimeLimit(environment_timeout)
    run = _Collection(
        engine, renderer, max_tokens, max_context, temperature, top_p, seed, limit, send_again
    )
    try:
        trajectories = asyncio.run(run.collect(tasks, advance))
    except (
        ExceptionGroup
    ) as failed:  # when one trajectory fails the others are cancelled; its error is the one to show
        raise failed.exceptions[0] from None
    finally:
        limit.close()
    groups: dict[int, TrajectoryGroup] = {}
    for trajectory in trajectories:
        groups.setdefault(
            trajectory.group_id, TrajectoryGroup(trajectory.group_id, [])
        ).trajectories.append(trajectory)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class _Collection:
    engine: RolloutEngine
    renderer: ChatRenderer
    max_tokens: int
    max_context: int
    temperature: float
    top_p: float
    seed: int
    limit: TimeLimit
    send_again: Callable[[], None] | None

    async def collect(
        self, tasks: Sequence[Task], advance: Callable[[], None] | None
    ) -> list[Trajectory]:
        async def play(session: int, repetition: int, task: Task) -> Trajectory:
            try:
                trajectory = await self._sample(session, repetition, task)
            finally:
                self.engine.release(session)
            if advance is not None:
                advance()
            return trajectory

        repetitions: Counter[tuple[int, int]] = (
            Counter()
        )  # members may share their outcomes, never their samples
        started = []
        async with asyncio.TaskGroup() as running:
            for session, task in enumerate(tasks):
                key = (task.group_id, task.outcome_seed)
                started.append(running.create_task(play(session, repetitions[key], task)))
                repetitions[key] += 1
        return [task.result() for task in started]

    async def _sample(self, session: int, repetition: int, task: Task) -> Trajectory:
        """Render, generate, append, respond; until the episode or the context is over."""
        trajectory = Trajectory(
            group_id=task.group_id,
            environment=task.environment,
            seed=task.seed,
            outcome_seed=task.outcome_seed,
            weight_version=self.engine.weight_version,
        )
        episode, messages = await self._start(task)
        observation = self.renderer.start(messages)
        if len(observation) >= self.max_context:
            raise ValueError(
                f"the first prompt of {task.environment} has {len(observation)} tokens and"
                f" max_context is {self.max_context}; raise --max-context-length or shorten the"
                " prompt"
            )
        stream = ("sampling", self.seed, task.group_id, task.outcome_seed, repetition)
        while True:
            trajectory.append_observation(observation)
            sampling = SamplingParams(
                max_tokens=min(self.max_tokens, self.max_context - len(trajectory)),
                temperature=self.temperature,
                top_p=self.top_p,
                stop_token_ids=self.renderer.stop_token_ids,
                seed=_stable_seed(*stream, len(trajectory.turns)),
            )
            completion = await self._generate(list(trajectory.tokens), sampling, session)
            turn = trajectory.append_action(completion)
            turn.info["finish_reason"] = completion.finish_reason
            result = await self._respond(episode, self.renderer.decode_action(completion.tokens))
            turn.reward = result.reward
            turn.info.update(result.info)
            trajectory.terminated, trajectory.truncated = result.terminated, result.truncated
            if result.message is None:
                return trajectory
            finished_cleanly = completion.tokens[-1:] == [self.renderer.end_of_turn]
            observation = self.renderer.observe(result.message, finished_cleanly)
            if len(trajectory) + len(observation) >= self.max_context:
                turn.info["context_overflow"] = trajectory.truncated = True
                return trajectory

    async def _start(self, task: Task) -> tuple[Episode, list[Message]]:
        def start() -> tuple[Episode, list[Message]]:
            episode = task.make_episode()
            return episode, episode.start(
                task.seed, outcome_seed=task.outcome_seed, board=task.board
            )

        try:
            return await self.limit.call(start)
        except EnvironmentFailed as error:
            raise ValueError(
                f"environment {task.environment} cannot start from seed {task.seed}: {error}"
            ) from error

    async def _generate(
        self, tokens: list[int], sampling: SamplingParams, session: int
    ) -> Completion:
        while True:
            try:
                return await self.engine.generate(tokens, sampling, session=session)
            except (RuntimeError, MemoryError, OSError) as error:
                if not isinstance(error, WeightsLost) or self.send_again is None:
                    raise EngineError(
                        f"the rollout engine failed: {type(error).__name__}: {error}"
                    ) from error
            self.send_again()  # blocks: without weights no trajectory can go on

    async def _respond(self, episode: Episode, text: str) -> TurnResult:
        """The environment's answer; if there is none, the end of this trajectory with the error as
        data.
        """
        try:
            return await self.limit.call(lambda: episode.respond(text))
        except EnvironmentFailed as error:
            info = {ERROR: str(error), "success": False}
            return TurnResult(reward=0.0, message=None, terminated=False, truncated=True, info=info)


def _stable_seed(*parts: object) -> int:
    """A 63-bit seed, the same in every process and run."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class PlaySettings:
    max_response_length: int
    max_context_length: int
    temperature: float
    seed: int
    top_p: float = 1.0
    environment_timeout: float = EnvironmentConfig.environment_timeout


class Collection:
    def __init__(self, engine, renderer, tasks, settings, *, advance=None):
        self.args = engine, renderer, tasks
        self.settings, self.advance = settings, advance

    def __enter__(self):
        return self

    def __exit__(self, *a):
        pass

    def play(self):
        s = self.settings
        self._groups = collect(
            *self.args,
            max_tokens=s.max_response_length,
            max_context=s.max_context_length,
            temperature=s.temperature,
            seed=s.seed,
            environment_timeout=s.environment_timeout,
            advance=self.advance,
        )
        return True

    def groups(self):
        return self._groups
