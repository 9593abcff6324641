"""An agent: a function of the user, or a program behind a URL, that plays an episode by asking for
completions at the door.

`agent:my_module:run` and `agent:http://host:port/path` are names of environments, so that shares,
tasks, seeds, groups and evaluations work as for any environment.
"""

import copy
import inspect
import json
import math
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from queue import LifoQueue
from textwrap import shorten
from typing import Any, NoReturn

import httpx2

from ragen_mega.config.sections.agent import PREFIX
from ragen_mega.environments import event_loop
from ragen_mega.environments.adapters.packages import required
from ragen_mega.environments.adapters.tasks import Split, overlap_note, read_parts, row_text
from ragen_mega.environments.episode import is_partial
from ragen_mega.environments.processes import Host, HostedEnvironment
from ragen_mega.environments.protocol import check_seed
from ragen_mega.extensions.registry import Registry
from ragen_mega.extensions.scalars import as_number
from ragen_mega.system.paths import path_in
from ragen_mega.system.web_client import ask

AGENTS = Registry("agent", "--agent", {})
_REMEDY = "change its parameters (docs/agents.md)"
REWARDS = Registry("agent reward", "--agent-reward", {}, remedy=_REMEDY)
EXAMPLES = Registry("agent example", "--agent-example", {}, remedy=_REMEDY)
_VARIABLES = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY")
"""Variables of the environment that name the door in the processes of agents."""
_NOWHERE = "http://127.0.0.1:9/v1"
Door = Callable[[str | None], AbstractContextManager[str]]
"""Function that opens a door for the requests of an episode, with a key or a new one (None), and
gives the key to the context.
"""
_AUTHORIZATION = "RAGEN_AGENT_AUTHORIZATION"
"""The variable with the credentials of agents behind a URL."""
_FIELDS = ("reward", "success", "calls")
"""Keys of a result that are read; all others are the `OUTCOME` of the last turn."""
_Named = tuple[int, int, int | None]
"""Index of a call, number of its answer and, for the id of a call of a tool, this call's number in
the answer.
"""


