"""Tools of real MCP servers, over the standard input and HTTP: ours by the SDK, a plain one without
it, and one of the protocol's authors.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp.types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ResourceLink,
    TextResourceContents,
)

from ragen_mega.config import parse
from ragen_mega.environments import calls
from ragen_mega.environments.adapters import mcp as adapter
from ragen_mega.environments.adapters.mcp import McpTools
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.registry import make
from ragen_mega.models.tokenizer import train_tokenizer
from ragen_mega.rollout.renderer import ChatRenderer
from tests.support import mcp_server, plain_mcp_server
from tests.support.processes import command_of, is_alive, wait_until

OURS = f"{sys.executable} {mcp_server.__file__}"
PLAIN = f"{sys.executable} -S {plain_mcp_server.__file__}"
TEMPLATE = Path(__file__).parents[1] / "support" / "templates" / "qwen3.jinja"


ENDLESS = """
import json
import sys

page = 0
for line in sys.stdin:
    request = json.loads(line)
    if request.get("method") == "initialize":
        version = request["params"]["protocolVersion"]
        about = {"name": "endless", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    elif request.get("method") == "tools/list":
        page += 1
        tool = {"name": f"tool_{page}", "inputSchema": {"type": "object"}}
        result = {"tools": [tool], "nextCursor": CURSOR}
    elif "id" in request:
        error = {"code": -32601, "message": "no such method"}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}), flush=True)
        continue
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""


