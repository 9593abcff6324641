"""Tasksets of the verifiers hub, e.g. `verifiers:my_taskset`: prompts, tools, users and rewards.

Interface: verifiers 0.4. The library plays its own episode, with its setup, limits, stops, users
and rewards; the policy takes the place of its model. Its chat loop and the tools of a taskset run
in this process, where the library starts a process for each tool.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from textwrap import shorten
from typing import Any, Literal

import verifiers.v1 as vf
from verifiers.v1.dialects import Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null.harness import NullHarness, NullHarnessConfig
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content
from verifiers.v1.interception import InterceptionServer

from ragen_mega.environments.adapters.tasks import held_out
from ragen_mega.environments.protocol import Message, StepResult, check_seed
from ragen_mega.environments.tool_calls import function_tool, tool_calls
from ragen_mega.system.web_client import open_client

logging.getLogger(vf.__name__).setLevel(logging.ERROR)  # what fails is raised

_MAX_TURNS = 10
_LONGEST_ERROR = 240  # characters
_MOST_BYTES = 8 << 20  # of a reply
_UNHURRIED = 1e9
"""Seconds that an agent may take: the time of the policy counts."""
_CHAT = NullHarnessConfig(id="null")
_Ask = Callable[[Sequence[vf.Message]], Awaitable[str]]
"""New messages -> the policy's answer."""
_Served = dict[str, tuple[Any, Any]]
"""Name -> a server of the protocol MCP, and its tool."""
_state: ContextVar[vf.State] = ContextVar("the state of the episode that calls a tool")


class VerifiersEnvironment:
    """An episode of one agent that chats and calls the tools of its taskset. The last step brings
    the reward: the weighted sum of the task's rewards.
    """

    splits = ("train", "validation")
    max_turns: int

    def __init__(
        self,
        taskset: str,
        /,
        *,
        split: Literal["train", "validation"] = "train",
        validation: dict[str, Any] | None = None,
        validation_share: float = 0.1,
        max_tasks: int = 1000,
        max_turns: int | None = None,
        solved_at: float = 1.0,
        **options: Any,
    ) -> None:
        """`options` are the fields of the taskset's configuration; `validation` replaces some
        fields for the evaluation, and without it `validation_share` of the prompts are kept for it.
        `max_tasks`: tasks that are read of an endless taskset; `solved_at`: least reward of a
        success. Raises ValueError, in one line, for a taskset or option that cannot be played.
        """
        world = self._world = _world(taskset, json.dumps(options), max_tasks)
        if validation is None:
            held = held_out(f"verifiers:{taskset}", map(_prompt, world.tasks), validation_share)
            tasks = [task for task in world.tasks if _prompt(task) in held]
        else:
            tasks = _world(taskset, json.dumps(options | validation), max_tasks).tasks
            held = {_prompt(task) for task in tasks}
        if split == "train":
            tasks = [task for task in world.tasks if _prompt(task) not in held]
        if not tasks:
            raise ValueError(
                f"verifiers:{taskset} must have a task in split {split}, and has none that the"
                " evaluation leaves; change the options, or those under validation"
            )
        self._tasks, self._solved_at = tasks, solved_at
        self.num_tasks = len(tasks)
        self.max_turns = max_turns or world.seat.max_turns or _MAX_TURNS
        if world.schemas:
            self.tools = world.schemas
        self._episode: asyncio.Task[vf.Trace] | None = None

    async def reset(self, seed: int) -> Sequence[Message]:
        await self.close()
        task = self._tasks[check_seed(seed) % self.num_tasks].with_data()
        self._episode = asyncio.create_task(self._play(task))
        event = await self._next()
        if isinstance(event, vf.Trace):
            raise RuntimeError(f"the episode ended before its first turn ({event.stop_condition})")
        return event

    def parse(self, text: str) -> str:
        """Return the text itself: the rewards say what an answer is worth."""
        return text

    async def step(self, text: str) -> StepResult:
        self._answer.set_result(text)
        event = await self._next()
        if not isinstance(event, vf.Trace):
            return StepResult(event, 0.0, terminated=False)
        info = {"success": event.reward >= self._solved_at}
        return StepResult("", event.reward, not event.is_truncated, event.is_truncated, info)

    async def close(self) -> None:
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.wait([self._episode])

    async def _next(self) -> Sequence[Message] | vf.Trace:
        """Wait until the policy is asked, or the episode is over."""
        self._asked = asyncio.get_running_loop().create_future()
        assert self._episode is not None  # `reset` comes first
        await asyncio.wait((self._asked, self._episode), return_when=asyncio.FIRST_COMPLETED)
        if self._asked.done():
            return [*map(_message, self._asked.result())]
        return self._episode.result()

    async def _ask(self, messages: Sequence[vf.Message]) -> str:
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.set_result(messages)
        return await self._answer

    async def _play(self, task: vf.Task) -> vf.Trace:
        """Play one episode, as `vf.Env.run_episode` does."""
        environment = self._world.environment
        chat = _Chat(self._world, _Tools(task.toolsets(task.config)))
        task.toolsets = lambda config: []  # the chat has them, so no server is started
        row = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = vf.Episode(task=row)
        async with _Door(_Policy(self._ask)) as door:

            def seated(name: str, seat: vf.AgentConfig) -> vf.Agent:
                agent = _Seat(_played(seat, self.max_turns), interception=door)
                agent.harness, agent.traces = chat, episode.traces
                return agent

            agents = vf.Agents(environment.config, seated)
            await environment.setup(agents)
            await environment.run(task, agents)
            await environment.finalize(task, episode)
        for trace in episode.traces:
            if not trace.ok:
                raise RuntimeError(f"{trace.last_error.type}: {trace.last_error.message}")
        return episode.traces[0]


