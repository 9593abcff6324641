"""Agents at the door: the real OpenAI client against a policy that says what it is told."""

import asyncio
import gc
import hashlib
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import httpx2
import openai
import psutil
import pytest

from ragen_mega.agents import server
from ragen_mega.agents.call_tree import CALL
from ragen_mega.agents.protocol import Connection
from ragen_mega.agents.repetition import RecordedAnswers
from ragen_mega.config import EnvironmentConfig
from ragen_mega.data.types import Completion
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments.episode import ERROR, TRUNCATED_BY
from ragen_mega.rollout.collector import FAILED_ATTEMPTS, Collection
from ragen_mega.rollout.player import PlaySettings
from ragen_mega.rollout.tasks import episode_maker, tasks_for_group
from tests.support.door import (
    RENDERER,
    TOOLS,
    TalkingEngine,
    ask,
    play,
    put_at_the_door,
    refusal,
    sampled,
)
from tests.support.processes import wait_until
from tests.support.small_policy import tiny_qwen2
from tests.support.web_server import Request, serving


def test_what_the_client_gets_is_what_is_trained_and_the_engine_has_sampled():
    seen = []

    def run(task: dict[str, Any], client: openai.OpenAI) -> dict[str, Any]:
        first = ask(client, "one", logprobs=True)
        said = first.choices[0]
        second = ask(client, "one", said.message.content, "two")
        seen.extend([first, second])
        return {"reward": 2, "success": False, "calls": {second.id: 0.5}, "note": task["seed"]}

    engine = TalkingEngine(lambda text: f"heard {len(text)}")
    (trajectory,) = play(run, engine=engine)
    first, second = seen
    assert sampled(trajectory) == [reply.choices[0].message.content for reply in seen]
    (prompt, _), (longer, _) = engine.asked
    mask = trajectory.loss_mask
    assert trajectory.tokens[: len(prompt)] == prompt
    assert trajectory.tokens[: len(longer)] == longer and trajectory.breaks == []
    assert [turn.reward for turn in trajectory.turns] == [0.0, 2.5]
    assert trajectory.terminated and not trajectory.truncated and not trajectory.success
    assert trajectory.turns[-1].info["outcome"] == {"note": 7}
    logprobs = [row.logprob for row in first.choices[0].logprobs.content]
    assert logprobs == [x for x, m in zip(trajectory.rollout_logprobs, mask) if m][: len(logprobs)]
    assert first.choices[0].finish_reason == "stop" and first.model == "policy"
    assert first.usage.prompt_tokens == len(prompt)
    assert first.usage.completion_tokens == len(logprobs)


def test_a_stream_says_what_the_whole_reply_says():
    """A client may read one call of a chunk alone, and none beside a content."""

    def say(text: str) -> str:
        block = '<tool_call>{{"name": "add", "arguments": {{"a": {}}}}}</tool_call>'.format
        return f"<think>why</think>sure {block(1)}\n{block(2)}"

    replies = []

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        given = {"tools": TOOLS, "n": 2, "logprobs": True}
        whole = ask(client, "add", **given)
        stream = ask(client, "add", **given, stream=True, stream_options={"include_usage": True})
        replies.extend([whole, list(stream)])
        with client.chat.completions.stream(
            model="policy", messages=[{"role": "user", "content": "add"}], tools=TOOLS
        ) as events:
            replies.append(events.get_final_completion())
        return 1.0

    play(run, say)
    whole, chunks, final = replies
    choice = whole.choices[1]
    parts = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == 1]
    begin, content, *calls, end = [part.delta for part in parts]
    assert (begin.role, begin.content, begin.reasoning_content) == ("assistant", "", "why")
    assert content.content == choice.message.content == "sure"
    assert begin.tool_calls is content.tool_calls is end.tool_calls is None
    assert [call.content for call in calls] == [None] * 2
    for number, (call, streamed) in enumerate(zip(choice.message.tool_calls, calls, strict=True)):
        (piece,) = streamed.tool_calls
        assert (piece.index, piece.function.name) == (number, "add")
        assert json.loads(call.function.arguments) == json.loads(piece.function.arguments)
    reasons = [part.finish_reason for part in parts]
    assert reasons == [None] * 4 + [choice.finish_reason] == [None] * 4 + ["tool_calls"]
    count = len(choice.logprobs.content)
    assert [len(p.logprobs.content) if p.logprobs else 0 for p in parts] == [0, count, 0, 0, 0]
    assert chunks[-1].usage == whole.usage
    assert [call.function.name for call in final.choices[0].message.tool_calls] == ["add"] * 2


