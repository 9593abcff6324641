"""Environments of the verifiers hub beside the library's own rollouts, whose programs and tools run
in processes and ask a model that gives the same answers.
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragen_mega.environments import calls
from ragen_mega.environments.actions import read_response
from ragen_mega.environments.registry import declares, held_out_options, make
from tests.support.hub import MODULES, WRITTEN, echoes
from tests.support.web_server import Request, serving

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

    class Model(Request):
        def answer(self) -> None:
            seen.append(json.loads(self.body))
            text, call = turns[len(seen) - 1]
            delta: dict[str, Any] = {"role": "assistant", "content": text}
            if call:
                function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
                named = {"index": 0, "id": f"c{len(seen)}", "type": "function"}
                delta["tool_calls"] = [named | {"function": function}]
            finish = "tool_calls" if call else "stop"
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
            chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": finish}]
            events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
            self.reply(events.encode(), content_type="text/event-stream")

    with serving(Model) as address:
        yield f"http://{address}/v1"


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


@pytest.mark.slow
@pytest.mark.timeout(300)
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
    for request, (text, call) in zip(requests, turns, strict=True):
        given = [(each["role"], each["content"]) for each in request["messages"]]
        assert said == [(role, content or "") for role, content in given]
        result = answer(world, text, call)
        said += [("assistant", text)]
        said += [(message.role, message.content) for message in result.observation or ()]
    assert result.terminated and result.reward == pytest.approx(reward)
    calls.close(world)


def answer(world: Any, text: str, call: dict[str, Any] | None) -> Any:
    """The step after an answer in the words of the policy."""
    said = f"{text}\n<tool_call>\n{json.dumps(call)}\n</tool_call>" if call else text
    parsed = read_response(world, said, think=False, max_actions=1)
    assert parsed.is_format_valid
    return calls.step(world, *parsed.actions)


def rewards(taskset: str, prompt: str, turns: Sequence[Turn], **options: Any) -> list[float]:
    """The rewards of the steps of an episode."""
    world, _ = begun(taskset, prompt, **options)
    results = [answer(world, *turn) for turn in turns]
    assert not any(result.terminated or result.truncated for result in results[:-1])
    assert results[-1].terminated and results[-1].info["success"] == (results[-1].reward >= 1)
    calls.close(world)
    return [result.reward for result in results]


def test_episodes_at_a_time_are_not_mixed_up() -> None:
    with ThreadPoolExecutor(32) as pool:
        played = pool.map(lambda episode: rewards(*episode[:3]), WRITTEN * 10)
        for found, (_, _, turns, reward) in zip(played, WRITTEN * 10, strict=True):
            assert found == pytest.approx([0.0] * (len(turns) - 1) + [reward])


def test_no_prompt_is_trained_on_and_evaluated() -> None:
    def prompts(**options: Any) -> set[str]:
        world = make("verifiers:sums_v1", **options)
        found = {calls.reset(world, seed)[-1].content for seed in range(world.num_tasks)}
        calls.close(world)
        assert len(found) == world.num_tasks
        return found

    held_out = held_out_options("verifiers:sums_v1")
    assert declares("verifiers:sums_v1", "max_turns")
    trained, evaluated = prompts(), prompts(**held_out)
    assert (len(trained), len(evaluated), trained & evaluated) == (18, 2, set())
    few = {"validation": {"largest": 5}}
    trained, evaluated = prompts(**few), prompts(**few, **held_out)
    assert (len(trained), len(evaluated), trained & evaluated) == (15, 5, set())


def test_an_endless_taskset_is_read_up_to_a_number(tmp_path: Path) -> None:
    (tmp_path / "echo_v1.py").write_text(echoes())
    assert make("verifiers:echo_v1", max_tasks=50).num_tasks == 45
    assert rewards("echo_v1", "echo 7", [("echo 7", None)], max_tasks=50) == [1.0]


def test_what_was_done_counts_where_the_turns_end() -> None:
    deposit = {"name": "deposit", "arguments": {"amount": 1}}
    world, _ = begun("bank_v1", "You have 3. Save 13.", max_turns=2)
    assert world.max_turns == 2
    assert not answer(world, "", deposit).truncated
    assert answer(world, "wait", None).reward == 0, "a turn without a call ends the chat"
    world, _ = begun("guess_v1", "Guess my number from 0 to 9, game 3.", max_turns=2)
    assert calls.step(world, "5").observation[0].content == "lower"
    cut = calls.step(world, "2")
    assert (cut.terminated, cut.truncated, cut.reward) == (False, True, 0.0)
    assert calls.reset(world, 0), "a cut episode leaves nothing behind"
    calls.close(world)


def test_a_call_that_cannot_be_read_is_text() -> None:
    world, _ = begun("lookup_v1", "What does oak mean?")
    result = calls.step(world, '<tool_call>{"name": "dictionary_look_up"')
    assert result.terminated and result.reward == 0


@pytest.mark.parametrize(
    ("taskset", "module", "options", "rule"),
    [
        ("no_such_v1", "", {}, "not found"),
        ("sums_v1", MODULES["sums_v1"], {"smallest": 3}, "smallest"),
        ("sums_v1", MODULES["sums_v1"], {"validation": {}}, "none that the evaluation leaves"),
        ("shell_v1", echoes('harness={"id": "bash"}'), {}, "one agent that chats"),
        ("long_v1", echoes("max_total_tokens=9"), {}, "max-context-length"),
        (
            "pair_v1",
            echoes(") ; user: vf.AgentConfig = vf.AgentConfig("),
            {},
            "it has 2",
        ),
        (
            "away_v1",
            MODULES["lookup_v1"].replace("ToolsetConfig())]", 'ToolsetConfig(url="http://a/b"))]'),
            {},
            "run in this process",
        ),
    ],
)
def test_what_cannot_be_an_environment_is_one_line(
    tmp_path: Path, taskset: str, module: str, options: dict[str, Any], rule: str
) -> None:
    if module:
        (tmp_path / f"{taskset}.py").write_text(module)
    with pytest.raises(ValueError, match=rule) as caught:
        make(f"verifiers:{taskset}", **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_an_episode_of_two_conversations_fails_by_itself(tmp_path: Path) -> None:
    (tmp_path / "twice_v1.py").write_text(echoes(num_runs=2))
    world = make("verifiers:twice_v1")
    calls.reset(world, 0)
    with pytest.raises(RuntimeError, match="one conversation that only grows"):
        calls.step(world, "echo 0")


def test_a_reward_that_fails_is_no_reward_of_zero(tmp_path: Path) -> None:
    text = MODULES["sums_v1"].replace("return float(trace", "return 1 / 0 + float(trace", 1)
    (tmp_path / "wrong_v1.py").write_text(text)
    world = make("verifiers:wrong_v1")
    calls.reset(world, 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        calls.step(world, "14")


def test_shared_tools_whose_setup_fails_are_set_up_again_by_the_next_episode(
    tmp_path: Path,
) -> None:
    """What they had opened is closed before."""
    failing = """
    async def setup(self):
        from pathlib import Path

        def note(said):
            with Path("setups").open("a") as file:
                file.write(said)

        note("open ")
        self._exit_stack.callback(note, "close ")
        if Path("setups").read_text().count("open") < 3:
            raise ConnectionError("the database is away for a moment")

    @vf.tool
"""
    owner, _, tools = MODULES["lookup_v1"].partition("    @classmethod\n")
    tools, reward, others = tools.partition("    @vf.reward\n")
    module = owner + reward + others  # which the task has no more, but all tasks together
    module = module.replace("    def load(self)", f"    @classmethod\n{tools}    def load(self)")
    (tmp_path / "unsteady_v1.py").write_text(module.replace("\n    @vf.tool\n", failing, 1))
    turns = [("", {"name": "dictionary_look_up", "arguments": {"name": "oak"}}), ("blue", None)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="away for a moment"):
            rewards("unsteady_v1", "What does oak mean?", turns)
    for _ in range(2):
        assert rewards("unsteady_v1", "What does oak mean?", turns) == [0.0, 1.0]
    assert (tmp_path / "setups").read_text() == "open close open close open "
