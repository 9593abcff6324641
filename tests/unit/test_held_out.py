"""Training meets no board that is evaluated on, whatever part a stage of the curriculum shows; and
how many held-out starts it meets where there are no boards.
"""

import json

import numpy as np
import pytest

from ragen_mega.agents.call_tree import CallTree, ChatMessage
from ragen_mega.config import parse
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.environments.boards import load_boards
from ragen_mega.environments.registry import make
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import TaskSampler, held_out_states
from ragen_mega.run.guards import HeldOutStarts
from tests.support.published_tokenizers import small_qwen3


def rooms_of(name: str) -> set[tuple]:
    """The boards of a set, by the facts of the world that is evaluated."""
    world, found = make(name), set()
    for board in load_boards(None, name):
        world.reset(board.seed, board=board.rows)
        found.add(tuple(world.facts().items()))
    return found


STAGES = {
    "0": {"sokoban": {"observation": "coord"}},
    "2": {"sokoban": {"observation": "cells", "max_shortest": 6}},
    "4": {"sokoban": {"observation": "words"}},
    "6": {},
}


def test_no_stage_of_a_curriculum_trains_on_an_evaluation_board() -> None:
    flags = ["--environments", "sokoban", "--curriculum", json.dumps(STAGES)]
    config = parse([*flags, "--num-groups", "64", "--group-size", "2", "--minibatch-size", "32"])
    tasks, held_out, would_meet = TaskSampler(config), rooms_of("sokoban"), 0
    for step in range(8):
        world = make("sokoban", **config.environment.training_options("sokoban", step))
        for group in tasks.sample(step):
            world.reset(group[0].seed)
            assert tuple(world.facts().items()) not in held_out
        for seed in np.random.default_rng([0, step]).integers(1_000_000, 1_000_000_000, 64):
            world.reset(int(seed))
            would_meet += tuple(world.facts().items()) in held_out
    assert would_meet > 10, "the test would not see a board that is drawn"


def test_boards_of_every_set_that_is_evaluated_are_held_out() -> None:
    """A stage may train on rooms of the size of another set; in others its boards do not fit."""
    boards = load_boards(None, "sokoban_large")
    world = make("sokoban_large")
    world.reset(boards[0].seed, board=boards[0].rows)
    (dim, _), boxes = world.facts()["size"], len(world.facts()["boxes"])
    large = {"dim": dim, "num_boxes": boxes, "observation": "coord"}
    flags = ["--environments", "sokoban", "--eval-environments", "sokoban_large"]
    config = parse([*flags, "--curriculum", json.dumps({"5": {"sokoban": large}})]).environment
    shown = make("sokoban", **large)
    assert held_out_states(config, "sokoban", None, 5) == {
        shown.reset(board.seed, board=board.rows) for board in boards
    }
    small = make("sokoban")
    assert held_out_states(config, "sokoban", None, 4) == {
        small.reset(board.seed, board=board.rows) for board in load_boards(None, "sokoban")
    }


class Two:
    """A lake with two states, both of which can be boards."""

    actions = ("Left",)

    def reset(self, seed, board=None):
        return board[0] if board else ("A", "B")[seed % 2]

    def step(self, action):
        return "", 0.0, True, False, {"success": False}

    def accepts_board(self, rows):
        return rows[0] in ("A", "B")


def test_a_world_that_draws_evaluation_boards_alone_is_refused(tmp_path) -> None:
    lines = [json.dumps({"set": "two", "seed": 0, "board": [state]}) for state in "AB"]
    flags = ["--environments", f"{__name__}:Two", "--boards", str(tmp_path / "boards.jsonl")]
    (tmp_path / "boards.jsonl").write_text(lines[0])
    drawn = TaskSampler(parse(flags)).sample(0)
    assert {group[0].seed % 2 for group in drawn} == {1}
    (tmp_path / "both.jsonl").write_text("\n".join(lines))
    flags[-1] = str(tmp_path / "both.jsonl")
    with pytest.raises(ValueError, match="1000 training seeds of .*:Two drew only boards"):
        TaskSampler(parse(flags)).sample(0)


