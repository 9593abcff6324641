"""One episode of an agent from the side of the rollout: requests become calls of a tree, calls
become completions of the engine.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from ragen_mega.agents.call_tree import Call, CallTree, RequestError, record
from ragen_mega.agents.protocol import Arrival, ChatRequest, Connection, Reply, call_id
from ragen_mega.config.sections.agent import AgentConfig
from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.environments.protocol import text_seed
from ragen_mega.rollout.renderer import ChatRenderer

ASKED = "asked_sampling"
"""Key of a turn's info: parameters of sampling that the agent asked for, where they differ from the
trainer's.
"""
UNDELIVERED = "undelivered_answers"
"""Key of the last turn's info: number of completions that no connection was left for."""
_LIMITS = {"context_length_exceeded": "context", "call_limit_exceeded": "budget"}
"""Code of a refused request -> cause of the end of an episode that it ended."""
_MOST_REFUSALS = 256
"""Number of requests that are refused for a limit, without an answer between them, after which an
episode ends without its agent: the branches of an agent may meet the limit together.
"""


class Answers(Protocol):
    """Source of the completions of an episode."""

    async def complete(
        self, call: Call, tokens: list[int], sampling: SamplingParams
    ) -> tuple[Completion, dict[str, Any]]:
        """Sample what follows the prompt `tokens` of a call, with further entries for the info of
        the answer's turn.
        """


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings under which an agent may sample."""

    max_context: int
    max_tokens: int
    max_answers: int
    temperature: float
    agent: AgentConfig


@dataclass(slots=True, eq=False)
class _Pending:
    """A request, with every connection on which it was repeated."""

    connections: list[Connection] = field(default_factory=list)
    task: asyncio.Task[Reply] = field(init=False)
    """Task of the answer, which is begun with the request."""
    num_retries: int = 0
    """Number of repetitions, as the client counts them."""
    num_presumed: int = 0
    """Number of connections whose client did not say that it repeats the request."""
    has_listener: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_undelivered(self) -> bool:
        return all(connection.is_lost for connection in self.connections)


class ServedEpisode:
    """The calls of one episode, in the event loop of the rollout.

    The samples depend on the seed of the episode, the prompt of a call and the number of times that
    it was asked before, not on the order in which concurrent requests arrive.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        sampler: Answers,
        limits: Limits,
        seed: Sequence[object],
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """`seed`: values that distinguish the episode from all others of the run; `on_answer` is
        called after each answer.
        """
        self.loop = asyncio.get_running_loop()
        self.tree = CallTree(renderer, max_context_length=limits.max_context)
        self.num_undelivered = 0
        """Number of answers that no connection was left for."""
        self.limit_reached: str | None = None
        """Cause by which the latest request was refused for a limit; None after one that was not.
        """
        self.refusal: str | None = None
        """Text of the latest error of a request, which an agent may have hidden."""
        self._renderer, self._sampler, self._limits = renderer, sampler, limits
        self._own = {"temperature": limits.temperature, "top_p": 1.0}
        self._seed = tuple(seed)
        self._on_answer = on_answer
        self._times_asked: Counter[int] = Counter()  # by a digest of the prompt
        self._arrivals: deque[Arrival] = deque()
        self._has_arrival = asyncio.Event()
        self._num_asked = 0  # answers that were begun
        self._num_refused = 0  # requests that a limit refused since the last answer was begun
        self._pending: defaultdict[str, list[_Pending]] = defaultdict(list)  # by identity
        self._running: set[asyncio.Task[Reply]] = set()
        self._is_over = False

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of models that were asked for, or that are trained; `policy` if there are none, for
        an agent may ask for the first model of the list.
        """
        asked = {call.role for call in tuple(self.tree.calls)}
        return tuple(sorted(asked | self._limits.agent.trained_roles)) or ("policy",)

    @property
    def is_endless(self) -> bool:
        """Whether the agent goes on asking although a limit allows no answer."""
        return self._num_refused >= _MOST_REFUSALS

    def arrive(self, arrival: Arrival) -> None:
        """Take a request; it is answered while the episode is served."""
        if self._is_over:
            arrival.reply.cancel()
            return
        self._arrivals.append(arrival)
        self._has_arrival.set()

    async def serve(
        self,
        program: asyncio.Future[Any],
        meanwhile: Callable[[Awaitable[None]], Awaitable[None]],
    ) -> None:
        """Answer requests until the program of the agent has ended or asks endlessly. `meanwhile`
        waits for the agent where no call of it is answered, and may keep an order. Raises what a
        call raises, other than a refusal.
        """
        try:
            while not program.done() and not self.is_endless:
                event, is_absent = self._event(program), not self._running
                await (meanwhile(event) if is_absent else event)
                for task in [task for task in self._running if task.done()]:
                    self._running.discard(task)
                    if not isinstance(error := task.exception(), RequestError) and error:
                        raise error
                # A request that was faster than the end of the last answer waits for `meanwhile`
                # as slower ones do, so that its speed does not decide what it is sampled beside.
                if is_absent or self._running:
                    self._has_arrival.clear()
                    while self._arrivals:
                        self._begin(self._arrivals.popleft())
        finally:
            self._is_over = True
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            for arrival in self._arrivals:
                arrival.reply.cancel()

    async def _event(self, program: asyncio.Future[Any]) -> None:
        """Wait for the end of the program, a request, or the end of an answer."""
        arrival = asyncio.ensure_future(self._has_arrival.wait())
        try:
            await asyncio.wait(
                {program, arrival, *self._running}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            arrival.cancel()

    def _begin(self, arrival: Arrival) -> None:
        """Begin the answer to a request, or let it wait for the answer to one that it repeats."""
        equal = self._pending[arrival.identity]
        repeated = _repeated(equal, arrival)
        pending = repeated or _Pending()
        pending.connections.append(arrival.connection)
        pending.num_retries = arrival.num_retries
        if repeated is None:
            equal.append(pending)
            pending.task = self.loop.create_task(self._answer(arrival.request, pending))
            self._running.add(pending.task)
        else:
            pending.num_presumed += not arrival.is_retry
            pending.has_listener.set()
        pending.task.add_done_callback(lambda task: _hand_over(task, arrival))

    async def _answer(self, request: ChatRequest, pending: _Pending) -> Reply:
        """Return the answers to a request. Raises RequestError if the request is refused."""
        call = self._call(request)
        tokens, asked = call.tokens, self._asked(request)
        prompt = tuple(tokens)
        # The last token before the call was sampled, and nothing has been recorded with it yet.
        num_recorded = max(0, len(tokens) - len(call.added) - 1)
        samplings = [
            self._sampling(request, prompt, asked, num_recorded) for _ in range(request.num_answers)
        ]
        completions = await asyncio.gather(
            *(self._sampler.complete(call, tokens, sampling) for sampling in samplings)
        )
        while pending.is_undelivered:  # what nobody reads has no part in the episode
            self.num_undelivered += request.num_answers
            pending.has_listener.clear()
            await pending.has_listener.wait()
            self.num_undelivered -= request.num_answers
        first, agent = len(call.answers), self._limits.agent
        is_trained = not agent.trained_roles or call.role in agent.trained_roles
        is_trained = is_trained and not (asked and agent.agent_sampling == "agent")
        for sampling, (completion, info) in zip(samplings, completions, strict=True):
            answer = self.tree.answer(
                call, completion, is_trained=is_trained, stop_texts=request.stop_texts
            )
            is_read = answer.completion.finish_reason == "stop" and not (
                call.tools and self._renderer.call_form.is_begun(answer.content)
            )
            answer.info |= {
                "finish_reason": answer.completion.finish_reason,
                "max_tokens": sampling.max_tokens,
                "is_format_valid": is_read,
                "is_action_valid": is_read,
                "thought": answer.thought or "",
                **({ASKED: asked} if asked else {}),
                **info,
            }
        self._on_answer()
        # Replies are kept for repetitions of their requests, and need no conversations.
        request = replace(request, messages=())
        reply = Reply(request, call, range(first, len(call.answers)), num_prompt=len(tokens))
        if not request.wants_logprobs:
            return reply
        decode = self._renderer.tokenizer.decode
        texts = [[str(decode([token])) for token in a.completion.tokens] for a in reply.answers]
        return replace(reply, token_texts=texts)

    def _call(self, request: ChatRequest) -> Call:
        """Return the call of a request, with its answers counted. Raises RequestError if the
        request is refused.
        """
        begin = partial(self.tree.begin, request.messages, request.tools, role=request.role)
        if not request.num_answers:  # tokens are counted
            return begin(is_asked=False)
        most, had = self._limits.max_answers, self._num_asked
        try:
            if had + request.num_answers > most:
                raise RequestError(
                    f"the episode may have {most} answers, has asked for {had} and now asks for"
                    f" {request.num_answers}; let the agent end, or raise --max-turns",
                    code="call_limit_exceeded",
                )
            call = begin()
        except RequestError as error:
            if error.code in _LIMITS:
                self.limit_reached = _LIMITS[error.code]
                self._num_refused += 1
            raise
        self.limit_reached = None
        self._num_refused = 0
        self._num_asked += request.num_answers
        return call

    def _asked(self, request: ChatRequest) -> dict[str, float]:
        """Return the parameters of sampling that differ from the trainer's."""
        asked = {"temperature": request.temperature, "top_p": request.top_p}
        return {
            name: value
            for name, value in asked.items()
            if value is not None and value != self._own[name]
        }

    def _sampling(
        self,
        request: ChatRequest,
        prompt: tuple[int, ...],
        asked: dict[str, float],
        num_recorded: int,
    ) -> SamplingParams:
        """Return the parameters of one sample of what follows a prompt, with its seed."""
        limits = self._limits
        digest = text_seed(repr(prompt))
        times = self._times_asked[digest]
        self._times_asked[digest] += 1
        own = self._own | (asked if limits.agent.agent_sampling == "agent" else {})
        room = limits.max_context - len(prompt)
        return SamplingParams(
            max_tokens=min(limits.max_tokens, room, request.max_tokens or room),
            stop_token_ids=self._renderer.stop_token_ids,
            seed=text_seed(repr((*self._seed, prompt, times, request.seed))),
            num_recorded=num_recorded,
            **own,
        )

    def records(self) -> list[dict[str, Any]]:
        """Return the record of every answer with its id, in the order of the calls."""
        return [
            {"id": call_id(call.index, number)} | record(call, number)
            for call in self.tree.calls
            for number in range(len(call.answers))
        ]


def _repeated(equal: Sequence[_Pending], arrival: Arrival) -> _Pending | None:
    """Return the earlier request that an equal one repeats; None if this is a further request.

    An answer without a connection goes to the next request. If the client of this request did not
    say that it repeats another one, and the first client comes again, both need an answer. Any
    other repetition follows an answer that was lost on its way, for a client that still waits
    repeats nothing.
    """
    equal = [known for known in equal if not (known.task.done() and known.task.exception())]
    if lost := [known for known in equal if known.is_undelivered]:
        return lost[0]
    if not arrival.is_retry:
        return None
    for known in equal:
        if known.num_presumed:
            known.num_presumed -= 1
            return None
    before = [known for known in equal if known.num_retries == arrival.num_retries - 1] or equal
    answered = [known for known in before if known.task.done()]
    return answered[-1] if answered else next(iter(before), None)


def _hand_over(task: asyncio.Task[Reply], arrival: Arrival) -> None:
    """Give the result of an answer to one of the requests that wait for it."""
    if arrival.reply.cancelled():
        return
    if task.cancelled():
        arrival.reply.cancel()
    elif error := task.exception():
        arrival.reply.set_exception(error)
    else:
        arrival.reply.set_result(task.result())
