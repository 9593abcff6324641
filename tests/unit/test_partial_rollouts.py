"""Trajectories that are unfinished when new weights come go on under them, turn by turn, with a
cache that is computed again or kept: their log-probabilities equal transformers' in float64.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import os.path
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from ragen_mega.agents import player as agents
from ragen_mega.data.types import Completion, Trajectory, in_groups
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.pool import Worker
from ragen_mega.environments.worlds.frozen_lake.world import FrozenLake
from ragen_mega.report.step_metrics import staleness
from ragen_mega.rollout.all_ranks import JointCollection
from ragen_mega.rollout.player import PlaySettings, Task
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import tasks_for_group
from tests.support import door
from tests.support.rounding import exact_logprobs
from tests.support.small_policy import lake_tokenizer, tiny_qwen2

SETTINGS = PlaySettings(max_context_length=256, temperature=1.0, seed=1, is_ordered=True)
FIRST, SECOND = 3, 4
"""Versions of the weights."""


class Dawdler(FrozenLake):
    """Answers from a thread, now and then."""

    is_instant = False

    def reset(self, seed: int, **options: Any) -> str:
        time.sleep(random.uniform(0, 0.01))
        return super().reset(seed, **options)

    def facts(self) -> Any:
        time.sleep(random.uniform(0, 0.01))
        return super().facts()


def episode(max_turns: int, world: type[FrozenLake] = FrozenLake) -> Episode:
    rules = EpisodeConfig(prompt_style="compact", max_turns=max_turns, max_response_length=8)
    return Episode(world(success_rate=1.0), rules)


LONG = partial(episode, 6)


def play(
    first: Qwen2ForCausalLM,
    second: Qwen2ForCausalLM,
    renderer: ChatRenderer,
    *,
    keeps_caches: bool,
    world: type[FrozenLake] = FrozenLake,
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Four long and four short trajectories under the first weights, of which the long ones go on
    under the second beside four others; and these.
    """
    long, short = (partial(episode, turns, world) for turns in (6, 1))
    engine = EmbeddedEngine(first.config, max_context=256, max_sessions=8)
    with engine.awake():
        engine.load_weights(first.state_dict().items())
        engine.weight_version = FIRST
        with JointCollection(engine, renderer, SETTINGS) as together:
            old = together.add(
                [
                    tasks_for_group(0, "frozen_lake", 0, long, group_size=4),
                    tasks_for_group(1, "frozen_lake", 1, short, group_size=4),
                ]
            )
            together.play(lambda left: len(left) <= 4)
            together.finish_turns()
            assert together.unfinished == set(old[:4])
            take_second(engine, together, second, keeps_caches)
            new = together.add([tasks_for_group(2, "frozen_lake", 2, long, group_size=4)])
            together.play()
            found = [
                [one for group in together.take(tasks) for one in group.trajectories]
                for tasks in (old, new)
            ]
    return found[0], found[1]


def take_second(
    engine: EmbeddedEngine, together: JointCollection, second: Qwen2ForCausalLM, keeps_caches: bool
) -> None:
    """Load the weights under which unfinished trajectories go on."""
    if keeps_caches:
        engine.seal_caches()
    else:
        together.drop_caches()
    engine.load_weights(second.state_dict().items(), again=True)
    engine.weight_version = SECOND


def kept(first: Qwen2ForCausalLM, second: Qwen2ForCausalLM, tokens: list[int], at: int) -> Tensor:
    """[L - at, V] float64 log-probabilities behind the positions from `at` on, of the second model
    on the cache that the first has left.
    """
    one, other = copy.deepcopy(first).double(), copy.deepcopy(second).double()
    with torch.inference_mode():
        cache = one(torch.tensor([tokens[:at]]), use_cache=True).past_key_values
        logits = other(torch.tensor([tokens[at:]]), past_key_values=cache).logits[0]
    return torch.log_softmax(logits, dim=-1)


