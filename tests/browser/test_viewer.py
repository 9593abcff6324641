"""What a run keeps for readers, and the page that shows it, opened in a real browser."""

import base64
import gzip
import hashlib
import json
import os
import re
import shutil
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ragen_mega import parse
from ragen_mega.agents.call_tree import CallTree, ChatMessage, ToolCall
from ragen_mega.commands import view
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.environments.registry import make
from ragen_mega.report import reader
from ragen_mega.report.glossary import GLOSSARY
from ragen_mega.report.metrics import CONFIG_FILE, METRICS_FILE, read_metrics
from ragen_mega.report.timeline import TIMELINE
from ragen_mega.report.traces import TraceWriter
from ragen_mega.report.viewer.data import trace_bytes
from ragen_mega.report.viewer.page import make_server, write_page
from ragen_mega.rollout.renderer import load_renderer
from ragen_mega.storage.rollouts import RolloutStore
from ragen_mega.train import train
from tests.support.refusals import refused
from tests.support.training import FLAGS

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
MORE = """
    --filter-strategy within_group --filter-value 0.5 --filter-keep-zero
    --lam 1 --reward-placement turn
    --keep-rollouts 0 --timeline --old-logprobs recompute --seed 3
    --environment-options {"frozen_lake":{"observation":"cells","success_rate":1.0}}
""".split()
NEVER_SEEN = "</script><b>never</b>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two environments; half of each group is filtered out; gamma and lambda are 1."""
    output = tmp_path_factory.mktemp("viewer")
    train(parse([*FLAGS, *MORE, "--output", str(output), "--name", "run"]))
    return output / "run"


def read_trace(run: Path, name: str) -> dict:
    return json.loads(gzip.decompress((run / "traces" / f"{name}.json.gz").read_bytes()))


def members(trace: dict) -> list[dict]:
    return [one for group in trace["groups"] for one in group["members"]]


def text_of(trace: dict, member: dict) -> str:
    return "".join(trace["strings"][at] for at in member["tokens"]).replace("\ufffd", "")


def test_traces_tell_what_was_sampled(run: Path) -> None:
    stored = RolloutStore(run / "rollouts").read(1).groups
    trace = read_trace(run, "step_00000001")
    tokenizer = AutoTokenizer.from_pretrained(run / "huggingface")
    played = [one for group in stored for one in group.trajectories]
    assert len(members(trace)) == len(played) == 16
    for told, one in zip(members(trace), played, strict=True):
        assert len(told["tokens"]) == len(one)
        assert [turn["reward"] for turn in told["turns"]] == pytest.approx(
            [turn.reward for turn in one.turns], rel=1e-3
        )
        sampled = [value for value, own in zip(one.rollout_logprobs, one.loss_mask) if own]
        assert told["channels"]["engine log-probability"] == pytest.approx(sampled, rel=1e-3)
        # What is no UTF-8 has no one way to be shown.
        assert text_of(trace, told) == tokenizer.decode(one.tokens).replace("\ufffd", "")


