"""The time left of a run against a simulated one whose end is known."""

import pytest

from ragen_mega.config import parse
from ragen_mega.report.pace import Pace, duration

STEP, EPISODE, STEPS = 7.0, 0.25, 12
EVALUATIONS = {4: 40, 8: 40, 12: 320}


def test_the_time_left_counts_evaluations_and_is_unknown_before_the_second_step() -> None:
    """A regular run: at every step the estimate is what is then really left, the last evaluation,
    which is the longest, included; within a step the clock counts down.
    """
    now = 0.0
    pace = Pace(STEPS, EVALUATIONS, clock=lambda: now)
    total = STEPS * STEP + sum(EVALUATIONS.values()) * EPISODE
    now += 300.0  # a warm start says nothing about steps
    assert pace.left() is None and "before the first of 12 steps" in str(pace)
    pace.played(40, 40 * EPISODE, in_evaluation=True)
    assert pace.left() is None
    begin = now
    for step in range(STEPS):
        pace.played(16, 16 * 99.0, in_evaluation=False)  # an evaluation is known to be faster
        now += STEP
        pace.step_done(step + 1, STEP)
        if step == 0:
            assert pace.left() is None
            continue
        assert pace.left() == pytest.approx(total - (now - begin))
        now += 2.0
        assert pace.left() == pytest.approx(total - (now - begin))
        now -= 2.0
        if count := EVALUATIONS.get(step + 1):
            now += count * EPISODE
            pace.played(count, count * EPISODE, in_evaluation=True)
            assert pace.left() == pytest.approx(total - (now - begin))
    assert pace.left() == 0.0


def test_a_step_that_takes_longer_leaves_those_behind_it() -> None:
    now = 0.0
    pace = Pace(4, {4: 10}, clock=lambda: now)
    pace.played(10, 10.0, in_evaluation=False)  # all that is known of episodes
    pace.step_done(1, 33.0)  # programs were compiled in it
    assert pace.left() is None
    pace.step_done(2, STEP)
    assert pace.left() == 2 * STEP + 10
    now += 1000.0
    assert pace.left() == STEP + 10


def test_the_first_step_of_a_resumed_process_compiles_too() -> None:
    pace = Pace(4, {}, clock=lambda: 0.0)
    pace.num_done = 1
    assert str(pace).startswith("1 of 4 steps") and pace.left() is None
    pace.step_done(2, 33.0)
    assert pace.left() is None
    pace.step_done(3, STEP)
    assert pace.left() == STEP


def test_recent_steps_count() -> None:
    pace = Pace(100, {}, clock=lambda: 0.0)
    for step in range(1, 51):
        pace.step_done(step, 1.0 if step <= 40 else 4.0)
    assert pace.left() == 50 * 4.0


def test_the_plan_of_a_configuration() -> None:
    flags = "--num-steps 12 --eval-interval 4 --eval-prompts 20 --eval-samples 8 --environments"
    assert parse([*flags.split(), "bandit,sokoban"]).planned_evaluations(1) == EVALUATIONS
    assert parse([*flags.split(), "bandit"]).planned_evaluations(2) == {4: 10, 8: 10, 12: 80}
    never = parse([*flags.split(), "bandit", "--eval-interval", "0"])
    assert never.planned_evaluations(1) == {12: 160}


def test_sets_that_are_only_evaluated_are_planned() -> None:
    flags = "--environments sokoban --num-steps 12 --eval-interval 4 --eval-prompts 20".split()
    one = parse(flags)
    three = parse([*flags, "--eval-environments", "sokoban_large,frozen_lake"])
    tripled = {step: 3 * count for step, count in one.planned_evaluations(1).items()}
    assert three.planned_evaluations(1) == tripled


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (3560, "59 min"),
        (3600 * 3 + 290, "3 h 05 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
