"""One trajectory from reset to end: observe, render, sample, parse, step.

Source: StarPO, arXiv:2504.20073, section 3.1 (trajectories of at most K turns). Sampled tokens are
appended to the trajectory as they were sampled; the environment's tokens are appended outside the
loss mask. Episodes of agents: `agents/player.py`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ragen_mega.agents.served_episode import Answers
from ragen_mega.config import EnvironmentConfig
from ragen_mega.config.sections.agent import AgentConfig
from ragen_mega.data.types import VERSION, Completion, SamplingParams, Trajectory
from ragen_mega.environments import calls
from ragen_mega.environments.episode import (
    ERROR,
    TRUNCATED_BY,
    Episode,
    TurnResult,
    failed_turn,
)
from ragen_mega.environments.pool import EnvironmentFailed, Worker, guarded
from ragen_mega.environments.protocol import Message, text_seed
from ragen_mega.rollout.context import Context
from ragen_mega.rollout.engine import EngineError, RolloutEngine, WeightsLost
from ragen_mega.rollout.renderer import ChatRenderer

T = TypeVar("T")

Advance = Callable[[int, bool], None]
"""Function that is called after every turn with the number of sampled tokens and whether the
trajectory is over.
"""
Meanwhile = Callable[[Awaitable[T]], Awaitable[T]]
"""Function that waits for the answer of an environment."""


@dataclass(frozen=True, slots=True)
class Task:
    """One trajectory to sample. The tasks of a group share everything but `outcome_seed`."""

    group_id: int
    environment: str
    seed: int
    """Seed of the initial state."""
    outcome_seed: int
    """Seed of everything random after the initial state."""
    board: tuple[str, ...] | None
    """Rows that replace the drawn initial state."""
    make_episode: Callable[[], Episode]
    """Builder of an episode. Tasks that share it reuse its episodes, one after the other."""


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """The settings by which trajectories are sampled; the flags have the same names."""

    max_context_length: int
    """Most tokens that the policy may see, plus those it samples after them."""
    temperature: float
    seed: int
    context_window: int = 0
    """Number of turns that the policy sees (0: all)."""
    environment_timeout: float = EnvironmentConfig.environment_timeout
    """Seconds for one call of an environment that is not instant; 0: no limit."""
    attempts: int = 1
    """Most plays of one task. A further one, with another outcome seed, follows an error or the
    time limit of the environment. Evaluation plays once, for what fails counts.
    """
    agent: AgentConfig = field(default_factory=AgentConfig)
    is_ordered: bool = False
    """The embedded engine hands over the answers of slow environments, and the requests of agents,
    only when nothing is left to decode, so that the trajectories that are unfinished after some
    steps do not depend on speed.
    """
    answers: Answers | None = None
    """Source of the answers to agents in place of the engine."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One play of a task. Each attempt has another outcome seed."""

    session: int
    task: Task
    repetition: int
    """Number of earlier tasks with the same group and outcome seed."""
    num_left: int
    """Number of attempts that may follow."""
    failures: tuple[dict[str, Any], ...] = ()
    """Ends of the earlier attempts."""

    def stream(self, seed: int) -> tuple[int, ...]:
        """Return the values that distinguish the samples of this attempt from all others of a run
        with this seed.
        """
        return seed, self.task.group_id, self.task.outcome_seed, self.repetition

    def trajectory(self, weight_version: int) -> Trajectory:
        """Return the trajectory of this attempt, without tokens."""
        return Trajectory(
            group_id=self.task.group_id,
            environment=self.task.environment,
            seed=self.task.seed,
            outcome_seed=self.task.outcome_seed,
            weight_version=weight_version,
        )

    def is_repeated(self, info: dict[str, Any]) -> bool:
        """Return whether another attempt follows if the last turn has this info."""
        return ERROR in info and info.get(TRUNCATED_BY) != "context" and self.num_left > 0


