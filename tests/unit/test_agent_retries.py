"""Equal requests of an episode: repetitions get the answer of the first, others their own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx2
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_mega.agents.call_tree import Call, ChatMessage
from ragen_mega.agents.protocol import Arrival, ChatRequest, Connection
from ragen_mega.agents.served_episode import Limits, ServedEpisode
from ragen_mega.config.sections.agent import AgentConfig
from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.environments.episode import ERROR
from tests.support.door import RENDERER, TalkingEngine, play

REQUEST = ChatRequest("policy", (ChatMessage("user", "go"),), ())


class Hand:
    """A sampler whose answers come when the test says so."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[None]] = []

    async def complete(
        self, call: Call, tokens: list[int], sampling: SamplingParams
    ) -> tuple[Completion, dict[str, Any]]:
        self.asked.append(asyncio.get_running_loop().create_future())
        await self.asked[-1]
        return Completion([RENDERER.end_of_turn], [-1.0], "stop"), {}

    @property
    def running(self) -> list[asyncio.Future[None]]:
        return [each for each in self.asked if not each.done()]


class Client:
    """A client that asks the same thing again and again; a request that is lost is repeated."""

    def __init__(self, table: "Table", says_so: bool) -> None:
        self.table, self.says_so = table, says_so
        self.got: list[Arrival] = []
        self.num_retries: int | None = None
        """None: nothing is to be repeated."""
        self.sent: Arrival | None = None

    def send(self) -> None:
        self.num_retries = 0 if self.num_retries is None else self.num_retries + 1
        said = self.num_retries if self.says_so else 0
        self.sent = self.table.arrive(said)

    def lose(self) -> None:
        """Lose the connection of a request that is not answered, as the door notices."""
        self.sent.connection.is_lost = True
        self.sent = None

    def read(self) -> None:
        if self.sent is not None and self.sent.reply.done():
            self.got.append(self.sent)
            self.sent = self.num_retries = None


class Table:
    """A visit, its sampler and its clients, one step after another."""

    def __init__(self) -> None:
        self.hand = Hand()
        self.visit = ServedEpisode(RENDERER, self.hand, LIMITS, ("seed",))
        self.program = self.visit.loop.create_future()
        self.clients: list[Client] = []

    def arrive(self, num_retries: int) -> Arrival:
        arrival = Arrival(REQUEST, "equal", num_retries > 0, num_retries, Connection(), Future())
        self.visit.arrive(arrival)
        return arrival

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)
        for client in self.clients:
            client.read()

    async def finish(self, which: int = 0) -> None:
        self.hand.running[which].set_result(None)
        await self.settle()

    @property
    def num_samples(self) -> int:
        return len(self.visit.records())


LIMITS = Limits(
    max_context=400,
    max_tokens=9,
    max_answers=100,
    temperature=1.0,
    agent=AgentConfig(),
)


def at_a_table(say: Callable[[Table], Any]) -> None:
    async def meanwhile(answer: Any) -> Any:
        return await answer

    async def sit() -> None:
        table = Table()
        serving = asyncio.create_task(table.visit.serve(table.program, meanwhile))
        try:
            await say(table)
        finally:
            table.program.set_result(None)
            await serving

    asyncio.run(sit())


def numbers(*arrivals: Arrival) -> list[int]:
    """Numbers of the answers that these requests have got."""
    return [number for arrival in arrivals for number in arrival.reply.result(0).numbers]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=4), st.lists(st.integers(0, 999), max_size=40))
