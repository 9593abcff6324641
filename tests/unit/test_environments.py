"""Environments: rules, rewards, seeds, registry, boards files and the Gymnasium view."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from ragen_mega.environments import calls
from ragen_mega.environments.boards import (
    has_packaged_boards,
    load_boards,
    packaged_sets,
)
from ragen_mega.environments.protocol import Environment, stable_seed
from ragen_mega.environments.registry import ENVIRONMENTS, make

CHECK = "\u221a"
ROOM = ["######", "#____#", "#_PXO#", "#____#", "#____#", "######"]
LAKE = ["SFFF", "FHFF", "FFFF", "FFFG"]


def play(environment, actions):
    return [environment.step(action) for action in actions]


# Registry


# These take free text: test_webshop.py, test_lookup_and_reverse.py
FREE_TEXT = {"webshop", "lookup", "reverse"}


@pytest.mark.parametrize("name", sorted({*ENVIRONMENTS.names()} - FREE_TEXT))
def test_every_environment_keeps_the_protocol(name):
    environment = make(name)
    assert isinstance(environment, Environment)
    observation = environment.reset(7, outcome_seed=1)
    assert observation and observation == make(name).reset(7, outcome_seed=2), (
        "the prompt seed alone draws the state"
    )
    assert environment.facts()
    for action in environment.actions:
        assert action in environment.instruction
    result = environment.step(environment.actions[0].upper())
    assert isinstance(result.info["success"], bool)
    with pytest.raises(ValueError, match="unknown action 'fly'; the legal"):
        environment.step("fly")
    with pytest.raises(ValueError, match="a whole number from 0"):
        environment.reset(-1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chess", {}, "unknown environment 'chess'; .*bandit"),
        ("sokoban", {"size": 4}, "no option size; .*dim, num_boxes"),
        ("sokoban", {"dim": "6"}, "dim of .*sokoban .*int, not '6'"),
        ("sokoban", {"dim": True}, "must be int, not True"),
        ("sokoban", {"dim": 4}, "at least 5"),
        ("sokoban", {"observation": "image"}, "grid_coord"),
        ("sokoban", {"max_shortest": 0}, "at least 1"),
        ("frozen_lake", {"success_rate": 0.0}, "success_rate must be in"),
        ("frozen_lake", {"success_rate": float("nan")}, "success_rate"),
        ("frozen_lake", {"size": 1}, "size .* at least 2"),
        ("bandit", {"high_probability": 0.05}, "pay more on average"),
        ("bandit", {"low_arm": "dragon"}, "two different names"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, **options)


def test_seeds_do_not_depend_on_the_process():
    script = (
        "from ragen_mega.environments.protocol import stable_seed\n"
        "from ragen_mega.environments.registry import make\nprint(stable_seed(5, 'x'),"
        " *(make(n).reset(10123) for n in ('sokoban', 'sokoban_large', 'frozen_lake')))"
    )
    run = [sys.executable, "-X", "utf8", "-c", script]
    outputs = {
        subprocess.run(
            run, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": salt}
        ).stdout
        for salt in ("0", "1")
    }
    assert len(outputs) == 1
    assert outputs.pop().startswith(f"{stable_seed(5, 'x')} {make('sokoban').reset(10123)}")


# Bandit


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("bandit", "Phoenix", "Dragon"),
        ("bandit_test", "Trader", "Librarian"),
        ("bandit_reversed", "Librarian", "Trader"),
    ],
)
def test_bandit_payouts(name, low, high):
    environment = make(name)
    rewards = Counter()
    for outcome_seed in range(4000):
        environment.reset(3, outcome_seed=outcome_seed)
        result = environment.step(high)
        assert result.terminated and result.info["success"]
        rewards[result.reward] += 1
    assert set(rewards) == {0.0, 1.0}
    assert rewards[1.0] / 4000 == pytest.approx(0.25, abs=0.028)  # 4 standard errors
    environment.reset(3)
    result = environment.step(low.lower())
    assert (result.reward, result.info["success"], result.observation) == (
        0.1,
        False,
        f"{low}: 0.1 points",
    )
    with pytest.raises(RuntimeError, match="call reset"):
        environment.step(low)


def test_bandit_order_is_random_but_shared_by_the_group():
    environment = make("bandit")
    firsts = Counter(environment.reset(seed).split()[3] for seed in range(1000))
    assert firsts["Phoenix"] == pytest.approx(500, abs=64)
    assert len({environment.reset(11, outcome_seed=member) for member in range(16)}) == 1
    with pytest.raises(ValueError, match="does not start from boards"):
        calls.reset(environment, 0, board=["##"])


# Sokoban


def test_sokoban_rewards_and_symbols():
    environment = make("sokoban")
    assert environment.reset(0, board=ROOM) == "\n".join(ROOM)
    solved = environment.step("right")
    assert solved.observation.split("\n")[2] == f"#__P{CHECK}#"
    assert (
        solved.reward == pytest.approx(-0.1 + 1 + 10)
        and solved.terminated
        and solved.info["success"]
    )
    with pytest.raises(RuntimeError, match="call reset"):
        environment.step("Left")


def test_sokoban_box_leaves_its_target():
    board = ["#######", f"#_P{CHECK}__#", "#_OX__#", "#######"]
    environment = make("sokoban")
    environment.reset(0, board=board)
    pushed, onto_target, blocked = play(environment, ["Right", "Left", "Up"])
    assert pushed.reward == pytest.approx(-1.1) and not pushed.terminated
    assert pushed.observation.split("\n")[1] == "#__SX_#"
    assert onto_target.observation.split("\n")[1] == "#_POX_#"
    assert blocked.reward == pytest.approx(-0.1) and not blocked.info["is_action_effective"]


def test_sokoban_boxes_block():
    environment = make("sokoban")
    environment.reset(0, board=["########", "#PXX_OO#", "########"])
    assert not environment.step("Right").info["is_action_effective"]
    environment.reset(0, board=["#####", "#OPX#", "#####"])
    assert not environment.step("Right").info["is_action_effective"]


def test_sokoban_vocabulary_and_coordinates():
    assert make("sokoban_new_vocabulary").reset(0, board=ROOM).split("\n")[2] == "W.ABGW"
    text = make("sokoban", observation="coord").reset(
        0, board=["######", *ROOM[1:4], "#_##_#", "######"]
    )
    assert text.split("\n") == [
        "Player: (2, 2)",
        "Boxes: (2, 3)",
        "Targets: (2, 4)",
        "Walls: (4, 2), (4, 3)",
        "Size: 6 rows, 6 columns",
    ]
    both = make("sokoban", observation="grid_coord")
    assert both.reset(0, board=ROOM).split("\n")[3:] == ROOM
    after = both.step("Down")
    assert after.observation.startswith("Player: (3, 2)")
    facts = both.facts()
    assert (
        facts["player"] == (3, 2) and facts["boxes"] == ((2, 3),) and facts["targets"] == ((2, 4),)
    )
    assert len(facts["walls"]) == 20 and len(facts["free"]) == 16


# FrozenLake


def test_frozen_lake_without_slip():
    environment = make("frozen_lake", success_rate=1.0)
    assert environment.reset(0, board=LAKE) == "P___\n_O__\n____\n___G"
    results = play(environment, ["Left", "Down", "Right"])
    assert [r.info["is_action_effective"] for r in results] == [False, True, True]
    assert results[-1].terminated and not results[-1].info["success"] and results[-1].reward == 0.0
    assert results[-1].observation.split("\n")[:2] == ["____", "_X__"]
    with pytest.raises(RuntimeError, match="call reset"):
        environment.step("Up")
    environment.reset(0, board=LAKE)
    goal = play(environment, ["Right", "Right", "Right", "Down", "Down", "Down"])[-1]
    assert goal.terminated and goal.info["success"] and goal.reward == 1.0
    assert goal.observation.endswith(CHECK)
    assert "slippery" not in environment.instruction


@pytest.mark.parametrize("success_rate", [1 / 3, 0.8])
def test_frozen_lake_slips_sideways_at_the_stated_rate(success_rate):
    environment = make("frozen_lake", success_rate=success_rate)
    landings = Counter()
    for outcome_seed in range(3000):
        environment.reset(0, outcome_seed=outcome_seed, board=["FFF", "FSF", "FFG"])
        environment.step("Up")
        landings[environment.facts()["player"]] += 1
    assert set(landings) == {(0, 1), (1, 0), (1, 2)}
    side = (1 - success_rate) / 2
    assert landings[0, 1] / 3000 == pytest.approx(success_rate, abs=0.035)
    assert landings[1, 0] / 3000 == pytest.approx(side, abs=0.035)


def test_frozen_lake_coordinates_end_at_the_last_cell():
    text = make("frozen_lake", observation="grid_coord").reset(0, board=LAKE)
    assert text.split("\n")[:4] == [
        "Player: (0, 0)",
        "Goal: (3, 3)",
        "Holes: (1, 1)",
        "Corners: (0, 0) to (3, 3)",
    ]


def test_outcomes_belong_to_the_member_and_repeat():
    def trace(outcome_seed):
        environment = make("frozen_lake")
        environment.reset(5, outcome_seed=outcome_seed, board=["SFFFF", *["FFFFF"] * 3, "FFFFG"])
        return tuple(environment.step("Right").observation for _ in range(4))

    assert trace(1) == trace(1) and trace(None) == trace(None)
    assert len({trace(member) for member in range(16)}) > 4


# Boards


def test_packaged_boards():
    assert packaged_sets() == ["frozen_lake_4x4_p0.8", "sokoban_6x6_1box", "sokoban_8x8_2box"]
    assert [board.seed for board in load_boards(None, "sokoban")] == list(range(123, 379))
    assert len(load_boards(None, "frozen_lake")) == 256
    assert len(load_boards(None, "sokoban_large")) == 227
    assert not has_packaged_boards(make("bandit"))
    with pytest.raises(ValueError, match="packaged boards sokoban_7x7_1box"):
        load_boards(None, "sokoban", dim=7)
    with pytest.raises(ValueError, match="does not start from boards"):
        load_boards(None, "bandit")


def record(**changes):
    return json.dumps({"set": "mine", "seed": 1, "board": ROOM, "note": "ignored", **changes})


def test_boards_of_other_kinds_are_left_out(tmp_path):
    path = tmp_path / "mixed.jsonl"
    large = ["#######", "#_PX_O#", "#_____#", "#__#__#", "#_____#", "#_____#", "#######"]
    path.write_text(
        "\n".join([record(), "", record(board=LAKE), record(board=large, seed=9)]), encoding="utf-8"
    )
    assert [board.rows for board in load_boards(path, "sokoban")] == [tuple(ROOM)]
    assert [board.seed for board in load_boards(path, "sokoban", dim=7)] == [9]
    assert [board.rows for board in load_boards(path, "frozen_lake")] == [tuple(LAKE)]
    with pytest.raises(ValueError, match=r"none of .*\(sets mine\) .*sokoban_large"):
        load_boards(path, "sokoban_large")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "must be a JSON object, not '{' .*; write one object a line"),
        ("[" * 100_000, "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        (record()[:-1] + ', "seed": 3}', "the key 'seed' is in it twice"),
        ('{"set": "a", "seed": 1}', "add board"),
        (record(set=""), "set must be a name"),
        (record(seed="1"), "seed must be .*, not '1'"),
        (record(seed=True), "seed must be"),
        (record(seed=-1), "seed must be"),
        (record(board="######"), "list of rows"),
        (record(board=[]), "list of rows"),
        (record(board=["######", "#"]), "rows of one length"),
        (record(board=[*ROOM[:4], "#__Q_#", ROOM[5]]), "not 'Q'"),
        (record(board=[*ROOM[:4], "#__P_#", ROOM[5]]), "exactly one player"),
        (record(board=[*ROOM[:4], "#__X_#", ROOM[5]]), "as many boxes as targets"),
        (record(board=[*ROOM[:2], f"#_P{CHECK}_#", *ROOM[3:]]), "solved already"),
        (record(board=[*ROOM[:5], "##_###"]), "enclosed by walls"),
        (record(board=["SF", "FFF"]), "square"),
        (record(board=["SF", "FP"]), "H G, not 'P'"),
        (record(board=["SG", "FG"]), "one start"),
        (record(board=["SH", "HG"]), "can be reached"),
    ],
)
def test_malformed_boards_name_file_and_line(tmp_path, line, message):
    path = tmp_path / "boards.jsonl"
    path.write_text(record() + "\n" + line + "\n", encoding="utf-8")
    name = "sokoban" if "#" in line or "board" not in line else "frozen_lake"
    with pytest.raises(ValueError, match=message) as caught:
        load_boards(path, name)
    assert str(caught.value).startswith(f"{path}, line 2") and "\n" not in str(caught.value)


def test_unreadable_boards_files(tmp_path):
    for name, content in (("empty.jsonl", b"\n \n"), ("binary.jsonl", b"\xff\xfe\x00")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            load_boards(tmp_path / name, "sokoban")
    with pytest.raises(ValueError, match="cannot read"):
        load_boards(tmp_path, "sokoban")
    (tmp_path / "marked.jsonl").write_text("\ufeff" + record() + "\n", encoding="utf-8")
    assert len(load_boards(tmp_path / "marked.jsonl", "sokoban")) == 1
