"""--max-turns of an agent: what counts, and how an episode ends that has met a limit."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from ragen_mega.agents import served_episode
from ragen_mega.agents.runner import AgentProgram
from ragen_mega.data.types import Trajectory
from ragen_mega.environments.episode import ERROR, TRUNCATED_BY
from tests.support.door import TalkingEngine, ask, play, refusal

MOST = 5


@pytest.fixture(autouse=True)
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentProgram, "max_turns", MOST)


def end_of(trajectory: Trajectory) -> tuple[str | None, float, int]:
    """Cause, return and number of sampled answers of an episode that is trained."""
    info = trajectory.turns[-1].info
    assert ERROR not in info, info
    assert trajectory.truncated == (TRUNCATED_BY in info) != trajectory.terminated
    return info.get(TRUNCATED_BY), trajectory.total_reward, len(trajectory.turns)


def test_counts_of_tokens_cost_no_call() -> None:
    counts = []

    def run(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        with anthropic.Anthropic(base_url=base_url[:-3], api_key=api_key) as client:
            messages: list[Any] = [{"role": "user", "content": "go"}]
            given = {"model": "policy", "messages": messages}
            draft = [{"role": "user", "content": "a draft that is never sent"}]
            for _ in range(MOST):
                client.messages.count_tokens(model="policy", messages=draft)
                counted = client.messages.count_tokens(**given).input_tokens
                reply = client.messages.create(**given, max_tokens=9)
                counts.append((counted, reply.usage.input_tokens))
                said = {"role": "assistant", "content": reply.content}
                messages += [said, {"role": "user", "content": "on"}]
            client.messages.count_tokens(**given)  # behind the last call
            too_long = [{"role": "user", "content": "x" * 5000}]
            count = client.messages.count_tokens(model="policy", messages=too_long)
            assert count.input_tokens > 5000, "an agent counts to stay within the context"
        return {"reward": 1.0, "calls": {MOST - 1: 0.5}}  # counts are no calls

    (trajectory,) = play(run)
    assert end_of(trajectory) == (None, 1.5, MOST)
    assert len(counts) == MOST and all(counted == used for counted, used in counts)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_sample_counts_of_whatever_prompt(size: int) -> None:
    """The agent asks the same again until an answer suits, and none does."""

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        while not any("suits" in each.message.content for each in ask(client, "x", n=size).choices):
            pass
        return 1.0

    (trajectory,) = play(run)
    assert end_of(trajectory) == ("budget", 0.0, MOST // size * size)


def test_refused_requests_and_repetitions_do_not_count() -> None:
    errors = []

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        once = client.with_options(max_retries=0)
        for _ in range(MOST):
            refusal(lambda: ask(once, "x", n=0))
            errors.append(refusal(lambda: ask(once, "x" * 5000)))
        for number in range(MOST):
            ask(client, f"x{number}")
        for number in range(MOST):  # the answers were lost on their way
            ask(client, f"x{number}", extra_headers={"x-stainless-retry-count": "1"})
        return 1.0

    (trajectory,) = play(run)
    assert {error.code for error in errors} == {"context_length_exceeded"}
    assert end_of(trajectory) == (None, 1.0, MOST)


def test_more_answers_than_are_left_are_refused_as_a_whole() -> None:
    errors = []

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        ask(client, "x", n=MOST - 1)
        errors.append(refusal(lambda: ask(client, "x", n=2)))
        ask(client, "x")
        return 1.0

    (trajectory,) = play(run)
    assert end_of(trajectory) == (None, 1.0, MOST)
    (error,) = errors
    assert error.code == "call_limit_exceeded" and "--max-turns" in error.text
    assert error.text.startswith(f"the episode may have {MOST} answers, has asked for {MOST - 1}")


def test_concurrent_requests_do_not_pass_the_limit() -> None:
    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        def branch(number: int) -> bool:
            try:
                return bool(ask(client, f"branch {number % 3}"))
            except openai.BadRequestError:
                return False

        with ThreadPoolExecutor(12) as threads:
            return float(sum(threads.map(branch, range(12))))

    engine = TalkingEngine(lambda text: "yes", seconds=0.1)
    (trajectory,) = play(run, engine=engine)
    assert end_of(trajectory) == ("budget", MOST, MOST)
    assert len(engine.asked) == MOST


def test_an_agent_that_catches_the_limit_earns_what_it_returns() -> None:
    def run(task: dict[str, Any], client: openai.OpenAI) -> dict[str, Any]:
        last = None
        try:
            while True:
                last = ask(client, "go")
        except openai.BadRequestError:
            return {"reward": 2.0, "success": True, "calls": {last.id: 0.25}}

    (trajectory,) = play(run)
    assert end_of(trajectory) == ("budget", 2.25, MOST) and trajectory.success


def test_an_agent_that_goes_on_after_a_full_context_has_met_no_limit() -> None:
    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        refusal(lambda: ask(client, "x" * 5000))
        ask(client, "in short")
        return 1.0

    assert end_of(*play(run)) == (None, 1.0, 1)


@pytest.mark.parametrize("limit", ["budget", "context"])
def test_an_agent_that_asks_on_after_a_limit_is_ended(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would ask for ever; once its key is closed, the errors are others."""
    monkeypatch.setattr(served_episode, "_MOST_REFUSALS", 40)

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        ask(client, "go")
        while True:
            try:
                ask(client, "go" if limit == "budget" else "x" * 5000)
            except openai.BadRequestError:
                continue

    (trajectory,) = play(run, attempts=2)
    assert end_of(trajectory) == (limit, 0.0, MOST if limit == "budget" else 1)
    assert "asked on" in trajectory.turns[-1].info["agent_error"]


def test_an_agent_that_is_late_behind_a_limit_has_met_the_limit() -> None:
    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        try:
            while True:
                ask(client, "go")
        except openai.BadRequestError:
            raise TimeoutError("my own patience") from None  # is told like --agent-timeout

    assert end_of(*play(run)) == ("budget", 0.0, MOST)


@pytest.mark.parametrize("request_", [{"n": MOST + 1}, {"messages": "long"}])
def test_an_agent_that_gets_no_answer_at_all_has_failed(request_: dict[str, Any]) -> None:
    """Its first request is beyond a limit, which says nothing about the policy."""

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        given = dict(request_)
        text = "x" * 5000 if given.pop("messages", None) else "go"
        ask(client, text, **given)
        return 1.0

    with pytest.raises(ValueError, match="came to a first answer") as caught:
        play(run)
    assert ("--max-turns" if "n" in request_ else "--max-context-length") in str(caught.value)
    odd = run

    def sometimes(task: dict[str, Any], client: openai.OpenAI) -> float:
        return odd(task, client) if task["outcome_seed"] % 2 else float(bool(ask(client, "go")))

    for trajectory in play(sometimes, count=6):
        info = trajectory.turns[-1].info
        assert (ERROR in info) == bool(trajectory.outcome_seed % 2)
        if ERROR in info:
            assert info[TRUNCATED_BY] == ("budget" if "n" in request_ else "context")