def test_stop_n_and_max_tokens_are_kept():
    replies = []

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        replies.append(ask(client, "go", stop=[" END"]))
        replies.append(ask(client, "go", n=3, max_tokens=4))
        replies.append(ask(client, "go", max_completion_tokens=2))
        return 1.0

    engine = TalkingEngine(lambda text: "before END after")
    (trajectory,) = play(run, engine=engine)
    stopped, several, short = replies
    assert stopped.choices[0].message.content == "before"
    assert stopped.choices[0].finish_reason == "stop"
    assert [choice.finish_reason for choice in several.choices] == ["length"] * 3
    assert [sampling.max_tokens for _, sampling in engine.asked] == [400, 4, 4, 4, 2]
    assert len({sampling.seed for _, sampling in engine.asked}) == 5
    texts = sampled(trajectory)
    assert sorted(map(len, texts)) == [2, 4, 4, 4, len("before END")]


@pytest.mark.parametrize(
    ("parameters", "code", "named"),
    [
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"logit_bias": {"5": 1}}, "unsupported_value", "logit_bias"),
        ({"frequency_penalty": 0.5}, "unsupported_value", "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "unsupported_value", "response_format"),
        ({"tool_choice": {"type": "function"}}, "unsupported_value", "tool_choice"),
        ({"logprobs": True, "top_logprobs": 2}, "unsupported_value", "top_logprobs"),
        ({"reasoning_effort": "low"}, "unsupported_parameter", "reasoning_effort"),
        ({"n": 0}, "invalid_value", "n"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "invalid_value", "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "invalid_value", "messages[0]"),
        ({"messages": "hello"}, "invalid_value", "messages"),
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0]"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "context_length_exceeded", None),
        ({"messages": [{"role": "user", "content": "x" * 10_000_000}]}, "request_too_large", None),
    ],
)
def test_a_request_that_cannot_be_kept_gets_one_clear_sentence(parameters, code, named):
    errors = []

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        client = client.with_options(max_retries=0)
        errors.append(refusal(lambda: ask(client, "hello", **parameters)))
        assert ask(client, "still here").choices[0].message.content == "yes"
        return 1.0

    (trajectory,) = play(run)
    assert ERROR not in trajectory.turns[-1].info, trajectory.turns[-1].info
    (error,) = errors
    assert error.status == (413 if code == "request_too_large" else 400)
    assert error.code == code and "\n" not in error.text and len(error.text) < 300
    if named:
        assert error.param == named and named.partition("[")[0].rstrip("s") in error.text
    assert sampled(trajectory) == ["yes"]


def test_keys_are_told_apart():
    errors, left = [], []

    def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        assert [model.id for model in client.models.list()] == ["policy"], "before the first call"
        ask(client, "hello")
        left.append(client)
        errors.append(refusal(lambda: ask(client.with_options(api_key="wrong"), "hello")))
        errors.append(refusal(lambda: client.get("/nothing", cast_to=object)))
        assert [model.id for model in client.models.list()] == ["policy"]
        return 1.0

    (trajectory,) = play(run)
    errors.append(refusal(lambda: ask(left[0], "are you there?")))
    assert [(error.status, error.code) for error in errors] == [
        (401, "invalid_api_key"),
        (404, "unknown_url"),
        (403, "episode_over"),
    ]
    assert sampled(trajectory) == ["yes"]


def test_an_answer_that_nobody_waits_for_has_no_part_in_the_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections: list[Connection] = []

    def connect() -> Connection:
        connections.append(Connection())
        return connections[-1]

    monkeypatch.setattr(server, "Connection", connect)

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        for text in ("lost", "asked again"):
            with pytest.raises(openai.APITimeoutError):
                ask(client.with_options(max_retries=0, timeout=3.0), text)
        wait_until(lambda: all(each.is_lost for each in connections))
        are_lost.set()
        ask(client, "asked again")
        ask(client, "kept")
        return 1.0

    engine = TalkingEngine(lambda text: "yes")
    answer, are_lost = engine.generate, threading.Event()

    async def generate(*asked: Any, **options: Any) -> Completion:
        while not are_lost.is_set():
            await asyncio.sleep(0.01)
        return await answer(*asked, **options)

    engine.generate = generate
    (trajectory,) = play(run, engine=engine)
    assert ERROR not in trajectory.turns[-1].info, trajectory.turns[-1].info
    assert len(engine.asked) == 3 and len(trajectory.turns) == 2
    assert "kept" in RENDERER.tokenizer.decode(trajectory.tokens)
    assert trajectory.turns[-1].info["undelivered_answers"] == 1


