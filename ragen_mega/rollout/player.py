"""One trajectory from reset to end: observe, render, sample, parse, step.

Source: StarPO, arXiv:2504.20073, section 3.1 (trajectories of at most K turns). Sampled tokens are
appended to the trajectory as they were sampled; the environment's tokens are appended outside the
loss mask.
"""

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Self, TypeVar

from ragen_mega.agents.call_tree import Call
from ragen_mega.agents.runner import (
    AgentEpisode,
    AgentProgram,
    Door,
    Outcome,
    judged,
    shared_client,
)
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
from ragen_mega.ranks import collectives
from ragen_mega.rollout.context import Context
from ragen_mega.rollout.engine import EngineError, RolloutEngine, WeightsLost
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.served_episode import UNDELIVERED, Answers, Limits, ServedEpisode

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
    """The settings by which trajectories are sampled; names and meaning are as in the flags."""

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
    """One play of a task. A further attempt has a new outcome seed."""

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

    def begin_agent(
        self, agent: AgentProgram, base_url: str, door: Door, seconds: float
    ) -> asyncio.Future[Any]:
        """Let the agent that is this environment play; the future fails with EnvironmentFailed. Its
        time is measured by a `Clock`; `seconds` bound later calls.
        """
        assert self.worker is not None  # an agent is not instant
        self.worker.seconds = 0.0
        ending = self.worker.call(partial(agent.run, base_url, door))
        self.worker.seconds = seconds
        return ending

    def give_up(self, agent: AgentProgram, ending: asyncio.Future[Any]) -> None:
        """Let the agent's episode fail because it takes too long."""
        assert self.worker is not None
        self.worker.give_up(ending, agent.why_late)

    def close(self) -> None:
        """Close the environment, in the thread that calls it."""
        if self._episode is not None:
            calls.close(self._episode.environment)

    async def judge(
        self, episode: AgentEpisode, failure: EnvironmentFailed | None, reward: str | None
    ) -> Outcome:
        """Return the rewards of an agent's episode. Raises EnvironmentFailed if there are none."""
        if failure is not None and (failure.is_late or reward is None):
            raise failure  # an agent that does not return keeps the thread
        return await self._call(partial(judged, episode, reward))

    async def _call(self, function: Callable[[], T]) -> T:
        if self.worker is None:
            return guarded(function)
        return await self.meanwhile(self.worker.call(function))


