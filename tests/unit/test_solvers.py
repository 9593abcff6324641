"""Reference players against published numbers, brute force over the environments themselves, and
sampling.
"""

import itertools
import json
import statistics
import time
from functools import cache

import numpy as np
import pytest

import ragen_mega.environments.boards as boards_module
from ragen_mega.environments.boards import load_boards
from ragen_mega.environments.episode import EpisodeConfig
from ragen_mega.environments.reference_players import baselines, wilson_interval
from ragen_mega.environments.registry import make
from ragen_mega.environments.worlds.frozen_lake.lakes import (
    DIRECTIONS,
    generate_lake,
    parse_lake,
)
from ragen_mega.environments.worlds.frozen_lake.solver import MAX_UNSEEN_ACTIONS, LakeSolver
from ragen_mega.environments.worlds.sokoban.rooms import parse_room
from ragen_mega.environments.worlds.sokoban.solver import random_success, shortest_plan
from tests.support.prompts import first_seeds

TRAIN_SEEDS = range(10_000, 11_000)


@cache
def records(name):
    (path,) = boards_module.Path(boards_module.__file__).parent.glob(
        f"worlds/*/boards/{name}.jsonl"
    )
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Sokoban


@pytest.mark.parametrize("name", ["sokoban_6x6_1box", "sokoban_8x8_2box"])
def test_shortest_solutions_of_the_packaged_rooms(name):
    environment = make("sokoban")
    for record in records(name):
        plan = shortest_plan(parse_room(record["board"]))
        assert len(plan) == record["shortest"], record["seed"]
        environment.reset(0, board=record["board"])
        results = [environment.step(action) for action in plan]
        assert results[-1].info["success"] and not any(result.terminated for result in results[:-1])


def brute_force_length(environment, rows):
    """Length of a shortest solution, found with the environment's own steps and its observations as
    states.
    """
    frontier, seen = [tuple(rows)], {tuple(rows)}
    for length in itertools.count(1):
        successors = []
        for state in frontier:
            for action in environment.actions:
                environment.reset(0, board=state)
                result = environment.step(action)
                if result.terminated:
                    return length
                successor = tuple(result.observation.split("\n"))
                if successor not in seen:
                    seen.add(successor)
                    successors.append(successor)
        if not successors:
            return None
        frontier = successors


def test_shortest_plan_against_brute_force():
    environment = make("sokoban")
    for seed in range(20):
        rows = environment.reset(seed).split("\n")
        plan = shortest_plan(parse_room(rows))
        assert len(plan) == brute_force_length(environment, rows)
        assert shortest_plan(parse_room(rows), len(plan)) == plan
        assert shortest_plan(parse_room(rows), len(plan) - 1) is None


def test_dead_rooms_have_no_plan():
    for rows in (
        ["#####", "#X_P#", "#__O#", "#####"],
        ["######", "#_X__#", "#PX_O#", "#___O#", "######"],
    ):
        expected = brute_force_length(make("sokoban"), rows)
        plan = shortest_plan(parse_room(rows))
        assert (None if plan is None else len(plan)) == expected
    assert shortest_plan(parse_room(["#####", "#X_P#", "#__O#", "#####"])) is None


def test_random_sokoban_player_against_enumeration():
    environment = make("sokoban")
    rows = ["#####", "#_P_#", "#_X_#", "#_O_#", "#####"]
    solved = 0
    for actions in itertools.product(environment.actions, repeat=5):
        environment.reset(0, board=rows)
        for action in actions:
            if environment.step(action).terminated:
                solved += 1
                break
    assert random_success(parse_room(rows), 5) == pytest.approx(solved / 4**5, abs=1e-12)