def test_a_failure_of_the_engine_is_no_end_of_the_episode():
    errors = []

    def say(text: str) -> str:
        raise RuntimeError("out of memory")

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        errors.append(refusal(lambda: ask(client.with_options(max_retries=0), "hello")))
        return 1.0

    with pytest.raises(RuntimeError, match="out of memory"):
        play(run, say)
    (error,) = errors
    assert (error.status, error.code) == (500, "internal_error") and "out of memory" in error.text


def raising(task: dict[str, Any], client: openai.OpenAI) -> float:
    ask(client, "hello")
    raise KeyError("my own fault")


def hanging(task: dict[str, Any], client: openai.OpenAI) -> float:
    ask(client, "hello")
    time.sleep(30)
    return 1.0


async def hanging_coroutine(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    await asyncio.sleep(30)
    return 1.0


def silent(task: dict[str, Any], client: openai.OpenAI) -> float:
    return 1.0


def hiding_a_refusal(task: dict[str, Any], client: openai.OpenAI) -> float:
    try:
        client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "hello"}],
            response_format={"type": "json_object"},
        )
    except openai.BadRequestError:
        return 0.0
    return 1.0


def asking_elsewhere(task: dict[str, Any], client: openai.OpenAI) -> float:
    try:
        client.post("/v1/messages", cast_to=object, body={})
    except openai.NotFoundError:
        return 0.0
    return 1.0


def rewarding_nothing(task: dict[str, Any], client: openai.OpenAI) -> Any:
    return ask(client, "hello").choices[0].message.content


def rewarding_unknown_calls(task: dict[str, Any], client: openai.OpenAI) -> Any:
    ask(client, "hello")
    return {"reward": 1.0, "calls": {7: 1.0}}


def leaving_the_process(task: dict[str, Any], client: openai.OpenAI) -> Any:
    ask(client, "hello")
    sys.exit(3)


@pytest.mark.parametrize(
    ("fault", "cause", "said"),
    [
        (raising, "error", "my own fault"),
        (hanging, "time", "took longer than 3 s"),
        (hanging_coroutine, "time", "took longer than 3 s|TimeoutError"),
        (silent, "error", "a cache of the framework"),
        (hiding_a_refusal, "error", "each request of the agent was refused, the latest one so"),
        (asking_elsewhere, "error", "/v1/v1/messages is not served here"),
        (rewarding_nothing, "error", "must return the reward"),
        (rewarding_unknown_calls, "error", "calls names"),
        (leaving_the_process, "error", "SystemExit"),
    ],
)
def test_a_faulty_agent_costs_one_episode(fault, cause, said):
    def run(task: dict[str, Any], client: openai.OpenAI) -> Any:
        if task["outcome_seed"] % 3 == 0:
            answer = fault(task, client)
            return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer
        ask(client, "hello")
        return 1.0

    played = play(run, count=9, agent_timeout=3 if cause == "time" else 60)
    faulty = [trajectory for trajectory in played if trajectory.outcome_seed % 3 == 0]
    assert 0 < len(faulty) < 9
    for trajectory in played:
        info = trajectory.turns[-1].info
        assert trajectory.truncated == (ERROR in info) == (trajectory in faulty)
        if trajectory in faulty:
            assert info[TRUNCATED_BY] == cause
            assert any(part in info[ERROR] for part in said.split("|")), info[ERROR]


def test_a_failed_episode_is_played_again():
    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        ask(client, f"hello {task['outcome_seed']}")
        if task["outcome_seed"] % 2:
            raise RuntimeError("odd")
        return 1.0

    played = play(run, count=12, attempts=2)
    assert any(FAILED_ATTEMPTS in trajectory.turns[-1].info for trajectory in played)
    for trajectory in played:
        assert (ERROR in trajectory.turns[-1].info) == bool(trajectory.outcome_seed % 2)