@dataclass
class _World:
    """An environment of the library, which all episodes of a process share."""

    environment: vf.Env
    seat: vf.AgentConfig
    tasks: list[vf.Task]
    shared: "_Tools"
    """Tools that serve all episodes."""
    schemas: list[dict[str, Any]]


@lru_cache(maxsize=16)
def _world(taskset: str, options: str, max_tasks: int) -> _World:
    name = f"verifiers:{taskset}"
    try:
        config = vf.resolve_env_config({"taskset": {"id": taskset, **json.loads(options)}})
        environment = vf.load_environment(config)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        said = shorten(str(error), _LONGEST_ERROR)
        raise ValueError(f"{name} cannot be built: {said}") from error
    seats = [value for _, value in config if isinstance(value, vf.AgentConfig)]
    programs = [seat.harness.id for seat in seats if seat.harness is not None]
    if (own := vf.default_harness_id(taskset)) != "bash":  # which the library adds to any other
        programs.append(own)
    has_server = type(environment).start is not vf.Env.start
    if len(seats) != 1 or {*programs} - {"null"} or has_server:
        raise ValueError(
            f"{name} must have one agent that chats, and no server of its own; it has {len(seats)}"
            f" ({', '.join(programs) or 'chat'}){' and a server' * has_server}: play it as an agent"
        )
    counted = ("max_input_tokens", "max_output_tokens", "max_total_tokens")
    if limits := [limit for limit in counted if getattr(seats[0], limit) is not None]:
        raise ValueError(
            f"{name} sets {', '.join(limits)}, and the trainer counts the tokens; set"
            " --max-context-length instead"
        )
    source = environment.taskset
    shared = _Tools(type(source).toolsets(source.config))
    of_task = _Tools(type(source).task_type().toolsets(source.config.task))
    with ThreadPoolExecutor(1) as thread:  # this one may have an event loop already
        found = thread.submit(asyncio.run, _all_served(shared, of_task)).result()
    schemas = [
        function_tool(called, tool.description or "", tool.input_schema)
        for called, (_, tool) in found.items()
    ]
    tasks = list(source if source.bounded else source.take(max_tasks))
    return _World(environment, seats[0], tasks, shared, schemas)


class _Tools:
    """Toolsets of the library, called as its tool servers call them."""

    def __init__(self, toolsets: Sequence[vf.Toolset]) -> None:
        """Raises ValueError for toolsets that run elsewhere."""
        for toolset in toolsets:
            if toolset.config.url or toolset.config.runtime.type != "subprocess":
                raise ValueError(
                    f"tools of {type(toolset).__name__} must run in this process, not in"
                    f" {toolset.config.url or toolset.config.runtime.type}; play it as an agent"
                )
        self._toolsets = toolsets
        self._opening = asyncio.Lock()
        self._stack: AsyncExitStack | None = None

    async def open(self, task: vf.TaskData | None = None) -> _Served:
        """Set the toolsets up, once, and return the tools by name. `task` is their only task."""
        async with self._opening:
            if self._stack is None:
                async with AsyncExitStack() as stack:  # which a failure closes
                    for toolset in self._toolsets:
                        toolset._pull_state = _current_state
                        await stack.enter_async_context(toolset._exit_stack)
                        await toolset.setup()
                        if task is not None:
                            await toolset.setup_task(task)
                    self._served = await self.served()
                    self._stack = stack.pop_all()
        return self._served

    async def served(self) -> _Served:
        from mcp.server.mcpserver import MCPServer  # which the library brings

        found: _Served = {}
        for toolset in self._toolsets:
            server = MCPServer(toolset.server_name or "tools", log_level="WARNING")
            toolset.register(server)
            prefix = f"{toolset.server_name}_" if toolset.server_name else ""
            found |= {f"{prefix}{tool.name}": (server, tool) for tool in await server.list_tools()}
        return found

    async def close(self) -> None:
        if self._stack is not None:
            await self._stack.aclose()


async def _all_served(*tools: _Tools) -> _Served:
    return {name: tool for each in tools for name, tool in (await each.served()).items()}