def test_generated_rooms_are_solvable_and_as_hard_as_the_original():
    environment = make("sokoban")
    started = time.process_time()
    for seed in TRAIN_SEEDS:
        environment.reset(seed)
    assert (time.process_time() - started) / len(TRAIN_SEEDS) < 0.010
    lengths, chances = [], []
    for seed in TRAIN_SEEDS:
        environment.reset(seed)
        lengths.append(len(shortest_plan(environment.room)))
        chances.append(random_success(environment.room, 10))
    # RAGEN's training rooms: mean 4.15, median 4, 99.4% within 10 actions; random play solves 19 to
    # 20%.
    assert statistics.mean(lengths) == pytest.approx(4.0, abs=0.3)
    assert statistics.median(lengths) == 4
    assert statistics.mean(length <= 10 for length in lengths) > 0.99
    assert statistics.mean(chances) == pytest.approx(0.198, abs=0.015)


def test_generated_large_rooms():
    environment = make("sokoban_large")
    lengths = []
    for seed in range(10_000, 10_200):
        environment.reset(seed)
        assert (
            len(environment.room.boxes) == 2
            and not environment.room.boxes & environment.room.targets
        )
        lengths.append(len(shortest_plan(environment.room)))
    assert statistics.mean(lengths) == pytest.approx(5.8, abs=0.5)


def test_curriculum_draws_short_rooms_only():
    environment = make("sokoban", max_shortest=2)
    for seed in range(100):
        environment.reset(seed)
        assert len(shortest_plan(environment.room)) <= 2
    with pytest.raises(ValueError, match="raise max_shortest"):
        make("sokoban_large", max_shortest=1).reset(0)


# FrozenLake


def test_per_board_values_of_the_packaged_lakes():
    for record in records("frozen_lake_4x4_p0.8"):
        lake = parse_lake(record["board"])
        solver = LakeSolver(lake, 1 / 3)
        assert solver.random(lake.start, 10) == pytest.approx(
            record["uniform_random_10_actions"], abs=1e-6
        )
        assert solver.closed_loop(lake.start, 10) == pytest.approx(
            record["optimum_slip_third_10_actions"], abs=1e-6
        )


def brute_force_open_loop(lake, success_rate, cell, turns, per_turn, budget):
    """Best success by trying every sequence of every turn and following all of its outcomes."""
    if cell == lake.goal:
        return 1.0
    if cell in lake.holes or turns == 0:
        return 0.0
    names = list(DIRECTIONS)
    best = 0.0
    for length in range(1, min(per_turn, budget) + 1):
        for sequence in itertools.product(range(4), repeat=length):
            outcomes = {cell: 1.0}
            for action in sequence:
                after = {}
                for place, mass in outcomes.items():
                    if place == lake.goal or place in lake.holes:
                        after[place] = after.get(place, 0.0) + mass
                        continue
                    for turn, chance in (
                        (0, success_rate),
                        (1, (1 - success_rate) / 2),
                        (3, (1 - success_rate) / 2),
                    ):
                        landing = lake.neighbour(place, names[(action + turn) % 4])
                        after[landing] = after.get(landing, 0.0) + mass * chance
                outcomes = after
            value = sum(
                mass
                * brute_force_open_loop(
                    lake, success_rate, place, turns - 1, per_turn, budget - length
                )
                for place, mass in outcomes.items()
            )
            best = max(best, value)
    return best


@pytest.mark.parametrize(
    ("turns", "per_turn", "budget"), [(1, 3, 3), (2, 2, 3), (3, 1, 5), (2, 2, 10)]
)
@pytest.mark.parametrize("success_rate", [1 / 3, 0.8, 1.0])
def test_open_loop_value_against_brute_force(turns, per_turn, budget, success_rate):
    rng = np.random.default_rng(0)
    for _ in range(3):
        lake = generate_lake(rng, size=3, frozen_probability=0.8)
        expected = brute_force_open_loop(lake, success_rate, lake.start, turns, per_turn, budget)
        value = LakeSolver(lake, success_rate).open_loop(
            lake.start, max_turns=turns, max_actions_per_turn=per_turn, max_actions=budget
        )
        assert value == pytest.approx(expected, abs=1e-12)


