"""One episode of an agent from its start to its rewards: the program of the user asks at the door,
and a shared engine, or another source of answers, samples what it asks for.
"""

import asyncio
import contextlib
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Self

from ragen_mega.agents.call_tree import Call
from ragen_mega.agents.runner import (
    AgentEpisode,
    AgentProgram,
    Outcome,
    judged,
    shared_client,
)
from ragen_mega.agents.served_episode import UNDELIVERED, Limits, ServedEpisode
from ragen_mega.data.types import VERSION, Completion, SamplingParams, Trajectory
from ragen_mega.environments.episode import BY_REWARD, TRUNCATED_BY, failed_turn
from ragen_mega.environments.pool import EnvironmentFailed
from ragen_mega.environments.protocol import OUTCOME
from ragen_mega.rollout.player import (
    Advance,
    Attempt,
    OpenEnvironment,
    Player,
    SharedEngine,
)

_NUM_PARTS = 100
"""Parts of a time limit that a clock counts one by one."""


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
        self._seconds = 0.0

    def restart_others(self) -> None:
        """Note an answer to this episode."""
        for clock in self._clocks:
            if clock is not self:
                clock.num_elsewhere += 1
                clock.start()

    def watch(self, seconds: float, give_up: Callable[[], None]) -> None:
        """Call `give_up` after so many seconds in which the event loop goes on. While it stands
        still, as when a server is replaced, no agent gets an answer.
        """
        part = seconds / _NUM_PARTS

        async def wait() -> None:
            while self._seconds < seconds:
                await asyncio.sleep(part)  # counts as one part, however late the loop comes back
                self._seconds += part
            give_up()

        self._watch = asyncio.get_running_loop().create_task(wait())


