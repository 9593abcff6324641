"""The experts that the embedded engine records for every token against those that transformers'
router chooses, in float64.
"""

import asyncio
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ragen_mega.agents.runner import AGENTS
from ragen_mega.config import EnvironmentConfig
from ragen_mega.config.sections.agent import AgentConfig
from ragen_mega.data.compact import compact, expand
from ragen_mega.data.fields import ROUTES, TOKEN_FIELDS, add_routes
from ragen_mega.data.types import SamplingParams, Trajectory
from ragen_mega.engines.embedded.engine import EmbeddedEngine
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.models.layout import split_experts
from ragen_mega.models.shape import ModelShape
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.rollout.collector import collect
from ragen_mega.rollout.player import PlaySettings
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import episode_maker, tasks_for_group
from ragen_mega.storage.rollouts import RolloutStore

WORDS = "system user assistant Tell the time You have turns left Reward State Turn 0 1 2 3 4 5"
RENDERER = ChatRenderer(train_tokenizer([WORDS] * 9), think=False)
LAYERS, EXPERTS, CHOSEN = 3, 5, 3
CONFIG = Qwen3MoeConfig(
    vocab_size=len(RENDERER.tokenizer), hidden_size=32, moe_intermediate_size=24,
    num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=1, head_dim=12,
    num_experts=EXPERTS, num_experts_per_tok=CHOSEN, norm_topk_prob=True, initializer_range=0.3,
    tie_word_embeddings=False, max_position_embeddings=2048,
)  # fmt: skip
TURNS = 5


class Clock:
    """Says how late it is, whatever is said to it."""

    is_instant = True
    instruction = "Tell the time."
    max_turns = TURNS

    def reset(self, seed):
        self.now = 0
        return f"time {seed}"

    def step(self, text):
        self.now += 1
        return f"time {self.now}", 1.0, self.now >= TURNS, False, {}

    def parse(self, text):
        return text


def episode() -> Episode:
    return Episode(Clock(), EpisodeConfig(think=False, max_response_length=6))


@pytest.fixture(autouse=True)
def _routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOKEN_FIELDS, ROUTES, None)  # there is none afterwards
    add_routes(LAYERS, CHOSEN, EXPERTS)


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    return random_model(0)


@pytest.fixture
def engine(model: Qwen3MoeForCausalLM) -> Iterator[EmbeddedEngine]:
    """Fewer slots than trajectories, so that each is used again."""
    engine = EmbeddedEngine(
        CONFIG, max_context=1000, max_sessions=5, dtype=torch.float64, records_routes=True
    )
    with engine.awake():
        engine.load_weights(weights(model))
        yield engine


