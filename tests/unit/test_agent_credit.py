"""Rewards of single answers: each reaches the answer that its name says, once, or is refused."""

from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_mega.agents.call_tree import CALL, UNTRAINED
from ragen_mega.agents.runner import REWARDS, AgentEpisode, judged
from ragen_mega.data.types import Trajectory
from ragen_mega.environments.episode import ERROR
from tests.support.door import TOOLS, ask, play

CALLS = '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 2


def paid(trajectory: Trajectory) -> dict[str, float]:
    """Id of an answer -> reward of its turn."""
    assert ERROR not in trajectory.turns[-1].info, trajectory.turns[-1].info
    return {
        f"call-{turn.info[CALL]['index']}-{turn.info[CALL]['answer']}": turn.reward
        for turn in trajectory.turns
    }


def three(client: openai.OpenAI) -> None:
    """Call 0 with two answers, each with two calls of tools, and call 1 with one."""
    assert ask(client, "one", tools=TOOLS).id == "call-0-0"
    assert ask(client, "one", tools=TOOLS).id == "call-0-1"
    assert ask(client, "other").id == "call-1-0"


EXACT: list[tuple[dict[Any, float], list[float]]] = [
    ({"call-0-0": 1}, [1, 0, 0]),
    ({"call-0-1": 1}, [0, 1, 0]),
    ({"call-0-0": 1, "call-0-1": 0}, [1, 0, 0]),
    ({"call-0-0": -0.5, "call-0-1": 0.25, "call-1-0": 4}, [-0.5, 0.25, 4]),
    ({1: 2}, [0, 0, 2]),
    ({"1": 2}, [0, 0, 2]),
    ({np.int64(1): np.float32(2)}, [0, 0, 2]),
    ({"call-0-1-0": 0.5, "call-0-1-1": 0.25, "call-0-0-1": 2}, [2, 0.75, 0]),
    ({"call-0-1": 1, "call-0-1-0": 0.5}, [0, 1.5, 0]),
]


@pytest.mark.parametrize(("calls", "expected"), EXACT, ids=str)
def test_a_reward_reaches_the_answer_that_is_named(
    calls: dict[Any, float], expected: list[float]
) -> None:
    def run(task: dict[str, Any], client: openai.OpenAI) -> dict[str, Any]:
        three(client)
        return {"reward": 0.0, "calls": calls}

    (trajectory,) = play(run, lambda text: CALLS if "one" in text else "no")
    names = ("call-0-0", "call-0-1", "call-1-0")
    assert paid(trajectory) == dict(zip(names, expected, strict=True))
    assert trajectory.total_reward == sum(calls.values())


@pytest.mark.parametrize(
    "calls",
    [
        {0: 1},  # a call with two answers
        {"0": 1},
        {1: 1, "call-1-0": 1},
        {"1": 1, 1: 1},
        {2: 1},
        {-1: 1},
        {1.0: 1},
        {1.5: 1},
        {True: 1},
        {None: 1},
        {"01": 1},
        {" 1": 1},
        {"": 1},
        {"call-0": 1},
        {"call-0-0-x": 1},
        {"call-0-0-2": 1},  # its answer has two calls of tools
        {"call-1-0-0": 1},
        {"call-0-2": 1},
        {"call-00-0": 1},
        {"Call-0-0": 1},
        {"call-0-0 ": 1},
        {"call--1-0": 1},
        {b"call-0-0": 1},
        {("call", 0): 1},
        {"call-0-0": None},
        {"call-0-0": "1"},
        {"call-0-0": float("nan")},
        ["call-0-0"],
        7,
    ],
    ids=str,
)
def test_other_names_are_refused_in_one_sentence(calls: Any) -> None:
    def run(task: dict[str, Any], client: openai.OpenAI) -> dict[str, Any]:
        three(client)
        return {"reward": 1.0, "calls": calls}

    (trajectory,) = play(run, lambda text: CALLS if "one" in text else "no")
    text = trajectory.turns[-1].info[ERROR]
    assert text.startswith("ValueError: calls ") and "\n" not in text and len(text) < 300, text
    if calls in ({0: 1}, {"0": 1}):
        assert "by the id of its reply: call-0-0, call-0-1" in text