def test_keys_of_an_agent_are_kept_and_never_read_as_the_trainers():
    others = {
        **{"error": "tool failed", "claims": 3, "thought": None, "actions": 5, "verdicts": 1},
        **{"is_format_valid": False, "finish_reason": "length", "truncated_by": "gnomes"},
        **{"call": 1, "failed_attempts": [2], "untrained_calls": 3, "outcome": 4},
    }

    def returning(own: dict[str, Any]) -> Callable[..., Any]:
        def run(task: dict[str, Any], client: openai.OpenAI) -> dict[str, Any]:
            ask(client, "hello")
            return {"reward": 1, **own}

        return run

    infos = []
    for own in ({}, others):
        (trajectory,) = play(returning(own), attempts=2)
        assert trajectory.terminated and trajectory.total_reward == 1.0
        infos.append(trajectory.turns[-1].info)
    plain, kept = infos
    assert kept == plain | {"outcome": others}


def test_running_into_a_limit_is_the_policys_own_end():
    def chatting(task: dict[str, Any], client: openai.OpenAI) -> float:
        texts = ["hello"]
        while True:
            texts += [ask(client, *texts).choices[0].message.content, "go on"]

    for settings, cause in (({}, "budget"), ({"max_context_length": 300}, "context")):
        (trajectory,) = play(chatting, attempts=2, **settings)
        info = trajectory.turns[-1].info
        assert trajectory.truncated and info[TRUNCATED_BY] == cause
        assert ERROR not in info and trajectory.total_reward == 0.0
        if cause == "budget":
            assert len(trajectory.turns) == 64
        else:
            before, last = trajectory.turns[-2:]
            num_tokens = len(trajectory.tokens)
            assert num_tokens <= 300 < num_tokens + last.start - before.start


def test_a_reward_function_judges_the_whole_episode(monkeypatch):
    def run(task: dict[str, Any], client: openai.OpenAI) -> str:
        ask(client, "a plan", model="planner")
        ask(client, "the work", model="worker")
        if task["outcome_seed"] % 2:
            raise ValueError("gave up")
        return "result"

    def reward(episode: Any) -> Any:
        assert [call["role"] for call in episode.calls] == ["planner", "worker"]
        assert episode.calls[0]["messages"][0]["content"] == "a plan"
        assert episode.calls[1]["reply"]["content"] == "yes"
        if episode.error is not None:
            assert episode.result is None
            return -1.0 if "gave up" in episode.error else None
        return {"reward": 1.0, "calls": {0: 0.25}, "seed": episode.task["seed"]}

    module = ModuleType("door_rewards")
    module.reward = reward
    monkeypatch.setitem(sys.modules, "door_rewards", module)
    for trajectory in play(run, count=6, agent_reward="door_rewards:reward"):
        assert ERROR not in trajectory.turns[-1].info, trajectory.turns[-1].info
        assert trajectory.total_reward == (-1.0 if trajectory.outcome_seed % 2 else 1.25)


def test_only_the_roles_that_are_named_are_trained():
    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        plan = ask(client, "a plan", model="planner")
        ask(client, "the work", model="worker", n=2)
        ask(client, "a plan", plan.choices[0].message.content, "more", model="planner")
        return 1.0

    (trajectory,) = play(run, train_roles="planner")
    assert len(trajectory.turns) == 2 and sum(trajectory.loss_mask) == 2 * len("yes ")
    assert len(trajectory.turns[-1].info["untrained_calls"]) == 2
    with pytest.raises(ValueError, match="model planner and worker alone, .*--train-roles"):
        play(run, train_roles="other")

    def fail(task: dict[str, Any], client: openai.OpenAI) -> float:
        raise KeyError(run(task, client))  # an error of the agent is said before its roles

    with pytest.raises(ValueError, match="With seed .*KeyError"):
        play(fail, train_roles="other")


@pytest.mark.parametrize("side", ["trainer", "agent"])
def test_other_sampling_than_the_trainers_is_never_silent(side):
    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        ask(client, "as the trainer", temperature=1, top_p=1.0)
        ask(client, "greedy", temperature=0)
        return 1.0

    engine = TalkingEngine(lambda text: "yes")
    (trajectory,) = play(run, engine=engine, agent_sampling=side)
    temperatures = [sampling.temperature for _, sampling in engine.asked]
    info = trajectory.turns[-1].info
    if side == "trainer":
        assert temperatures == [1.0, 1.0] and len(trajectory.turns) == 2
        assert [turn.info.get("asked_sampling") for turn in trajectory.turns].count(
            {"temperature": 0}
        ) == 1
    else:
        assert temperatures == [1.0, 0.0] and len(trajectory.turns) == 1
        assert info["untrained_calls"][0]["asked_sampling"] == {"temperature": 0}
        with pytest.raises(ValueError, match="--agent-sampling agent does not train"):
            play(
                lambda task, client: ask(client, "it", temperature=0).id and 1.0,
                agent_sampling=side,
            )


def test_half_a_character_is_refused_however_it_is_written():
    said = []

    def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
        headers = {"authorization": f"Bearer {api_key}"}
        with httpx2.Client(trust_env=False, headers=headers) as client:
            for key in (b"\\ud800", b"\xed\xa0\x80"):
                body = b'{"model": "policy", "messages": [], "%s": 1}' % key
                answer = client.post(f"{base_url}/chat/completions", content=body)
                said.append((answer.status_code, answer.json()["error"]["message"]))
            hello = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
            client.post(f"{base_url}/chat/completions", json=hello)
        return 1.0

    play(run)
    assert said == [(400, "the body must be valid Unicode")] * 2


def test_an_episode_without_a_trained_answer_has_an_empty_record():
    seeds = []

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        seeds.append(task["outcome_seed"])
        ask(client, "greedy", temperature=float(task["outcome_seed"] != seeds[0]))
        return 1.0

    played = play(run, agent_sampling="agent", count=2)
    for trajectory in played:
        is_trained = trajectory.outcome_seed != seeds[0]
        assert any(CALL in turn.info for turn in trajectory.turns) == is_trained
        assert bool(RecordedAnswers(trajectory)._answers) == is_trained


def test_samples_depend_on_the_calls_and_not_on_their_order():
    texts = [f"branch {i}" for i in range(4)]

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda text: ask(client, text, seed=5), texts))
        ask(client, "branch 0", seed=5)
        ask(client, "branch 0", seed=6)
        return 1.0

    seen = []
    for _ in range(2):
        engine = TalkingEngine(lambda text: text[-20:], seconds=0.3)
        (trajectory,) = play(run, engine=engine)
        assert engine.most_running > 1
        asked = sorted((tokens, sampling.seed) for tokens, sampling in engine.asked)
        seen.append((trajectory.tokens, trajectory.breaks, asked))
        texts.reverse()
    assert seen[0] == seen[1]
    assert len({seed for _, seed in seen[0][2]}) == 6


def test_calls_that_overlap_are_sampled_to_the_bit_whenever_they_come():
    clock = random.Random(0)

    def branch(client: openai.OpenAI, number: int) -> None:
        texts = [f"branch {number}"]
        for _ in range(3):
            time.sleep(clock.random() / 50)
            reply = ask(client, *texts, max_tokens=number + 5)
            texts += [reply.choices[0].message.content, "go on"]

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda number: branch(client, number), range(4)))
        return 1.0

    model = tiny_qwen2(len(RENDERER.tokenizer))
    seen = []
    for _ in range(3):
        engine = EmbeddedEngine(model.config, max_context=4000, max_sessions=12)
        with engine.awake():
            engine.load_weights(model.state_dict().items())
            played = play(run, engine=engine, count=4)
        seen.append([(one.tokens, one.rollout_logprobs) for one in played])
    assert seen[0] == seen[1] == seen[2]


