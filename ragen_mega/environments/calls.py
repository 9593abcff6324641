"""How an environment is called: with the keywords that it takes, awaited where it is `async`, and
with a check of what it returns.

Environments are anyone's code: what they do wrong is an error that says which rule it broke.
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Sequence
from functools import cache
from numbers import Real
from typing import Any

from ragen_mega.environments.protocol import Environment, StepResult


def reset(
    environment: Environment,
    seed: int,
    *,
    outcome_seed: int | None = None,
    board: Sequence[str] | None = None,
) -> str:
    """Start an episode: the first observation. `outcome_seed` is left out where `reset` does not
    take it.

    Raises ValueError for a board where it takes none, TypeError if it returns no text.
    """
    taken = _keywords(type(environment).reset)
    if board is not None and "board" not in taken:
        raise ValueError(f"{type(environment).__name__} does not start from boards; use seeds")
    keywords = {"outcome_seed": outcome_seed, "board": board}
    return _text(
        "reset",
        _settled(environment.reset(seed, **{name: keywords[name] for name in taken})),
    )


def step(environment: Environment, action: str) -> StepResult:
    """Do one action. Raises TypeError for an answer of the wrong kind, and FloatingPointError for a
    reward that is not finite.
    """
    result = _settled(environment.step(action))
    if isinstance(result, tuple) and len(result) == 5:
        result = StepResult(*result)
    if not isinstance(result, StepResult):
        raise TypeError(
            "step must return a StepResult or (observation, reward, terminated, truncated, info),"
            f" not {result!r:.60}"
        )
    _text("step", result.observation)
    if not isinstance(result.reward, Real):
        raise TypeError(f"the environment's reward must be a number, not {result.reward!r:.60}")
    if not math.isfinite(result.reward):
        raise FloatingPointError(
            f"the environment's reward must be a finite number, not {result.reward}"
        )
    if not isinstance(result.info, dict):
        raise TypeError(f"the info of a step must be a dict, not {result.info!r:.60}")
    return result


def close(environment: Any) -> None:
    """Let the environment give back what it holds, if it has a `close`."""
    if callable(method := getattr(environment, "close", None)):
        _settled(method())


@cache
def _keywords(method: Any) -> tuple[str, ...]:
    """Which of our keywords a `reset` takes."""
    parameters = inspect.signature(method).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in ("outcome_seed", "board") if takes_all or name in parameters)


def _text(method: str, observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(
            f"the observation of {method} must be text (str), not {observation!r:.60}; convert it"
            " in the environment"
        )
    return observation


def _settled(value: Any) -> Any:
    """The value itself, or what it comes to on the event loop of all `async` environments."""
    if not inspect.isawaitable(value):
        return value

    async def settle() -> Any:
        return await value

    return asyncio.run_coroutine_threadsafe(settle(), _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """It runs in a thread of its own, so that connections live on from call to call, whoever
    calls.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop
