"""An agent: a function of the user, or a program behind a URL, that plays an episode by asking for
completions at the door.

`agent:my_module:run` and `agent:http://host:port/path` are names of environments, so that shares,
tasks, seeds, groups and evaluations are those of any environment.
"""

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from ragen_mega.agents.protocol import index_of
from ragen_mega.data.registry import Registry
from ragen_mega.data.web_client import ask
from ragen_mega.environments.adapters.packages import required
from ragen_mega.environments.adapters.tasks import Split, read_rows
from ragen_mega.environments.protocol import check_seed, text_seed

AGENTS = Registry("agent", "--agent", {})
REWARDS = Registry("agent reward", "--agent-reward", {})
_AUTHORIZATION = "RAGEN_AGENT_AUTHORIZATION"
"""The variable with the credentials of agents behind a URL."""
_FIELDS = ("reward", "success", "calls")


@dataclass(frozen=True, slots=True)
class AgentEpisode:
    """An episode that is over, as a reward function gets it."""

    task: Mapping[str, Any]
    calls: Sequence[Mapping[str, Any]]
    """Calls in the order of their requests. Each has its index, answer, role, parent, the messages
    that are new since the parent's answer, tools, reply and tool_calls.
    """
    result: Any
    """Value that the agent returned."""
    error: str | None
    """Text of the exception that the agent raised, if it did."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rewards of an episode."""

    reward: float
    success: bool
    call_rewards: Mapping[int, float] = field(default_factory=dict)
    """Index of a call -> its own reward, beside that of the episode."""
    info: Mapping[str, Any] = field(default_factory=dict)


class AgentProgram:
    """An agent with its tasks: the rows of a file, or seeds alone."""

    splits = ("train", "validation")
    max_turns = 64

    def __init__(
        self,
        agent: str,
        /,
        *,
        tasks: str | None = None,
        split: Split = "train",
        validation: str | None = None,
        validation_share: float = 0.1,
    ) -> None:
        """`tasks`: a file of JSON lines, or parquet; `validation`: another one for evaluations,
        without which `validation_share` of the rows are kept for them.

        Raises ValueError for an agent that cannot be imported or called, and for a file without
        rows.
        """
        self.name = agent
        self._function, self._takes_client = import_agent(agent)
        self._rows: Sequence[Mapping[str, Any]] = ()
        if tasks is not None:
            parts = [read_rows(tasks), read_rows(validation or tasks)]
            if validation is None:
                parts = _parts(parts[0], validation_share)
            self._rows = parts[self.splits.index(split)]
            self.num_tasks = len(self._rows)
        self.task: dict[str, Any] = {}

    def reset(self, seed: int, outcome_seed: int | None = None) -> str:
        """Take the task of a seed. The agent is started by `run`."""
        row = self._rows[check_seed(seed) % len(self._rows)] if self._rows else {}
        self.task = {"seed": seed, "outcome_seed": outcome_seed} | json.loads(json.dumps(row))
        return ""

    def step(self, action: str) -> None:
        """Raise TypeError: an agent does its steps itself."""
        raise TypeError("an agent is played through its door, not by steps")

    def run(self, base_url: str, api_key: str, seconds: float | None) -> Any:
        """Play the episode with completions from a door, and return what the agent returns. Raises
        what the agent raises; a coroutine is cancelled after `seconds`.
        """
        if self._function is None:
            return _ask(self.name, self.task, base_url, api_key, seconds)
        if inspect.iscoroutinefunction(self._function):
            return asyncio.run(asyncio.wait_for(self._play(base_url, api_key), seconds))
        if not self._takes_client:
            return self._function(self.task, base_url, api_key)
        with _client("OpenAI", "DefaultHttpxClient", base_url, api_key) as client:
            return self._function(self.task, client)

    async def _play(self, base_url: str, api_key: str) -> Any:
        if not self._takes_client:
            return await self._function(self.task, base_url, api_key)
        client = _client("AsyncOpenAI", "DefaultAsyncHttpxClient", base_url, api_key)
        async with client:
            return await self._function(self.task, client)


def import_agent(agent: str) -> tuple[Callable[..., Any] | None, bool]:
    """Return the function of an agent, None behind a URL, and whether it takes a client of
    OpenAI's. Imports all that a first call would import, in many threads at once. Raises ValueError
    for an agent that cannot be imported or called.
    """
    for server in ("starlette", "uvicorn"):
        required(server, "agents", purpose="agents")
    if "://" in agent:
        return None, False
    function = AGENTS.get(agent)
    takes_client = _takes_client(agent, function)
    if takes_client:
        completions = "openai.resources.chat.completions"
        required(completions, "agents", purpose="agents that take a client")
    return function, takes_client