def test_agents_may_be_coroutines_with_calls_of_their_own_at_once():
    async def run(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
        replies = await asyncio.gather(*(ask(client, f"part {i}") for i in range(3)))
        return float(len(replies))

    engine = TalkingEngine(lambda text: "yes")
    answer, six = engine.generate, asyncio.Barrier(6)

    async def generate(*asked: Any, **options: Any) -> Completion:
        await six.wait()  # an episode is not the only one, nor its call
        return await answer(*asked, **options)

    engine.generate = generate
    played = play(run, engine=engine, count=4)
    assert [len(trajectory.turns) for trajectory in played] == [3] * 4


@pytest.fixture
def remote_agent() -> Iterator[str]:
    """URL of an agent in its own server."""

    class Agent(Request):
        def answer(self) -> None:
            given = json.loads(self.body)
            client = openai.OpenAI(base_url=given["base_url"], api_key=given["api_key"])
            said = ask(client, f"remote {given['task']['seed']}").choices[0].message.content
            if self.path == "/broken":
                self.reply({"detail": "out of order"}, 500)
            else:
                self.reply({"reward": float(said == "yes")})

    with serving(Agent) as address:
        yield f"http://{address}"


def test_an_agent_may_live_behind_a_url(remote_agent):
    played = play(f"{remote_agent}/agent", count=3)
    assert [trajectory.total_reward for trajectory in played] == [1.0] * 3
    assert "remote 7" in RENDERER.tokenizer.decode(played[0].tokens)
    (broken,) = play(f"{remote_agent}/broken")
    assert "answered 500" in broken.turns[-1].info[ERROR]
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/agent"
    with pytest.raises(
        ValueError, match=rf"{url} cannot be reached \(.+\); start the agent, or correct"
    ):
        play(url)


def test_tasks_are_rows_of_a_file(tmp_path):
    rows = [{"question": f"q{i}", "level": {"deep": i}} for i in range(20)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    asked: dict[str, set[str]] = {"train": set(), "validation": set()}

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        assert {"question", "level", "seed", "outcome_seed"} == task.keys()
        ask(client, task["question"])
        asked[split].add(task["question"])
        return 1.0

    for split in asked:
        for seed in range(20):
            play(run, seed=seed, options={"tasks": str(file), "split": split})
    assert len(asked["train"]) == 18 and len(asked["validation"]) == 2
    assert asked["train"] | asked["validation"] == {row["question"] for row in rows}


def test_an_address_that_is_taken_is_refused_at_the_start():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"agent_listen {place} must be"):
            play(silent, agent_listen=place)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_256_episodes_of_20_calls_lose_nothing_and_keep_nothing():
    """Every call is answered by its own text, which must come back to its agent and be in its
    trajectory once. After the first step the memory of the process grows by less than 1 KiB a call.
    """
    heard: dict[int, list[str]] = {}
    memory: list[int] = []

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        texts = [f"episode {task['outcome_seed']}"]
        for number in range(20):
            said = ask(client, *texts).choices[0].message.content
            texts += [said, str(number)]
        heard[task["outcome_seed"]] = texts[1::2]
        return 1.0

    for _ in range(3):
        engine = TalkingEngine(lambda text: hashlib.sha256(text.encode()).hexdigest()[:8])
        played = play(run, engine=engine, count=256)
        assert len(engine.asked) == 256 * 20
        for trajectory in played:
            assert sampled(trajectory) == heard[trajectory.outcome_seed]
            assert len(trajectory.turns) == 20 and trajectory.breaks == []
        assert len({text for texts in heard.values() for text in texts}) == 256 * 20
        del engine, played
        gc.collect()
        memory.append(psutil.Process().memory_info().rss)
    assert memory[2] - memory[0] < 2 * 256 * 20 * 1024, [size >> 20 for size in memory]


def test_agents_are_held_between_calls_and_go_on():
    """As before a weight sync in the middle of a rollout: what has begun ends, nothing begins."""

    def run(task: dict[str, Any], client: openai.OpenAI) -> float:
        texts = ["hello"]
        for _ in range(6):
            texts += [ask(client, *texts).choices[0].message.content, "go on"]
            time.sleep(0.2)  # longer than a part of the play, so that three parts do not end it
        return 1.0

    name = put_at_the_door(run)
    maker = episode_maker(EnvironmentConfig(environments=name), name)
    tasks = tasks_for_group(0, name, 7, maker, group_size=4)
    engine = TalkingEngine(lambda text: "yes", seconds=0.02)
    with Collection(engine, RENDERER, tasks, PlaySettings(4000, 1.0, 3)) as collection:
        for version in range(1, 4):
            engine.weight_version = version
            assert collection.play(steps=20)
            assert collection.play(begin_turns=False)
            assert not engine.sessions
            num_asked = len(engine.asked)
            time.sleep(0.2)  # requests come and wait
            assert len(engine.asked) == num_asked
        assert collection.unfinished
        assert collection.play()
        played = collection.trajectories()
    assert [len(trajectory.turns) for trajectory in played] == [6] * 4
    assert any(len({*trajectory.versions}) > 1 for trajectory in played)
