"""The baselines tool: its file, table and one-line errors; environments without a solver."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ragen_mega.commands.baselines import main, text
from ragen_mega.environments.episode import EpisodeConfig
from ragen_mega.environments.protocol import Budget, StepResult
from ragen_mega.environments.reference_players import Baselines, baselines, find_solver
from ragen_mega.environments.registry import register
from ragen_mega.ranks.launcher import PROGRAM
from tests.support.prompts import first_seeds
from tests.support.refusals import refused

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    command = [sys.executable, "-P", "-m", PROGRAM, "baselines", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(ROOT)}
    )


def test_report(tmp_path):
    out = tmp_path / "baselines.json"
    process = run(
        "--environment",
        "frozen_lake",
        "--max-actions-per-turn",
        "2",
        "--num-prompts",
        "64",
        "--json",
        out,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(out.read_text())
    assert report["environment"] == "frozen_lake" and report["num_prompts"] == 64
    assert report["protocol"] == {"max_turns": 5, "max_actions_per_turn": 2, "max_actions": 10}
    assert 0 < report["random_ci_low"] < report["random"] < report["random_ci_high"] < 1
    assert report["random"] < report["optimum"] < report["optimum_closed_loop"]
    assert f"{100 * report['optimum']:.1f}%" in process.stdout


def test_boards_of_the_user(tmp_path):
    path, out = tmp_path / "boards.jsonl", tmp_path / "out.json"
    board = {
        "set": "mine",
        "seed": 0,
        "board": ["######", "#P___#", "#_X__#", "#__O_#", "#____#", "######"],
    }
    path.write_text(json.dumps(board))
    assert (
        run(
            "--environment", "sokoban", "--boards", path, "--max-actions", 3, "--json", out
        ).returncode
        == 0
    )
    assert (
        json.loads(out.read_text())["optimum"] == 0.0
    )  # the shortest solution takes more than three actions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--environment", "chess"], "unknown environment 'chess'"),
        (["--environment", "sokoban", "--boards", "missing.jsonl"], "missing.jsonl: cannot read"),
        (["--environment", "sokoban", "--num-prompts", "0"], "--num-prompts must be"),
        (["--environment", "sokoban", "--num-prompts", "257"], "exceeds the 256"),
        (["--environment", "sokoban", "--option", "dim"], "takes NAME=VALUE"),
        (["--boards", "x"], "required: --environment"),
        (
            ["--environment", "frozen_lake", "--environment-timeout", "-1"],
            "environment_timeout must be at least 0, not -1.0; set --environment-timeout",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, message):
    argv = [*arguments, "--json", str(tmp_path / "out.json")]
    assert message in refused(capsys, main, argv)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("rates", "is_exact", "said"),
    [
        ((0.5, None, None), False, "32 episodes per prompt; of one trajectory per prompt, 95%"),
        ((0.5, 0.9, 0.9), False, "sampled; of one"),
        ((0.5, 0.9, 0.9), True, "exact; of one"),
    ],
)
def test_the_table_says_how_the_random_player_was_measured(rates, is_exact, said):
    random, *optima = rates
    result = Baselines("world", 4, random, 0.1, 0.9, *optima, is_exact)
    assert said in text(result, Budget(), "seeds")


class Coin:
    """Succeeds if the second action matches the first one; a world that the solvers do not know."""

    actions = ("Heads", "Tails")
    instruction = "Say the same twice.\nYour available actions are:\nHeads, Tails"

    def reset(self, seed, *, outcome_seed=None, board=None):
        self.said = []
        return "Say something."

    def step(self, action):
        self.said.append(action.lower())
        done = len(self.said) == 2
        success = done and self.said[0] == self.said[1]
        return StepResult(
            "ok", float(success), done, False, {"success": success, "is_action_effective": True}
        )

    def facts(self):
        return {}


def test_environment_without_a_solver():
    register("coin", Coin)
    result = baselines("coin", first_seeds(100), EpisodeConfig())
    assert result.random == pytest.approx(0.5, abs=0.04) and not result.is_exact
    assert result.optimum is None and result.optimum_closed_loop is None
    assert baselines("coin", first_seeds(3), EpisodeConfig(max_actions=1)).random == 0.0
    with pytest.raises(ValueError, match="no solver for Coin"):
        find_solver(Coin())
    with pytest.raises(ValueError, match="one board or seed"):
        baselines("coin", [], EpisodeConfig())


class Slow(Coin):
    def __init__(self):
        time.sleep(0.5)


def test_the_time_limit_of_an_environment_is_a_flag(capsys):
    register("slow", Slow)
    flags = ["--environment", "slow", "--num-prompts", "1", "--environment-timeout"]
    with pytest.raises(SystemExit):
        main([*flags, "0.1"])
    assert "took longer than 0.1 s; raise --environment-timeout" in capsys.readouterr().err
    main([*flags, "60"])
    assert "slow: 1 prompts" in capsys.readouterr().out


class Fragile(Coin):
    """Raises for one of its answers, so that it ends three of four random episodes."""

    def step(self, action):
        if action == "Tails":
            raise RuntimeError("tails is lost")
        return super().step(action)


def test_errors_of_the_random_player_are_said():
    register("fragile", Fragile)
    result = baselines("fragile", first_seeds(100), EpisodeConfig())
    assert result.random == pytest.approx(0.25, abs=0.04), "an error counts as lost"
    num_failed, num_episodes = map(
        int, result.errors_say.split(": ")[1].split(" random")[0].split(" of ")
    )
    assert num_episodes == 3200 and num_failed == 3200 - round(3200 * result.random)
    assert "RuntimeError: tails is lost (in step, " in text(result, Budget(), "seeds")
    register("coin_again", Coin)
    assert baselines("coin_again", first_seeds(3), EpisodeConfig()).errors_say is None