def _takes_client(name: str, function: Callable[..., Any]) -> bool:
    """Return whether an agent takes a client of OpenAI's, and not a URL and a key."""
    for arguments in (2, 3):
        try:
            inspect.signature(function).bind(*range(arguments))
            return arguments == 2
        except TypeError:
            continue
    raise ValueError(
        f"--agent {name} must be a function (task, client) or (task, base_url, api_key), not"
        f" {function.__name__}{inspect.signature(function)}; change its parameters"
    )


def _client(kind: str, transport: str, base_url: str, api_key: str) -> Any:
    """Return a client of OpenAI's for the door alone: no proxy, certificates or time limit of its
    own, for a call waits as long as its episode may.
    """
    openai = required("openai", "agents")
    http = getattr(openai, transport)(verify=False, trust_env=False, timeout=None)
    return getattr(openai, kind)(base_url=base_url, api_key=api_key, timeout=None, http_client=http)


def _ask(
    url: str, task: Mapping[str, Any], base_url: str, api_key: str, seconds: float | None
) -> Any:
    """Have an agent behind a URL play. Raises RuntimeError if its answer is no JSON, and what
    `ask` raises.
    """
    body = {"task": task, "base_url": base_url, "api_key": api_key}
    answer = asyncio.run(ask("POST", url, _AUTHORIZATION, seconds=seconds, body=body))
    text = answer.content.decode("utf-8", "replace")
    if answer.status_code != 200:
        raise RuntimeError(f"{url} answered {answer.status_code}: {text:.200}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RuntimeError(f"{url} must answer with JSON, not {text!r:.200}") from None


def _parts(rows: Sequence[Mapping[str, Any]], share: float) -> list[Sequence[Mapping[str, Any]]]:
    """Return the rows to train on and those to evaluate on, drawn by their text."""
    ordered = sorted(rows, key=lambda row: text_seed(json.dumps(row, sort_keys=True, default=str)))
    if not 0 < share < 1 or len(ordered) < 2:
        raise ValueError(
            f"validation_share ({share}) must be between 0 and 1, and leave rows on both sides of"
            f" {len(ordered)}; name another file by the option validation"
        )
    size = min(max(1, round(share * len(ordered))), len(ordered) - 1)
    return [ordered[size:], ordered[:size]]


def judged(episode: AgentEpisode, reward: str | None) -> Outcome:
    """Return the rewards of an episode: by the function `reward`, or as the agent itself says.
    Raises ValueError for a value that is no reward, and for an agent that asked for nothing.
    """
    if not episode.calls and episode.error is None:
        raise ValueError(
            "the agent asked for no completion; let it use the client, or base_url and api_key,"
            " that it is given"
        )
    if reward is None:
        outcome = _outcome(episode.result, "the agent")
    else:
        value = REWARDS.get(reward)(episode)
        if value is None and episode.error is not None:
            raise RuntimeError(episode.error)
        outcome = _outcome(value, f"--agent-reward {reward}")
    known = {call["index"] for call in episode.calls}
    if unknown := outcome.call_rewards.keys() - known:
        raise ValueError(f"calls names {sorted(unknown)}, and the episode has {sorted(known)}")
    return outcome


def _outcome(value: Any, who: str) -> Outcome:
    given = dict(value) if isinstance(value, Mapping) else {"reward": value}
    reward = _number(given.get("reward"), who)
    calls = given.get("calls") or {}
    try:
        call_rewards = {index_of(name): _number(own, who) for name, own in dict(calls).items()}
    except (TypeError, ValueError, IndexError):
        raise ValueError(
            f"calls of {who} must map the index of a call or the id of its reply to a reward, not"
            f" {calls!r:.80}"
        ) from None
    info = {name: own for name, own in given.items() if name not in _FIELDS}
    success = given.get("success", reward > 0)
    return Outcome(reward, bool(success), call_rewards, json.loads(json.dumps(info, default=str)))


def _number(value: Any, who: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(
            f"{who} must return the reward, a finite number, or a dict with it as reward, not"
            f" {value!r:.80}"
        )
    return float(value)