async def _current_state() -> vf.State:
    return _state.get()


class _Chat(NullHarness):
    """The library's chat loop: ask the model, call its tools, until it answers without a call."""

    SUPPORTS_TOOL_INTERCEPTION = False

    def __init__(self, world: _World, tools: _Tools) -> None:
        super().__init__(_CHAT)
        self._world, self._tools = world, tools

    async def setup(self, runtime: vf.Runtime) -> None:
        """Do nothing: no program is installed."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        _state.set(trace.state)
        tools = await self._world.shared.open() | await self._tools.open(trace.task.data)
        if [*tools] != [schema["function"]["name"] for schema in self._world.schemas]:
            raise ValueError("a task must have the tools that all tasks of its taskset have")
        system, prompt = self.resolve_prompt(data)
        start = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        if system is not None:
            start = [vf.SystemMessage(content=system), *start]
        messages = [*map(message_to_wire, start)]
        body = {"messages": messages} | ({"tools": self._world.schemas} if tools else {})
        key = {"Authorization": f"Bearer {secret}"}
        async with open_client(endpoint, headers=key, most_bytes=_MOST_BYTES) as client:
            while True:
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                if reply.is_error:
                    raise vf.HarnessError(reply.text)
                messages.append(message := reply.json()["choices"][0]["message"])
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                messages += [await _result(tools, call) for call in message["tool_calls"]]

    async def cleanup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await self._tools.close()


async def _result(tools: _Served, call: Mapping[str, Any]) -> dict[str, Any]:
    """Call a tool and return the message with its result, or with what went wrong."""
    from mcp.server.mcpserver.exceptions import ToolError

    name = call["function"]["name"]
    content = f"error: unknown tool {name!r}"
    if name in tools:
        server, tool = tools[name]
        try:
            result = await server.call_tool(tool.name, json.loads(call["function"]["arguments"]))
            content = mcp_content_to_chat_content(result.content)
        except ToolError as error:
            content = str(error)
    message = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
    return bound_tool_message(message)


class _Policy(vf.Client):
    """The policy as the model of an episode."""

    def __init__(self, ask: _Ask) -> None:
        self._ask = ask
        self._known: list[vf.Message] = []

    async def get_response(self, dialect: Dialect, body: dict, *_: Any, **__: Any) -> vf.Response:
        messages, num_known = dialect.parse_request(body).messages, len(self._known)
        if messages[:num_known] != self._known or len(messages) == num_known:
            raise vf.HarnessError(
                "an episode must be one conversation that only grows, and another one began or its"
                " history was changed; play it as an agent"
            )
        self._known = messages
        message = _assistant(await self._ask(messages[num_known:]), num_known, body.get("tools"))
        raw = {
            "id": f"turn_{num_known}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        self._known = [*messages, response.message]
        return response


def _assistant(text: str, turn: int, tools: Any) -> dict[str, Any]:
    """Return the policy's answer as a message; a tool call that cannot be read stays text."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    try:
        called = tool_calls(text) if tools else []
    except ValueError:
        return message
    if called:
        message["content"] = text.partition("<tool_call>")[0].strip()
        message["tool_calls"] = [
            {
                "id": f"call_{turn}_{index}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for index, call in enumerate(called)
        ]
    return message


class _Door(InterceptionServer):
    """The server, on the loopback, through which the library's episode reaches its model."""

    def __init__(self, policy: _Policy) -> None:
        super().__init__()
        self._policy = policy

    def _client(self, config: Any) -> _Policy:
        return self._policy


class _Seat(vf.Agent):
    """An agent that keeps the traces of its runs."""

    traces: list[vf.Trace]

    async def run(self, task: vf.Task, **options: Any) -> vf.Trace:
        return await super().run(task, on_trace=self.traces.append, **options)

    def interaction(self, task: vf.Task, **options: Any) -> Any:
        return super().interaction(task, on_trace=self.traces.append, **options)


def _played(seat: vf.AgentConfig, max_turns: int) -> vf.AgentConfig:
    """Return the configuration of a seat that the policy takes."""
    changes: dict[str, Any] = {"model": "policy", "max_turns": max_turns, "harness": _CHAT}
    changes["timeout"] = seat.timeout.model_copy(update={"rollout": _UNHURRIED})
    if "runtime" not in seat.model_fields_set:
        changes["runtime"] = vf.SubprocessConfig()
    return seat.model_copy(update=changes)


def _prompt(task: vf.Task) -> str:
    """Return what tells a task from others: its prompt, or the whole row where a user begins."""
    shown = {"prompt", "system_prompt"} if task.data.prompt is not None else None
    return task.data.model_dump_json(include=shown, exclude={"idx"})


def _message(message: vf.Message) -> Message:
    if not isinstance(message.content, str) or getattr(message, "tool_calls", None):
        raise ValueError(
            f"a message of a task must be a text without tool calls, not {message!r:.80}"
        )
    return Message(message.role, message.content)