def test_returns_are_those_of_the_rewards_to_come(run: Path) -> None:
    """With gamma = lambda = 1 the return of a token is what its turn and all later ones earn."""
    trained = 0
    for group in read_trace(run, "step_00000001")["groups"]:
        for one in group["members"]:
            assert ("return" in one["channels"]) == one["kept"]
            assert ("entropy" in one["channels"]) == one["kept"]
            if not one["kept"]:
                continue
            rewards = [turn["reward"] for turn in one["turns"]]
            expected = [
                sum(rewards[index:])
                for index, turn in enumerate(one["turns"])
                for _ in range(turn["end"] - turn["start"])
            ]
            assert one["channels"]["return"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
            trained += 1
    assert trained == 8


def test_evaluations_show_the_same_prompts(run: Path) -> None:
    names = [path.name for path in sorted((run / "traces").glob("eval_*_frozen_lake.*"))]
    first, *rest = [read_trace(run, name.removesuffix(".json.gz")) for name in names]
    assert len(rest) >= 2 and len(first["groups"]) == 8
    for later in rest:
        assert [g["seed"] for g in later["groups"]] == [g["seed"] for g in first["groups"]]
        assert [m["pictures"][0] for m in members(later)] == [
            m["pictures"][0] for m in members(first)
        ]


def test_pictures_follow_the_turns(run: Path) -> None:
    """Without slips a move that is not blocked takes the player one cell on."""
    steps = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
    moved = 0
    for one in members(read_trace(run, "eval_00000003_frozen_lake")):
        pictures = one["pictures"]
        assert len(pictures) == len(one["turns"]) + 1
        for turn, before, after in zip(one["turns"], pictures[:-1], pictures[1:], strict=True):
            (r, c), actions = player(before), turn["info"]["actions"]
            for action in actions:
                r = min(3, max(0, r + steps[action][0]))
                c = min(3, max(0, c + steps[action][1]))
            assert player(after) == (r, c)
            moved += len(actions)
    assert moved


def player(picture: str) -> tuple[int, int]:
    """The cell of what is drawn last, on top."""
    column, row = re.findall(r"translate\((\d+) (\d+)\)", picture)[-1]
    return int(row) // 20, int(column) // 20


def test_sokoban_is_drawn_as_it_is() -> None:
    world = make("sokoban", dim=5)
    world.reset(0, board=["#####", "#PX_#", "#_O_#", "#___#", "#####"])
    picture = world.render()
    assert picture.count('fill="#5b6472"') == 16  # walls
    assert player(picture) == (1, 1)
    assert 'translate(40 20)"><rect x="3"' in picture  # the box, in row 1 and column 2
    assert 'translate(40 40)"><circle' in picture  # the target


def test_a_resumed_run_writes_its_steps_anew(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    stale = copy / "traces" / "step_00000009.json.gz"
    stale.write_bytes(b"of a step that the checkpoint does not know")
    kept = {path.name: path.read_bytes() for path in (run / "traces").iterdir()}
    again = ("--output", str(tmp_path), "--name", "run", "--num-steps", "4", "--resume")
    train(parse([*FLAGS, *MORE, *again]))
    assert not stale.exists()
    now = {path.name: path.read_bytes() for path in (copy / "traces").iterdir()}
    assert {name: now[name] for name in kept} == kept
    assert "step_00000003.json.gz" in now


def test_a_run_without_a_checkpoint_begins_its_record_anew(run: Path, tmp_path: Path) -> None:
    """Killed before the first one, it is resumed from step 0, and may be asked for fewer steps."""
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints")
    (copy / "summary.json").unlink()
    again = ("--output", str(tmp_path), "--name", "run", "--num-steps", "1", "--resume")
    train(parse([*FLAGS, *MORE, *again]))
    steps = [path.name[:13] for path in (copy / "traces").glob("step_*")]
    assert steps == ["step_00000000"]
    assert read_trace(copy, "step_00000000") == read_trace(run, "step_00000000")
    spans = [event for event in json.loads((copy / TIMELINE).read_text()) if event["ph"] == "X"]
    assert {event["args"]["step"] for event in spans} == {0}
    assert sum(event["name"] == "update" for event in spans) == 1


def test_every_metric_is_explained(run: Path) -> None:
    keys = {key for record in read_metrics(run / METRICS_FILE) for key in record} - {"step"}
    assert len(keys) > 40
    entries = "|".join(re.escape(name.removesuffix("/*")) for name in GLOSSARY)
    assert [key for key in keys if not re.match(f"({entries})($|[/_])", key)] == []


def test_a_page_has_its_limit(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    assert write_page([run], target) == 0
    whole = target.stat().st_size
    assert whole < 15e6
    left_out = write_page([run], target, most_megabytes=(whole - 3000) / 1e6)
    assert 0 < left_out < len(list((run / "traces").iterdir()))
    assert target.stat().st_size <= whole - 3000
    assert 'id="trace-0-step_00000002"' in target.read_text()  # the last step stays


def test_a_step_that_is_named_is_on_the_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However small the page has to be; a step that was not kept is refused, as the page would open
    at another.
    """
    target = tmp_path / "page.html"
    flags = (str(run), "--output", str(target))
    view.main([*flags, "--max-megabytes", "0.1", "--step", "1"])
    on_page = re.findall(r'id="trace-0-(step_\d+|eval_\w+)"', target.read_text())
    assert "step_00000001" in on_page and len(on_page) == 2  # and the last one
    assert capsys.readouterr().out.strip().endswith("one=0,step_00000001,0,0")
    assert "step 7; give --step 2" in refused(capsys, view.main, [*flags, "--step", "7"])


def test_what_a_run_holds_is_no_program_of_the_page(run: Path, tmp_path: Path) -> None:
    """The name of a trace is text, and the browser executes no script but the page's own."""
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("check*", "roll*"))
    (trace, *_) = (copy / "traces").glob("eval_*")
    step, _, _ = trace.name.removeprefix("eval_").partition("_")
    trace.rename(trace.with_name(f'eval_{step}_x"><script>alert(1)<.json.gz'))
    write_page([copy], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert(1)" not in page and "&lt;script&gt;alert(1)" in page
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe-inline' 'sha" not in policy


def long_run(directory: Path, num_steps: int, num_traces: int) -> Path:
    """The record of a run with 120 metrics and an evaluation every 100 steps."""
    (directory / "traces").mkdir(parents=True)
    (directory / CONFIG_FILE).write_text("{}")
    with (directory / METRICS_FILE).open("w") as file:
        for step in range(num_steps):
            row = {f"stage/name_{key}": (step + 1) / (key + 1.3) for key in range(119)}
            row |= {"eval/success": step / num_steps} if step % 100 == 99 else {}
            file.write(json.dumps({"step": step} | row) + "\n")
    group = {"id": 0, "environment": "bandit", "seed": 0, "kept": True, "members": []}
    trace = gzip.compress(json.dumps({"step": 0, "strings": [], "groups": [group]}).encode())
    for step in range(0, num_steps, num_steps // num_traces):
        (directory / "traces" / f"step_{step:08d}.json.gz").write_bytes(trace)
    return directory


def test_a_long_run_has_room_for_trajectories(tmp_path: Path) -> None:
    """Its 10,000 rows were 23 MB of the page, beside no trajectory."""
    run, target = long_run(tmp_path / "run", 10_000, 100), tmp_path / "page.html"
    assert write_page([run], target) == 0 and target.stat().st_size < 15e6
    (text,) = re.findall(r'id="runs">(.*?)</script>', target.read_text())
    ((page,), rows) = json.loads(text), read_metrics(run / METRICS_FILE)
    assert len(page["traces"]) == 100
    metrics = page["metrics"]
    steps = metrics["steps"]
    assert metrics["num_steps"] == 10_000 and 2_000 < len(steps) < 4_000
    assert steps == sorted({*range(0, 10_000, 4), *range(99, 10_000, 100)})
    for key, column in metrics["values"].items():
        there = {step: rows[step][key] for step in steps if key in rows[step]}
        shown = {
            step: value for step, value in zip(steps, column, strict=True) if value is not None
        }
        assert shown == pytest.approx(there, rel=5e-6), key
    assert sum(value is not None for value in metrics["values"]["eval/success"]) == 100


def test_the_folder_of_traces_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, listed = long_run(tmp_path / "run", 50, 50), []
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: [listed.append(path), *iterdir(path)][1:])
    assert write_page([run], tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").read_text().count('id="trace-0-step_') == 50
    assert listed == [run / "traces"]
    for name in ("step_1", "../config", "../traces/step_00000001"):
        with pytest.raises(ValueError, match="has no trace"):
            trace_bytes(run, name)


def test_a_live_page_reads_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read, whole = long_run(tmp_path / "run", 50, 1), [], reader.read_metrics
    monkeypatch.setattr(reader, "read_metrics", lambda path: [read.append(path), whole(path)][1])
    with make_server([run], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def asked() -> dict:
            address = f"http://127.0.0.1:{server.server_port}/runs"
            with urllib.request.urlopen(address, timeout=60) as answer:
                return json.load(answer)[0]

        assert asked()["metrics"]["steps"] == asked()["metrics"]["steps"] == [*range(50)]
        assert read == [run / METRICS_FILE]
        with (run / METRICS_FILE).open("a") as file:
            file.write(json.dumps({"step": 50, "new/one": 1.0}) + "\n")
        shutil.copy(
            run / "traces" / "step_00000000.json.gz", run / "traces" / "step_00000050.json.gz"
        )
        metrics, *_ = (now := asked())["metrics"], asked()
        assert metrics["steps"][-1] == 50 and metrics["values"]["new/one"] == [None] * 50 + [1.0]
        assert now["traces"][-1]["step"] == 50
        assert read == [run / METRICS_FILE] * 2
        server.shutdown()


@pytest.mark.parametrize(
    "name", [CONFIG_FILE, "events.jsonl", TIMELINE, "traces", "traces/step_00000000.json.gz"]
)
def test_a_page_holds_no_file_from_elsewhere(name: str, tmp_path: Path) -> None:
    """A run that came in an archive may hold links to any file of the user."""
    run, elsewhere = long_run(tmp_path / "run", 1, 1), tmp_path / "elsewhere"
    for written in ("events.jsonl", TIMELINE):
        (run / written).write_text("")
    (run / name).rename(elsewhere)
    (run / name).symlink_to(elsewhere)
    with pytest.raises(ValueError, match=rf"{name}\S* leads out of .*run; remove the link"):
        write_page([run], tmp_path / "page.html")
    if TIMELINE in name or "traces" in name:
        with pytest.raises(ValueError, match="leads out"):
            trace_bytes(run, "timeline" if name == TIMELINE else "step_00000000")


@pytest.mark.parametrize("name", ["view.html", ".view.html.part"])
def test_a_page_is_not_written_where_a_link_leads(name: str, tmp_path: Path) -> None:
    run, victim = long_run(tmp_path / "run", 1, 1), tmp_path / "victim"
    victim.write_text("mine")
    (run / name).symlink_to(victim)
    assert write_page([run], run / "view.html") == 0
    assert victim.read_text() == "mine" and "trace-0-step_0" in (run / "view.html").read_text()


def test_a_live_page_answers_an_address_of_any_letters(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with make_server([long_run(tmp_path / "run", 1, 1)], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("%E2%82%AC", "a%0D%0AX-Mine:1"):
            address = f"http://127.0.0.1:{server.server_port}/trace/0/{name}"
            with pytest.raises(urllib.error.HTTPError, match="404: Not Found") as answer:
                urllib.request.urlopen(address, timeout=60)
            assert "X-Mine" not in answer.value.headers
            assert "has no trace" in answer.value.read().decode()
        server.shutdown()
    assert capfd.readouterr().err == ""


def test_no_run_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        write_page([tmp_path], tmp_path / "page.html")


# In a browser

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install chromium"
)


@pytest.fixture(scope="module")
def page(run: Path) -> Iterator:
    """The page of the run in a headless browser; any error on its console fails the test."""
    (run / "events.jsonl").write_text(json.dumps({"step": 1, "text": NEVER_SEEN}) + "\n")
    target = run.parent / "page.html"
    write_page([run], target)
    errors: list[str] = []
    with playwright.sync_playwright() as started:
        alone = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        flags = [*sandbox, "--disable-gpu", "--no-first-run", *alone]
        browser = started.chromium.launch(executable_path=CHROMIUM, args=flags)
        opened = browser.new_page(viewport={"width": 1280, "height": 800})
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.on(
            "console", lambda said: errors.append(said.text) if said.type == "error" else None
        )
        opened.goto(target.as_uri())
        yield opened
        browser.close()
    assert errors == []


@needs_browser
def test_overview_shows_the_outcome(run: Path, page) -> None:
    summary = json.loads((run / "summary.json").read_text())
    page.locator(".plot .main-svg").first.wait_for()
    # What makes it open fast: traces stay packed, one plot is drawn, and lists are short.
    assert page.evaluate("cache.size") == 0
    assert page.locator(".plot").count() == 1
    assert page.locator("#view *").count() < 1000
    kinds = page.locator("script[id^=trace]").evaluate_all("all => all.map(one => one.type)")
    assert len(kinds) > 3 and set(kinds) == {"text/plain"}
    text = page.locator(".outcome").inner_text()
    for name, result in summary["sets"].items():
        exact = Decimal(100 * result["success"])  # browsers round halves up
        assert name in text and f"{exact.quantize(Decimal('0.1'), ROUND_HALF_UP)}%" in text
    assert NEVER_SEEN in page.locator(".warnings").inner_text()  # as text, not as a tag


@needs_browser
def test_a_trajectory_is_read_in_two_actions(run: Path, page) -> None:
    page.keyboard.press("3")
    page.locator("input.step").fill("1")
    page.keyboard.press("Enter")
    one = read_trace(run, "step_00000001")["groups"][0]["members"][0]
    page.wait_for_url(re.compile("step_00000001"))
    playwright.expect(page.locator(".message.agent")).to_have_count(len(one["turns"]))
    shown = page.locator(".message.agent").first.inner_text()
    assert one["turns"][0]["info"]["thought"].strip() in shown
    page.locator(".message.agent .token").first.hover()
    said = page.locator("#token").inner_text()
    assert f"{one['channels']['engine log-probability'][0]:g}"[:6] in said


@needs_browser
def test_filters_narrow_what_is_listed(run: Path, page) -> None:
    listed = members(read_trace(run, "step_00000001"))
    assert page.locator(".member").count() == len(listed)
    page.get_by_label("search trajectories").fill("Dragon")
    trace = read_trace(run, "step_00000001")
    named = sum("Dragon" in text_of(trace, one) for one in listed)
    assert page.locator(".member").count() == named < len(listed)
    page.get_by_label("search trajectories").fill("> 0.05")
    assert page.locator(".member").count() == sum(one["reward"] > 0.05 for one in listed)
    page.get_by_label("search trajectories").fill("")
    page.get_by_label("show").select_option("good")
    assert page.locator(".member").count() == sum(one["success"] for one in listed)
    page.get_by_label("show").select_option("kept")
    trained = sum("return" in one["channels"] for one in listed)
    assert page.locator(".member").count() == trained < len(listed)
    page.get_by_label("show").select_option("")


def current(page) -> int:
    marks = page.locator(".member").evaluate_all("all => all.map(one => one.ariaCurrent)")
    return marks.index("true")


@needs_browser
def test_keys_move_through_steps_and_trajectories(page) -> None:
    page.keyboard.press("Escape")
    page.locator("footer").click()
    before = current(page)
    page.keyboard.press("j")
    assert current(page) == before + 1
    page.keyboard.press("k")
    assert current(page) == before
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator("input.step")).to_have_value("2")
    assert "one=0%2Cstep_00000002" in page.url


@needs_browser
def test_tokens_are_colored_by_their_advantage(page) -> None:
    page.get_by_label("show").select_option("kept")
    page.get_by_label("color").select_option("advantage")
    style = page.locator(".message.agent .token").first.get_attribute("style")
    assert "rgba" in style
    page.get_by_label("color").select_option("")
    page.get_by_label("show").select_option("")


def agents_episode(renderer) -> Trajectory:
    """A planner asks a tool, asks again behind the same answer, and a worker is not trained."""
    tree = CallTree(renderer, max_context_length=4096)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

    def sample(messages: list[ChatMessage], text: str, *, role: str, is_trained: bool = True):
        call = tree.begin(messages, tools, role=role)
        tokens = renderer.encode_answer(text)
        completion = Completion(tokens, [-1.0] * len(tokens), "stop")
        answer = tree.answer(call, completion, is_trained=is_trained)
        said = ChatMessage("assistant", answer.content, answer.tool_calls)
        return [*messages, said]

    asked = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    begun = sample([ChatMessage("user", "How much?")], asked, role="planner")
    assert begun[-1].tool_calls == (ToolCall("add", '{"a": 1}'),)
    for result in ("one", NEVER_SEEN):
        sample([*begun, ChatMessage("tool", result)], f"It is {result}.", role="planner")
    sample([ChatMessage("user", "Help.")], "No.", role="worker", is_trained=False)
    empty = Trajectory(0, environment="bandit", outcome_seed=1)
    episode = tree.trajectory(empty, reward=1.0, call_rewards={(1, 0): 0.25})
    episode.turns[-1].info["outcome"] = {"error": "tool failed"}
    return episode


@needs_browser
def test_the_calls_of_an_agent_are_a_tree(run: Path, page, tmp_path: Path) -> None:
    renderer = load_renderer(str(run / "huggingface"), think=False)
    directory = shutil.copytree(run, tmp_path / "agent")
    config = parse([*FLAGS, "--output", str(tmp_path)]).environment
    writer = TraceWriter(directory / "traces", renderer.tokenizer.decode, config, print)
    writer.write_evaluation(9, "bandit", [TrajectoryGroup(0, [agents_episode(renderer)])], [None])
    write_page([directory], tmp_path / "page.html")
    opened = page.context.browser.new_page()
    opened.goto(f"{(tmp_path / 'page.html').as_uri()}#view=trajectories")
    opened.keyboard.press("3")
    opened.get_by_label("of").select_option("evaluation, bandit")
    top = opened.locator("#calls > ul > li")
    top.first.wait_for()
    assert top.locator("> button").all_inner_texts() == [
        "call-0-0 of planner",
        "call-3-0 of worker",
    ]
    assert 'add({"a": 1})' in top.first.inner_text() and "not trained" in top.last.inner_text()
    below = top.first.locator("li")
    names = ["call-1-0 of planner", "call-2-0 of planner"]
    assert below.locator("button").all_inner_texts() == names
    assert "reward 0.25" in below.first.inner_text() and NEVER_SEEN in below.last.inner_text()
    # The branch shows its new message, and its whole prompt once it is opened.
    branch = opened.locator("details.message")
    assert branch.count() == 1
    branch.locator("summary").click()
    assert "How much?" in branch.inner_text()
    assert 'returned {"error":"tool failed"}' in opened.locator(".turn .facts").last.inner_text()
    opened.close()


@needs_browser
def test_a_line_of_text_that_a_world_draws_is_seen_whole(run: Path, page, tmp_path: Path) -> None:
    directory = shutil.copytree(run, tmp_path / "drawn")
    for path in (directory / "traces").glob("*.json.gz"):
        trace = read_trace(run, path.name.removesuffix(".json.gz"))
        for one in members(trace):
            one["pictures"] = ["shelf 0 1 2 3 4 5 6 7 8 9, one is right"] * (len(one["turns"]) + 1)
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    write_page([directory], tmp_path / "page.html")
    opened = page.context.browser.new_page()
    opened.goto(f"{(tmp_path / 'page.html').as_uri()}#view=trajectories")
    drawn = opened.locator(".picture pre")
    drawn.first.wait_for()
    assert drawn.first.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    opened.close()


@needs_browser
def test_what_reorders_a_line_is_shown_in_its_place(run: Path, page, tmp_path: Path) -> None:
    """In a token, in its numbers and in a warning."""
    directory, mark = shutil.copytree(run, tmp_path / "marked"), "\u202e"
    for path in (directory / "traces").glob("*.json.gz"):
        trace = read_trace(run, path.name.removesuffix(".json.gz"))
        trace["strings"] = [f"{mark}\x1b[2J\t{text}" for text in trace["strings"]]
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    (directory / "events.jsonl").write_text(json.dumps({"step": 1, "text": mark}) + "\n")
    write_page([directory], tmp_path / "page.html")
    opened = page.context.browser.new_page()
    opened.goto((tmp_path / "page.html").as_uri())
    warned = opened.locator(".warnings").inner_text()
    opened.keyboard.press("3")
    opened.locator(".message.agent .token").first.hover()
    said = opened.locator(".message.user").first.text_content()
    answered = opened.locator(".message.agent").first.text_content()
    for text in (warned, said, answered, opened.locator("#token").inner_text()):
        assert r"\u202e" in text and not {mark, "\x1b"} & {*text}
    assert "\\u001b[2J\t" in said
    opened.close()


@needs_browser
def test_a_page_says_that_steps_are_left_out(
    page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 200 steps those that 32 divides, and the two with an evaluation."""
    monkeypatch.setattr("ragen_mega.report.viewer.page.MOST_NUMBERS", 10 * 120)
    write_page([long_run(tmp_path / "run", 200, 1)], tmp_path / "page.html")
    opened = page.context.browser.new_page()
    for shown in ("overview", "curves", "time"):
        opened.goto(f"{(tmp_path / 'page.html').as_uri()}#view={shown}")
        opened.reload()
        said = ", 9 of 200 steps, evaluations among them"
        opened.locator("#view", has_text=said).wait_for()
    opened.close()


@needs_browser
def test_two_steps_stand_side_by_side(page) -> None:
    page.locator("footer").click()
    page.keyboard.press("4")
    page.locator(".pair .message.agent").first.wait_for()
    steps = [page.locator("input.step").nth(at).input_value() for at in (0, 1)]
    assert steps == ["0", "3"]
    groups = [page.locator(".pair .browser").nth(at).locator(".group") for at in (0, 1)]
    assert groups[0].first.inner_text() == groups[1].first.inner_text()


@needs_browser
def test_a_narrow_page_keeps_its_tables_and_counts_steps_as_the_text_does(run: Path, page) -> None:
    """The evaluation after N steps is at N, as the console has it, and the first one at 0."""
    narrow = page.context.browser.new_page(viewport={"width": 500, "height": 800})
    narrow.goto(page.url.partition("#")[0] + "#view=overview")
    narrow.locator(".plot .main-svg").first.wait_for()
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 500
    names = "Array.from(document.querySelectorAll('.outcome th[title]'), (one) => one.textContent)"
    assert narrow.evaluate(names) == ["success", "random", "optimum"]
    held_out = narrow.evaluate(
        "document.querySelector('.plot').data.filter((line) => line.name?.endsWith('held out'))"
    )
    steps = {int(path.name.split("_")[1]) for path in (run / "traces").glob("eval_*")}
    assert sorted(held_out[0]["x"]) == sorted(steps) and 0 in steps
    narrow.close()


@needs_browser
def test_curves_are_searched_and_drawn(page) -> None:
    page.keyboard.press("2")
    page.get_by_label("search metrics").fill("actor/entropy")
    assert page.locator(".panel h3").all_inner_texts()[0] == "actor/entropy"
    page.locator(".panel .main-svg").first.wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("5")
    page.locator(".plot .main-svg").first.wait_for()


@needs_browser
def test_the_timeline_of_the_ranks_is_saved(run: Path, page) -> None:
    """What a trace viewer is given: what the run did, as the run recorded it."""
    page.keyboard.press("5")
    with page.expect_download() as saved:
        page.locator("#timeline").click()
    assert saved.value.suggested_filename == "run-timeline.json"
    events = json.loads(Path(saved.value.path()).read_text())
    assert events == json.loads((run / TIMELINE).read_text())
    done = {(event["name"], event["args"]["step"]) for event in events if event["ph"] == "X"}
    steps = range(3)
    assert {(name, step) for name in ("rollout", "update") for step in steps} <= done
    assert {("evaluation", 0), ("evaluation", 1)} <= done  # before the first step; after two


@pytest.mark.slow
@needs_browser
def test_a_live_page_follows_its_run(run: Path, page, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("check*", "roll*"))
    records = (copy / METRICS_FILE).read_text().splitlines(keepends=True)
    (copy / METRICS_FILE).write_text(records[0])
    summary = (copy / "summary.json").rename(tmp_path / "summary.json")
    events = (copy / "events.jsonl").read_text()
    with make_server([copy], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        page.goto(address)
        page.locator(".outcome").wait_for()
        assert "1 of 3" in page.locator(".outcome").inner_text()
        (copy / METRICS_FILE).write_text("".join(records))
        page.locator(".outcome", has_text="3 of 3").wait_for()
        later = "told while nothing was trained"
        (copy / "events.jsonl").write_text(events + json.dumps({"step": 2, "text": later}) + "\n")
        page.locator(".warnings", has_text=later).wait_for()
        assert "still training" in page.locator(".outcome").inner_text()
        summary.rename(copy / "summary.json")
        page.locator(".outcome", has_not_text="still training").wait_for()
        page.keyboard.press("3")
        page.locator(".message.agent").first.wait_for()
        for trace in (copy / "traces").glob("step_*"):  # of a full disk, say
            trace.write_bytes(trace.read_bytes()[:-9])
        page.reload()
        page.locator(".members", has_text="is damaged and cannot be shown").wait_for()
        page.keyboard.press("1")
        page.locator(".outcome").wait_for()
        for path in ("trace/0/../../config.json", f"trace/0/{CONFIG_FILE}", "trace/7/x", "other"):
            assert page.request.get(address + path).status == 404
        server.shutdown()


def test_a_live_page_outlives_readers_that_leave_and_names_a_port_it_cannot_have(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with make_server([run], 0) as server:
        port = server.server_port
        for taken, why in ((port, "in use"), (1 << 16, "0 to 65535")):
            with pytest.raises(ValueError, match=f"{taken} .*{why}.* --port"):
                make_server([run], taken)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for path in ("/runs", "/other") * 3:
            with socket.create_connection(("127.0.0.1", port)) as reader:
                # closing resets the connection, so that the answer cannot be sent
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                reader.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/runs", timeout=60) as answer:
            assert json.load(answer)[0]["name"] == "run"
        # A foreign page whose own name server says 127.0.0.1.
        foreign = urllib.request.Request(
            f"http://127.0.0.1:{port}/runs", headers={"Host": f"evil.example:{port}"}
        )
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(foreign, timeout=60)
        server.shutdown()
    assert "Traceback" not in capfd.readouterr().err