@dataclass(frozen=True, slots=True)
class AgentEpisode:
    """An episode that is over, as a reward function gets it."""

    task: Mapping[str, Any]
    calls: Sequence[Mapping[str, Any]]
    """Answers in the order of their calls. Each has its `id`, which its reply had, the index of its
    call, its number among the answers to this call (`answer`), role, parent (index and number of
    the answer that the call continues), the messages that are new since then, tools and reply.
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
    call_rewards: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Index of a call and number of its answer -> the answer's own reward, beside the reward of the
    episode.
    """
    info: Mapping[str, Any] = field(default_factory=dict)
    """Other entries, which the trainer keeps and does not read."""
    is_by_reward: bool = False
    """Whether nothing but a partial reward says that the episode is solved."""


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
        processes: int = 0,
        directory: str = "",
    ) -> None:
        """`tasks`: a file of JSON lines, or parquet; `validation`: another one for evaluations,
        without which `validation_share` of the rows are kept for them. `processes`: number of
        processes in which the agent runs, one episode at a time in each (0: in this one).
        `directory`: folder that relative paths begin in; a run sets its working directory.

        Raises ValueError for an agent that cannot be imported or called, and for a file without
        rows.
        """
        self.name = agent
        self._function, self._takes_client = import_agent(agent, in_processes=processes > 0)
        call = inspect.getattr_static(type(self._function), "__call__", None)  # of an object
        self._is_coroutine = any(map(inspect.iscoroutinefunction, (self._function, call)))
        is_here = self._function is not None
        self._processes = _processes(agent, processes) if processes and is_here else None
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._parts: Sequence[Sequence[Mapping[str, Any]]] = ()
        if tasks is not None:
            other = validation and path_in(directory, validation)
            self._parts = read_parts(path_in(directory, tasks), other, validation_share)
            self._rows = self._parts[self.splits.index(split)]
            self.num_tasks = len(self._rows)
        self.task: dict[str, Any] = {}
        self._awaited: Future[Any] | None = None
        self._host: Host | None = None
        self._is_stopped = False

    @property
    def split_note(self) -> str | None:
        """See `overlap_note`."""
        return overlap_note(*([*map(row_text, part)] for part in self._parts or ((), ())))

    def reset(self, seed: int, outcome_seed: int | None = None) -> str:
        """Take the task of a seed. The agent is started by `run`."""
        row = self._rows[check_seed(seed) % len(self._rows)] if self._rows else {}
        self._awaited, self._is_stopped = None, False
        self.task = {"seed": seed, "outcome_seed": outcome_seed} | json.loads(json.dumps(row))
        return ""

    def step(self, action: str) -> NoReturn:
        """Raise TypeError: an agent does its steps itself."""
        raise TypeError("an agent is played through its door, not by steps")

    def run(self, base_url: str, door: Door) -> Any:
        """Play the episode with completions from a door, and return what the agent returns. Raises
        what the agent raises.
        """
        task = copy.deepcopy(self.task)  # which the agent may write into, and a reward reads
        if self._processes is None:
            with door(None) as api_key:
                return self.play(task, base_url, api_key)
        place = self._processes.get()  # once another episode has ended
        try:
            with door(place.key) as api_key:
                self._host = place.host(base_url)
                if self._is_stopped:  # before it could be killed
                    raise RuntimeError("the episode was ended before the agent had a process")
                return place.program().play(task, base_url, api_key)
        finally:
            self._host = None
            self._processes.put(place)

    def play(self, task: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """Let the agent play in this process; see `run`."""
        function = self._function
        if function is None:
            return self._settled(_ask(self.name, task, base_url, api_key))
        if self._is_coroutine:
            return self._settled(self._play(function, task, base_url, api_key))
        if not self._takes_client:
            return self._settled(function(task, base_url, api_key))
        with _client("OpenAI", "DefaultHttpxClient", base_url, api_key) as client:
            return self._settled(function(task, client))

    def stop(self) -> None:
        """End the episode: a coroutine is cancelled and a process killed. A plain function of this
        process cannot be ended.
        """
        self._is_stopped = True
        if self._awaited is not None:
            self._awaited.cancel()
        if (host := self._host) is not None:
            host.end()

    @property
    def why_late(self) -> str:
        """A clause about the cause for which the agent may be late; empty if none is known."""
        return event_loop.standstill() if self._is_coroutine else ""

    def _settled(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        self._awaited = event_loop.begin(value)
        return self._awaited.result()

    async def _play(
        self, function: Callable[..., Any], task: Mapping[str, Any], base_url: str, api_key: str
    ) -> Any:
        if not self._takes_client:
            return await function(task, base_url, api_key)
        client = _client("AsyncOpenAI", "DefaultAsyncHttpxClient", base_url, api_key)
        async with client:
            return await function(task, client)


class _AgentProcess:
    """A process of an agent, which has one key at the door for all its episodes, so that a client
    that the agent keeps serves the next one too.
    """

    def __init__(self, agent: str) -> None:
        self.key = f"process-{secrets.token_urlsafe(18)}"
        self._agent = agent
        self._host: Host | None = None
        self._program: HostedEnvironment | None = None

    def host(self, base_url: str) -> Host:
        """Return the process, which is started if it is not there."""
        if self._host is None or not self._host.is_alive:
            variables = dict(
                zip(_VARIABLES, (base_url, base_url.removesuffix("/v1"), self.key, self.key))
            )
            self._host, self._program = Host(variables), None
        return self._host

    def program(self) -> HostedEnvironment:
        """Return the proxy of the agent in the process."""
        if self._program is None:
            self._program = HostedEnvironment(f"{PREFIX}{self._agent}", {}, host=self._host)
        return self._program


@cache
def _processes(agent: str, count: int) -> LifoQueue[_AgentProcess]:
    """Return the places of the processes of an agent in which no episode is played."""
    places: LifoQueue[_AgentProcess] = LifoQueue()
    for _ in range(count):
        places.put(_AgentProcess(agent))
    return places


def import_agent(
    agent: str, *, in_processes: bool = False
) -> tuple[Callable[..., Any] | None, bool]:
    """Return the function of an agent, None behind a URL, and whether it takes a client of
    OpenAI's. Imports all that a first call would import, in many threads at once. Raises ValueError
    for an agent that cannot be imported or called.

    `in_processes`: the agent is called in others. Its module may make a client that reads the
    environment, so that this one gets variables with an address where nobody answers.
    """
    if in_processes:
        for name in _VARIABLES:
            os.environ.setdefault(name, _NOWHERE if name.endswith("URL") else "none")
    for server in ("starlette.applications:Starlette", "uvicorn:Server"):
        required(server, "agents", purpose="agents")
    if "://" in agent:
        return None, False
    if agent.startswith(("http:", "https:")):
        raise ValueError(
            f"--agent {agent} must be an address such as http://127.0.0.1:8000/run; correct it"
        )
    function = AGENTS.get(agent)
    takes_client = _takes_client(agent, function)
    if takes_client:
        completions = "openai.resources.chat.completions:AsyncCompletions"
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
    """Return a client of OpenAI's for the door alone: no proxy, no certificates and no time limit,
    for a call waits as long as its episode may.
    """
    openai = required("openai:AsyncOpenAI", "agents")
    http = getattr(openai, transport)(verify=False, trust_env=False, timeout=None)
    return getattr(openai, kind)(base_url=base_url, api_key=api_key, timeout=None, http_client=http)


async def _ask(url: str, task: Mapping[str, Any], base_url: str, api_key: str) -> Any:
    """Have an agent behind a URL play, until it is cancelled. Raises RuntimeError if it cannot
    be reached or the answer is no JSON, and what `ask` raises.
    """
    body = {"task": task, "base_url": base_url, "api_key": api_key}
    try:
        answer = await ask("POST", url, _AUTHORIZATION, seconds=None, body=body)
    except httpx2.ConnectError as error:
        said = f"{url} cannot be reached ({error}); start the agent, or correct --agent"
        raise RuntimeError(said) from None
    text = answer.content.decode("utf-8", "replace")
    if answer.status_code != 200:
        raise RuntimeError(f"{url} answered {answer.status_code}: {text:.200}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RuntimeError(f"{url} must answer with JSON, not {text!r:.200}") from None


_NO_CACHE = (
    "turn off a cache of the framework, which answers in the door's place (dspy.LM(cache=False),"
    " LangChain's set_llm_cache(None))"
)
"""Remedy for a framework that has the answers of other episodes."""


def judged(episode: AgentEpisode, reward: str | None) -> Outcome:
    """Return the rewards of an episode: by the function `reward`, or as the agent itself says.
    Raises ValueError for a value that is no reward, and for an agent that asked for nothing.
    """
    if not episode.calls and episode.error is None:
        raise ValueError(
            "the agent asked for no completion; let it use the client, or base_url and api_key,"
            f" that it is given, and {_NO_CACHE}"
        )
    named = _named(episode.calls)
    if reward is None:
        return _outcome(episode.result, "the agent", named)
    value = REWARDS.get(reward)(replace(episode, calls=copy.deepcopy(episode.calls)))
    if value is None and episode.error is not None:
        raise RuntimeError(episode.error)
    return _outcome(value, f"--agent-reward {reward}", named)


def _named(calls: Sequence[Mapping[str, Any]]) -> Mapping[str, Sequence[_Named]]:
    """Return every name of a reply -> its answer; the index of a call -> all answers to it."""
    named: defaultdict[str, list[_Named]] = defaultdict(list)
    for call in calls:
        node, name = (call["index"], call["answer"]), call["id"]
        named[str(call["index"])].append((*node, None))
        named[name].append((*node, None))
        for number in range(len(call["reply"]["tool_calls"])):
            named[f"{name}-{number}"].append((*node, number))
    return named


def shared_client(num_elsewhere: int) -> str:
    """Describe an agent that asked for nothing while other episodes of it were answered."""
    return (
        f"the agent asked for no completion under its own key, and {num_elsewhere} answers went to"
        " the keys of other episodes: a client or OPENAI_API_KEY that the whole process shares has"
        " the key of one of them. Let the agent use the client, or base_url and api_key, that each"
        " episode is given, or set --environment-processes 8, under which each process plays one"
        " episode at a time and has OPENAI_BASE_URL and OPENAI_API_KEY. If the client is right,"
        f" {_NO_CACHE}"
    )


def _outcome(value: Any, who: str, named: Mapping[str, Sequence[_Named]]) -> Outcome:
    given = dict(value) if isinstance(value, Mapping) else {"reward": value}
    reward = _number(given.get("reward"), who)
    call_rewards = _call_rewards(given.get("calls") or {}, who, named)
    info = {name: own for name, own in given.items() if name not in _FIELDS}
    success = given.get("success", reward > 0)
    if math.isnan(as_number(success) or 0):  # which Python counts as true
        raise ValueError(f"success of {who} must be true or false, not nan")
    kept = json.loads(json.dumps(info, default=_known))
    is_by_reward = "success" not in given and is_partial(reward)
    return Outcome(reward, bool(success), call_rewards, kept, is_by_reward)


def _known(value: Any) -> float | str:
    """Return a value that JSON does not know as a number, else as a text."""
    number = as_number(value)
    return str(value) if number is None else number


def _call_rewards(
    calls: Any, who: str, named: Mapping[str, Sequence[_Named]]
) -> Mapping[tuple[int, int], float]:
    """Return the reward of each answer that `calls` names. Raises ValueError for a name of no
    answer or of several, and for two names of one answer.
    """
    # Only here, for it brings torch, which a process of an agent does not need.
    from ragen_mega.agents.protocol import call_id

    try:
        given = {name: _number(own, who) for name, own in dict(calls).items()}
    except (TypeError, ValueError):
        raise ValueError(
            f"calls of {who} must map the id of a reply, or the index of a call with one answer, to"
            f" a reward, not {calls!r:.80}"
        ) from None
    names: dict[_Named, object] = {}
    rewards: defaultdict[tuple[int, int], float] = defaultdict(float)
    for name, own in given.items():
        places = named.get(str(name), ())
        if len(places) != 1:
            ids = [call_id(*place[:2]) for place in places] or [n for n in named if "-" in n]
            raise ValueError(
                f"calls names {name!r:.40}, and must name one answer by the id of its reply:"
                f" {shorten(', '.join(ids), 80)}"
            )
        if (known := names.setdefault(places[0], name)) is not name:
            raise ValueError(f"calls names one answer twice, {known!r} and {name!r}; name it once")
        rewards[places[0][:2]] += own
    return rewards


def _number(value: Any, who: str) -> float:
    number = as_number(value)
    if number is None or not math.isfinite(number):
        raise ValueError(
            f"{who} must return the reward, a finite number, or a dict with it as reward, not"
            f" {value!r:.80}"
        )
    return number