def test_one_action_a_turn_is_the_closed_loop():
    lake = generate_lake(np.random.default_rng(1), size=4, frozen_probability=0.8)
    solver = LakeSolver(lake, 0.7)
    value = solver.open_loop(lake.start, max_turns=9, max_actions_per_turn=1, max_actions=10)
    assert value == pytest.approx(solver.closed_loop(lake.start, 9), abs=1e-12)
    too_long = MAX_UNSEEN_ACTIONS + 1
    assert (
        solver.open_loop(lake.start, max_turns=2, max_actions_per_turn=too_long, max_actions=20)
        is None
    )


# Scripted play and baselines


def optimal_actions(environment, actions_left=10):
    return environment.solver.optimal_actions(environment, actions_left)


def test_optimal_actions_solve_sokoban():
    environment = make("sokoban")
    for seed in range(50):
        environment.reset(seed)
        plan = optimal_actions(environment, actions_left=20)
        assert [environment.step(action) for action in plan][-1].info["success"]
        assert optimal_actions(environment) == []
    environment.reset(0, board=["#####", "#X_P#", "#__O#", "#####"])
    assert optimal_actions(environment) == []
    environment.reset(0, board=["#########", "#PX____O#", "#########"])
    assert optimal_actions(environment, actions_left=3) == ["Right"] * 3


def test_values_behind_the_budget_would_not_help_on_the_lake():
    """Ten actions one at a time on the packaged boards: play that is optimal for the budget, and
    play whose last value belongs to a game that goes on (what bootstrapping at the end of the
    budget would teach at best), which chooses among equal actions as the first one does.
    """
    won = np.zeros(2)
    boards = load_boards(None, "frozen_lake")
    for board in boards:
        world = make("frozen_lake")
        world.reset(board.seed, board=board.rows)
        lake, slip = world.lake, (1 - world.success_rate) / 2
        cells = list(itertools.product(range(lake.size), repeat=2))
        places = {cell: place for place, cell in enumerate(cells)}
        is_end = np.array([cell == lake.goal or cell in lake.holes for cell in cells])
        goal = np.array([float(cell == lake.goal) for cell in cells])
        moves = np.zeros((4, len(cells), len(cells)))
        for action, cell in itertools.product(range(4), cells):
            for turn, chance in ((0, world.success_rate), (1, slip), (-1, slip)):
                way = world.actions[(action + turn) % 4]
                moves[action, places[cell], places[lake.neighbour(cell, way)]] += chance

        def after(values, moves=moves, is_end=is_end, goal=goal):  # [4, cells]
            return np.where(is_end, goal, moves @ values)

        forever = goal
        for _ in range(500):
            forever = after(forever).max(0)
        for which, last in enumerate((goal, forever)):
            values, truth = last, goal
            for _ in range(10):
                hoped, reached = after(values), after(truth)
                is_best = hoped >= hoped.max(0) - 1e-9
                values, truth = hoped.max(0), np.where(is_best, reached, -1.0).max(0)
            won[which] += truth[places[lake.start]] / len(boards)
    assert won == pytest.approx([0.4832, 0.4775], abs=5e-4)


def test_optimal_actions_reach_the_value_of_the_lake():
    environment = make("frozen_lake", success_rate=0.8)
    rows = ["SFFH", "FHFF", "FFFH", "HFFG"]
    environment.reset(0, board=rows)
    value = LakeSolver(environment.lake, 0.8).closed_loop((0, 0), 10)
    successes = 0
    choices = {}
    for outcome_seed in range(1500):
        environment.reset(0, outcome_seed=outcome_seed, board=rows)
        for left in range(10, 0, -1):
            situation = (environment.facts()["player"], left)
            if situation not in choices:
                choices[situation] = optimal_actions(environment, actions_left=left)
            result = environment.step(*choices[situation])
            if result.terminated:
                successes += result.info["success"]
                assert optimal_actions(environment) == []
                break
    assert successes / 1500 == pytest.approx(value, abs=4 * (value * (1 - value) / 1500) ** 0.5)