def changed(first: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    second = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return second


CACHES = pytest.mark.parametrize("keeps_caches", [False, True], ids=["recomputed", "kept"])


@CACHES
def test_turns_are_of_the_weights_that_they_name(keeps_caches: bool) -> None:
    tokenizer = lake_tokenizer(LONG)
    first, renderer = tiny_qwen2(len(tokenizer)), ChatRenderer(tokenizer, think=True)
    second = changed(first)
    old, new = play(first, second, renderer, keeps_caches=keeps_caches)

    assert [{*one.versions} for one in old] == [{FIRST, SECOND}] * 4 + [{FIRST}] * 4
    assert all(one.versions == sorted(one.versions) for one in old)
    assert [{*one.versions} for one in new] == [{SECOND}] * 4
    for one in old + new:
        under = {
            version: exact_logprobs(model, one.tokens, 1.0)
            for version, model in ((FIRST, first), (SECOND, second))
        }
        switch = one.versions.index(SECOND) if SECOND in one.versions else len(one.turns)
        for index, (turn, version) in enumerate(zip(one.turns, one.versions)):
            exact, bound = under[version]
            if keeps_caches and one in old and index >= switch:
                # the last sampled token of a turn is first read by the next one
                at = one.turns[switch - 1].end - 1
                exact = torch.cat([exact[:at], kept(first, second, one.tokens, at)])
            for position in range(turn.start, turn.end):
                expected = exact[position - 1, one.tokens[position]]
                assert abs(one.rollout_logprobs[position] - float(expected)) <= bound

    found = staleness(SECOND, in_groups(old))
    assert found["continued"] == 0.5 and 0 < found["staleness"] < 1


@CACHES
def test_a_branch_that_asks_beside_another_waits_until_the_other_has_its_answer(
    keeps_caches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns are held back for new weights while the first branch of an agent is answered, and then
    the second one asks.
    """
    monkeypatch.setattr(door.RENDERER, "stop_token_ids", ())  # answers have their full lengths
    first = tiny_qwen2(len(door.RENDERER.tokenizer))
    second, may_ask = changed(first), threading.Event()
    engine = EmbeddedEngine(first.config, max_context=1000, max_sessions=4)
    complete = agents._Sessions.complete
    num_running: list[int] = []  # as each call begins
    answers: list[tuple[list[int], Completion]] = []

    async def noted(self: Any, call: Any, tokens: list[int], sampling: Any) -> Any:
        num_running.append(len(engine._running))
        completion, info = await complete(self, call, tokens, sampling)
        answers.append((tokens, completion))
        return completion, info

    def run(task: dict[str, Any], client: Any) -> float:
        with ThreadPoolExecutor(1) as branch:
            other = branch.submit(door.ask, client, "a long answer", max_tokens=300)
            assert may_ask.wait(250)
            door.ask(client, "a short one", max_tokens=5)
            other.result()
        return 1.0

    settings = replace(SETTINGS, max_context_length=1000)
    monkeypatch.setattr(agents._Sessions, "complete", noted)
    with engine.awake(), JointCollection(engine, door.RENDERER, settings) as together:
        decode = engine._slots.decode

        def decode_slowly(decoder: Any) -> Any:
            if may_ask.is_set() and len(num_running) < 2:
                time.sleep(0.05)  # the second branch is about to ask
            return decode(decoder)

        monkeypatch.setattr(engine._slots, "decode", decode_slowly)
        engine.load_weights(first.state_dict().items())
        engine.weight_version = FIRST
        old = together.add([door.agent_tasks(run)])
        together.play(lambda left: bool(engine._running))
        may_ask.set()
        together.finish_turns()
        assert num_running == [0, 1] and not engine._running
        take_second(engine, together, second, keeps_caches)
        together.play()
        (group,) = together.take(old)

    (one,) = group.trajectories
    assert sorted(one.versions) == [FIRST, SECOND]
    (begin, long), (prompt, short) = answers
    assert (len(long.tokens), len(short.tokens)) == (300, 5)
    exact, bound = exact_logprobs(first, begin + long.tokens, 1.0)
    assert_sampled(exact[len(begin) - 1 :], long, bound)
    exact, bound = exact_logprobs(second, prompt + short.tokens, 1.0)
    if keeps_caches:  # what both prompts begin with was read under the first weights
        at = len(os.path.commonprefix([begin, prompt]))
        exact = torch.cat([exact[:at], kept(first, second, prompt + short.tokens, at)])
    assert_sampled(exact[len(prompt) - 1 :], short, bound)


def assert_sampled(exact: Tensor, found: Completion, bound: float) -> None:
    """`exact`: [>= A, V] log-probabilities of the tokens from the first sampled one on."""
    for row, token, logprob in zip(exact, found.tokens, found.logprobs):
        assert abs(float(row[token]) - logprob) <= bound


@pytest.mark.parametrize("world", [FrozenLake, Dawdler])
def test_what_was_taken_is_forgotten(world: type[FrozenLake]) -> None:
    """A collection lives as long as a run that carries over."""
    tokenizer = lake_tokenizer(LONG)
    model, renderer = tiny_qwen2(len(tokenizer)), ChatRenderer(tokenizer, think=True)
    kinds = (Task, Trajectory, Worker, Episode, asyncio.Future)

    def alive() -> Counter[type]:
        gc.collect()
        return Counter(type(one) for one in gc.get_objects() if issubclass(type(one), kinds))

    engine = EmbeddedEngine(model.config, max_context=256, max_sessions=8)
    with engine.awake(), JointCollection(engine, renderer, SETTINGS) as together:
        engine.load_weights(model.state_dict().items())
        before, counts = alive(), []
        for step in range(4):
            maker = partial(episode, 3, world)
            old = together.add([tasks_for_group(step, "frozen_lake", step, maker, group_size=4)])
            together.play(lambda left: len(left) <= 2)
            together.play()
            assert [len(group.trajectories) for group in together.take(old)] == [4]
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                left = alive()
                first = counts[0] if counts else left
                if left[Worker] <= before[Worker] and left <= first:
                    break
                time.sleep(0.01)  # threads end, and what other threads have at work
            counts.append(left)
    # What tests before have left may end meanwhile.
    assert all(counts[-1][kind] <= counts[0][kind] for kind in counts[-1])
    assert all(counts[-1][kind] <= before[kind] for kind in (Task, Trajectory, Worker))


def test_the_same_whenever_environments_answer() -> None:
    tokenizer = lake_tokenizer(LONG)
    model, renderer = tiny_qwen2(len(tokenizer)), ChatRenderer(tokenizer, think=True)
    once, again = (
        play(model, model, renderer, keeps_caches=False, world=Dawdler) for _ in range(2)
    )
    assert once == again
