"""A server of OpenEnv for a world of a test, which openenv-core alone runs in another process.

python openenv_server.py MODULE:CLASS PORT
"""

import argparse
import importlib
import sys
from typing import Any, Literal

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State


class Told(Observation):
    text: str = ""
    truncated: bool = False


def application(world: Any) -> Any:
    class Answer(Action):
        action: Literal[tuple(world.actions)]

    class Served(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.world = world()

        def reset(self, seed: int | None = None, episode_id: str | None = None) -> Told:
            return Told(text=self.world.reset(seed or 0))

        def step(self, action: Answer, timeout_s: float | None = None) -> Told:
            text, reward, terminated, truncated, _ = self.world.step(action.action)
            return Told(text=text, reward=reward, done=terminated or truncated, truncated=truncated)

        @property
        def state(self) -> State:
            return State()

    limits = ConcurrencyConfig(max_concurrent_envs=64)
    return create_fastapi_app(Served, Answer, Told, concurrency_config=limits)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("world")
    parser.add_argument("port", type=int)
    arguments = parser.parse_args()
    sys.path.insert(0, "")
    module, _, name = arguments.world.partition(":")
    world = getattr(importlib.import_module(module), name)
    uvicorn.run(application(world), host="127.0.0.1", port=arguments.port, log_level="info")