class OpenEnvironment:
    """An open environment, which plays one trajectory after another."""

    def __init__(
        self, episode: Episode | None, worker: Worker | None, meanwhile: Meanwhile
    ) -> None:
        """`episode`: None if the first start builds it; `worker`: the thread that calls the
        environment, None if it is instant.
        """
        self._episode = episode
        self.worker = worker
        self.is_broken = False
        self.meanwhile = meanwhile

    @property
    def episode(self) -> Episode:
        """The episode, once it is built."""
        assert self._episode is not None  # the first start has built it
        return self._episode

    async def start(self, task: Task) -> list[Message]:
        """Return the first messages of a task. Raises EnvironmentFailed if it cannot start."""

        def start() -> list[Message]:
            self._episode = self._episode or task.make_episode()
            return self._episode.start(task.seed, outcome_seed=task.outcome_seed, board=task.board)

        try:
            return await self.call(start)
        except EnvironmentFailed as error:
            self.is_broken = True
            raise EnvironmentFailed(
                f"environment {task.environment} cannot start from seed {task.seed}: {error}",
                is_late=error.is_late,
            ) from error

    async def respond(self, text: str) -> TurnResult:
        """Return the environment's answer; if the call fails, the end of the trajectory."""
        try:
            return await self.call(partial(self.episode.respond, text))
        except EnvironmentFailed as error:
            self.is_broken = True
            return failed_turn(error, self.episode.action)

    def close(self) -> None:
        """Close the environment, in the thread that calls it."""
        if self._episode is not None:
            calls.close(self._episode.environment)

    async def call(self, function: Callable[[], T]) -> T:
        """Return what a function of the environment returns. Raises EnvironmentFailed."""
        if self.worker is None:
            return guarded(function)
        return await self.meanwhile(self.worker.call(function))


class SharedEngine:
    """An engine as the trajectories of a process share it. They wait before a turn while turns are
    held back, and in a turn while the engine has no weights; `on_wait` is called then.
    """

    def __init__(self, engine: RolloutEngine, on_wait: Callable[[], None]) -> None:
        self.engine = engine
        self.has_weights = True
        self._on_wait = on_wait
        self._resting: set[int] = set()  # sessions of trajectories with nothing in the engine
        self._may_begin = asyncio.Event()
        self._loaded = asyncio.Event()  # set once the engine gets its weights again

    def go_on(self, *, begin_turns: bool) -> None:
        """Let all trajectories go on, as the engine has its weights; without `begin_turns` only to
        the end of their turn.
        """
        self.has_weights = True
        self._loaded.set()
        self._loaded = asyncio.Event()
        if begin_turns:
            self._may_begin.set()
        else:
            self._may_begin.clear()

    @property
    def num_held(self) -> int:
        """Number of trajectories that wait to begin a turn, agents that may ask at any time among
        them; 0 unless turns are held back.
        """
        return 0 if self._may_begin.is_set() else len(self._resting)

    async def wait_for_turn(self, session: int) -> None:
        """Wait until turns may begin, and end the trajectory's rest."""
        while not self._may_begin.is_set():
            await self._may_begin.wait()
        self.end_rest(session)

    def rest(self, session: int) -> None:
        """Note that a trajectory has nothing in the engine until its next `wait_for_turn`."""
        self._resting.add(session)
        self._on_wait()

    def end_rest(self, session: int) -> None:
        """Note that a trajectory goes on, or that it is over."""
        self._resting.discard(session)

    @contextlib.asynccontextmanager
    async def outlasting_weights(self) -> AsyncIterator[None]:
        """Give a context for a request to the engine. If this has lost its weights, the context
        ends once the engine has others, which may have come since the request. Raises EngineError
        if the engine fails otherwise.
        """
        loaded = self._loaded
        try:
            yield
        except WeightsLost:
            if loaded is self._loaded:
                self.has_weights = False
                self._on_wait()
            await loaded.wait()
        except (RuntimeError, MemoryError, OSError) as error:
            raise EngineError(
                f"the rollout engine failed: {type(error).__name__}: {error}"
            ) from error


