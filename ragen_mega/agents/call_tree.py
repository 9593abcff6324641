"""The calls of one episode of an agent, as a tree: matched by messages, continued by tokens.

A request repeats the whole conversation as messages. Where its beginning equals an earlier call
with one of the answers that were sampled, the tokens go on from the tokens of this call; sampled
tokens are never encoded again. A branch of the tree is a segment of one `Trajectory`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ragen_mega.data.types import CALL, Completion, Trajectory
from ragen_mega.environments.messages import ChatMessage, RequestError, ToolCall, as_texts
from ragen_mega.environments.protocol import Message
from ragen_mega.environments.tool_calls import CallForm
from ragen_mega.rollout.renderer import ChatRenderer

UNTRAINED = "untrained_calls"
"""Key of the last turn's info: the records of answers outside the loss mask."""


_LONGEST_TOKEN = 128
"""Characters of a token at most, by which a text that cannot fit is refused before it is encoded:
9 million characters take 40 seconds.
"""


@dataclass(slots=True)
class Answer:
    """One sample of a call."""

    completion: Completion
    """Sampled tokens, the last of which may complete a stop text."""
    text: str
    """Sampled text without special tokens, up to a stop text."""
    thought: str | None
    content: str
    """Text without the thought and without calls of tools."""
    tool_calls: tuple[ToolCall, ...]
    is_trained: bool
    """Whether its tokens are under the loss mask."""
    stopped_by: str | None = None
    """Stop text that ended it."""
    info: dict[str, Any] = field(default_factory=dict)
    """Further entries of the info of the answer's turn."""


@dataclass(slots=True, eq=False)
class Call:
    """One request with all its samples: a node of the tree."""

    index: int
    """Number of earlier calls of the episode."""
    role: str
    """Name of the model that the request asked for."""
    parent: tuple[Call, int] | None
    """Call and number of its answer that this call continues; None for a root."""
    messages: tuple[ChatMessage, ...]
    """Messages of the request behind the parent's answer."""
    tools: tuple[dict[str, Any], ...]
    added: list[int]
    """Tokens of the prompt behind the parent's answer."""
    answers: list[Answer] = field(default_factory=list)

    @property
    def lineage(self) -> list[tuple[Call, int]]:
        """Calls before this one, from the root on, each with the number of the answer that the next
        one continues.
        """
        found, parent = [], self.parent
        while parent is not None:
            found.append(parent)
            parent = parent[0].parent
        return found[::-1]

    @property
    def tokens(self) -> list[int]:
        """The whole prompt [L]."""
        parts = [
            part
            for call, number in self.lineage
            for part in (call.added, call.answers[number].completion.tokens)
        ]
        return [token for part in (*parts, self.added) for token in part]