def random_model(seed: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(CONFIG).double().eval()
    model.set_experts_implementation("eager")  # the only one in float64
    return model


def weights(model: Qwen3MoeForCausalLM) -> Iterable[tuple[str, torch.Tensor]]:
    return split_experts(model.state_dict(), ModelShape.of(CONFIG)).items()


def chosen(model: Qwen3MoeForCausalLM, tokens: list[int]) -> np.ndarray:
    """The experts [L, layers, k] of transformers, ascending."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    found = [layer.topk(CHOSEN).indices.sort().values for layer in logits]
    return torch.stack(found, 1).numpy()


def assert_routes(model: Qwen3MoeForCausalLM, trajectory: Trajectory) -> None:
    """Of all tokens but the last of a segment, which no log-probability comes after."""
    routes = np.asarray(trajectory.further_fields[ROUTES])
    assert routes.dtype == np.uint8 and routes.shape == (len(trajectory), LAYERS, CHOSEN)
    for start, end in trajectory.segments:
        expected = chosen(model, trajectory.tokens[start:end])
        assert np.array_equal(np.sort(routes[start : end - 1]), expected[:-1])
        assert len(set(routes[end - 1, 0])) == CHOSEN


@pytest.mark.parametrize("window", [0, 3])
def test_turns_and_what_was_said_between_them(
    model: Qwen3MoeForCausalLM, engine: EmbeddedEngine, window: int, tmp_path: Path
) -> None:
    """Groups share their prompts; the stored and the sent trajectories have the same routes."""
    tasks = [
        task
        for group in range(2)
        for task in tasks_for_group(group, "clock", group, episode, group_size=3)
    ]
    groups = collect(engine, RENDERER, tasks, PlaySettings(1000, 1.0, 0, context_window=window))
    played = [trajectory for group in groups for trajectory in group.trajectories]
    assert engine.counts.cached_tokens > 0.3 * engine.counts.prompt_tokens
    assert {len(trajectory.turns) for trajectory in played} == {TURNS}
    assert all(bool(trajectory.breaks) == bool(window) for trajectory in played)
    for trajectory in played:
        assert_routes(model, trajectory)
    store = RolloutStore(tmp_path)
    store.write(0, groups, {})
    stored = [member for group in store.read(0).groups for member in group.trajectories]
    assert stored == played == expand(compact(played))
    TOKEN_FIELDS.pop(ROUTES)  # as where the model of the run is not known
    assert [member.tokens for group in store.read(0).groups for member in group.trajectories] == [
        member.tokens for member in played
    ]


async def agent(task: dict[str, Any], client: openai.AsyncOpenAI) -> float:
    """Several samples of a call and their continuations at once, a helper that is not trained and
    is asked on, a stop text, a history that was edited.
    """

    async def ask(*texts: str, **parameters: Any) -> list[str]:
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
        ]
        parameters = {"model": "main", "max_tokens": 9, "messages": messages} | parameters
        reply = await client.chat.completions.create(**parameters)
        return [choice.message.content for choice in reply.choices]

    first = await ask("Tell the time", n=3)
    later = await asyncio.gather(*(ask("Tell the time", said, "and 5?") for said in first))
    helped = await ask("help", model="helper")
    await ask("help", *helped, "more", model="helper")
    await ask("help", *helped, "and I ask on", stop=[later[0][0][1:2] or "e"])
    long = await ask("0 1 2", stop=list("aeiou 0123456789"))
    await asyncio.gather(
        ask("0 1 2", *long, "3"),
        ask("Tell the time", "edited", "5"),
        ask("Tell the time", first[0], "or 4?"),
        *(ask("Tell the time", first[0], "and 5?", later[0][0], text) for text in "012"),
    )
    return 1.0


def test_trees_of_calls(
    model: Qwen3MoeForCausalLM, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("routes_agents")
    module.agent = agent
    monkeypatch.setitem(sys.modules, "routes_agents", module)
    monkeypatch.setattr(AGENTS, "_known", {})
    name = "agent:routes_agents:agent"
    maker = episode_maker(EnvironmentConfig(environments=name), name)
    tasks = tasks_for_group(0, name, 7, maker, group_size=2)
    settings = PlaySettings(1000, 1.0, 3, agent=AgentConfig(train_roles="main"))
    (group,) = collect(engine, RENDERER, tasks, settings)
    for trajectory in group.trajectories:
        assert len(trajectory.segments) == 9 and len(trajectory.turns) == 14
        assert trajectory.turns[-1].info["untrained_calls"]
        assert_routes(model, trajectory)


def test_new_weights_do_not_change_what_was_recorded(
    model: Qwen3MoeForCausalLM, engine: EmbeddedEngine
) -> None:
    """A trajectory that goes on under other weights keeps the routes of its first turn, whether its
    cache was kept or is computed again; the latter begins with the last sampled token.
    """
    other = random_model(1)
    prompt, further = RENDERER.encode_answer("Tell the time"), RENDERER.encode_answer("4 5")
    for is_kept in (True, False):
        engine.load_weights(weights(model), again=True)
        trajectory = Trajectory(0)
        trajectory.append_observation(prompt)
        sampling = SamplingParams(7)
        first = asyncio.run(engine.generate(prompt, sampling, session=1))
        trajectory.append_action(first)
        trajectory.append_observation(further)
        engine.seal_caches()
        if not is_kept:
            engine.release(1)
        engine.load_weights(weights(other), again=True)
        known = len(prompt) + 6
        sampling = replace(sampling, num_recorded=known)
        second = asyncio.run(engine.generate(list(trajectory.tokens), sampling, session=1))
        trajectory.append_action(second)
        engine.release(1)
        routes = np.sort(np.asarray(trajectory.further_fields[ROUTES]))
        before, after = (chosen(each, trajectory.tokens) for each in (model, other))
        assert np.array_equal(routes[:known], before[:known])
        if not is_kept:
            assert np.array_equal(routes[known:-1], after[known:-1])
        assert (before[:known] != after[:known]).any() and (before[known:] != after[known:]).any()


def test_a_byte_holds_256_experts() -> None:
    add_routes(1, 8, 256)
    assert TOKEN_FIELDS[ROUTES].defaults(1).tolist() == [[[*range(0, 256, 32)]]]
    with pytest.raises(ValueError, match="routing_replay .* 257 experts"):
        add_routes(1, 8, 257)


def test_nothing_is_recorded_unless_asked_for(model: Qwen3MoeForCausalLM) -> None:
    engine = EmbeddedEngine(CONFIG, max_context=100, max_sessions=1, dtype=torch.float64)
    with engine.awake():
        engine.load_weights(weights(model))
        completion = asyncio.run(engine.generate([1, 2, 3], SamplingParams(3), session=0))
        assert not engine._slots._cache.records_routes
    assert not completion.further_fields and not completion.prompt_fields