def test_answers_of_one_request_have_their_own_rewards() -> None:
    """The reply has the id of the first; calls of tools have the ids of their own answers."""

    def run(task: dict[str, Any], client: openai.OpenAI) -> dict[str, Any]:
        ask(client, "one", tools=TOOLS)
        reply = ask(client, "one", tools=TOOLS, n=3)
        assert reply.id == "call-0-1"
        third = reply.choices[2].message.tool_calls[0].id
        return {"reward": 8.0, "calls": {reply.id: 1.0, "call-0-2": 2.0, third: 4.0}}

    (trajectory,) = play(run, lambda text: CALLS)
    rewards = paid(trajectory)
    last = trajectory.turns[-1].info[CALL]["answer"]
    assert rewards.pop(f"call-0-{last}") == [0.0, 1.0, 2.0, 4.0][last] + 8.0
    expected = {f"call-0-{number}": [0.0, 1.0, 2.0, 4.0][number] for number in range(4)}
    assert rewards == {name: own for name, own in expected.items() if name in rewards}


def test_a_reward_function_names_answers_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(task: dict[str, Any], client: openai.OpenAI) -> None:
        three(client)

    def reward(episode: AgentEpisode) -> dict[str, Any]:
        seen.extend(call["id"] for call in episode.calls)
        calls = {call["id"]: 2.0**place for place, call in enumerate(episode.calls)}
        episode.calls[0]["id"] = "mine"
        return {"reward": 0.0, "calls": calls}

    monkeypatch.setitem(REWARDS._known, "r:r", reward)
    (trajectory,) = play(run, agent_reward="r:r")
    assert seen == ["call-0-0", "call-0-1", "call-1-0"]
    assert paid(trajectory) == dict(zip(seen, (1.0, 2.0, 4.0), strict=True))


@pytest.mark.parametrize("name", ["call-1-0", 1])
def test_a_reward_of_an_answer_that_is_not_trained_is_paid_once(name: Any) -> None:
    def run(task: dict[str, Any], client: openai.OpenAI) -> dict[str, Any]:
        ask(client, "a plan", model="planner")
        ask(client, "the work", model="worker")
        return {"reward": 1.0, "calls": {name: 0.5, "call-0-0": 0.25}}

    (trajectory,) = play(run, train_roles="planner")
    assert paid(trajectory) == {"call-0-0": 1.75}
    (worker,) = trajectory.turns[-1].info[UNTRAINED]
    assert (worker["index"], worker["answer"]) == (1, 0)


def test_a_repeated_request_has_one_answer_to_pay() -> None:
    def run(task: dict[str, Any], client: openai.OpenAI) -> dict[str, Any]:
        first = ask(client, "go")
        again = ask(client, "go", extra_headers={"x-stainless-retry-count": "1"})
        assert first.id == again.id
        return {"reward": 0.0, "calls": {again.id: 1.0}}

    (trajectory,) = play(run)
    assert paid(trajectory) == {"call-0-0": 1.0}


counts = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(counts, st.data())
def test_the_sum_of_all_payments_is_the_sum_of_what_is_named(
    sizes: list[int], data: st.DataObject
) -> None:
    """Or nothing is paid, and only for a call with several answers or an answer named twice."""
    samples = [(index, number) for index, size in enumerate(sizes) for number in range(size)]
    records = [
        {
            "id": f"call-{index}-{number}",
            "index": index,
            "answer": number,
            "reply": {"tool_calls": [{}, {}]},
        }
        for index, number in samples
    ]
    if not samples:
        return
    meaning: dict[Any, tuple[int, int] | None] = {}
    for index, number in samples:
        for end in ("", "-0", "-1"):
            meaning[f"call-{index}-{number}{end}"] = index, number
        for name in (index, str(index)):
            meaning[name] = (index, number) if sizes[index] == 1 else None
    amounts = st.integers(-9, 9).map(float)
    named = data.draw(st.dictionaries(st.sampled_from([*meaning]), amounts, max_size=5))
    whole = [meaning[name] for name in named if str(name).count("-") != 3]
    episode = AgentEpisode({}, records, {"reward": 0.0, "calls": named}, None)
    if None in whole or len({*whole}) < len(whole):
        with pytest.raises(ValueError, match="calls names"):
            judged(episode, None)
        return
    expected = dict.fromkeys(samples, 0.0)
    for name, amount in named.items():
        expected[meaning[name]] += amount
    found = judged(episode, None).call_rewards
    assert {sample: found.get(sample, 0.0) for sample in samples} == expected
    assert sum(found.values()) == sum(named.values())
