"""Episodes of an agent at the door, against a policy that says what it is told."""

import asyncio
import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import openai
import pytest

from ragen_mega.agents.runner import AGENTS
from ragen_mega.config import EnvironmentConfig
from ragen_mega.config.sections.agent import AgentConfig
from ragen_mega.data.types import Completion, SamplingParams, Trajectory
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.rollout.collector import collect
from ragen_mega.rollout.engine import RolloutEngine
from ragen_mega.rollout.player import PlaySettings, Task
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import episode_maker, tasks_for_group

RENDERER = ChatRenderer(train_tokenizer([]), think=False)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
Say = Callable[[str], str]


class TalkingEngine(RolloutEngine):
    """A policy that answers the text of a prompt with `say(text)`; it keeps what was asked."""

    def __init__(self, say: Say, seconds: float = 0.0) -> None:
        self.say, self.seconds = say, seconds
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.num_running = self.most_running = 0
        self.sessions: set[int] = set()

    async def generate(
        self, tokens: list[int], sampling: SamplingParams, *, session: int
    ) -> Completion:
        assert session not in self.sessions
        self.sessions.add(session)
        self.most_running = max(self.most_running, len(self.sessions))
        self.asked.append((tokens, sampling))
        await asyncio.sleep(self.seconds)
        self.sessions.discard(session)
        answer = RENDERER.encode_answer(self.say(RENDERER.tokenizer.decode(tokens)))
        answer = answer[: sampling.max_tokens]
        ended = answer[-1] == RENDERER.end_of_turn
        logprobs = [-float(len(tokens) + place) for place in range(len(answer))]
        return Completion(answer, logprobs, "stop" if ended else "length")


def put_at_the_door(run: Callable[..., Any]) -> str:
    """Make a function the agent of a name, which is returned."""
    module = sys.modules["door_agents"] = ModuleType("door_agents")
    module.run = run
    AGENTS._known.clear()
    return "agent:door_agents:run"


def agent_tasks(
    run: Callable[..., Any] | str,
    *,
    count: int = 1,
    options: dict[str, Any] | None = None,
    seed: int = 7,
) -> list[Task]:
    """A group of episodes of an agent, which is a function or the URL of one."""
    name = f"agent:{run}" if isinstance(run, str) else put_at_the_door(run)
    config = EnvironmentConfig(
        environments=name, environment_options=json.dumps({name: options or {}})
    )
    return tasks_for_group(0, name, seed, episode_maker(config, name), group_size=count)


def play(
    run: Callable[..., Any],
    say: Say = lambda text: "yes",
    *,
    count: int = 1,
    engine: TalkingEngine | None = None,
    options: dict[str, Any] | None = None,
    seed: int = 7,
    **settings: Any,
) -> list[Trajectory]:
    """Trajectories of an agent, which is a function or the URL of one."""
    tasks = agent_tasks(run, count=count, options=options, seed=seed)
    settings = {"max_context_length": 4000, "temperature": 1.0, "seed": 3} | settings
    agent = AgentConfig(**{key: settings.pop(key) for key in [*settings] if key in AGENT_FIELDS})
    engine = engine or TalkingEngine(say)
    played = collect(engine, RENDERER, tasks, PlaySettings(agent=agent, **settings))
    return [trajectory for group in played for trajectory in group.trajectories]


AGENT_FIELDS = AgentConfig.__dataclass_fields__


def ask(client: openai.OpenAI, *texts: str, **parameters: Any) -> Any:
    """Ask with messages that alternate between the user and the assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return client.chat.completions.create(**{"model": "policy", "messages": messages} | parameters)


def refusal(ask_badly: Callable[[], Any]) -> SimpleNamespace:
    """Status, code, parameter and message of the error that a request gets."""
    with pytest.raises(openai.APIStatusError) as caught:
        ask_badly()
    error = caught.value
    return SimpleNamespace(
        status=error.status_code, code=error.code, param=error.param, text=error.body["message"]
    )


def sampled(trajectory: Trajectory) -> list[str]:
    return [
        RENDERER.decode_action(trajectory.tokens[turn.start : turn.end])
        for turn in trajectory.turns
    ]