@contextmanager
def serving(port: int = 0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """URL and process of our server over HTTP."""
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    with subprocess.Popen([*OURS.split(), str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
            yield f"http://127.0.0.1:{port}/mcp", process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as (address, _):
        yield address


@pytest.fixture(params=["program", "http"], scope="module")
def server(request: pytest.FixtureRequest) -> str:
    return OURS if request.param == "program" else request.getfixturevalue("url")


def ask(tools: McpTools, name: str, /, **arguments: Any) -> str:
    """The text of a result, as an episode gets it."""
    result = calls.step(tools, {"name": name, "arguments": arguments})
    ((role, text),) = [(message.role, message.content) for message in result.observation]
    assert (role, result.reward, result.terminated, result.truncated) == ("tool", 0, False, False)
    assert result.info["is_action_effective"] == (not text.startswith("Error"))
    return text


def test_schemas_come_to_the_letter_and_results_as_text(server: str) -> None:
    tools = McpTools(server)
    served = asyncio.run(mcp_server.server.list_tools())
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools.tools}
    assert schemas == {tool.name: tool.input_schema for tool in served}
    renderer_sees = prompt_of(tools.tools)
    for tool in tools.tools:
        assert json.dumps(tool) in renderer_sees
    assert ask(tools, "add", a=20, b=3) == "23"
    assert ask(tools, "add", a="x", b=3).startswith("Error executing tool add: 1 validation error")
    assert json.loads(ask(tools, "town", name="Graz")) == {"name": "Graz", "people": 306_000}
    assert ask(tools, "draw") == "a dot\n[image/png is left out: only text can be read]"
    assert ask(tools, "fault", kind="raise").startswith("Error executing tool fault")
    huge = McpTools(server, timeout=120.0, max_result=9, is_shared=True)
    assert ask(huge, "fault", kind="huge") == "xxxxxxxxx\n[cut: it has 10000000 characters]"
    for each in (tools, huge):
        each.close()


def prompt_of(tools: list[dict[str, Any]]) -> str:
    tokenizer = train_tokenizer([json.dumps(tools), "system user assistant Add."])
    tokenizer.chat_template = TEMPLATE.read_text()
    renderer = ChatRenderer(tokenizer, think=False)
    return tokenizer.decode(renderer.start(Episode(Asked(), EpisodeConfig()).start(0), tools))


class Asked:
    def reset(self, seed):
        return [("user", "Add.")]

    def step(self, call):
        return "", 0.0, True, False, {}


def test_parts_of_a_result_that_are_no_text_are_named() -> None:
    text = TextResourceContents(uri="file:///a", text="inside")
    blob = BlobResourceContents(uri="file:///b", blob="", mime_type="audio/wav")
    content = [EmbeddedResource(resource=part) for part in (text, blob)]
    content.append(ResourceLink(name="c", uri="file:///c"))
    assert adapter._text(CallToolResult(content=content)).splitlines() == [
        "inside",
        "[audio/wav is left out: only text can be read]",
        "[a link to file:///c]",
    ]
    assert adapter._text(CallToolResult(content=[], structured_content={"a": "\u00e9"})) == (
        '{"a": "\u00e9"}'
    )
    assert adapter._text(CallToolResult(content=[])) == "[the tool says nothing]"


def test_sessions_end_with_their_episode_unless_they_are_shared(server: str) -> None:
    first, second = McpTools(server), McpTools(server)
    assert ask(first, "note", text="a") == "a" and ask(first, "note", text="b") == "a, b"
    assert ask(second, "note", text="c") == "c", "two environments at a time"
    first.close()
    assert ask(first, "note", text="d") == "d", "two episodes of one environment"
    second.close()
    shared = McpTools(server, is_shared=True)
    said = ask(shared, "note", text="e")
    shared.close()
    assert ask(McpTools(server, is_shared=True), "note", text="f") == f"{said}, f"
    first.close()


@pytest.mark.parametrize(
    ("fault", "only", "num_before"),
    [("reads", (), 1), ("reads and writes", (), 0), ("reads and writes", ("add",), 1), ("", (), 0)],
)
def test_one_process_serves_all_episodes_where_no_tool_writes(
    fault: str, only: tuple[str, ...], num_before: int
) -> None:
    """The server counts the calls of its session; a second word names another server."""
    command = f"{PLAIN} '{fault}' {'alone' if only else 'whole'}"
    for episode in range(2):
        tools = McpTools(command, only=only)
        said = ask(tools, "add", a=1, b=2)
        tools.close()
        assert said == f"3 in call {1 + episode * num_before}"


def test_a_server_that_dies_or_hangs_costs_an_episode_and_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_SECONDS_TO_LIST", 0.2)
    for fault, error, said in (
        ("dies", ConnectionError, r"dies' failed in tool add \(.*; it wrote: out of paper\)"),
        ("hangs", TimeoutError, "tool add of .* took longer than 1 s; raise its timeout"),
        ("nonsense", ConnectionError, "nonsense' failed in tool add .*content"),
    ):
        for is_shared in (False, True):
            tools = McpTools(f"{PLAIN} {fault}", timeout=1.0, is_shared=is_shared)
            for _ in range(2):
                with pytest.raises(error, match=said) as failed:
                    ask(tools, "add", a=1, b=2)
                assert "\n" not in str(failed.value)
                tools.close()


def test_a_slow_call_does_not_end_a_shared_session(url: str) -> None:
    tools = McpTools(url, is_shared=True, timeout=1.0)
    ask(tools, "note", text="before")
    with pytest.raises(TimeoutError, match="tool fault of .* took longer than 1 s"):
        ask(tools, "fault", kind="hang")
    assert "before" in ask(tools, "note", text="after")


def test_a_run_outlives_the_restart_of_a_server_over_http() -> None:
    with serving() as (address, process):
        alone, shared = (McpTools(address, is_shared=is_shared) for is_shared in (False, True))
        for tools in (alone, shared):
            ask(tools, "note", text="before")
        process.kill()
        process.wait()
        for tools in (alone, shared):
            with pytest.raises(ConnectionError, match=f"{address}' failed in tool note"):
                ask(tools, "note", text="lost")
            tools.close()
    with serving(int(address.split(":")[2].partition("/")[0])):
        for tools in (alone, shared):
            assert ask(tools, "note", text="after") == "after"
            tools.close()


def test_servers_that_cannot_be_used_are_one_line_at_the_start(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    for servers, options, said in (
        (
            ["no_such_program -x"],
            {},
            "'no_such_program -x' does not start .*; it wrote: FileNotFoundError",
        ),
        ([""], {}, "MCP server '' does not start"),
        (["'"], {}, "No closing quotation"),
        ([f"{PLAIN} 'no start'"], {}, "does not start .*; it wrote: no licence"),
        ([f"{PLAIN} 'no answer'"], {}, "does not start .not within 2 s"),
        (["http://127.0.0.1:9/mcp"], {}, "9/mcp' does not start .All connection attempts failed"),
        ([f"{url}/no"], {}, "no' does not start .Not Found"),
        ([f"{PLAIN} 'no tools'"], {}, "must have tools, and names none"),
        ([f"{PLAIN} 'no list'"], {}, "failed in the list of tools .*should be a valid list"),
        ([f"{PLAIN} 'no schema'"], {}, r"tool add must .* and \$\.properties\.a\.type of it is"),
        ([PLAIN, f"{PLAIN} "], {}, "distinct names, and add is one of"),
        ([PLAIN], {"only": ["add", "sub"]}, "not sub; it has add"),
    ):
        patience = 2.0 if "no answer" in servers[0] else 60.0
        monkeypatch.setattr(adapter, "_SECONDS_TO_START", patience)
        with pytest.raises(ValueError, match=said) as failed:
            McpTools(*servers, **options)
        assert "\n" not in str(failed.value)


@pytest.mark.parametrize(("cursor", "num_pages"), [("'more'", 2), ("str(page)", 101)])
def test_a_list_of_tools_without_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cursor: str, num_pages: int
) -> None:
    """A server that names the same next page for ever, and one that always names a new one."""
    program = tmp_path / "endless.py"
    program.write_text(ENDLESS.replace("CURSOR", cursor))
    with pytest.raises(ValueError, match=f"has no end: after {num_pages} pages") as caught:
        McpTools(f"{sys.executable} -S {program}")
    assert "\n" not in str(caught.value)


def test_programs_start_in_the_directory_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_server.py").write_text(Path(mcp_server.__file__).read_text())
    (tmp_path / "rows.jsonl").write_text('{"question": "?", "answer": 1}\n' * 2)
    monkeypatch.chdir(tmp_path)
    flags = ["--tasks", "rows.jsonl", "--mcp", f"{sys.executable} my_server.py"]
    config = parse(flags).environment.located()
    monkeypatch.chdir("/")
    options = config.options("tasks:rows.jsonl") | {"validation": "rows.jsonl"}
    world = make("tasks:rows.jsonl", **options)
    calls.reset(world, 0)
    call = {"name": "add", "arguments": {"a": 20, "b": 3}}
    assert calls.step(world, call).observation[0].content == "23"
    world.close()


def test_a_server_of_the_protocols_authors() -> None:
    pytest.importorskip("mcp_server_time", reason="needs mcp 2.3, and verifiers takes 2.0.0 alone")
    time_server = f"{sys.executable} -m mcp_server_time --local-timezone UTC"
    tools = McpTools(time_server, PLAIN, only=["convert_time", "add"], is_shared=False)
    assert [tool["function"]["name"] for tool in tools.tools] == ["convert_time", "add"]
    noon = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    said = json.loads(ask(tools, "convert_time", **noon))
    assert said["target"]["datetime"].endswith("T21:00:00+09:00")
    assert "Error" in ask(tools, "convert_time", **noon | {"target_timezone": "Nowhere"})
    assert ask(tools, "add", a=4, b=5) == "9 in call 1"

    def are_running() -> list[bool]:
        children = psutil.Process().children()
        return ["mcp_server_time" in command_of(child.pid) for child in children]

    assert sum(are_running()) == 1
    tools.close()
    assert not any(are_running())
    # Its tools are read-only by its own word, so one process serves all episodes unless told.
    assert McpTools(time_server)._is_shared == {time_server: True}


@pytest.mark.parametrize("is_shared", [False, True])
def test_an_error_of_a_tool_is_its_answer_and_keeps_the_session(is_shared: bool) -> None:
    """Whatever its code; the SDK uses -32000 for connections that are closed, and servers do for
    their own errors.
    """
    for code in (-32602, -32603, -32601, -32600, -32000, -32001, 7):
        refusing = McpTools(f"{PLAIN} 'refuses {code}'", is_shared=is_shared)
        assert ask(refusing, "add", a=1) == "Error: no such arguments"
        sessions = adapter._shared if is_shared else refusing._sessions
        (session,) = [s for s in sessions.values() if f"refuses {code}'" in s._server]
        assert ask(refusing, "add", a=2) == "Error: no such arguments"
        assert session in sessions.values() and not session.is_over
        refusing.close()


def test_a_call_that_cannot_be_sent_keeps_the_session() -> None:
    tools = McpTools(f"{PLAIN} notifies")
    assert ask(tools, "add", a=1) == "1 in call 1"
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    for odd in ("\ud83d", float("nan"), {1, 2}, deep):
        assert ask(tools, "add", a=odd).startswith("Error: arguments must be valid JSON")
    assert ask(tools, "sub", a=1) == "Error: there is no tool 'sub'"
    assert ask(tools, "add", a=3) == "3 in call 2", "the same session"
    tools.close()


USE = """
import os, signal, sys
from ragen_mega.environments.adapters.mcp import McpTools
for is_shared in (False, True):
    McpTools(sys.argv[1], is_shared=is_shared).step({"name": "add", "arguments": {"a": 1}})
ending = sys.argv[2]
if ending == "end":
    sys.exit()
os.kill(os.getpid(), int(ending))
"""


@pytest.mark.parametrize(
    "ending",
    [
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("end", int(signal.SIGTERM))),
        int(signal.SIGKILL),
    ],
)
def test_no_program_is_left_behind(tmp_path: Path, ending: Any) -> None:
    """Of servers that ignore the end of their input and SIGTERM."""
    command = [sys.executable, "-c", USE, f"{PLAIN} {plain_mcp_server.STUBBORN}", str(ending)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr and abs(done.returncode) == (
        ending if ending != "end" else 0
    )
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3, "one was asked for its tools"
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    sums = [{"question": f"Add {n} and 4.", "answer": n + 4} for n in range(9)]
    Path("my_data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sums))
    return "tasks:my_data.jsonl"


def called(**arguments: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"


def test_tasks_from_a_file_are_solved_with_tools(rows: str) -> None:
    flags = ["--tasks", "my_data.jsonl", "--mcp", PLAIN]
    options = parse(flags).environment.options(rows)
    assert options == {"mcp": PLAIN}
    for after, form, written in (
        (None, "<answer> [your answer] </answer>", "<answer>{}</answer>"),
        ("####", "#### [your answer]", "so\n#### {}"),
    ):
        told = "stand in its tags" if after is None else "follow '####'"
        extra = {} if after is None else {"answer_after": after}
        episode = Episode(make(rows, **options, **extra), EpisodeConfig())
        assert episode.tools == McpTools(PLAIN).tools and episode.budget.max_turns == 5
        first = episode.start(2)[-1].content
        assert f"</tool_call> or {form} with no extra text" in first
        left = int(first.partition("Add ")[2].split()[0])
        result = episode.respond(f"sum</think>{called(a=left, b=4)}{called(a=1)}")
        said = [(message.role, message.content) for message in result.messages]
        assert said == [("tool", f"{left + 4} in call 1"), ("tool", "1 in call 2")]
        assert result.reward == 0 and not result.terminated and result.info["is_action_effective"]
        wrong = episode.respond(f"sum</think>{called(a=left, c=4)}")
        assert (
            not wrong.info["is_action_valid"] and "'c' was unexpected" in wrong.messages[0].content
        )
        unread = episode.respond("sum</think>nine")
        assert not unread.info["is_format_valid"] and told in unread.messages[0].content
        right = episode.respond("sum</think>" + written.format(left + 4))
        assert right.terminated and right.info["success"] and right.reward == 1
        episode.start(2)
        again = episode.respond(f"sum</think>{called(a=2)}")
        assert again.messages[0].content == "2 in call 1", "a new session"
        calls.close(episode.environment)


def test_a_reference_that_is_read_as_a_call_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    rows = [{"prompt": f"Add {n} and 4.", "answer": called(a=n)} for n in range(2)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    world = make(f"tasks:{path}", mcp=PLAIN, answer_after="####")
    note = world.judge_references()
    assert "1 of 1 references" in note and "(it is read as a call of tools)" in note


def test_a_window_of_turns_keeps_the_question(rows: str) -> None:
    episode = Episode(make(rows, mcp=PLAIN), EpisodeConfig())
    opening = episode.start(0)
    result = episode.respond(f"sum</think>{called(a=1)}")
    assert episode.beginning(result.messages) == [*opening, *result.messages]
    calls.close(episode.environment)


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    for name in ("my_server.py", "my_search.py"):
        source = page.partition(f"```python\n# {name}\n")[2].partition("```")[0]
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    episode = Episode(make("my_search:Search"), EpisodeConfig(think=False))
    episode.start(0)
    call = '<tool_call>{{"name": "multiply", "arguments": {{"a": 17, "b": {}}}}}</tool_call>'
    assert [m.content for m in episode.respond(call.format(2)).messages] == ["34"]
    assert episode.respond(call.format(23)).info["success"]
    calls.close(episode.environment)


OWN = f"""
from ragen_mega.environments.adapters.mcp import McpTools


class Ask:
    def __init__(self):
        self.server = McpTools({PLAIN!r})
        self.tools = self.server.tools

    def reset(self, seed):
        self.server.close()
        return [("user", "Make nine.")]

    async def step(self, call):
        return self.server.step(call)
"""


def test_a_call_that_would_wait_for_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_async.py").write_text(OWN)
    episode = Episode(make("my_async:Ask"), EpisodeConfig())
    episode.start(0)
    with pytest.raises(RuntimeError, match="must not be called in one that is async"):
        episode.respond(f"sum</think>{called(a=1)}")
