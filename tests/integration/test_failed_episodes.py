"""A policy that can break its world does not learn to, and worlds that mix up the tasks of a group
are named.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragen_mega.config import parse
from ragen_mega.run.build import build
from ragen_mega.run.run import Run
from tests.support.runs import finish, launch, metrics, state

FLAGS = """
    --prompt-style compact --no-think --max-response-length 24 --max-context-length 300
    --hidden-size 32 --ffn-hidden-size 64 --num-layers 2 --num-groups 16 --group-size 8
    --minibatch-size 32 --advantage-estimator grpo --filter-value 1 --lr 1e-3 --format-penalty -5
    --eval-prompts 2 --eval-interval 0 --warm-start-trajectories 200 --warm-start-steps 80
    --warm-start-first-turn-steps 80
""".split()


class Jump:
    """Three turns of work, each of which costs 1; whoever jumps breaks the world."""

    actions = (*(f"work {n}" for n in range(1, 10)), "jump")
    max_turns, max_actions_per_turn, max_actions = 3, 1, 3
    is_instant = True

    def reset(self, seed: int) -> str:
        self.num_steps = 0
        return f"Room {seed % 7}."

    def step(self, action: str) -> tuple:
        if action == "jump":
            raise ValueError("the floor is gone")
        self.num_steps += 1
        is_done = self.num_steps == 3
        return f"Step {self.num_steps}.", -1.0, is_done, False, {"success": is_done}


def open_run(output: Path, name: str, *flags: str, environment: str = "Jump") -> Run:
    world = f"{__name__}:{environment}"
    named = ["--environments", world, "--output", str(output), "--name", name]
    return build(parse([*FLAGS, *named, *flags]))


def failing(row: dict) -> float:
    """The share of episodes that an error ended."""
    errors = row["rollout/environment_errors"]
    return errors / (row["rollout/num_trajectories"] + row["rollout/resampled"])


def test_a_policy_does_not_learn_to_break_its_world(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """Trained on, an episode that failed would earn 0, more than the -3 of any other."""
    rows = metrics(finish(open_run(tmp_path, "jump", "--num-steps", "3")))
    assert failing(rows[0]) > 0.2, "a third of the first episodes jump"
    assert max(map(failing, rows[1:])) < failing(rows[0]) + 0.1, "of 128, three deviations"
    for row in rows:
        assert row["rollout/reward"] <= -3.0, "no failed episode is in the mean"
        errors, lost = row["rollout/environment_errors"], row["rollout/lost_trajectories"]
        assert row["rollout/resampled"] == errors - lost > lost
        assert row["rollout/truncated_by_error"] == lost / 128
    said = capfd.readouterr().out
    assert "the policy causes an error" in said and "'jump'" in said and "penalty" in said


@pytest.mark.slow
def test_a_policy_does_not_learn_to_break_its_world_in_the_long_run(tmp_path: Path) -> None:
    run = open_run(tmp_path, "long", "--num-steps", "12", "--eval-samples", "16")
    rows = metrics(finish(run))
    assert failing(rows[-1]) < failing(rows[0]) / 2
    assert rows[-1]["rollout/success"] > 0.8 and rows[-1]["eval/success"] > 0.8


@pytest.mark.slow
@pytest.mark.forks
def test_ranks_train_on_the_same_samples_and_a_resumed_run_repeats_them(tmp_path: Path) -> None:
    """Two ranks share the groups; a run from the rollouts on the disk is the same to the bit."""
    world = ["--environments", f"{__name__}:Jump", "--save-interval", "1", "--keep-last", "0"]
    flags = [*FLAGS, *world, "--num-groups", "4", "--keep-rollouts", "0"]
    whole = launch(tmp_path, "whole", 2, *flags, "--num-steps", "3")
    parts = launch(tmp_path, "parts", 2, *flags, "--num-steps", "2")
    launch(tmp_path, "parts", 2, *flags, "--num-steps", "3", "--resume")
    assert metrics(whole)[2]["rollout/resampled"] > 0
    assert [row["rollout/reward"] for row in metrics(whole)] == [
        row["rollout/reward"] for row in metrics(parts)
    ]
    expected, found = state(whole, 3), state(parts, 3)
    assert expected.keys() == found.keys()
    assert all((expected[key] == found[key]).all() for key in expected)


class Shared:
    """Draws its board from the global generator, which other threads use too."""

    actions = ("left", "right")
    max_turns, max_actions_per_turn, max_actions = 1, 1, 1

    def draw(self, seed: int) -> Iterator[int]:
        random.seed(seed)
        for _ in range(5):
            time.sleep(0.004)
            yield random.randrange(4)

    def reset(self, seed: int) -> str:
        return f"Board {''.join(map(str, self.draw(seed)))}."

    def step(self, action: str) -> tuple:
        return "", float(action == "left"), True, False, {}


class Own(Shared):
    """As its base, with its own generator."""

    def draw(self, seed: int) -> Iterator[int]:
        own = random.Random(seed)
        for _ in range(5):
            time.sleep(0.004)
            yield own.randrange(4)


@pytest.mark.parametrize(("environment", "times"), [("Shared", 1), ("Own", 0)])
def test_a_world_that_mixes_up_the_tasks_of_a_group_is_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture, environment: str, times: int
) -> None:
    flags = ["--num-groups", "2", "--num-steps", "2", "--warm-start-trajectories", "24"]
    run = open_run(tmp_path, "run", *flags, environment=environment)
    capfd.readouterr()
    finish(run)
    said = capfd.readouterr().out
    assert said.count("members of a group play different tasks") == times
