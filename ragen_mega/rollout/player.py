"""One trajectory from reset to end: observe, render, sample, parse, step.

Source: StarPO, arXiv:2504.20073, section 3.1 (trajectories of at most K turns). Sampled tokens are
appended to the trajectory as they were sampled; the environment's tokens are appended outside the
loss mask.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ragen_mega.config import EnvironmentConfig
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
    """The settings by which trajectories are sampled; names and meaning are those of the flags."""

    max_context_length: int
    """Most tokens that the policy may see, plus those it samples after them."""
    temperature: float
    seed: int
    top_p: float = 1.0
    context_window: int = 0
    """Number of turns that the policy sees (0: all)."""
    environment_timeout: float = EnvironmentConfig.environment_timeout
    """Seconds for one call of an environment that is not instant; 0: no limit."""
    attempts: int = 1
    """Most plays of one task. A further one, with another outcome seed, follows an error or the
    time limit of the environment. Evaluation plays once, for what fails counts.
    """


@dataclass(frozen=True, slots=True)
class Attempt:
    """One play of a task. A further attempt has an outcome seed of its own."""

    session: int
    task: Task
    repetition: int
    """Number of earlier tasks with the same group and outcome seed."""
    num_left: int
    """Number of attempts that may follow."""
    failures: tuple[dict[str, Any], ...] = ()
    """Ends of the earlier attempts."""

    def is_repeated(self, info: dict[str, Any]) -> bool:
        """Return whether another attempt follows if the last turn has this info."""
        return ERROR in info and info.get(TRUNCATED_BY) != "context" and self.num_left > 0


class Seat:
    """An open environment, which plays one trajectory after another."""

    def __init__(
        self, episode: Episode | None, worker: Worker | None, meanwhile: Meanwhile
    ) -> None:
        """`episode`: None if the first start builds it; `worker`: the thread that calls the
        environment, None if it is instant.
        """
        self.episode = episode
        self.worker = worker
        self.is_broken = False
        self._meanwhile = meanwhile

    async def start(self, task: Task) -> list[Message]:
        """Return the first messages of a task. Raises EnvironmentFailed if it cannot start."""

        def start() -> list[Message]:
            self.episode = self.episode or task.make_episode()
            return self.episode.start(task.seed, outcome_seed=task.outcome_seed, board=task.board)

        try:
            return await self._call(start)
        except EnvironmentFailed as error:
            self.is_broken = True
            raise EnvironmentFailed(
                f"environment {task.environment} cannot start from seed {task.seed}: {error}",
                is_late=error.is_late,
            ) from error

    async def respond(self, text: str) -> TurnResult:
        """Return the environment's answer; if the call fails, the end of the trajectory."""
        try:
            return await self._call(partial(self.episode.respond, text))
        except EnvironmentFailed as error:
            self.is_broken = True
            return failed_turn(error, self.episode.action)

    def close(self) -> None:
        """Close the environment, in the thread that calls it."""
        if self.episode is not None:
            calls.close(self.episode.environment)

    async def _call(self, function: Callable[[], T]) -> T:
        if self.worker is None:
            return guarded(function)
        return await self._meanwhile(self.worker.call(function))


