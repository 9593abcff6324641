"""Our environments as an OpenEnv server: one environment per session.

Interface: openenv-core 0.3, which must be installed before this module is imported. Actions have
one field, `action`: a name, a text, or for environments with tools a call `{"name", "arguments"}`.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
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
from ragen_mega.environments.episode import LIMITS, EpisodeConfig, is_success
from ragen_mega.environments.protocol import STEP_INFO, Message, StepResult
from ragen_mega.environments.protocol import Observation as Words
from ragen_mega.environments.registry import make
from ragen_mega.environments.tool_calls import HERMES


class WorldObservation(Observation):
    """The outcome of a reset or a step; either `text` or `messages` is set."""

    text: str = ""
    messages: list[dict[str, str]] = []
    truncated: bool = False
    actions: list[str] = []
    """Names of the actions in the present state, where answers are names."""
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
        words = calls.reset(self._world, seed, outcome_seed=outcome_seed)
        return self._with_actions(_observation(words))

    def step(self, action: Any, timeout_s: float | None = None) -> WorldObservation:
        """Do the action; if the environment has a parser, the steps that it finds in the text, as
        many as a turn may have. Raises RuntimeError if no episode is running.
        """
        if self._is_over:
            raise RuntimeError("no episode runs; reset before the next step")
        steps = [action.action]
        if hasattr(self._world, "parse"):
            most = EpisodeConfig().budget(self._world).max_actions_per_turn
            try:
                steps = calls.parse(self._world, action.action)[:most]
            except ValueError as error:
                return _stepless_result(f"Unreadable: {error}")
        results: list[StepResult] = []
        for step in steps:
            results.append(calls.step(self._world, step))
            self._is_over = results[-1].terminated or results[-1].truncated
            if self._is_over:
                break
        self._state.step_count += 1
        if not results:
            return _stepless_result("Nothing was done.")
        return self._with_actions(_step_observation(results))

    @property
    def state(self) -> State:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        instruction = getattr(self._world, "instruction", f"{self._name} environment")
        return EnvironmentMetadata(name=self._name, description=instruction)

    def close(self) -> None:
        calls.close(self._world)

    def _with_actions(self, observation: WorldObservation) -> WorldObservation:
        if not (hasattr(self._world, "parse") or hasattr(self._world, "tools")):
            observation.actions = list(getattr(self._world, "actions", ()))
        return observation


def application(name: str, options: Mapping[str, Any], max_sessions: int) -> FastAPI:
    """Return the FastAPI application of the server. Raises ValueError as `make` does."""
    world = make(name, **options)
    reads_text = hasattr(world, "parse")  # whatever else it declares
    actions = [] if reads_text else list(getattr(world, "actions", ()))
    tools = None if reads_text else getattr(world, "tools", None)
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


def _stepless_result(reason: str) -> WorldObservation:
    """Return the answer to a text without a step."""
    return WorldObservation(text=reason, reward=0.0, info={"is_action_valid": False})


def _step_observation(results: Sequence[StepResult]) -> WorldObservation:
    """Return the outcome of the steps of one answer, taken together as `Episode.respond` does."""
    last = results[-1]
    words = last.observation
    if not isinstance(words, str):
        observations = (
            result.observation for result in results if not isinstance(result.observation, str)
        )
        words = [message for messages in observations for message in messages]
    info = {name: bool(last.info[name]) for name in STEP_INFO if name in last.info}
    if last.terminated:  # or the client would judge by the sum of the rewards
        info["success"] = is_success(last)
    for name, together in (("is_action_valid", all), ("is_action_effective", any)):
        said = [bool(result.info[name]) for result in results if name in result.info]
        info |= {name: together(said)} if said else {}
    observation = _observation(words)
    observation.reward = math.fsum(result.reward for result in results)
    observation.done = last.terminated or last.truncated
    observation.truncated = last.truncated and not last.terminated
    observation.info = info
    return observation


def _as_json(message: Message) -> dict[str, Any]:
    calls, _ = HERMES.split(message.calls)
    said = {"role": message.role, "content": message.content}
    return said | ({"tool_calls": calls} if calls else {})
