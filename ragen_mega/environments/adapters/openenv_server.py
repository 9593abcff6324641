"""Our environments as an OpenEnv server: one environment per session.

Interface: openenv-core 0.3, which must be installed before this module is imported. Actions have
one field, `action`: a name, a text, or for environments with tools a call `{"name", "arguments"}`.
"""

import secrets
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fastapi import FastAPI
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import (
    Action,
    ConcurrencyConfig,
    EnvironmentMetadata,
    Observation,
    State,
)
from pydantic import ConfigDict, Field, create_model

from ragen_mega.environments import calls
from ragen_mega.environments.protocol import Budget, Message, StepResult
from ragen_mega.environments.protocol import Observation as Words
from ragen_mega.environments.registry import make

LIMITS = (*(item.name for item in fields(Budget)), "format_penalty")
"""Limits that an environment may set; the action schema carries them as `limits`."""
_INFO = ("success", "is_action_valid", "is_action_effective")


class WorldObservation(Observation):
    """The outcome of a reset or a step; either `text` or `messages` is set."""

    text: str = ""
    messages: list[dict[str, str]] = []
    truncated: bool = False
    info: dict[str, bool] = {}
    """The entries of `StepResult.info` that the protocol defines."""


class ServedWorld(Environment[Any, WorldObservation, State]):
    """The environment of one session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Raises ValueError as `make` does."""
        super().__init__()
        self._name = name
        self._world = make(name, **options)
        self._state = State()
        self._is_over = True

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        outcome_seed: int | None = None,
    ) -> WorldObservation:
        seed = secrets.randbelow(2**31) if seed is None else seed
        self._state = State(episode_id=episode_id)
        self._is_over = False
        return _observation(calls.reset(self._world, seed, outcome_seed=outcome_seed))

    def step(self, action: Any, timeout_s: float | None = None) -> WorldObservation:
        """Do the action; if the environment has a parser, all steps that it finds in the text.
        Raises RuntimeError if no episode is running.
        """
        if self._is_over:
            raise RuntimeError("no episode runs; reset before the next step")
        steps = [action.action]
        if hasattr(self._world, "parse"):
            try:
                steps = calls.parse(self._world, action.action)
            except ValueError as error:
                unread = StepResult(f"Unreadable: {error}", 0.0, False)
                return _step_observation(unread, {"is_action_valid": False})
        reward = 0.0
        for one in steps:
            result = calls.step(self._world, one)
            reward += result.reward
            self._is_over = result.terminated or result.truncated
            if self._is_over:
                break
        self._state.step_count += 1
        info = {name: bool(result.info[name]) for name in _INFO if name in result.info}
        observation = _step_observation(result, info)
        observation.reward = reward
        return observation

    @property
    def state(self) -> State:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        instruction = getattr(self._world, "instruction", f"{self._name} environment")
        return EnvironmentMetadata(name=self._name, description=instruction)

    def close(self) -> None:
        calls.close(self._world)


def application(name: str, options: Mapping[str, Any], max_sessions: int) -> FastAPI:
    """The FastAPI application of the server. Raises ValueError as `make` does."""
    world = make(name, **options)
    actions = list(getattr(world, "actions", ()))
    tools = getattr(world, "tools", None)
    limits = {limit: getattr(world, limit) for limit in LIMITS if hasattr(world, limit)}
    calls.close(world)
    extra: dict[str, Any] = {"enum": actions} if actions else {}
    if tools:
        extra["tools"] = tools
    schema = create_model(
        "WorldAction",
        __base__=Action,
        action=(dict[str, Any] if tools else str, Field(json_schema_extra=extra)),
    )
    schema.model_config = ConfigDict(**schema.model_config, json_schema_extra={"limits": limits})
    schema.model_rebuild(force=True)
    return create_fastapi_app(
        lambda: ServedWorld(name, options),
        schema,
        WorldObservation,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=max_sessions),
    )


def _observation(words: Words) -> WorldObservation:
    if isinstance(words, str):
        return WorldObservation(text=words)
    return WorldObservation(messages=[_as_json(message) for message in words])


def _step_observation(result: StepResult, info: Mapping[str, bool]) -> WorldObservation:
    observation = _observation(result.observation)
    observation.reward = result.reward
    observation.done = result.terminated or result.truncated
    observation.truncated = result.truncated
    observation.info = dict(info)
    return observation


def _as_json(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}
