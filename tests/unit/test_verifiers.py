"""Environments of the verifiers hub beside the library's own rollouts: its chat program and its tool
servers, each in a process, talk to a model that gives the same answers.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ragen_mega.environments import calls
from ragen_mega.environments.actions import read_response
from ragen_mega.environments.registry import declares, held_out_options, make
from tests.support.hub import MODULES, WRITTEN

vf = pytest.importorskip("verifiers.v1", reason="needs the extra verifiers")

Turn = tuple[str, dict[str, Any] | None]
"""An answer: a text, and a call of a tool."""


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the hub in the working directory, unknown to earlier tests."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PRIME_API_KEY", "none")
    sys.modules.pop("ragen_mega.environments.adapters.verifiers", None)


@contextmanager
def model(turns: Sequence[Turn], seen: list[dict[str, Any]]) -> Iterator[str]:
    """The address of a model that gives these answers in turn; `seen` gets the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            text, call = turns[len(seen) - 1]
            delta: dict[str, Any] = {"role": "assistant", "content": text}
            if call:
                function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
                named = {"index": 0, "id": f"c{len(seen)}", "type": "function"}
                delta["tool_calls"] = [named | {"function": function}]
            finish = "tool_calls" if call else "stop"
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
            chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": finish}]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def played_by_the_library(
    taskset: str, prompt: str, turns: Sequence[Turn], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[str, Any]], Any]:
    """The requests that its model got, and the trace, of one task."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    async def program(self: Any, script: str, *_: Any, **__: Any) -> list[str]:
        Path(taskset).with_suffix(".program.py").write_text(script)
        return [sys.executable, str(Path(taskset).with_suffix(".program.py").absolute())]

    monkeypatch.setattr(SubprocessRuntime, "prepare_uv_script", program)  # which downloads packages
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 10}
    (name,) = agent_config_fields(vf.env_config_type(taskset)())
    config = vf.resolve_env_config({"taskset": {"id": taskset}, name: seat})
    environment = vf.load_environment(config)
    (task,) = [task for task in environment.taskset if task.data.prompt_text == prompt]
    seen: list[dict[str, Any]] = []

    async def play(url: str) -> Any:
        client = vf.EvalClientConfig(base_url=url)
        async with environment.serving():
            return await environment.run_episode(task, vf.ModelContext(model="m", client=client))

    with model(turns, seen) as url:
        episode = asyncio.run(play(url))
    assert not episode.errors and episode.ok, [episode.errors, episode.traces[0].errors]
    return seen, episode.traces[0]


def begun(taskset: str, prompt: str, **options: Any) -> tuple[Any, list[Any]]:
    """An environment with its first messages, in the task with this prompt."""
    for split in ("train", "validation"):
        world = make(f"verifiers:{taskset}", split=split, **options)
        for seed in range(world.num_tasks):
            messages = calls.reset(world, seed)
            if messages[-1].content == prompt:
                return world, list(messages)
    raise AssertionError(f"no task {prompt!r}")


@pytest.mark.parametrize(("taskset", "prompt", "turns", "reward"), WRITTEN)
def test_an_episode_is_that_of_the_library(
    taskset: str,
    prompt: str,
    turns: Sequence[Turn],
    reward: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests, trace = played_by_the_library(taskset, prompt, turns, monkeypatch)
    assert trace.reward == pytest.approx(reward)
    world, messages = begun(taskset, prompt)
    assert getattr(world, "tools", []) == (requests[0].get("tools") or [])
    said = [(message.role, message.content) for message in messages]
    for number, (text, call) in enumerate(turns):
        given = [(each["role"], each["content"]) for each in requests[number]["messages"]]
        assert [pair for pair in said if pair[0] != "assistant"] == [
            pair for pair in given if pair[0] != "assistant"
        ]
        answer = f"{text}\n<tool_call>\n{json.dumps(call)}\n</tool_call>" if call else text
        parsed = read_response(world, answer, think=False, max_actions=1)
        assert parsed.is_format_valid
        result = calls.step(world, parsed.actions[0])
        said += [("assistant", text)]
        is_over = number == len(turns) - 1
        assert (result.terminated, result.reward) == (is_over, reward if is_over else 0)
        if not is_over:
            said += [(message.role, message.content) for message in result.observation]
    assert result.info["success"] == (reward >= 1)
    calls.close(world)