class Player:
    """Plays trajectories with one engine, each call of `play` at its own pace.

    Calls wait before a turn while turns are held back, and in a turn while the engine has no
    weights; `on_wait` is called then.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        renderer: ChatRenderer,
        settings: PlaySettings,
        advance: Advance,
        on_wait: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._settings = settings
        self._advance = advance
        self._on_wait = on_wait
        self.has_weights = True
        self.num_held = 0
        """Number of trajectories that wait before a turn."""
        self._may_begin = asyncio.Event()
        self._loaded = asyncio.Event()  # set once the engine gets its weights again

    def go_on(self, *, begin_turns: bool) -> None:
        """Let all calls of `play` go on, as the engine has its weights; without `begin_turns` only
        to the end of their turn.
        """
        self.has_weights = True
        self._loaded.set()
        self._loaded = asyncio.Event()
        if begin_turns:
            self.num_held = 0
            self._may_begin.set()
        else:
            self._may_begin.clear()

    async def play(self, attempt: Attempt, seat: Seat) -> Trajectory:
        """Play one trajectory until its episode ends or its context is full."""
        engine, renderer, settings = self._engine, self._renderer, self._settings
        task, max_context = attempt.task, settings.max_context_length
        trajectory = Trajectory(
            group_id=task.group_id,
            environment=task.environment,
            seed=task.seed,
            outcome_seed=task.outcome_seed,
            weight_version=engine.weight_version,
        )
        try:
            messages = await seat.start(task)
            context = Context(renderer, seat.episode, settings.context_window)
            trajectory.append_observation(context.begin(messages))
        except EnvironmentFailed as error:
            return self._unplayed(attempt, trajectory, failed_turn(error).info)
        if len(trajectory) >= max_context:
            why = EnvironmentFailed(no_room(task.environment, len(trajectory), max_context))
            info = failed_turn(why).info | {TRUNCATED_BY: "context"}
            return self._unplayed(attempt, trajectory, info)
        is_over = False
        while not is_over:
            most = seat.episode.budget.max_response_length
            max_tokens = min(most, max_context - len(context.tokens))
            sampling = self._sampling(attempt, len(trajectory.turns), max_tokens)
            await self._wait_for_turn()
            completion = None
            while completion is None:
                loaded = self._loaded
                try:
                    completion = await engine.generate(
                        context.tokens[:], sampling, session=attempt.session
                    )
                except WeightsLost:
                    await self._wait_for_weights(loaded)
                except (RuntimeError, MemoryError, OSError) as error:
                    raise EngineError(
                        f"the rollout engine failed: {type(error).__name__}: {error}"
                    ) from error
            turn = trajectory.append_action(completion)
            if engine.weight_version != trajectory.weight_version:
                turn.info[VERSION] = engine.weight_version
            context.answer(completion.tokens)
            turn.info["finish_reason"] = completion.finish_reason
            turn.info["max_tokens"] = max_tokens
            result = await seat.respond(renderer.decode_action(completion.tokens))
            turn.reward = result.reward
            turn.info.update(result.info)
            trajectory.terminated, trajectory.truncated = result.terminated, result.truncated
            is_over = not result.messages
            if not is_over:
                observation, is_new_prompt = context.go_on(result.messages)
                if len(context.tokens) >= max_context:
                    turn.info["context_overflow"] = trajectory.truncated = is_over = True
                    turn.info[TRUNCATED_BY] = "context"
            self._advance(len(completion.tokens), is_over and not attempt.is_repeated(turn.info))
            if not is_over:
                trajectory.append_observation(observation, afresh=is_new_prompt)
                if is_new_prompt:  # its cache belongs to another prompt
                    engine.release(attempt.session)
        return trajectory

    def _sampling(self, attempt: Attempt, num_turns: int, max_tokens: int) -> SamplingParams:
        """Return the parameters that sample the turn after `num_turns` others, with its seed."""
        settings, task = self._settings, attempt.task
        stream = ("sampling", settings.seed, task.group_id, task.outcome_seed, attempt.repetition)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            stop_token_ids=self._renderer.stop_token_ids,
            seed=text_seed(repr((*stream, num_turns))),
        )

    def _unplayed(
        self, attempt: Attempt, trajectory: Trajectory, info: dict[str, Any]
    ) -> Trajectory:
        """Return the trajectory of an environment that could not start: nothing was sampled."""
        nothing = self._renderer.start([Message("user", "")])
        trajectory = trajectory.without_tokens()
        trajectory.append_observation(nothing)
        turn = trajectory.append_action(Completion([], [], "abort"))
        turn.info.update(info)
        trajectory.truncated = True
        self._advance(0, not attempt.is_repeated(info))
        return trajectory

    async def _wait_for_turn(self) -> None:
        if not self._may_begin.is_set():
            self.num_held += 1
            self._on_wait()
            await self._may_begin.wait()

    async def _wait_for_weights(self, loaded: asyncio.Event) -> None:
        """Wait for the weights after those that a request was made under, which were lost: not at
        all if they have come since the request.
        """
        if loaded is self._loaded:
            self.has_weights = False
            self._on_wait()
        await loaded.wait()


def no_room(environment: str, num_tokens: int, max_context: int) -> str:
    """Describe a first prompt that fills the context."""
    return (
        f"the first prompt of {environment} has {num_tokens} tokens and max_context_length is"
        f" {max_context}; raise --max-context-length or shorten the prompt"
    )
