"""Random trees of calls against the chat template, the tokens that the engine was given, and
transformers.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from ragen_mega.agents.call_tree import (
    CALL,
    UNTRAINED,
    Answer,
    Call,
    CallTree,
    ChatMessage,
    RequestError,
    ToolCall,
)
from ragen_mega.data.compact import outlined, outlines_of
from ragen_mega.data.packing import microbatch, pack, part_of, parts_of
from ragen_mega.data.types import Completion, SamplingParams, Trajectory
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.rollout.renderer import ChatRenderer
from tests.support.published_tokenizers import published, small_qwen3, small_smollm2
from tests.support.rounding import exact_logprobs
from tests.support.small_policy import tiny_qwen2

SMALL = {"qwen3": small_qwen3, "smollm2": small_smollm2}
LOOK = {"type": "function", "function": {"name": "look", "description": "Look \u00e9 <b>."}}
SYSTEM, USER = ChatMessage("system", "Be kind."), ChatMessage("user", "Hello.")
CONTEXT = 100_000


@pytest.fixture(
    scope="module",
    params=["small-qwen3", "small-smollm2"]
    + [pytest.param(f"published-{name}", marks=pytest.mark.slow) for name in SMALL],
)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    size, _, name = request.param.partition("-")
    if size == "small":
        return SMALL[name]()
    return published(name, request.config.cache.mkdir("tokenizers"))


@pytest.fixture(scope="module")
def qwen3() -> ChatRenderer:
    return ChatRenderer(small_qwen3(), think=False)


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    return "tools" in tokenizer.chat_template


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def completion_of(renderer: ChatRenderer, text: str, *, is_clean: bool = True) -> Completion:
    tokens = encoded(renderer.tokenizer, text) + [renderer.end_of_turn] * is_clean
    logprobs = [-0.5 - number for number in range(len(tokens))]
    return Completion(tokens, logprobs, "stop" if is_clean else "length")


def said(answer: Answer) -> ChatMessage:
    """The message by which an agent repeats an answer."""
    return ChatMessage("assistant", answer.content, answer.tool_calls)


@dataclass
class Sampled:
    """One answer as the engine gave it."""

    prompt: list[int]
    completion: Completion
    is_trained: bool
    parent: int | None


@dataclass
class Log:
    """A history that an agent has: its messages, and the texts that the policy saw for them."""

    messages: list[ChatMessage]
    chat: list[dict[str, Any]]
    texts: list[str]
    """What stands in place of the marks MARK0, MARK1, ... of `chat`."""
    parent: int | None = None
    """Number of the last answer that was sampled."""

    def plus(self, *messages: ChatMessage, text: str | None = None) -> Log:
        """The history with more messages. `text`: the one message is this sampled answer."""
        chat, texts = [*self.chat], [*self.texts]
        for message in messages:
            shown = {"role": message.role, "content": message.content}
            if text is not None:
                shown["content"] = f"MARK{len(texts)}"
                texts.append(text)
            elif message.tool_calls:
                shown["tool_calls"] = [
                    {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                    for call in message.tool_calls
                ]
            chat.append(shown)
        return replace(self, messages=[*self.messages, *messages], chat=chat, texts=texts)


@dataclass
class Episode:
    """A random agent, and what it asked and got."""

    tree: CallTree
    requests: list[tuple[Log, str, Completion, bool]] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)


plain = st.lists(
    st.sampled_from(["\u4f60\u597d", "e\u0301", "\r\n", "\n\n", "  12  3", "{", "'", "the box"]),
    max_size=4,
).map("".join)
VALUES = st.dictionaries(st.sampled_from("abc"), st.integers(-9, 9) | plain, max_size=2)


@st.composite
def episodes(draw: st.DrawFn, renderer: ChatRenderer, tools: list[dict[str, Any]]) -> Episode:
    """Roots, further samples, continued, edited and compacted histories, in any order."""
    opened = renderer.tokenizer.decode(renderer.start([USER])).rpartition("assistant\n")[2]
    thinks = opened == "<think>"
    episode = Episode(CallTree(renderer, max_context_length=CONTEXT))
    empty, numbers = Log([], [], []), iter(range(99))
    asked: list[Log] = []
    ends: list[tuple[Log, Answer, int]] = []

    def words(kind: str) -> str:  # a letter is a token apart from what stands before it
        return f"{kind}{next(numbers)}{draw(plain)}"

    def call() -> ToolCall:
        arguments = json.dumps(draw(VALUES), ensure_ascii=False)
        return ToolCall("look", arguments)

    def following() -> list[ChatMessage]:
        roles = draw(st.lists(st.sampled_from(["user", "tool"]), min_size=1, max_size=2))
        return [ChatMessage(role, words("o")) for role in roles]

    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["root", "again", "on", "on", "on", "edit"]))
        if kind == "again" and asked:
            log = draw(st.sampled_from(asked))
        elif kind in ("on", "edit") and ends:
            log, answer, number = draw(st.sampled_from(ends))
            if kind == "on":
                message = said(answer)
                if answer.thought is not None and draw(st.booleans()):
                    content = f"<think>{answer.thought}</think>{message.content}"
                    message = replace(message, content=content)
                raw = renderer.decode_action(episode.sampled[number].completion.tokens)
                log = replace(log.plus(message, text=opened + raw), parent=number)
            else:
                calls = (call(),) if tools and draw(st.booleans()) else ()
                log = log.plus(ChatMessage("assistant", words("e"), calls))
            log = log.plus(*following())
        else:
            first = [ChatMessage("system", words("s"))] * draw(st.booleans())
            shots = [ChatMessage("user", words("u")), ChatMessage("assistant", words("f"))]
            shots *= draw(st.booleans())
            log = empty.plus(*first, *shots, ChatMessage("user", words("u")))
        role, is_trained = draw(st.sampled_from([("a", True), ("b", True), ("c", False)]))
        text = words("t") + "</think>" if thinks else ""
        text += words("a")
        if tools and draw(st.booleans()):
            each = call()
            text += (
                f'\n<tool_call>\n{{"name": "look", "arguments": {each.arguments}}}\n</tool_call>'
            )
        completion = completion_of(renderer, text, is_clean=draw(st.booleans()))
        found = episode.tree.begin(log.messages, tools, role=role)
        whole = renderer.tokenizer.apply_chat_template(
            log.chat, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        for mark, shown in enumerate(log.texts):
            whole = whole.replace(f"MARK{mark}<", f"{shown}<")
        assert found.tokens == encoded(renderer.tokenizer, whole + opened)
        answer = episode.tree.answer(found, completion, is_trained=is_trained)
        episode.requests.append((log, role, completion, is_trained))
        episode.sampled.append(Sampled(found.tokens, completion, is_trained, log.parent))
        asked.append(log)
        ends.append((log, answer, len(episode.sampled) - 1))
    return episode


def shape_of(trajectory: Trajectory) -> tuple[Any, ...]:
    spans = [(turn.start, turn.end) for turn in trajectory.turns]
    return trajectory.tokens, trajectory.loss_mask, trajectory.breaks, spans


@given(st.booleans(), st.booleans(), st.data())
def test_every_sampled_token_is_trained_once_behind_what_the_policy_saw(
    tokenizer: PreTrainedTokenizerBase, think: bool, with_tools: bool, data: st.DataObject
) -> None:
    """The prompts equal the chat template's (asserted while the episode is drawn)."""
    renderer = ChatRenderer(tokenizer, think=think)
    tools = [LOOK] if with_tools and takes_tools(tokenizer) else []
    episode = data.draw(episodes(renderer, tools))
    trajectory = episode.tree.trajectory(Trajectory(0), reward=1.0)
    starts = [start for start, _ in trajectory.segments]
    found = []
    for turn in trajectory.turns:
        start = max(at for at in starts if at <= turn.start)
        own = slice(turn.start, turn.end)
        assert all(trajectory.loss_mask[own])
        found.append(
            (
                trajectory.tokens[start : turn.start],
                trajectory.tokens[own],
                trajectory.rollout_logprobs[own],
            )
        )
    trained = [each for each in episode.sampled if each.is_trained]
    expected = [(each.prompt, each.completion.tokens, each.completion.logprobs) for each in trained]
    if not trained:
        assert found[0][1:] == ([], []) and len(found) == 1
        return
    assert sorted(found) == sorted(expected)
    assert sum(trajectory.loss_mask) == sum(len(each.completion.tokens) for each in trained)
    assert trajectory.total_reward == trajectory.turns[-1].reward == 1.0
    needed = {number for number, each in enumerate(episode.sampled) if each.is_trained}
    for number in sorted(needed, reverse=True):
        while (number := episode.sampled[number].parent) is not None:
            needed.add(number)
    leaves = needed - {episode.sampled[number].parent for number in needed}
    assert len(trajectory.segments) == len(leaves)
    records = [turn.info[CALL] for turn in trajectory.turns]
    records += trajectory.turns[-1].info.get(UNTRAINED, [])
    asked = [(each["index"], each["answer"]) for each in records]
    assert sorted(asked) == sorted(
        (call.index, number) for call in episode.tree.calls for number in range(len(call.answers))
    )
    assert json.loads(json.dumps(records)) == records