class AgentPlayer(Player):
    """Plays episodes of agents with a shared engine, each call of `play` at its own pace."""

    @cached_property
    def _clocks(self) -> defaultdict[str, list[Clock]]:
        """Clocks of the episodes that are played at present, by agent."""
        return defaultdict(list)

    @cached_property
    def _further_sessions(self) -> Iterator[int]:
        """Numbers of sessions that no trajectory has."""
        return itertools.count(-1, -1)

    def restart_clocks(self) -> None:
        """Let the time of all episodes count anew: nothing was played in the meantime."""
        for clock in itertools.chain.from_iterable(self._clocks.values()):
            clock.start()

    async def play(self, attempt: Attempt, opened: OpenEnvironment) -> Trajectory:
        """Play one episode of an agent until its program ends, or a limit ends it."""
        trajectory = attempt.trajectory(self._engine.weight_version)
        try:
            await opened.start(attempt.task)
        except EnvironmentFailed as error:
            return self._unplayed(attempt, trajectory, failed_turn(error).info)
        program = opened.episode.environment
        assert isinstance(program, AgentProgram)  # by the name of the environment
        settings, budget = self._settings, opened.episode.budget
        limits = Limits(
            max_context=settings.max_context_length,
            max_tokens=budget.max_response_length,
            max_answers=budget.max_turns,
            temperature=settings.temperature,
            agent=settings.agent,
        )
        answers = settings.answers or _Sessions(
            self._shared,
            self._advance,
            self._further_sessions,
            attempt.session,
            trajectory.weight_version,
        )
        clock = Clock(self._clocks[attempt.task.environment])
        seed = ("agent", *attempt.stream(settings.seed))
        served = ServedEpisode(self._renderer, answers, limits, seed, clock.restart_others)
        with clock:
            ending = await self._serve(served, clock, attempt, opened, program)
        outcome, info = await self._judge(served, clock, opened, program.task, ending)
        trajectory = served.tree.trajectory(
            trajectory, reward=outcome.reward, call_rewards=outcome.call_rewards
        )
        trajectory.truncated = TRUNCATED_BY in info
        trajectory.terminated = not trajectory.truncated
        last = trajectory.turns[-1].info
        last |= {"success": outcome.success} | info
        if outcome.is_by_reward:
            last[BY_REWARD] = outcome.reward
        if outcome.info:
            last[OUTCOME] = dict(outcome.info)
        if served.num_undelivered:
            last[UNDELIVERED] = served.num_undelivered
        self._advance(0, not attempt.is_repeated(last))
        return trajectory

    async def _serve(
        self,
        served: ServedEpisode,
        clock: Clock,
        attempt: Attempt,
        opened: OpenEnvironment,
        program: AgentProgram,
    ) -> asyncio.Future[Any]:
        """Let the program play, in the thread of its environment, and answer its requests. Returns
        what the program returns or fails with.
        """
        # Only here, for it needs the extra `agents`.
        from ragen_mega.agents.server import door

        worker, agent = opened.worker, self._settings.agent
        assert worker is not None  # an agent is not instant
        entrance = door(agent.listen_on(int(os.environ.get("RANK", 0))))  # in the whole job
        self._shared.rest(attempt.session)
        worker.seconds = 0.0  # the clock measures this call
        ending = worker.call(partial(program.run, entrance.url, partial(entrance.open, served)))
        worker.seconds = agent.agent_timeout
        if agent.agent_timeout:
            clock.watch(agent.agent_timeout, lambda: worker.give_up(ending, program.why_late))
        try:
            await served.serve(ending, opened.meanwhile)
        finally:
            self._shared.end_rest(attempt.session)
            ending.cancel()
            program.stop()
        return ending

    async def _judge(
        self,
        served: ServedEpisode,
        clock: Clock,
        opened: OpenEnvironment,
        task: Mapping[str, Any],
        ending: asyncio.Future[Any],
    ) -> tuple[Outcome, dict[str, Any]]:
        """Return the rewards of an episode that is over, none if it failed, and entries about its
        end for the info of the last turn.
        """
        reward = self._settings.agent.agent_reward
        failure = (
            EnvironmentFailed("it asked on although a limit allowed no answer", is_late=True)
            if served.is_endless  # and the program was ended
            else ending.exception()
        )
        assert failure is None or isinstance(failure, EnvironmentFailed)  # see `Worker.call`
        opened.is_broken = failure is not None
        nothing, records = Outcome(0.0, success=False), served.records()
        info = {TRUNCATED_BY: served.limit_reached} if served.limit_reached else {}
        if failure is not None and info and records:
            return nothing, info | {"agent_error": str(failure)}
        if failure is None and not records and served.refusal:
            hidden = f"each request of the agent was refused, the latest one so: {served.refusal}"
            return nothing, failed_turn(EnvironmentFailed(hidden)).info
        if failure is None and not served.tree.calls and clock.num_elsewhere:
            return nothing, failed_turn(EnvironmentFailed(shared_client(clock.num_elsewhere))).info
        if failure is not None and (failure.is_late or reward is None):
            # An agent that does not return keeps the thread in which it would be judged.
            return nothing, failed_turn(failure).info | info
        result, error = (None, str(failure)) if failure else (ending.result(), None)
        episode = AgentEpisode(task, records, result, error)
        try:
            return await opened.call(partial(judged, episode, reward)), info
        except EnvironmentFailed as failed:
            return nothing, failed_turn(failed).info | info


class _Sessions:
    """Sessions of the engine for the calls of an agent's episode.

    A call continues the session of the episode if this is free. Otherwise the engine opens one for
    it. A session is released when its call ends while others run, which may wait for its slot. The
    episode rests while none of its calls is in the engine, whether others wait for a turn or not.
    """

    def __init__(
        self,
        engine: SharedEngine,
        advance: Advance,
        further_sessions: Iterator[int],
        own: int,
        version: int,
    ) -> None:
        """`own`: session of the episode; `version`: weights at its start."""
        self._shared, self._advance, self._further_sessions = engine, advance, further_sessions
        self._own, self._version = own, version
        self._busy: set[int] = set()

    async def complete(
        self, call: Call, tokens: list[int], sampling: SamplingParams
    ) -> tuple[Completion, dict[str, Any]]:
        """Sample as soon as turns may begin; see `served_episode.Answers`."""
        engine = self._shared.engine
        await self._shared.wait_for_turn(self._own)
        session = self._own if self._own not in self._busy else next(self._further_sessions)
        self._busy.add(session)
        try:
            completion = None
            while completion is None:
                async with self._shared.outlasting_weights():
                    completion = await engine.generate(tokens[:], sampling, session=session)
        finally:
            self._busy.discard(session)
            if session != self._own or self._busy:
                engine.release(session)
            if not self._busy:
                self._shared.rest(self._own)
        self._advance(len(completion.tokens), False)
        version = engine.weight_version
        return completion, {} if version == self._version else {VERSION: version}
