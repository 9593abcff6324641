"""Play of agents whose model is an example: the data of their warm start, and the score of ideal
answers.
"""

import copy
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

from ragen_mega.agents.call_tree import UNTRAINED, Call
from ragen_mega.agents.runner import EXAMPLES
from ragen_mega.config.rules import Sections
from ragen_mega.config.sections.agent import is_agent
from ragen_mega.data.types import CALL, Completion, SamplingParams, Trajectory, in_groups
from ragen_mega.environments.messages import ChatMessage, read_message, written
from ragen_mega.environments.pool import EnvironmentFailed, describe_failures, guarded
from ragen_mega.environments.reference_players import (
    Baselines,
    Prompt,
    too_few_turns,
    wilson_interval,
)
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.ranks.collectives import on_main
from ragen_mega.rollout.collector import collect
from ragen_mega.rollout.endings import check_ends, environment_errors, last_info
from ragen_mega.rollout.engine import NoEngine
from ragen_mega.rollout.held_out import reference_players
from ragen_mega.rollout.player import Task
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import (
    SCRIPTED_SEEDS,
    episode_maker,
    evaluation_tasks,
    play_settings,
    tasks_for_group,
)

MOST_EPISODES = 2048
"""Number of different episodes; the warm start repeats them."""
_OTHERS = 64
"""Episodes whose answers are given to the calls of others."""
_RANDOM_EPISODES = 4
"""Episodes per prompt with random answers."""
_WHOLE = 1 << 20
"""Tokens that no episode has."""
Example = Callable[[Call, random.Random], str]
"""Function that writes the text of the answer to a call, with its source of randomness."""


class ExampleAnswers:
    """Answers as an example gives them."""

    def __init__(self, renderer: ChatRenderer, example: Example) -> None:
        self._renderer, self._example = renderer, example

    async def complete(
        self, call: Call, tokens: list[int], sampling: SamplingParams
    ) -> tuple[Completion, dict[str, Any]]:
        """Encode the example's answer; see `Answers`."""
        text = self._example(call, random.Random(sampling.seed))
        if self._renderer.opens_thought and "</think>" not in text:
            text = f"\n</think>\n\n{text}"
        answer = self._renderer.encode_answer(text)[: sampling.max_tokens]
        is_whole = answer[-1:] == [self._renderer.end_of_turn]
        return Completion(answer, [0.0] * len(answer), "stop" if is_whole else "length"), {}


def example_play(
    config: Sections, name: str, renderer: ChatRenderer, indices: Sequence[int]
) -> dict[int, Trajectory]:
    """Return index -> episode of agent `name`, with the answers of `agent_example` under the loss
    mask. Indices MOST_EPISODES apart have the same episode.

    Each answer is the example's own with probability `warm_start_skill`, else one that the example
    gave to a call of the same role and number in another episode: it has the right form alone.
    """
    example = _with_skill(config, name, renderer, config.warm_start.warm_start_skill)
    distinct = list(dict.fromkeys(index % MOST_EPISODES for index in indices))
    played = _play(config, renderer, example, _tasks(config, name, distinct))
    episodes = dict(zip(distinct, played, strict=True))
    return {index: episodes[index % MOST_EPISODES] for index in indices}


def find_references(config: Sections, name: str, prompts: Sequence[Prompt]) -> Baselines:
    """Return reference players of an environment or of an agent with an example. Collective."""
    if is_agent(name) and config.agent.agent_example is not None:
        return on_main(lambda: example_references(config, name, prompts))
    return reference_players(config.environment, name, prompts)


def example_references(config: Sections, name: str, prompts: Sequence[Prompt]) -> Baselines:
    """Return the success of ideal and of random answers, in the sense of `example_play`, on the
    same prompts.
    """
    whole, renderer = _unlimited(config)
    rates, errors_say = [], None
    for player, skill, count in (("random", 0.0, _RANDOM_EPISODES), ("ideal", 1.0, 1)):
        groups = evaluation_tasks(whole.environment, name, prompts, samples_per_prompt=count)
        example = _with_skill(whole, name, renderer, skill)
        played = _play(whole, renderer, example, list(chain.from_iterable(groups)))
        rates.append(sum(trajectory.success for trajectory in played) / len(played))
        failures = [(each.seed, why) for each, why in environment_errors(in_groups(played))]
        errors_say = errors_say or describe_failures(name, player, len(played), failures)
    rate, ideal = rates
    limit, turns_say = config.environment.max_turns, None
    if ideal == 0 and limit is not None:
        free = replace(whole, environment=replace(whole.environment, max_turns=None))
        (tasks,) = evaluation_tasks(free.environment, name, prompts[:1])
        (first,) = _play(free, renderer, _ideal(config.agent.agent_example), tasks)
        needed = len(first.turns) + len(last_info(first).get(UNTRAINED, ()))
        if first.success and needed > limit:
            turns_say = too_few_turns(name, limit, needed)
    low, high = wilson_interval(rate * len(prompts), len(prompts))
    return Baselines(
        name,
        len(prompts),
        rate,
        low,
        high,
        ideal,
        None,
        is_exact=False,
        errors_say=errors_say,
        turns_say=turns_say,
    )