@settings(max_examples=40)
@given(st.data())
def test_the_order_in_which_concurrent_calls_arrive_changes_no_token(data: st.DataObject) -> None:
    renderer = ChatRenderer(small_qwen3(), think=True)
    episode = data.draw(episodes(renderer, [LOOK]))
    other = CallTree(renderer, max_context_length=CONTEXT)
    order = data.draw(st.permutations(episode.requests))
    # An answer comes before what continues it.
    for log, role, completion, is_trained in sorted(order, key=lambda one: len(one[0].messages)):
        other.answer(
            other.begin(log.messages, [LOOK], role=role), completion, is_trained=is_trained
        )
    first, second = (tree.trajectory(Trajectory(0), reward=0.0) for tree in (episode.tree, other))
    assert shape_of(first) == shape_of(second)


def test_log_probabilities_are_those_of_transformers(qwen3: ChatRenderer) -> None:
    """Of an agent that continues, samples again, edits, and asks a helper with other messages."""
    model = tiny_qwen2(len(qwen3.tokenizer))
    tree = CallTree(qwen3, max_context_length=1000)
    engine = EmbeddedEngine(model.config, max_context=1000, max_sessions=16)
    given_prompts: list[list[int]] = []

    async def ask(messages: list[ChatMessage], role: str = "main", *, trained: bool = True):
        call = tree.begin(messages, [LOOK], role=role)
        sampling = SamplingParams(12, stop_token_ids=qwen3.stop_token_ids, seed=len(given_prompts))
        given_prompts.append(call.tokens)
        completion = await engine.generate(call.tokens, sampling, session=len(given_prompts))
        return tree.answer(call, completion, is_trained=trained)

    async def agent() -> None:
        history = [SYSTEM, USER]
        for number in range(3):
            answer = await ask(history)
            again = await ask(history)
            history = [*history, said(again), ChatMessage("tool", f"result {number}")]
            await ask([SYSTEM, ChatMessage("user", f"help {answer.content}")], "helper")
            await ask([*history[:-2], ChatMessage("assistant", "edited"), USER], trained=False)
        await ask([SYSTEM, ChatMessage("user", f"so far: {history[-1].content}")])

    with engine.awake():
        engine.load_weights(model.state_dict().items())
        asyncio.run(agent())
    trajectory = tree.trajectory(Trajectory(0), reward=1.0)
    prompts, num_compared = [], 0
    for start, end in trajectory.segments:
        tokens = trajectory.tokens[start:end]
        exact, bound = exact_logprobs(model, tokens, 1.0)
        picked = exact[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        mask = torch.tensor(trajectory.loss_mask[start:end])[1:]
        recorded = torch.tensor(trajectory.rollout_logprobs[start:end]).double()[1:]
        torch.testing.assert_close(recorded[mask], picked[mask], atol=min(bound, 1e-4), rtol=0)
        num_compared += int(mask.sum())
        spans = [turn for turn in trajectory.turns if start < turn.start < end]
        prompts += [trajectory.tokens[start : turn.start] for turn in spans]
    trained = [given_prompts[n] for n in range(len(given_prompts)) if n % 4 != 3]
    assert sorted(prompts) == sorted(trained) and len(trained) == 10
    assert num_compared == sum(trajectory.loss_mask) > 60
    batch = pack([trajectory]).by_segment()
    (part,) = parts_of(batch, range(batch.num_trajectories), 10**6, most_nodes=1.0)
    forest = microbatch(part_of(batch, part), multiple=1, device=torch.device("cpu")).forest
    texts = [trajectory.tokens[start : end - 1] for start, end in trajectory.segments]
    distinct = {tuple(text[: size + 1]) for text in texts for size in range(len(text))}
    assert forest.num_nodes == len(distinct) < 0.7 * batch.num_positions


@pytest.mark.parametrize(
    ("text", "thought", "content", "names"),
    [
        ("plain ", None, "plain ", ""),
        ("<think>\nso\n</think>\n\n ok", "so", " ok", ""),
        ('<tool_call>{"name": "a", "arguments": {"b": "</tool_call>"}}</tool_call>', None, "", "a"),
        (
            'x </think> I <tool_call>{"name":"a"}</tool_call>\n<tool_call>{"name":"b",'
            '"arguments":"{}"}</tool_call> you',
            "x",
            "I \n you",
            "ab",
        ),
        ('<tool_call>{"name": "a"}</tool_call> <tool_call>{"name": </tool_call>', None, ..., ""),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', None, ..., ""),
        ('<tool_call>{"name": "a", "parameters": {}}</tool_call>', None, ..., ""),
        ('<tool_call>{"name": "a"}', None, ..., ""),
        ('<think> <tool_call>{"name": "a"}</tool_call> </think>no', "call", "no", ""),
    ],
)  # fmt: skip
def test_parts_of_an_answer(
    qwen3: ChatRenderer, text: str, thought: str | None, content: str, names: str
) -> None:
    """`...`: a malformed call reaches the agent as the text that it is."""
    tree = CallTree(qwen3, max_context_length=CONTEXT)
    answer = tree.answer(tree.begin([USER], [LOOK]), completion_of(qwen3, text))
    assert answer.content == (text if content is ... else content)
    assert "".join(call.name for call in answer.tool_calls) == names
    assert (thought or "") in (answer.thought or "") and (thought is None) == (
        answer.thought is None
    )
    unasked = tree.answer(tree.begin([SYSTEM, USER], []), completion_of(qwen3, text))
    assert not unasked.tool_calls, "a request without tools gets text"


def test_a_thought_that_does_not_end_is_no_content() -> None:
    renderer = ChatRenderer(small_qwen3(), think=True)
    tree = CallTree(renderer, max_context_length=CONTEXT)
    answer = tree.answer(tree.begin([USER], None), completion_of(renderer, "so", is_clean=False))
    assert (answer.thought, answer.content) == ("so", "")
    assert tree.begin([USER, said(answer), USER], None).parent is not None


def test_a_stop_text_cuts_at_the_token_that_completes_it(qwen3: ChatRenderer) -> None:
    tree = CallTree(qwen3, max_context_length=CONTEXT)
    call = tree.begin([USER], None)
    full = completion_of(qwen3, "the box Observation: left\nObservation: 12")
    full = replace(full, further_fields={"extra": list(range(len(full.tokens)))})
    answer = tree.answer(call, full, stop_texts=("nothing", "servation:", "Obs"))
    kept, size = answer.completion, len(answer.completion.tokens)
    assert answer.text == answer.content == "the box " and kept.finish_reason == "stop"
    shorter = qwen3.decode_action(full.tokens[: size - 1])
    assert "Obs" in qwen3.decode_action(kept.tokens) and "Obs" not in shorter
    assert kept.tokens == full.tokens[:size] and kept.logprobs == full.logprobs[:size]
    assert kept.further_fields == {"extra": list(range(size))}
    after = tree.begin([USER, said(answer), USER], None)
    assert after.parent == (call, 0) and after.added[0] == qwen3.end_of_turn
    assert tree.answer(call, full, stop_texts=("never",)).completion is full


def test_what_counts_as_the_same_message(qwen3: ChatRenderer) -> None:
    tree = CallTree(qwen3, max_context_length=CONTEXT)
    call = tree.begin([SYSTEM, USER], [LOOK])
    text = 'ok\n<tool_call>\n{"name": "look", "arguments": {"a": 1, "b": "\u00e9"}}\n</tool_call>'
    tree.answer(call, completion_of(qwen3, text))

    def asked(*calls: ToolCall, content: str = "ok", tools: Any = (LOOK,), first: Any = SYSTEM):
        told = ChatMessage("assistant", content, calls)
        return tree.begin([first, USER, told, ChatMessage("tool", "4")], tools)

    def parent(*calls: ToolCall, **others: Any) -> tuple[Call, int] | None:
        return asked(*calls, **others).parent

    same = ToolCall("look", '{"b":"\\u00e9", "a":1}')
    assert parent(same) == (call, 0)
    assert asked(same) is asked(same, content=" ok\n") is asked(content=text)
    for number in ("1.0", "1e0"):  # JavaScript has one kind of numbers
        assert parent(replace(same, arguments=f'{{"b": "\u00e9", "a": {number}}}')) == (call, 0)
    for other in ("true", "1.5", "1e999"):
        assert parent(replace(same, arguments=f'{{"b": "\u00e9", "a": {other}}}')) is None
    assert parent(same, content="edited") is None
    assert parent(content="ok") is None
    assert parent(replace(same, arguments='{"a": 1}')) is None
    assert parent(replace(same, name="see")) is None
    assert parent(same, same) is None
    assert parent(same, first=replace(SYSTEM, content="Be kind")) is None
    assert parent(same, tools=()) is None
    assert parent(same, tools=[LOOK | {"strict": True}]) is None


def test_a_thought_tells_equal_answers_apart() -> None:
    renderer = ChatRenderer(small_qwen3(), think=True)
    tree = CallTree(renderer, max_context_length=CONTEXT)
    call = tree.begin([USER], None)
    for thought in ("zz", "b", "a"):
        tree.answer(call, completion_of(renderer, f"{thought}</think>yes"))
    told = [ChatMessage("assistant", f"{before}yes") for before in ("", "<think>\nb</think>\n")]
    silent, open_minded = (tree.begin([USER, message, USER], None) for message in told)
    least = min(range(3), key=lambda number: call.answers[number].completion.tokens)
    assert silent.parent == (call, least) and open_minded.parent == (call, 1)
    edited = ChatMessage("assistant", "<think>c</think>yes")
    assert tree.begin([USER, edited, USER], None).parent is None


def test_a_call_is_its_request_with_its_role(qwen3: ChatRenderer) -> None:
    tree = CallTree(qwen3, max_context_length=CONTEXT)
    call = tree.begin([SYSTEM, USER], None, role="a")
    assert tree.begin([SYSTEM, USER], [], role="a") is call
    other = tree.begin([SYSTEM, USER], None, role="b")
    assert (other.index, other.tokens) == (1, call.tokens)
    answer = tree.answer(other, completion_of(qwen3, "yes"))
    assert tree.begin([SYSTEM, USER, said(answer), USER], None, role="a").parent == (other, 0)


def refused(tree: CallTree, *arguments: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        tree.begin(*arguments)
    assert tree.calls == [] and "\n" not in str(caught.value)
    return caught.value


def test_requests_that_cannot_be_answered(qwen3: ChatRenderer) -> None:
    tree = CallTree(qwen3, max_context_length=40)
    answer = ChatMessage("assistant", "so")
    for messages in ([], [USER, answer]):
        assert refused(tree, messages, None).code == "invalid_value"
    for text in ("the box " * 40, "<" * 9_000_000):
        error = refused(tree, [ChatMessage("user", text)], None)
        assert (error.code, error.param) == ("context_length_exceeded", "messages")
    without_tools = CallTree(ChatRenderer(small_smollm2(), think=False), max_context_length=4000)
    assert "tools" in str(refused(without_tools, [USER], [LOOK]))


def test_rewards_and_records_of_calls(qwen3: ChatRenderer) -> None:
    tree = CallTree(qwen3, max_context_length=CONTEXT)
    call = tree.begin([SYSTEM, USER], [LOOK], role="a")
    answers = [tree.answer(call, completion_of(qwen3, text)) for text in ("no", "yes")]
    judged = tree.begin([SYSTEM, USER, said(answers[1]), USER], [LOOK], role="judge")
    tree.answer(judged, completion_of(qwen3, "good"), is_trained=False)
    answers[0].info["max_tokens"] = 7
    rewards = {(0, 0): 0.5, (0, 1): -4.0, (1, 0): 0.25}
    trajectory = tree.trajectory(Trajectory(0), reward=2.0, call_rewards=rewards)
    assert trajectory.total_reward == 0.5 - 4.0 + 0.25 + 2.0
    assert [turn.info[CALL]["answer"] for turn in trajectory.turns] == [0, 1]
    assert [turn.reward for turn in trajectory.turns] == [0.5, -4.0 + 2.0 + 0.25]
    infos = {turn.info[CALL]["answer"]: turn.info for turn in trajectory.turns}
    assert infos[0]["max_tokens"] == 7 and infos[0][CALL]["tools"] == [LOOK]
    (other,) = trajectory.turns[-1].info[UNTRAINED]
    assert (other["role"], other["parent"], other["tools"]) == ("judge", [0, 1], [])
    assert other["reply"]["content"] == "good" and other["messages"][0]["content"] == "Hello."
    assert len(trajectory) == len(trajectory.segments) * len(call.tokens) + sum(
        len(answer.completion.tokens) for answer in answers
    ), "an untrained end is left out"
    for unknown in ((2, 0), (0, 2)):
        with pytest.raises(ValueError, match="which no answer of the tree is"):
            tree.trajectory(Trajectory(0), reward=0.0, call_rewards={unknown: 1.0})


def test_a_prompt_that_is_only_counted_has_no_part_in_the_episode(qwen3: ChatRenderer) -> None:
    tree = CallTree(qwen3, max_context_length=40)
    long = [ChatMessage("user", "the box " * 40)]
    counted = tree.begin(long, None, is_asked=False)
    whole = qwen3.tokenizer.apply_chat_template(
        [{"role": "user", "content": long[0].content}], tokenize=False, add_generation_prompt=True
    )
    opened = qwen3.tokenizer.decode(qwen3.start([USER])).rpartition("assistant\n")[2]
    assert counted.tokens == encoded(qwen3.tokenizer, whole + opened)
    assert len(counted.tokens) > 40 and tree.calls == []
    refused(tree, long, None)
    tree.begin([USER], None, is_asked=False)
    asked = tree.begin([USER], None)
    assert tree.begin([USER], None, is_asked=False) is asked and tree.calls == [asked]


def test_other_ranks_know_that_a_trajectory_is_a_tree(qwen3: ChatRenderer) -> None:
    tree = CallTree(qwen3, max_context_length=CONTEXT)
    tree.answer(tree.begin([USER], None), completion_of(qwen3, "yes"))
    played = [tree.trajectory(Trajectory(3), reward=1.0), Trajectory(3)]
    assert [each.is_tree for each in outlined(outlines_of(played))] == [True, False]


def test_a_long_episode_is_written_without_recursion(qwen3: ChatRenderer) -> None:
    tree = CallTree(qwen3, max_context_length=CONTEXT)
    history = [USER]
    for number in range(150):
        answer = tree.answer(tree.begin(history, None), completion_of(qwen3, f"a{number}"))
        history += [said(answer), ChatMessage("user", "on")]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 60)
    try:
        trajectory = tree.trajectory(Trajectory(0), reward=0.0)
    finally:
        sys.setrecursionlimit(limit)
    assert len(trajectory.segments) == 1 and len(trajectory.turns) == 150
