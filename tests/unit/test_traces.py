"""What is kept of a step for people to read, against each trajectory taken by itself."""

import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_mega.config import EnvironmentConfig
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.environments.registry import make
from ragen_mega.report.traces import TraceWriter
from ragen_mega.rollout.tasks import evaluation_tasks

LOGPROBS = [-1.23456789, -0.000123456, -1234567.0, float("nan"), -math.inf, 0.0]
TOKENS = [*"caf\u00e9a".encode()]  # bytes, of which two make one character

HALVES = """
class Halves:
    actions = ("on",)
    splits = ("trained on", "held out")
    is_instant = True

    def __init__(self, *, split: str = "trained on"):
        self.split = split

    def reset(self, seed):
        return f"what is {self.split}"

    def step(self, action):
        return "", 0.0, True, False, {}

    def render(self):
        return self.reset(0)
"""


def member(outcome_seed: int, actions: list[Any]) -> Trajectory:
    one = Trajectory(0, "frozen_lake", seed=4, outcome_seed=outcome_seed)
    one.append_observation([99, 100])
    turn = one.append_action(Completion(TOKENS, LOGPROBS, "stop"))
    turn.reward, turn.info = 0.123456, {"actions": actions}
    return one


def test_a_group_shares_the_work_and_nothing_else(tmp_path: Path) -> None:
    asked: Counter[tuple[int, ...]] = Counter()

    def decode(tokens: list[int]) -> str:
        asked[tuple(tokens)] += 1
        return bytes(tokens).decode(errors="replace")

    members = [member(1, ["Left", "Down"]), member(2, ["Right"]), member(3, [])]
    writer = TraceWriter(tmp_path, decode, EnvironmentConfig("frozen_lake"), pytest.fail)
    writer.write_step(7, [TrajectoryGroup(0, members)])
    trace = json.loads(gzip.decompress((tmp_path / "step_00000007.json.gz").read_bytes()))
    assert max(asked.values()) == 1
    for one, shown in zip(members, trace["groups"][0]["members"], strict=True):
        texts = [trace["strings"][index] for index in shown["tokens"]]
        assert len(texts) == len(one.tokens) and "".join(texts) == bytes(one.tokens).decode()
        (turn,) = shown["turns"]
        assert (turn["start"], turn["end"], turn["reward"]) == (2, 8, 0.1235)
        assert shown["channels"] == {
            "engine log-probability": [-1.235, -0.0001235, -1235000.0, None, None, 0.0]
        }
        world = make("frozen_lake")
        world.reset(one.seed, outcome_seed=one.outcome_seed)
        pictures = [world.render()]
        for action in one.turns[0].info["actions"]:
            world.step(action)
        assert shown["pictures"] == [*pictures, world.render()]
    assert len({tuple(one["pictures"]) for one in trace["groups"][0]["members"]}) > 1


def test_tool_calls_are_text_that_any_browser_can_read(tmp_path: Path) -> None:
    calls = [{"name": "look", "arguments": {"at": [math.nan, -math.inf, "\ud800"]}}]
    missed: list[str] = []
    writer = TraceWriter(tmp_path, str, EnvironmentConfig(), missed.append)
    writer.write_step(0, [TrajectoryGroup(0, [member(1, calls)])])
    text = gzip.decompress((tmp_path / "step_00000000.json.gz").read_bytes()).decode()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    trace = json.loads(text, parse_constant=refuse)
    (turn,) = trace["groups"][0]["members"][0]["turns"]
    assert turn["info"]["actions"] == [json.dumps(calls[0])]
    assert '"name": "look"' in turn["info"]["actions"][0]
    assert len(missed) == 1, "a tool call is no move on the ice"


def test_evaluations_are_drawn_on_the_split_that_they_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halves.py").write_text(HALVES)
    monkeypatch.syspath_prepend(tmp_path)
    config, name = EnvironmentConfig("halves:Halves"), "halves:Halves"
    ((task,),) = evaluation_tasks(config, name, [(0, None)])
    assert task.make_episode().environment.reset(0) == "what is held out"
    one = Trajectory(0, name, seed=0, outcome_seed=0)
    writer = TraceWriter(tmp_path, str, config, pytest.fail)
    writer.write_evaluation(3, name, [TrajectoryGroup(0, [one])], [None])
    writer.write_step(3, [TrajectoryGroup(0, [one])])
    for file, text in (("eval", "what is held out"), ("step", "what is trained on")):
        (path,) = tmp_path.glob(f"{file}_*.json.gz")
        trace = json.loads(gzip.decompress(path.read_bytes()))
        assert trace["groups"][0]["members"][0]["pictures"] == [text]


class Plain:
    actions = ("on",)

    def reset(self, seed):
        return "Go on."

    def step(self, action):
        return "", 0.0, True, False, {}


class Slow(Plain):
    def render(self):
        return "never"


class Broken(Plain):
    is_instant = True

    def render(self):
        return {}["picture"]


class Array(Plain):
    is_instant = True

    def render(self):
        return [[0, 255]]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("Plain", None),
        ("Slow", "declares is_instant = True"),
        ("Broken", r"KeyError: 'picture' \(in render, .*test_traces.py:\d+\)"),
        ("Array", r"TypeError: render must return .*\[\[0, 255\]\]"),
    ],
)
def test_why_there_is_no_picture_is_said_once(tmp_path: Path, kind: str, why: str | None) -> None:
    name, said = f"{__name__}:{kind}", []
    writer = TraceWriter(tmp_path, str, EnvironmentConfig(name), said.append)
    for step in range(2):
        writer.write_step(step, [TrajectoryGroup(0, [Trajectory(0, name), Trajectory(0, name)])])
    assert len(said) == (why is not None)
    assert not said or re.search(f"pictures of {name} .*{why}", said[0])


def test_equal_seeds_give_one_board_and_other_seeds_others() -> None:
    """A board is drawn once for a group; options are part of what it depends on."""
    for name, options in (("frozen_lake", {"frozen_probability": 0.4}), ("sokoban", {"dim": 7})):
        first, again, other = (make(name) for _ in range(3))
        assert first.reset(11, outcome_seed=1) == again.reset(11, outcome_seed=2)
        assert len({other.reset(seed) for seed in range(6)}) > 1
        assert make(name, **options).reset(11) != first.reset(11)


@given(st.lists(st.sampled_from([*"a\u0255\U0001f600".encode(), 0x80, 0xFF, 0xC9]), max_size=12))
def test_the_texts_of_tokens_are_those_of_all_together(tokens: list[int]) -> None:
    """But for bytes that belong to no character, which have no one way to be shown."""

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    texts = [*TraceWriter(Path(), decode, EnvironmentConfig(), pytest.fail)._texts(tokens)]
    assert len(texts) == len(tokens)
    assert "".join(texts).replace("\ufffd", "") == decode(tokens).replace("\ufffd", "")
