"""Calls an environment with the keywords that it takes, awaits the result if it is `async`, and
checks the returned value.

Environments are user code: an error says which rule they broke.
"""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ragen_mega.environments import event_loop
from ragen_mega.environments.messages import ChatMessage, Given, as_texts, paired, read_message
from ragen_mega.environments.protocol import (
    OUTCOME,
    STEP_INFO,
    Environment,
    Message,
    Observation,
    StepResult,
)
from ragen_mega.extensions.scalars import as_number

MAX_OBSERVATION = 1_000_000
"""Most characters of an observation; no context is this long."""
MAX_REWARD = 1e30
"""Largest size of a reward; sums of larger ones are not finite in float32."""
ROLES = ("system", "user", "tool", "assistant")
"""Roles of messages that an environment may give."""


def reset(
    environment: Environment,
    seed: int,
    *,
    outcome_seed: int | None = None,
    board: Sequence[str] | None = None,
) -> Observation:
    """Start an episode and return the first observation, a text or a tuple of `Message`.
    `outcome_seed` is left out if `reset` does not take it.

    Raises ValueError for a board if `reset` takes none, and for an observation that is too long or
    not valid Unicode; TypeError if it is neither text nor messages.
    """
    taken = _keywords(getattr(environment.reset, "__func__", environment.reset))
    if board is not None and "board" not in taken:
        raise ValueError(f"{type(environment).__name__} does not start from boards; use seeds")
    keywords = {"outcome_seed": outcome_seed, "board": board}
    return _observation(
        "reset",
        settled(environment.reset(seed, **{name: keywords[name] for name in taken})),
    )


def step(environment: Environment, action: Any) -> StepResult:
    """Do one action; messages come back as a tuple of `Message`, numbers of NumPy and torch as
    numbers of Python. Raises TypeError for an answer of the wrong kind, FloatingPointError for a
    reward that is not finite or above `MAX_REWARD` in size and for a truth value that is NaN, and
    ValueError for an observation that is too long or not valid Unicode.
    """
    result = settled(environment.step(action))
    if isinstance(result, tuple) and len(result) == 5:
        result = StepResult(*result)
    if not isinstance(result, StepResult):
        raise TypeError(
            "step must return a StepResult or (observation, reward, terminated, truncated, info),"
            f" not {result!r:.60}"
        )
    observation = _observation("step", result.observation)
    reward = as_number(result.reward)
    if reward is None:
        raise TypeError(f"the environment's reward must be a number, not {result.reward!r:.60}")
    if not abs(reward) <= MAX_REWARD:  # nan included
        raise FloatingPointError(
            f"the environment's reward must be a finite number, not {reward:g}, and at most"
            f" {MAX_REWARD:g} in size; mend its formula, for example a division by 0"
        )
    if not isinstance(result.info, dict):
        raise TypeError(f"the info of a step must be a dict, not {result.info!r:.60}")
    truths = {name: _truth(name, result.info[name]) for name in STEP_INFO if name in result.info}
    info = result.info | truths
    if OUTCOME in info and not (isinstance(info[OUTCOME], dict) and _is_json(info[OUTCOME])):
        del info[OUTCOME]
    return replace(
        result,
        observation=observation,
        reward=reward,
        terminated=_truth("terminated", result.terminated),
        truncated=_truth("truncated", result.truncated),
        info=info,
    )


def _truth(name: str, value: Any) -> bool:
    """Return a truth value of a step. Raises FloatingPointError for NaN, which Python counts as
    true.
    """
    if math.isnan(as_number(value) or 0):
        raise FloatingPointError(f"{name} of a step must be true or false, not nan; mend it")
    return bool(value)


def parse(environment: Any, text: str) -> list[Any]:
    """Return the steps that the environment's own parser reads from an answer. Raises ValueError if
    the parser does, TypeError for steps that are neither text nor JSON objects.
    """
    answer = settled(environment.parse(text))
    steps = [answer] if isinstance(answer, (str, Mapping)) else answer
    are_steps = isinstance(steps, (list, tuple)) and all(
        isinstance(action, str) or (isinstance(action, dict) and _is_json(action))
        for action in steps
    )
    if not are_steps:
        raise TypeError(
            f"parse must return a step or a list of them, each a text or a JSON object, not"
            f" {answer!r:.60}; raise ValueError for an answer that cannot be read"
        )
    return list(steps)


def close(environment: Any) -> None:
    """Call the environment's `close`, if it has one."""
    if callable(method := getattr(environment, "close", None)):
        settled(method())


@lru_cache(maxsize=256)
def _keywords(method: Any) -> tuple[str, ...]:
    """Return which of our keywords a `reset` takes."""
    parameters = inspect.signature(method).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in ("outcome_seed", "board") if takes_all or name in parameters)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _observation(method: str, observation: Any) -> Observation:
    """Return a text unchanged; messages, in any accepted form, as a tuple of `Message`."""
    if isinstance(observation, str):
        return _text(method, observation)
    parts = observation if isinstance(observation, (list, tuple)) else ()
    if any(isinstance(part, Mapping) for part in parts) and not any(
        isinstance(part, str) for part in parts
    ):
        observation = _read(method, parts)
    pairs = list(map(_pair, observation)) if isinstance(observation, (list, tuple)) else []
    if not pairs or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise TypeError(
            f"the observation of {method} must be text (str) or messages (role, content), not"
            f" {observation!r:.60}; convert it in the environment"
        )
    for role, _ in pairs:
        if role not in ROLES:
            raise ValueError(
                f"a message of {method} must have one of the roles {', '.join(ROLES)}, not"
                f" {role!r:.60}; the policy's answers are added for it"
            )
    for _, content in pairs:
        _text(method, content)
    return tuple(
        each if isinstance(each, Message) else Message(*pair)
        for each, pair in zip(observation, pairs, strict=True)
    )


def _read(method: str, observation: Sequence[Any]) -> list[Any]:
    """Return messages of which the mappings are read as chat completions has them, with results
    of tools behind the calls that they are of. Earlier calls were the policy's.
    """
    found = []
    for place, message in enumerate(observation):
        where = f"message {place} of {method}"
        if isinstance(message, (list, tuple)) and len(message) == 2:
            message = dict(zip(("role", "content"), message, strict=True))
        if isinstance(message, Message):
            found.append(Given(where, ChatMessage(message.role, message.text, name=message.name)))
        else:
            found.append(read_message(where, message))
    return [*as_texts(paired(found, is_whole=False))]


def _pair(message: Any) -> Any:
    """Return the role and content of a message; anything else unchanged."""
    return (message.role, message.content) if isinstance(message, Message) else message


def _text(method: str, observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(
            f"the observation of {method} must be text (str), not {observation!r:.60}; convert it"
            " in the environment"
        )
    if len(observation) > MAX_OBSERVATION:
        raise ValueError(
            f"the observation of {method} has {len(observation)} characters, and no context holds"
            f" more than {MAX_OBSERVATION}; shorten it in the environment"
        )
    observation.encode()  # raises for a lone surrogate, which no tokenizer takes
    return observation


def settled(value: Any) -> Any:
    """Return the value itself, or its result if awaited, as `event_loop.begin` does."""
    return event_loop.begin(value).result() if inspect.isawaitable(value) else value