def group_of(name: str, *prompts: list[int]) -> TrajectoryGroup:
    members = []
    for prompt in prompts:
        one = Trajectory(group_id=0, environment=name)
        one.append_observation(prompt)
        one.append_action(Completion([9], [0.0], "stop"))
        one.append_observation([7, 7])
        members.append(one)
    return TrajectoryGroup(0, members)


def test_starts_are_counted_once_and_warned_of_once() -> None:
    starts = HeldOutStarts()
    starts.evaluated(
        [group_of("sokoban", [1, 2]), group_of("sokoban", [3]), group_of("sokoban", [3])]
    )
    assert starts.count("sokoban") == (0, 2) and starts.count("bandit") is None
    assert starts.trained([group_of("sokoban", [1], [2]), group_of("bandit", [3])]) == []
    starts.commit()
    before = json.dumps(starts.state_dict())
    (said,) = starts.trained([group_of("sokoban", [3], [3])])
    assert "met 1 of the 2 starts that sokoban" in said
    assert json.dumps(starts.state_dict()) == before, "the step may be repeated"
    assert starts.trained([group_of("sokoban", [3], [3])]) == [said]
    starts.commit()
    assert starts.trained([group_of("sokoban", [3]), group_of("sokoban", [1, 2])]) == []
    starts.commit()
    other = HeldOutStarts()
    other.load_state_dict(json.loads(json.dumps(starts.state_dict())))
    assert starts.count("sokoban") == other.count("sokoban") == (2, 2)
    assert other.trained([group_of("sokoban", [3])]) == []
    other.load_state_dict({})  # of an older run
    assert other.count("sokoban") is None


def test_prompts_that_are_all_alike_tell_nothing() -> None:
    """A number that is to be guessed is not in the prompt."""
    starts = HeldOutStarts()
    starts.evaluated([group_of("bandit_test", [1]), group_of("bandit_test", [1])])
    assert (
        starts.count("bandit_test") is None and starts.trained([group_of("bandit_test", [1])]) == []
    )


def test_equal_beginnings_of_a_world_that_hides_its_state_are_not_counted() -> None:
    starts = HeldOutStarts()
    starts.evaluated([group_of("lookup", [1]), group_of("lookup", [2])])
    assert starts.trained([group_of("lookup", [1])]) == [] and starts.count("lookup") is None


AGENT = "agent:my_agent:run"


@pytest.mark.parametrize("word", "ABCDEFGHxyz!")
def test_the_start_of_an_agent_is_its_first_request_whatever_its_tokens(word: str) -> None:
    """A worker answers a row; then a checker is asked one of two texts."""
    renderer = ChatRenderer(small_qwen3(), think=False)

    def episode(row: str, verdict: str) -> TrajectoryGroup:
        tree, asked = CallTree(renderer, max_context_length=1000), []
        for text in (f"{word} {row}", verdict):
            asked.append(tree.begin([ChatMessage("user", text)], None))
            tree.answer(asked[-1], Completion([renderer.end_of_turn], [0.0], "stop"))
        one = tree.trajectory(Trajectory(0, environment=AGENT), reward=0.0)
        assert one.first_prompt == tuple(asked[0].tokens)
        is_first.add(one.tokens[: len(asked[0].tokens)] == asked[0].tokens)
        return TrajectoryGroup(0, [one])

    is_first: set[bool] = set()
    starts = HeldOutStarts()
    starts.evaluated([episode("one", "Agood?"), episode("two", "zbad?")])
    assert starts.count(AGENT) == (0, 2)
    assert starts.trained([episode("three", "Agood?"), episode("four", "zbad?")]) == []
    (said,) = starts.trained([episode("two", "Agood?")])
    assert "met 1 of the 2 starts" in said and "--tasks" in said and "boards" not in said
    if word == "E":
        assert is_first == {True, False}, "the test would not see an order"