def test_each_of_equal_requests_gets_one_answer_of_its_own(
    kinds: list[bool], draws: list[int]
) -> None:
    """Clients ask at once, lose connections and repeat their requests, and say so or do not."""

    async def say(table: Table) -> None:
        table.clients = [Client(table, says_so) for says_so in kinds]
        num_requests = 0
        for draw in draws:
            client = table.clients[draw % len(kinds)]
            what = draw // len(kinds) % 5
            if client.sent is None and what < 3:
                num_requests += client.num_retries is None
                client.send()
            elif client.sent is not None and what in (0, 3):
                client.lose()
            elif table.hand.running:
                await table.finish(draw % len(table.hand.running))
            await table.settle()
        waiting = True
        while waiting:
            for client in table.clients:
                if client.sent is None and client.num_retries is not None:
                    client.send()
            await table.settle()
            if table.hand.running:
                await table.finish()
            waiting = [one for one in table.clients if one.num_retries is not None]
        while table.hand.running:
            await table.finish()
        got = [arrival for client in table.clients for arrival in client.got]
        assert sorted(numbers(*got)) == [*range(num_requests)], "each has one, and none is shared"
        assert table.num_samples == len(table.hand.asked) == num_requests, "no token doubles"
        assert table.visit.num_undelivered == 0

    at_a_table(say)


def test_one_of_two_equal_requests_is_lost_and_another_client_comes_between() -> None:
    async def say(table: Table) -> None:
        first = table.arrive(0)
        await table.settle()
        first.connection.is_lost = True
        other = table.arrive(0)  # another thread of the agent
        await table.settle()
        assert len(table.hand.asked) == 1, "it gets the answer that nobody waits for"
        again = table.arrive(1)
        await table.settle()
        assert len(table.hand.asked) == 2, "the first was no earlier try of the other"
        await table.finish()
        await table.finish()
        assert sorted(numbers(other, again)) == [0, 1]

    at_a_table(say)


def test_a_repetition_of_an_answered_request_does_not_join_one_that_waits() -> None:
    async def say(table: Table) -> None:
        first = table.arrive(0)
        await table.settle()
        await table.finish()
        waiting = table.arrive(0)
        again = table.arrive(1)  # the first answer was lost on its way
        await table.settle()
        assert numbers(first, again) == [0, 0]
        assert not waiting.reply.done() and table.num_samples == 1
        await table.finish()
        assert numbers(waiting) == [1]

    at_a_table(say)


def test_both_of_two_requests_are_lost_and_one_comes_again() -> None:
    async def say(table: Table) -> None:
        pair = [table.arrive(0), table.arrive(0)]
        await table.settle()
        for arrival in pair:
            arrival.connection.is_lost = True
        again = table.arrive(1)
        await table.settle()
        for _ in pair:
            await table.finish()
        assert numbers(again) == [0]
        assert table.num_samples == 1 and table.visit.num_undelivered == 1

    at_a_table(say)


def test_a_repetition_whose_loss_is_not_seen_joins_the_only_request() -> None:
    async def say(table: Table) -> None:
        arrivals = [table.arrive(0), table.arrive(1)]
        await table.settle()
        await table.finish()
        assert numbers(*arrivals) == [0, 0]
        assert len(table.hand.asked) == 1

    at_a_table(say)


def test_headers_tell_which_request_is_repeated() -> None:
    ids: list[str] = []
    body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    other = {"model": "policy", "messages": [{"role": "user", "content": "else"}]}

    def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
        with httpx2.Client(trust_env=False) as client:

            def post(given: dict[str, Any] = body, **headers: str) -> None:
                headers["authorization"] = f"Bearer {api_key}"
                answer = client.post(f"{base_url}/chat/completions", json=given, headers=headers)
                ids.append(answer.json()["id"])

            for retries in ("0", "0", "1", "1", "2"):
                post(**{"x-stainless-retry-count": retries})
            for given in (body, other, body):
                post(given, **{"idempotency-key": "of the whole program"})
            for retries in ("9" * 5000, "many"):  # no number of a client that counts
                post(**{"x-stainless-retry-count": retries})
        return 1.0

    engine = TalkingEngine(lambda text: "yes")
    (trajectory,) = play(run, engine=engine)
    assert ERROR not in trajectory.turns[-1].info, trajectory.turns[-1].info
    assert ids[:2] == ["call-0-0", "call-0-1"]
    assert sorted(ids[2:4]) == ids[:2], "two repetitions are of two requests"
    assert ids[4] in ids[:2]
    assert ids[5:8] == ["call-0-2", "call-1-0", "call-0-2"], "a key names one body"
    assert {*ids[8:]} <= {"call-0-0", "call-0-1"}
    assert len(engine.asked) == len(trajectory.turns) == 4