class CallTree:
    """The calls of one episode."""

    def __init__(self, renderer: ChatRenderer, *, max_context_length: int) -> None:
        """`max_context_length`: most tokens of a prompt with its answer."""
        self._renderer = renderer
        self._max_context = max_context_length
        # A place is a history of messages. Those that continue a sampled answer are places of
        # their own beside those in which the same answer came as a text.
        self._places: dict[tuple[int, Hashable], int] = {}
        self._calls_at: defaultdict[int, list[Call]] = defaultdict(list)
        self.calls: list[Call] = []
        """Calls in the order of their requests."""

    def begin(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] | None,
        *,
        role: str = "",
        is_asked: bool = True,
    ) -> Call:
        """Return the call of a request; the same for requests with the same history, tools and
        role. Raises RequestError if it cannot be answered. `is_asked`: False if tokens are counted
        alone: the prompt may exceed the context, and a new call has no part in the episode.
        """
        if not messages:
            raise RequestError("messages must hold at least one message")
        if messages[-1].role == "assistant":
            raise RequestError(
                "the last message must not be the assistant's, for an answer cannot be continued;"
                " add a message of the user or a tool"
            )
        tools = tuple(tools or ())
        place = self._place(0, json.dumps(tools))
        parent, start = None, 0
        for number, message in enumerate(messages):
            answer = None
            if message.role == "assistant":
                answer = self._sampled(place, message)
            place = self._place(place, message if answer is None else answer)
            if answer is not None:
                parent, start = (self.calls[answer[0]], answer[1]), number + 1
        for call in self._calls_at[place]:
            if call.role == role:
                return call
        new = tuple(messages[start:])
        shown = [*as_texts(new)]
        if sum(len(each.text) for each in shown) > _LONGEST_TOKEN * self._max_context:
            raise self._too_long(f"more than {_LONGEST_TOKEN * self._max_context} characters")
        added = self._added(parent, shown, tools)
        call = Call(len(self.calls), role, parent, new, tools, added)
        if not is_asked:
            return call
        if (size := len(call.tokens)) >= self._max_context:
            raise self._too_long(f"{size} tokens")
        self.calls.append(call)
        self._calls_at[place].append(call)
        return call

    def answer(
        self,
        call: Call,
        completion: Completion,
        *,
        is_trained: bool = True,
        stop_texts: Sequence[str] = (),
    ) -> Answer:
        """Add a sample to a call, cut at the token that completes a stop text."""
        completion, text, stopped_by = self._stopped(completion, stop_texts)
        form = self._renderer.call_form if call.tools else None
        parts = _parts(text, form, opens_thought=self._renderer.opens_thought)
        call.answers.append(Answer(completion, text, *parts, is_trained, stopped_by))
        return call.answers[-1]

    def trajectory(
        self,
        trajectory: Trajectory,
        *,
        reward: float,
        call_rewards: Mapping[tuple[int, int], float] = {},
    ) -> Trajectory:
        """Write the tree into a trajectory without tokens, depth first, and return it.

        A call continues the segment of its parent's answer if it is the first that continues it;
        every other call begins a segment, with its whole prompt as context. Siblings are in the
        order of their tokens, which does not depend on their arrival. `call_rewards`: index of a
        call and number of its answer -> reward of this answer. The last turn earns `reward` and
        what answers outside the mask earned.
        """
        nodes = [(call, n) for call in self.calls for n in range(len(call.answers))]
        if others := call_rewards.keys() - {(call.index, number) for call, number in nodes}:
            raise ValueError(f"call_rewards names {sorted(others)}, which no answer of the tree is")
        trajectory.is_tree = True
        successors = self._successors()
        stack = [(node, False) for node in reversed(successors[None])]
        while stack:
            (call, number), continues = stack.pop()
            answer = call.answers[number]
            for before, answered in () if continues else call.lineage:
                trajectory.append_observation(before.added, afresh=before.parent is None)
                trajectory.append_context(before.answers[answered].completion)
            trajectory.append_observation(call.added, afresh=call.parent is None)
            if answer.is_trained:
                turn = trajectory.append_action(answer.completion)
                turn.reward = call_rewards.get((call.index, number), 0.0)
                turn.info |= {CALL: record(call, number)} | answer.info
            else:
                trajectory.append_context(answer.completion)
            following = successors[call.index, number]
            stack += [(node, place == 0) for place, node in enumerate(following)][::-1]
        if not trajectory.turns:  # nothing was sampled
            trajectory.append_observation(self._renderer.start([Message("user", "")]))
            trajectory.append_action(Completion([], [], "abort"))
        last = trajectory.turns[-1]
        untrained = [(call, n) for call, n in nodes if not call.answers[n].is_trained]
        if untrained:
            last.info[UNTRAINED] = [
                record(*node) | node[0].answers[node[1]].info for node in untrained
            ]
        last.reward += reward + sum(call_rewards.get((call.index, n), 0.0) for call, n in untrained)
        return trajectory

    def _successors(self) -> defaultdict[tuple[int, int] | None, list[tuple[Call, int]]]:
        """Return the answers that continue each answer (None: roots) and lead to a trained one, in
        the order of their tokens.
        """
        found: defaultdict[tuple[int, int] | None, list[tuple[Call, int]]] = defaultdict(list)
        for call in reversed(self.calls):  # behind its parent
            parent = None if call.parent is None else (call.parent[0].index, call.parent[1])
            for number, answer in enumerate(call.answers):
                if answer.is_trained or found[call.index, number]:
                    found[parent].append((call, number))
        for siblings in found.values():
            siblings.sort(key=_order)
        return found

    def _place(self, place: int, step: Hashable) -> int:
        return self._places.setdefault((place, step), len(self._places) + 1)

    def _sampled(self, place: int, message: ChatMessage) -> tuple[int, int] | None:
        """Return the answer at a place that an assistant's message repeats; of equal ones the first
        in the order of their tokens. An empty thought is one that was not sent back, unless an
        answer without a thought matches.
        """
        found = []
        for call in self._calls_at.get(place, ()):
            form = self._renderer.call_form if call.tools else None
            thought, content, in_text = _parts(message.content, form, opens_thought=False)
            thought = thought if message.thought is None else message.thought.strip()
            said = content.strip(), _values(message.tool_calls or in_text)
            found += [
                (
                    thought == "" and bool(answer.thought),
                    answer.completion.tokens,
                    call.index,
                    number,
                )
                for number, answer in enumerate(call.answers)
                if (answer.content.strip(), _values(answer.tool_calls)) == said
                and (not thought or thought == answer.thought)
            ]
        return min(found)[2:] if found else None

    def _added(
        self,
        parent: tuple[Call, int] | None,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> list[int]:
        try:
            if parent is None:
                return self._renderer.start(messages, list(tools) or None)
            call, number = parent
            sampled = call.answers[number].completion.tokens
            return self._renderer.observe(messages, sampled[-1:] == [self._renderer.end_of_turn])
        except ValueError as error:
            raise RequestError(str(error)) from error

    def _too_long(self, size: str) -> RequestError:
        return RequestError(
            f"the prompt has {size} and the context of {self._max_context} tokens must also hold an"
            " answer; shorten the conversation or raise --max-context-length",
            code="context_length_exceeded",
        )

    def _stopped(
        self, completion: Completion, stop_texts: Sequence[str]
    ) -> tuple[Completion, str, str | None]:
        """Return a completion up to the token that completes a stop text, its text before and the
        stop text.
        """
        decode, tokens = self._renderer.decode_action, completion.tokens
        text = decode(tokens)
        if not any(stop in text for stop in stop_texts):
            return completion, text, None
        size = 1 + bisect_left(
            range(1, len(tokens)),
            True,
            key=lambda size: any(stop in decode(tokens[:size]) for stop in stop_texts),
        )
        text = decode(tokens[:size])
        end, stopped_by = min((text.find(stop), stop) for stop in stop_texts if stop in text)
        cut = replace(
            completion,
            tokens=tokens[:size],
            logprobs=completion.logprobs[:size],
            finish_reason="stop",
            further_fields={name: row[:size] for name, row in completion.further_fields.items()},
        )
        return cut, text[:end], stopped_by


def _parts(
    text: str, form: CallForm | None, *, opens_thought: bool
) -> tuple[str | None, str, tuple[ToolCall, ...]]:
    """Return the thought, the content and the calls of tools in the text of an answer. With
    `opens_thought` the prompt ended with `<think>`; `form`: None if there are no tools. A malformed
    call leaves all in the content.
    """
    before, end, content = text.partition("</think>")
    is_thought = bool(end) or opens_thought
    thought = before.strip().removeprefix("<think>").strip() if is_thought else None
    content = content.lstrip("\n") if is_thought else text
    found: list[dict[str, Any]] = []
    if form is not None:
        with suppress(ValueError):
            found, around = form.split(content)
            content = around.strip() if found else content
    return (
        thought,
        content,
        tuple(
            ToolCall(each["name"], json.dumps(each["arguments"], ensure_ascii=False))
            for each in found
        ),
    )


def _order(node: tuple[Call, int]) -> tuple[list[int], list[int], str]:
    call, number = node
    return call.added, call.answers[number].completion.tokens, call.role


def record(call: Call, number: int) -> dict[str, Any]:
    """Return what the info of a turn tells about a call and one of its answers, as JSON."""
    answer = call.answers[number]
    reply = ChatMessage("assistant", answer.content, answer.tool_calls)
    return {
        "index": call.index,
        "answer": number,
        "role": call.role,
        "parent": None if call.parent is None else [call.parent[0].index, call.parent[1]],
        "messages": [_shown(message) for message in call.messages],
        "tools": [] if call.parent else list(call.tools),
        "reply": _shown(reply) | {"thought": answer.thought},
    }


def _shown(message: ChatMessage) -> dict[str, Any]:
    calls = [asdict(each) for each in message.tool_calls]
    beside = {"thought": message.thought, "name": message.name or None}
    shown = {"role": message.role, "content": message.content, "tool_calls": calls}
    return shown | {key: value for key, value in beside.items() if value is not None}


def _values(calls: Sequence[ToolCall]) -> list[tuple[str, str]]:
    """Return names and arguments in one spelling of their JSON."""
    found = []
    for call in calls:
        arguments = call.arguments
        with suppress(ValueError, RecursionError):
            read = json.loads(arguments or "{}", parse_float=_number)
            arguments = json.dumps(read, sort_keys=True)
        found.append((call.name, arguments))
    return found


def _number(text: str) -> float:
    """Return a whole number as an integer, for clients in JavaScript send 1.0 back as 1; a float
    from 2**53 on does not name one integer.
    """
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