class Clock(contextlib.AbstractContextManager["Clock"]):
    """The time of one episode of an agent, which counts from its start or from the last answer to
    another episode of the agent, or the end of one. An episode that waits for others, as at a
    semaphore or a limit of rates, is therefore not late while they go on.
    """

    def __init__(self, clocks: list["Clock"]) -> None:
        """`clocks`: the clocks of the agent's episodes that are played at present."""
        self._clocks = clocks
        self._watch: asyncio.Task[None] | None = None
        self.num_elsewhere = 0
        """Number of answers to other episodes in the meantime."""

    def __enter__(self) -> Self:
        self._clocks.append(self)
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._clocks.remove(self)
        for clock in self._clocks:
            clock.start()
        if self._watch is not None:
            self._watch.cancel()

    def start(self) -> None:
        """Begin to count anew."""
        self._start = time.monotonic()

    def restart_others(self) -> None:
        """Note an answer to this episode."""
        for clock in self._clocks:
            if clock is not self:
                clock.num_elsewhere += 1
                clock.start()

    def watch(self, seconds: float, give_up: Callable[[], None]) -> None:
        """Call `give_up` after so many seconds."""

        async def wait() -> None:
            while (left := self._start + seconds - time.monotonic()) > 0:
                await asyncio.sleep(left)
            give_up()

        self._watch = asyncio.get_running_loop().create_task(wait())


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
        self.advance = advance
        self._on_wait = on_wait
        self.has_weights = True
        self._clocks: defaultdict[str, list[Clock]] = defaultdict(list)  # by agent
        self._resting: set[int] = set()  # sessions of trajectories with nothing in the engine
        self.further_session = partial(next, itertools.count(-1, -1))
        self._may_begin = asyncio.Event()
        self._loaded = asyncio.Event()  # set once the engine gets its weights again

    def go_on(self, *, begin_turns: bool) -> None:
        """Let all calls of `play` go on, as the engine has its weights; without `begin_turns` only
        to the end of their turn.
        """
        self.has_weights = True
        for clock in chain.from_iterable(self._clocks.values()):
            clock.start()  # nothing was played since the last call
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

    async def play(self, attempt: Attempt, opened: OpenEnvironment) -> Trajectory:
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
            messages = await opened.start(task)
        except EnvironmentFailed as error:
            return self._unplayed(attempt, trajectory, failed_turn(error).info)
        if isinstance(program := opened.episode.environment, AgentProgram):
            return await self._host(attempt, opened, program, trajectory)
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
            await self.wait_for_turn(attempt.session)
            completion = None
            while completion is None:
                async with self.outlasting_weights():
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
                    turn.info["context_overflow"] = trajectory.truncated = is_over = True
                    turn.info[TRUNCATED_BY] = "context"
            self.advance(len(completion.tokens), is_over and not attempt.is_repeated(turn.info))
            if not is_over:
                trajectory.append_observation(observation, afresh=is_new_prompt)
                if is_new_prompt:  # its cache belongs to another prompt
                    engine.release(attempt.session)
        return trajectory

    async def _host(
        self,
        attempt: Attempt,
        opened: OpenEnvironment,
        program: AgentProgram,
        trajectory: Trajectory,
    ) -> Trajectory:
        """Play one episode of an agent, which has been given its task."""
        # Only here, for it needs the extra `agents`.
        from ragen_mega.agents.server import door

        settings, task, agent = self._settings, attempt.task, self._settings.agent
        limits = Limits(
            max_context=settings.max_context_length,
            max_tokens=opened.episode.budget.max_response_length,
            max_answers=opened.episode.budget.max_turns,
            temperature=settings.temperature,
            top_p=1.0,
            stop_token_ids=self._renderer.stop_token_ids,
            agent=agent,
        )
        seed = (settings.seed, task.group_id, task.outcome_seed, attempt.repetition)
        sampler = settings.answers or _Sessions(
            self, self._engine, attempt.session, trajectory.weight_version
        )
        clock = Clock(self._clocks[task.environment])
        served = ServedEpisode(
            self._renderer, sampler, limits, ("agent", *seed), clock.restart_others
        )
        entrance = door(agent.listen_on(collectives.rank()))
        self.rest(attempt.session)
        with clock:
            entry = partial(entrance.open, served)
            ending = opened.begin_agent(program, entrance.url, entry, agent.agent_timeout)
            if agent.agent_timeout:
                clock.watch(agent.agent_timeout, partial(opened.give_up, program, ending))
            try:
                await served.serve(ending, opened.meanwhile)
            finally:
                self._resting.discard(attempt.session)
                ending.cancel()
                program.stop()
        failure = (
            EnvironmentFailed("it asked on although a limit allowed no answer", is_late=True)
            if served.is_endless
            else ending.exception()
        )
        assert failure is None or isinstance(failure, EnvironmentFailed)  # see `Worker.call`
        opened.is_broken = failure is not None
        outcome, records = Outcome(0.0, success=False), served.records()
        info = {TRUNCATED_BY: served.limit_reached} if served.limit_reached else {}
        if failure is not None and info and records:
            info["agent_error"] = str(failure)
        elif failure is None and not served.tree.calls and clock.num_elsewhere:
            info = failed_turn(EnvironmentFailed(shared_client(clock.num_elsewhere))).info
        else:
            try:
                outcome = await opened.judge(
                    AgentEpisode(
                        program.task,
                        records,
                        None if failure else ending.result(),
                        None if failure is None else str(failure),
                    ),
                    failure,
                    agent.agent_reward,
                )
            except EnvironmentFailed as error:
                info = failed_turn(error).info | info
        trajectory = served.tree.trajectory(
            trajectory, reward=outcome.reward, call_rewards=outcome.call_rewards
        )
        trajectory.truncated = TRUNCATED_BY in info
        trajectory.terminated = not trajectory.truncated
        last = trajectory.turns[-1].info
        last |= dict(outcome.info) | {"success": outcome.success} | info
        if served.num_undelivered:
            last[UNDELIVERED] = served.num_undelivered
        self.advance(0, not attempt.is_repeated(last))
        return trajectory

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

    def _sampling(
        self, attempt: Attempt, num_turns: int, max_tokens: int, num_recorded: int
    ) -> SamplingParams:
        """Return the parameters that sample the turn after `num_turns` others, with its seed."""
        settings, task = self._settings, attempt.task
        stream = ("sampling", settings.seed, task.group_id, task.outcome_seed, attempt.repetition)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=settings.temperature,
            stop_token_ids=self._renderer.stop_token_ids,
            seed=text_seed(repr((*stream, num_turns))),
            num_recorded=num_recorded,
        )

    def _unplayed(
        self, attempt: Attempt, trajectory: Trajectory, info: dict[str, Any]
    ) -> Trajectory:
        """Return the trajectory of an environment that could not start: nothing was sampled."""
        trajectory.append_observation(self._renderer.start([Message("user", "")]))
        turn = trajectory.append_action(Completion([], [], "abort"))
        turn.info.update(info)
        trajectory.truncated = True
        self.advance(0, not attempt.is_repeated(info))
        return trajectory

    async def wait_for_turn(self, session: int) -> None:
        """Wait until turns may begin."""
        while not self._may_begin.is_set():
            self.rest(session)
            await self._may_begin.wait()
        self._resting.discard(session)

    def rest(self, session: int) -> None:
        """Note that a trajectory has nothing in the engine until its next `wait_for_turn`."""
        self._resting.add(session)
        self._on_wait()


class _Sessions:
    """Sessions of the engine for the calls of an agent's episode.

    A call continues the session of the episode if this is free. Otherwise it gets a new session. A
    session is released when its call ends while others run, which may wait for its slot.
    """

    def __init__(self, player: Player, engine: RolloutEngine, own: int, version: int) -> None:
        """`own`: session of the episode; `version`: weights at its start."""
        self._player, self._engine, self._own, self._version = player, engine, own, version
        self._busy: set[int] = set()

    async def complete(
        self, call: Call, tokens: list[int], sampling: SamplingParams
    ) -> tuple[Completion, dict[str, Any]]:
        """Sample as soon as turns may begin; see `served_episode.Answers`."""
        player, engine = self._player, self._engine
        await player.wait_for_turn(self._own)
        session = self._own if self._own not in self._busy else player.further_session()
        self._busy.add(session)
        try:
            completion = None
            while completion is None:
                async with player.outlasting_weights():
                    completion = await engine.generate(tokens[:], sampling, session=session)
        finally:
            self._busy.discard(session)
            if session != self._own or self._busy:
                engine.release(session)
            if not self._busy:
                player.rest(self._own)
        player.advance(len(completion.tokens), False)
        version = engine.weight_version
        return completion, {} if version == self._version else {VERSION: version}


def no_room(environment: str, num_tokens: int, max_context: int) -> str:
    """Describe a first prompt that fills the context."""
    return (
        f"the first prompt of {environment} has {num_tokens} tokens and max_context_length is"
        f" {max_context}; raise --max-context-length or shorten the prompt"
    )
