"""Tasksets of the verifiers hub, e.g. `verifiers:my_taskset`: prompts, tools, users and rewards.

Interface: verifiers 0.4. The library plays its own episode, with its own limits, stops, hooks and
rewards; only the model that it calls is the policy of this program. Its chat loop and the tools of
the taskset run in this process, where the library starts a process for each.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import httpx
import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from mcp.types import Tool
from pydantic import ValidationError
from verifiers.v1.dialects import Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null.harness import NullHarness, NullHarnessConfig
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.types import content_text

from ragen_mega.environments.adapters.tasks import held_out
from ragen_mega.environments.protocol import Message, StepResult, check_seed
from ragen_mega.environments.tool_calls import tool_calls

_MAX_TURNS = 10
_TOKEN_LIMITS = ("max_input_tokens", "max_output_tokens", "max_total_tokens")
_UNHURRIED = 1e9
"""Seconds that an agent may take, the time of the policy included."""
_state: ContextVar[vf.State] = ContextVar("state of the episode whose tool is called")


class VerifiersEnvironment:
    """An episode of an environment with one agent, which talks and calls the taskset's tools.

    The reward of the episode comes with its last step, and is the weighted sum of the task's
    rewards.
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
        environment: str = "",
        **options: Any,
    ) -> None:
        """`options` are those of the taskset's configuration, and `validation` replaces some of
        them for the evaluation; without it, `validation_share` of the prompts are kept for it.
        `max_tasks`: the tasks that are read of an infinite taskset. `solved_at`: least reward of a
        success. `environment`: the library's environment, if it is not the taskset's own.

        Raises ValueError for a name, an option or an environment that cannot be played.
        """
        self._world = _world(taskset, environment, json.dumps(options), max_tasks)
        if validation is None:
            held = held_out(taskset, map(_prompt, self._world.tasks), validation_share)
            evaluated = [task for task in self._world.tasks if _prompt(task) in held]
        else:
            others = json.dumps(options | validation)
            evaluated = _world(taskset, environment, others, max_tasks).tasks
            held = {_prompt(task) for task in evaluated}
        trained = [task for task in self._world.tasks if _prompt(task) not in held]
        self._tasks = trained if split == "train" else evaluated
        if not self._tasks:
            raise ValueError(
                f"verifiers:{taskset} must have tasks to train on that are not evaluated; name"
                " other options under validation"
            )
        if self._world.schemas:
            self.tools = self._world.schemas
        self._solved_at = solved_at
        self.max_turns = max_turns or self._world.seat.max_turns or _MAX_TURNS
        self._episode: asyncio.Task[None] | None = None

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    async def reset(self, seed: int) -> Sequence[Message]:
        await self.close()
        self._events: asyncio.Queue[Sequence[vf.Message] | vf.Trace | Exception] = asyncio.Queue()
        task = self._tasks[check_seed(seed) % len(self._tasks)]
        self._episode = asyncio.create_task(self._play(task.with_data()))
        event = await self._next()
        if isinstance(event, vf.Trace):
            raise RuntimeError(f"the episode ended before its first turn ({event.stop_condition})")
        return event

    def parse(self, text: str) -> str:
        """Return the text as it is: the library decides what an answer is worth."""
        return text

    async def step(self, text: str) -> StepResult:
        self._answer.set_result(text)
        event = await self._next()
        if not isinstance(event, vf.Trace):
            return StepResult(event, 0.0, terminated=False)
        is_cut = event.is_truncated
        is_solved = event.reward >= self._solved_at
        return StepResult("", event.reward, not is_cut, is_cut, {"success": is_solved})

    async def close(self) -> None:
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.wait([self._episode])

    async def _next(self) -> Sequence[Message] | vf.Trace:
        """Wait until the policy is asked, or the episode is over."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event if isinstance(event, vf.Trace) else [*map(_message, event)]

    async def _ask(self, messages: Sequence[vf.Message]) -> str:
        self._answer = asyncio.get_running_loop().create_future()
        self._events.put_nowait(messages)
        return await self._answer

    async def _play(self, task: vf.Task) -> None:
        try:
            event: vf.Trace | Exception = await self._outcome(task)
        except Exception as error:  # a task of asyncio would keep it, while `_next` waits for ever
            event = error
        self._events.put_nowait(event)

    async def _outcome(self, task: vf.Task) -> vf.Trace:
        """Play one episode as `Env.run_episode` does."""
        environment = self._world.environment
        chat = _Chat(self._world, _Tools("the task", type(task).toolsets(task.config)))
        task.toolsets = lambda config: []  # of this task: `chat` has them
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
        if len(episode.traces) != 1:
            raise ValueError(
                f"{type(environment).__name__}.run must run its agent once in an episode, and ran"
                f" it {len(episode.traces)} times; play it as an agent"
            )
        trace = episode.traces[0]
        if not trace.ok:
            raise RuntimeError(f"{trace.last_error.type}: {trace.last_error.message}")
        return trace


@dataclass
class _World:
    """An environment of the library with its tasks, which all episodes of a process share."""

    environment: vf.Env
    seat: vf.AgentConfig
    tasks: list[vf.Task]
    schemas: list[dict[str, Any]]
    shared: "_Tools"
    """Tools of the taskset that serve all episodes."""


@lru_cache(maxsize=16)
def _world(taskset: str, environment: str, options: str, max_tasks: int) -> _World:
    name = f"verifiers:{taskset}"
    config = {"id": environment, "taskset": {"id": taskset, **json.loads(options)}}
    try:
        loaded = vf.load_environment(vf.resolve_env_config(config))
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
        )
        raise ValueError(f"{name} cannot be built: {wrong}") from None
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{name} cannot be built: {' '.join(str(error).split())}") from error
    seats = [value for _, value in loaded.config if isinstance(value, vf.AgentConfig)]
    pinned = [seat.harness.id for seat in seats if seat.harness is not None]
    own = vf.default_harness_id(taskset)
    if len(seats) > 1 or {*pinned, own} - {"null", "bash"} or "bash" in pinned:
        raise ValueError(
            f"{name} must have one agent, which chats, and has {len(seats)}, which"
            f" {' and '.join(pinned or [own])} runs; play it as an agent"
        )
    if limits := [limit for limit in _TOKEN_LIMITS if getattr(seats[0], limit) is not None]:
        raise ValueError(
            f"{name} sets {', '.join(limits)}, and the trainer counts the tokens; set"
            " --max-context-length instead"
        )
    shared = _Tools(name, type(loaded.taskset).toolsets(loaded.taskset.config))
    of_task = _Tools(name, type(loaded.taskset).task_type().toolsets(loaded.taskset.config.task))
    with ThreadPoolExecutor(1) as thread:  # this one may have an event loop already
        schemas = [
            schema
            for tools in (shared, of_task)
            for schema in thread.submit(asyncio.run, tools.schemas()).result()
        ]
    tasks = list(loaded.taskset if loaded.taskset.bounded else loaded.taskset.take(max_tasks))
    return _World(loaded, seats[0], tasks, schemas, shared)


class _Tools:
    """Toolsets of the library, served in this process as its tool servers would serve them."""

    def __init__(self, name: str, toolsets: Sequence[vf.Toolset]) -> None:
        """Raises ValueError for toolsets that run elsewhere."""
        for toolset in toolsets:
            place = getattr(toolset.config, "url", None) or toolset.config.runtime.type
            if place != "subprocess":
                raise ValueError(
                    f"{name} has tools in {place}, and only tools that run in this process can be"
                    " called; play it as an agent"
                )
        self._toolsets = toolsets
        self._opening = asyncio.Lock()
        self._open: dict[str, tuple[MCPServer, Tool]] | None = None
        self._stack = AsyncExitStack()

    async def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas for a chat template."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for name, (_, tool) in (await self._served()).items()
        ]

    async def open(self, task: vf.TaskData | None = None) -> dict[str, tuple[MCPServer, Tool]]:
        """Set the toolsets up, once, and return the tools by name; `task` is the task of toolsets
        that serve no other.
        """
        async with self._opening:
            if self._open is None:
                for toolset in self._toolsets:
                    toolset._pull_state = _current_state
                    await self._stack.enter_async_context(toolset._exit_stack)
                    await toolset.setup()
                    if task is not None:
                        await toolset.setup_task(task)
                self._open = await self._served()
        return self._open

    async def close(self) -> None:
        await self._stack.aclose()

    async def _served(self) -> dict[str, tuple[MCPServer, Tool]]:
        found: dict[str, tuple[MCPServer, Tool]] = {}
        for toolset in self._toolsets:
            server = MCPServer(toolset.server_name or "tools")
            toolset.register(server)
            prefix = f"{toolset.server_name}_" if toolset.server_name else ""
            found |= {f"{prefix}{tool.name}": (server, tool) for tool in await server.list_tools()}
        return found


async def _current_state() -> vf.State:
    return _state.get()


class _Chat(NullHarness):
    """The library's chat loop in this process: it asks the model and calls tools until the model
    answers without a call.
    """

    SUPPORTS_TOOL_INTERCEPTION = False

    def __init__(self, world: _World, tools: _Tools) -> None:
        super().__init__(NullHarnessConfig(id="null"))
        self._world, self._tools = world, tools

    async def setup(self, runtime: vf.Runtime) -> None:
        """Do nothing: the loop needs no program."""

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
            raise ValueError("the tools of a taskset must be those of all its tasks")
        system, prompt = self.resolve_prompt(data)
        start = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else [*prompt]
        if system is not None:
            start.insert(0, vf.SystemMessage(content=system))
        messages = [*map(message_to_wire, start)]
        body = {"messages": messages, "tools": self._world.schemas or None}
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=None, trust_env=False) as client:
            while True:
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                if reply.is_error:
                    raise vf.HarnessError(reply.text)
                messages.append(message := reply.json()["choices"][0]["message"])
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    answer = await _call(tools, **call["function"])
                    heading = {"role": "tool", "tool_call_id": call["id"]}
                    named = heading | {"name": call["function"]["name"], "content": answer}
                    messages.append(bound_tool_message(named))

    async def cleanup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await self._tools.close()


async def _call(tools: Mapping[str, tuple[MCPServer, Tool]], name: str, arguments: str) -> Any:
    """Return the content of a tool's answer; what goes wrong is an answer too."""
    if name not in tools:
        return f"error: unknown tool {name!r}"
    server, tool = tools[name]
    try:
        result = await server.call_tool(tool.name, json.loads(arguments))
    except Exception as error:  # the library's servers answer with the text of any error
        return str(error)
    return mcp_content_to_chat_content(result.content)