def test_optimal_actions_lead_to_a_goal_that_is_out_of_reach() -> None:
    environment = make("frozen_lake")
    environment.reset(0, board=["SFFF", "HHHF", "HHHF", "HHHG"])
    assert [optimal_actions(environment, left) for left in (1, 5, 16)] == [["Up"]] * 3


def test_optimal_actions_do_not_dither_without_slip():
    environment = make("frozen_lake", success_rate=1.0)
    environment.reset(0, board=["SFFF", "FHFF", "FFFF", "FFFG"])
    steps = [environment.step(*optimal_actions(environment)) for _ in range(6)]
    assert steps[-1].info["success"]


def test_optimal_actions_pull_the_better_arm():
    environment = make("bandit_test")
    environment.reset(0)
    assert optimal_actions(environment) == ["Librarian"]
    environment.step("Librarian")
    assert optimal_actions(environment) == []


def budget(turns, per_turn, total=10):
    return EpisodeConfig(max_turns=turns, max_actions_per_turn=per_turn, max_actions=total)


@pytest.mark.parametrize(
    ("name", "protocol", "random", "optimum", "closed_loop"),
    [
        ("sokoban", budget(5, 5), 0.198, 1.0, 1.0),
        ("sokoban_new_vocabulary", budget(5, 5), 0.198, 1.0, 1.0),
        ("frozen_lake", budget(5, 5), 0.212, 0.477, 0.483),
        ("frozen_lake", budget(5, 2), 0.212, 0.464, 0.483),
        ("frozen_lake", budget(5, 1), None, 0.290, 0.483),
        ("bandit", budget(1, 1, 1), 0.5, 1.0, 1.0),
    ],
)
def test_known_baselines(name, protocol, random, optimum, closed_loop):
    prompts = [(seed, None) for seed in range(123, 379)]
    if name != "bandit":
        prompts = [(board.seed, board.rows) for board in load_boards(None, name)]
    result = baselines(name, prompts, protocol)
    if random is not None:
        # The published Sokoban number was sampled; the lakes' was computed.
        assert result.random == pytest.approx(
            random, abs=0.01 if name.startswith("sokoban") else 0.0005
        )
    assert result.optimum == pytest.approx(optimum, abs=0.0005)
    assert result.optimum_closed_loop == pytest.approx(closed_loop, abs=0.0005)
    assert result.num_prompts == 256 and result.is_exact
    assert result.random_ci_low < result.random < result.random_ci_high


@pytest.mark.parametrize(
    ("name", "options"), [("sokoban", {}), ("frozen_lake", {"success_rate": 0.8})]
)
def test_random_baseline_against_sampled_play(name, options):
    environment = make(name, **options)
    rng = np.random.default_rng(0)
    seeds = range(40)
    successes = 0
    for seed, repeat in itertools.product(seeds, range(30)):
        environment.reset(seed, outcome_seed=repeat)
        for _ in range(10):
            result = environment.step(environment.actions[rng.integers(4)])
            if result.terminated:
                successes += result.info["success"]
                break
    rate = baselines(name, first_seeds(40), budget(5, 5), options).random
    assert successes / 1200 == pytest.approx(rate, abs=4 * (rate * (1 - rate) / 1200) ** 0.5)


def test_wilson_interval():
    assert wilson_interval(10, 100) == pytest.approx((0.05523, 0.17437), abs=1e-5)  # textbook value
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson_interval(10, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)
    for successes, n in ((1, 0), (-1, 5), (6, 5), (float("nan"), 5)):
        with pytest.raises(ValueError, match="0 <= successes <= n"):
            wilson_interval(successes, n)