class Player:
    """Plays trajectories with a shared engine, each call of `play` at its own pace."""

    def __init__(
        self,
        engine: SharedEngine,
        renderer: ChatRenderer,
        settings: PlaySettings,
        advance: Advance,
    ) -> None:
        self._shared, self._engine = engine, engine.engine
        self._renderer = renderer
        self._settings = settings
        self._advance = advance

    async def play(self, attempt: Attempt, opened: OpenEnvironment) -> Trajectory:
        """Play one trajectory until its episode ends or its context is full."""
        engine, renderer, settings = self._engine, self._renderer, self._settings
        task, max_context = attempt.task, settings.max_context_length
        trajectory = attempt.trajectory(engine.weight_version)
        try:
            messages = await opened.start(task)
        except EnvironmentFailed as error:
            return self._unplayed(attempt, trajectory, failed_turn(error).info)
        context = Context(renderer, opened.episode, settings.context_window)
        try:
            prompt = context.begin(messages)
        except ValueError as error:  # what the chat template does not take costs this episode
            return self._unplayed(attempt, trajectory, failed_turn(error).info)
        if len(prompt) >= max_context:
            why = EnvironmentFailed(no_room(task.environment, len(prompt), max_context))
            info = failed_turn(why).info | {TRUNCATED_BY: "context"}
            return self._unplayed(attempt, trajectory, info)
        trajectory.append_observation(prompt)
        is_over = False
        while not is_over:
            most = opened.episode.budget.max_response_length
            max_tokens = min(most, max_context - len(context.tokens))
            sampling = self._sampling(
                attempt, len(trajectory.turns), max_tokens, context.num_recorded
            )
            self._shared.rest(attempt.session)
            await self._shared.wait_for_turn(attempt.session)
            completion = None
            while completion is None:
                async with self._shared.outlasting_weights():
                    completion = await engine.generate(
                        context.tokens[:], sampling, session=attempt.session
                    )
            turn = trajectory.append_action(completion)
            if engine.weight_version != trajectory.weight_version:
                turn.info[VERSION] = engine.weight_version
            context.answer(completion.tokens)
            turn.info["finish_reason"] = completion.finish_reason
            turn.info["max_tokens"] = max_tokens
            result = await opened.respond(
                renderer.read_answer(completion.tokens, opened.episode.tools)
            )
            turn.reward = result.reward
            turn.info.update(result.info)
            trajectory.terminated, trajectory.truncated = result.terminated, result.truncated
            is_over = not result.messages
            if not is_over:
                try:
                    observation, is_new_prompt = context.go_on(result.messages)
                except ValueError as error:
                    turn.info |= failed_turn(error).info
                    trajectory.truncated = is_over = True
                if len(context.tokens) >= max_context:
                    trajectory.truncated = is_over = True
                    turn.info[TRUNCATED_BY] = "context"
            self._advance(len(completion.tokens), is_over and not attempt.is_repeated(turn.info))
            if not is_over:
                trajectory.append_observation(observation, afresh=is_new_prompt)
                if is_new_prompt:  # its cache belongs to another prompt
                    engine.release(attempt.session)
        return trajectory

    def _unplayed(
        self, attempt: Attempt, trajectory: Trajectory, info: dict[str, Any]
    ) -> Trajectory:
        """Return the trajectory of an environment that could not start: nothing was sampled."""
        trajectory.append_observation(self._renderer.start([Message("user", "")]))
        turn = trajectory.append_action(Completion([], [], "abort"))
        turn.info.update(info)
        trajectory.truncated = True
        self._advance(0, not attempt.is_repeated(info))
        return trajectory

    def _sampling(
        self, attempt: Attempt, num_turns: int, max_tokens: int, num_recorded: int
    ) -> SamplingParams:
        """Return the parameters that sample the turn after `num_turns` others, with its seed."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self._settings.temperature,
            stop_token_ids=self._renderer.stop_token_ids,
            seed=text_seed(repr(("sampling", *attempt.stream(self._settings.seed), num_turns))),
            num_recorded=num_recorded,
        )


def no_room(environment: str, num_tokens: int, max_context: int) -> str:
    """Describe a first prompt that fills the context."""
    return (
        f"the first prompt of {environment} has {num_tokens} tokens and max_context_length is"
        f" {max_context}; raise --max-context-length, beside --no-fit-context if it was fitted, or"
        " shorten the prompt"
    )