def _with_skill(config: Sections, name: str, renderer: ChatRenderer, skill: float) -> Example:
    """Return an example whose answers are ideal with probability `skill`. Raises ValueError if an
    error ends every episode with ideal answers, which are played unless `skill` is 1.
    """
    ideal = _ideal(config.agent.agent_example)
    if skill == 1:
        return ideal
    others: dict[tuple[str, int], list[str]] = defaultdict(list)
    played = _play(config, renderer, ideal, _tasks(config, name, range(_OTHERS)))
    check_ends(in_groups(played))
    for trajectory in played:
        for call, text in _calls(trajectory, renderer):
            others[call["role"], call["index"]].append(text)

    def answer(call: Call, draw: random.Random) -> str:
        known = others.get((call.role, call.index))
        return draw.choice(known) if known and draw.random() >= skill else ideal(call, draw)

    return answer


def example_texts(config: Sections, name: str) -> list[str]:
    """Return everything that is said in episodes of agent `name`: the corpus of a tokenizer."""
    whole, renderer = _unlimited(config)
    texts = []
    ideal = _ideal(config.agent.agent_example)
    for trajectory in _play(whole, renderer, ideal, _tasks(config, name, range(200))):
        texts.append("system\nuser\nassistant\ntool\n")
        for call, text in _calls(trajectory, renderer):
            texts += [message["content"] for message in call["messages"]]
            texts += [json.dumps(tool, ensure_ascii=False) for tool in call["tools"]]
            texts.append(text)
    return texts


def _unlimited(config: Sections) -> tuple[Sections, ChatRenderer]:
    """Return a renderer for which every byte is a token, and `config` without the limits of another
    tokenizer.
    """
    whole = replace(
        config,
        rollout=replace(config.rollout, max_context_length=_WHOLE),
        environment=replace(config.environment, max_response_length=_WHOLE // 2),
    )
    return whole, ChatRenderer(train_tokenizer([]), think=config.environment.think)


def _calls(
    trajectory: Trajectory, renderer: ChatRenderer
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the record of every call with the text of its answer."""
    for turn in trajectory.turns:
        if CALL in turn.info:
            tokens = list(trajectory.tokens[turn.start : turn.end])
            yield turn.info[CALL], renderer.decode_action(tokens)


def _tasks(config: Sections, name: str, indices: Sequence[int]) -> list[Task]:
    """Return the tasks of these episodes, which no evaluation has."""
    maker = episode_maker(config.environment, name)
    return [
        task
        for seed in (SCRIPTED_SEEDS + index for index in indices)
        for task in tasks_for_group(seed, name, seed, maker, group_size=1)
    ]


def _play(
    config: Sections, renderer: ChatRenderer, example: Example, tasks: Sequence[Task]
) -> list[Trajectory]:
    """Play episodes of an agent with an example as its model. Raises ValueError if none of them
    asks for an answer, and for an example that fails.
    """
    settings = play_settings(config, temperature=1.0, seed=0)
    settings = replace(settings, answers=ExampleAnswers(renderer, example))
    played = collect(NoEngine(), renderer, tasks, settings)
    return [trajectory for group in played for trajectory in group.trajectories]


@cache
def _ideal(path: str) -> Example:
    function: Callable[..., Any] = EXAMPLES.get(path)

    def answer(call: Call, draw: random.Random) -> str:
        try:
            tools = copy.deepcopy(list(call.tools))
            said = guarded(lambda: function(_conversation(call), tools))
        except EnvironmentFailed as error:
            raise ValueError(f"--agent-example {path} failed: {error}") from error
        return written(_message(path, said))

    return answer


def _message(path: str, said: Any) -> ChatMessage:
    """Read what an example returned. Raises ValueError if it is no message of the assistant."""
    given: Mapping[str, Any] = {"content": said} if isinstance(said, str) else said
    try:
        return read_message("its answer", {**given, "role": "assistant"}).message
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--agent-example {path} must return a text, or a message with content and tool_calls,"
            f" each with name and arguments, not {said!r:.80} ({error!s:.200})"
        ) from None


def _conversation(call: Call) -> list[dict[str, Any]]:
    """Return the messages of a request, as OpenAI's interface has them."""
    messages: list[dict[str, Any]] = []
    if call.parent is not None:
        earlier, number = call.parent
        answer = earlier.answers[number]
        said = ChatMessage("assistant", answer.content, answer.tool_calls)
        messages = [*_conversation(earlier), _as_json(said)]
    return [*messages, *map(_as_json, call.messages)]


def _as_json(message: ChatMessage) -> dict[str, Any]:
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        given["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return given