class _Policy(vf.Client):
    """The model that the library calls: `ask` returns the answer of the policy to new messages."""

    def __init__(self, ask: Callable[[Sequence[vf.Message]], Awaitable[str]]) -> None:
        self._ask = ask
        self._known: list[vf.Message] = []

    async def get_response(self, dialect: Dialect, body: dict, *_: Any, **__: Any) -> vf.Response:
        messages, num_known = dialect.parse_request(body).messages, len(self._known)
        if messages[:num_known] != self._known or len(messages) == num_known:
            raise vf.HarnessError(
                "an episode must be one conversation that only grows, and its history was changed,"
                " or a second one began; play it as an agent"
            )
        self._known = messages
        message = _assistant(await self._ask(messages[num_known:]), body, num_known)
        completion = {
            "id": f"turn_{num_known}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }
        response = dialect.parse_response(dialect.validate_response(completion))
        response.raw = completion
        self._known = [*messages, response.message]
        return response


def _assistant(text: str, body: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """Return the policy's text as a message of the assistant, with the tool calls that can be read
    in it.
    """
    try:
        called = tool_calls(text) if body.get("tools") else []
    except ValueError:  # what cannot be read stays text
        called = []
    if not called:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": text.partition("<tool_call>")[0].strip() or None,
        "tool_calls": [
            {
                "id": f"call_{turn}_{index}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for index, call in enumerate(called)
        ],
    }


class _Door(InterceptionServer):
    """The server through which the library's episode reaches the policy, on the loopback."""

    def __init__(self, policy: _Policy) -> None:
        super().__init__()
        self._policy = policy

    def _client(self, config: Any) -> _Policy:
        return self._policy


class _Seat(vf.Agent):
    """An agent whose runs are kept in `traces`."""

    traces: list[vf.Trace]

    async def run(self, task: vf.Task, **options: Any) -> vf.Trace:
        return await super().run(task, on_trace=self.traces.append, **options)

    def interaction(self, task: vf.Task, **options: Any) -> Any:
        return super().interaction(task, on_trace=self.traces.append, **options)


def _played(seat: vf.AgentConfig, max_turns: int) -> vf.AgentConfig:
    """Return the configuration of a seat that the policy plays."""
    changes: dict[str, Any] = {"model": "policy", "max_turns": max_turns}
    changes["harness"] = NullHarnessConfig(id="null")
    changes["timeout"] = seat.timeout.model_copy(update={"rollout": _UNHURRIED})
    if "runtime" not in seat.model_fields_set:
        changes["runtime"] = vf.SubprocessConfig()
    return seat.model_copy(update=changes)


def _prompt(task: vf.Task) -> str:
    """Return what tells a task from others in a split: its prompt, or the row without one."""
    data = task.data
    shown = {"prompt", "system_prompt"} if data.prompt is not None else None
    return data.model_dump_json(include=shown, exclude={"idx"})


def _message(message: vf.Message) -> Message:
    content = message.content or ""
    if content_text(content) != content or getattr(message, "tool_calls", None):
        raise ValueError(
            "a message of a task must be a text, without pictures and tool calls, not"
            f" {message!r:.60}"
        )
    return Message(message.role, content)
