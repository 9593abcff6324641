"""Environments of other libraries beside the libraries themselves: the same seeds and actions give
the same observations and rewards, and their packages are optional.
"""

import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

from ragen_mega.config.sections.environment import parse_shares
from ragen_mega.environments import calls
from ragen_mega.environments.adapters.packages import ProcessRandomness, required
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.protocol import StepResult
from ragen_mega.environments.registry import make

TAXI = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))


# Names


def test_a_share_follows_the_name_and_a_port_the_host() -> None:
    names = (
        "gymnasium:Blackjack-v1:2,gem:game:GuessTheNumber-v0-easy,mine:World:3,"
        "openenv:ws://127.0.0.1:8000,openenv:ws://[::1]:8001:4,openenv:http://host/path:5"
    )
    assert parse_shares(names) == {
        "gymnasium:Blackjack-v1": 2,
        "gem:game:GuessTheNumber-v0-easy": 1,
        "mine:World": 3,
        "openenv:ws://127.0.0.1:8000": 1,
        "openenv:ws://[::1]:8001": 4,
        "openenv:http://host/path": 5,
    }


def test_a_missing_package_names_its_extra() -> None:
    with pytest.raises(ValueError, match=r"pip install 'ragen-mega\[its-extra\]'"):
        required("no_such_package", "its-extra")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("gymnasium:NoSuch-v0", "NoSuch.*correct the name"),
        ("gymnasium:no_such_module:Such-v0", "no_such_module.*correct the name"),
        ("gymnasium:Needing-v0", "cannot be built.*No module named 'no_such_package'"),
        ("gymnasium:Pendulum-v1", "Discrete or Text actions"),
        ("openenv:ws://127.0.0.1:9", "not installed|does not answer as an OpenEnv server"),
    ],
)
def test_what_cannot_be_played_is_one_line(
    name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_missing = EnvSpec("Needing-v0", entry_point="no_such_package:World")
    monkeypatch.setitem(gymnasium.registry, "Needing-v0", of_missing)
    with pytest.raises(ValueError, match=rule) as caught:
        make(name)
    assert "\n" not in str(caught.value)


# Gymnasium


def test_an_older_version_of_an_environment_brings_no_warning() -> None:
    program = "from ragen_mega.environments.registry import make; make('gymnasium:CartPole-v0')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "name", [TAXI, "Blackjack-v1", "FrozenLake-v1", "CliffWalking-v1", "CartPole-v1"]
)
def test_a_gymnasium_environment_plays_as_itself(name: str) -> None:
    ours, theirs = make(f"gymnasium:{name}"), gymnasium.make(name)
    draw = random.Random(0)
    for seed in range(20):
        calls.reset(ours, seed)
        theirs.reset(seed=seed)
        for _ in range(30):
            index = draw.randrange(len(ours.actions))
            result = calls.step(ours, ours.actions[index])
            _, reward, terminated, truncated, _ = theirs.step(index)
            assert (result.reward, result.terminated, result.truncated) == (
                reward,
                terminated,
                truncated,
            )
            if terminated or truncated:
                break
    calls.close(ours)


def test_the_namesake_of_a_known_environment_in_another_namespace_is_unknown() -> None:
    pole = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    gymnasium.register("mine/Taxi-v0", pole, max_episode_steps=5, reward_threshold=5)
    world = make("gymnasium:mine/Taxi-v0")
    assert world.actions == ("0", "1") and not hasattr(world, "instruction")
    calls.reset(world, 0)
    last = [calls.step(world, action) for action in "01010"][-1]
    assert last.truncated and last.info["success"]


def test_names_of_actions_mean_what_they_say() -> None:
    lake = make("gymnasium:FrozenLake-v1", is_slippery=False)
    assert calls.reset(lake, 0) == "[S]FFF\nFHFH\nFFFH\nHFFG"
    for action, seen in (("right", "S[F]FF"), ("left", "[S]FFF"), ("down", "[F]HFH")):
        assert seen in calls.step(lake, action).observation.splitlines()
    assert calls.step(lake, "up").observation == "  (Up)\n[S]FFF\nFHFH\nFFFH\nHFFG"
    taxi = make(f"gymnasium:{TAXI}")
    for seed in range(10):
        places = [calls.reset(taxi, seed)]
        places += [calls.step(taxi, action).observation for action in ("south", "north")]
        row, lower, upper = (int(re.findall(r"taxi is at row (\d)", text)[0]) for text in places)
        assert lower == min(row + 1, 4) and upper == lower - 1
    ours, theirs = make("gymnasium:Blackjack-v1"), gymnasium.make("Blackjack-v1")
    for seed in range(50):
        (total, dealer, ace), _ = theirs.reset(seed=seed)
        said = f"{'with' if ace else 'without'} a usable ace. The dealer shows {dealer}."
        assert calls.reset(ours, seed) == f"Your sum is {total}, {said}"


def test_the_words_of_a_taxi_name_its_whole_state() -> None:
    ours, theirs = make(f"gymnasium:{TAXI}"), gymnasium.make(TAXI)
    for seed in range(50):
        text = calls.reset(ours, seed)
        state, _ = theirs.reset(seed=seed)
        assert "\x1b" not in text
        row, column, *_ = map(int, re.findall(r"row (\d), column (\d)", text)[0])
        passenger, destination = re.findall(r"(?:at|to) (\w) \(", text)
        assert theirs.unwrapped.encode(
            row, column, "RGYB".index(passenger), "RGYB".index(destination)
        ) == int(state)


def test_outcomes_have_a_seed_of_their_own() -> None:
    world = make("gymnasium:Blackjack-v1")

    def deal(seed: int, outcome_seed: int) -> list[str]:
        seen = [calls.reset(world, seed, outcome_seed=outcome_seed)]
        while not (result := calls.step(world, "hit")).terminated:
            seen.append(result.observation)
        return [*seen, result.observation]

    games = [deal(3, outcome) for outcome in range(10)]
    assert len({game[0] for game in games}) == 1
    assert len({tuple(game) for game in games}) > 1
    assert deal(3, 4) == games[4]


def test_success_is_read_from_the_last_reward() -> None:
    cliff = make("gymnasium:CliffWalking-v1")
    calls.reset(cliff, 0)
    way = ["up", *["right"] * 11, "down"]
    results = [calls.step(cliff, action) for action in way]
    assert results[-1].terminated and results[-1].info["success"]
    assert not any(result.info["success"] for result in results[:-1])


def test_success_is_the_threshold_that_an_environment_names() -> None:
    """CartPole's last reward is 1 however early the pole falls; 475 count as solved."""
    pole = make("gymnasium:CartPole-v1")
    left, right = pole.actions

    def play(choose: Callable[[list[float]], str]) -> StepResult:
        state, result = calls.reset(pole, 0), None
        while result is None or not (result.terminated or result.truncated):
            result = calls.step(pole, choose([float(x) for x in state.strip("[]").split()]))
            state = result.observation
        return result

    fallen = play(lambda state: left)
    assert fallen.reward > 0 and not fallen.info["success"]
    held = play(lambda state: right if state[2] + 0.3 * state[3] > 0 else left)
    assert held.truncated and held.info["success"]


class Keys(gymnasium.Env):
    """Keys of a keyboard; the last one wins, a moment before the time limit."""

    action_space = gymnasium.spaces.Discrete(3, start=5)
    observation_space = gymnasium.spaces.Box(0, 1, (40, 40), dtype=np.int8)
    meanings = ("h", "H", "l")

    def get_action_meanings(self):
        return self.meanings

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.field = np.zeros((40, 40), np.int8)
        return self.field, {}

    def step(self, action):
        self.field[action, 20] = 1
        return self.field, 0.0, False, action == 7, {"is_success": action == 7}


gymnasium.register("RagenMegaKeys-v0", entry_point=Keys)


@pytest.mark.parametrize(
    ("meanings", "names"),
    [(("H", "K", "L"), ("h", "k", "l")), (("h", "H", "l"),) * 2, (("h",) * 3, ("5", "6", "7"))],
)
def test_every_gymnasium_action_has_a_name_of_its_own(
    meanings: tuple[str, ...], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keys, "meanings", meanings)
    world = make("gymnasium:RagenMegaKeys-v0")
    assert world.actions == names
    calls.reset(world, 0)
    for row, name in enumerate(names, start=5):
        calls.step(world, name)
        assert world._environment.unwrapped.field[row, 20] == 1


def test_gymnasium_takes_an_option_that_cannot_be_copied() -> None:
    """Gymnasium then has no description of the environment around which it put wrappers."""
    name = "RagenMegaLocked-v0"
    gymnasium.register(name, lambda lock: Keys(), max_episode_steps=9, reward_threshold=9.0)
    with pytest.warns(UserWarning, match="while copying the environment spec"):
        world = make(f"gymnasium:{name}", lock=threading.Lock())
        calls.reset(world, 0)
        assert not calls.step(world, "h").info["success"]
        assert calls.step(world, "l").info["success"]


def test_a_large_array_is_shown_whole() -> None:
    world = make("gymnasium:RagenMegaKeys-v0")
    shown = calls.reset(world, 0)
    assert re.findall(r"\d", shown) == ["0"] * 1600
    result = calls.step(world, "h")
    assert "1" in result.observation and result.info["is_action_effective"]


def test_success_counts_where_a_time_limit_ends_the_episode() -> None:
    world = make("gymnasium:RagenMegaKeys-v0")
    calls.reset(world, 0)
    results = [calls.step(world, name) for name in ("h", "l")]
    assert [(one.truncated, one.info["success"]) for one in results] == [
        (False, False),
        (True, True),
    ]


# Packages that draw from the generators of the process


def test_borrowed_generators_are_given_back() -> None:
    own, other = ProcessRandomness(), ProcessRandomness()
    own.seed(1)
    other.seed(1)
    random.seed(7)
    np.random.seed(7)
    expected = random.Random(7).random(), np.random.RandomState(7).rand()
    drawn = []
    for randomness in (own, other, own, other):
        with randomness.installed():
            drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert (random.random(), np.random.rand()) == expected


# TextArena

GAMES = ["GuessTheNumber-v0", "Mastermind-v0", "TowerOfHanoi-v0", "Sokoban-v0"]
MOVES = {
    "GuessTheNumber-v0": [f"[{number}]" for number in range(1, 21)],
    "Mastermind-v0": ["[1 2 3 4]", "[4 5 6 1]", "[6 5 4 3]"],
    "TowerOfHanoi-v0": ["[A C]", "[A B]", "[C B]", "[B A]", "[C A]"],
    "Sokoban-v0": ["[up]", "[down]", "[left]", "[right]"],
}


@pytest.mark.parametrize("game", GAMES)
def test_a_game_of_textarena_plays_as_itself(game: str) -> None:
    arena = pytest.importorskip("textarena", reason="needs the extra textarena")
    ours, beside, theirs = make(f"textarena:{game}"), make(f"textarena:{game}"), arena.make(game)
    draw = random.Random(1)
    for seed in range(5):
        random.seed(seed)
        np.random.seed(seed)
        theirs.reset(num_players=1, seed=seed)
        said = [calls.reset(ours, seed)]
        calls.reset(beside, seed + 1)
        for _ in range(40):
            move = draw.choice(MOVES[game])
            is_over, _ = theirs.step(move)
            calls.step(beside, move)
            result = calls.step(ours, move)
            said.append(result.observation)
            assert result.terminated == is_over
            if is_over:
                rewards, _ = theirs.close()
                assert result.reward == rewards[0]
                assert result.info["success"] == (rewards[0] == 1)
                break
            whole = theirs.get_observation()[1]
            assert all(line in whole for text in said for line in text.splitlines())
            calls.reset(beside, seed + 1)


def test_a_tower_of_hanoi_is_solved_and_misread_moves_are_said() -> None:
    pytest.importorskip("textarena", reason="needs the extra textarena")
    game = make("textarena:TowerOfHanoi-v0")
    calls.reset(game, 0)
    assert not calls.step(game, "nonsense").info["is_action_valid"]
    moves = ["A C", "A B", "C B", "A C", "B A", "[B C]", "A C"]
    results = [calls.step(game, move) for move in moves]
    assert all(result.info["is_action_valid"] for result in results)
    assert [result.reward for result in results] == [0.0] * 6 + [1.0]
    assert results[-1].info["success"]
    with pytest.raises(ValueError, match="cannot be played alone"):
        make("textarena:TicTacToe-v0")


# reasoning-gym


SOME_TASKS = """ab base_conversion basic_arithmetic bitwise_arithmetic caesar_cipher chain_sum
    complex_arithmetic count_bits countdown course_schedule dice family_relationships futoshiki gcd
    knights_knaves largest_island leg_counting letter_counting maze mini_sudoku number_sorting
    prime_factorization rotate_matrix sokoban spell_backward sudoku syllogism tower_of_hanoi
    zebra_puzzles""".split()


@pytest.mark.parametrize("names", [SOME_TASKS, pytest.param(None, marks=pytest.mark.slow)])
def test_tasks_of_reasoning_gym_score_as_they_do_themselves(names: list[str] | None) -> None:
    gym = pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")
    from reasoning_gym.factory import DATASETS

    names = names or sorted(set(DATASETS) - {"composite"})  # which has no task
    solved = 0
    for task in names:
        world = make(f"reasoning_gym:{task}")
        tasks = gym.create_dataset(task, seed=11, size=1)
        entry = tasks[0]
        assert calls.reset(world, 11) == entry["question"].strip()
        answer = str(entry["answer"])
        result = calls.step(world, answer)
        assert result.terminated
        assert result.reward == pytest.approx(tasks.score_answer(answer, entry))
        solved += result.info["success"]
        for text in ("", "?", "[1, 2]", "((("):
            calls.reset(world, 11)
            assert calls.step(world, text).reward <= 1.0
    assert solved >= 0.9 * len(names)


def test_several_attempts_pay_the_best_one_and_tell_the_score() -> None:
    pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")
    world = make("reasoning_gym:leg_counting", attempts=3)
    episode = Episode(world, EpisodeConfig(think=False))
    question = episode.start(5)[-1].content
    legs = {"butterfly": 6, "crab": 10, "praying mantis": 6, "giraffe": 4, "cockroach": 6}
    counts = {name: int(re.search(rf"(\d+) {name}", question)[1]) for name in legs}
    total = sum(legs[name] * number for name, number in counts.items())
    wrong = episode.respond("<answer>0</answer>")
    assert not wrong.terminated and "scores 0" in wrong.messages[0].content
    right = episode.respond(f"<answer>{total}</answer>")
    assert right.terminated and right.info["success"] and right.reward == 1.0


# GEM


@pytest.mark.parametrize("game", ["GuessTheNumber", "Mastermind", "FifteenPuzzle"])
def test_a_game_of_gem_plays_as_itself(game: str) -> None:
    gem = pytest.importorskip("gem", reason="needs the extra gem")
    name = f"game:{game}-v0-easy"
    ours, theirs = make(f"gem:{name}"), gem.make(name)
    for seed in range(5):
        seen = calls.reset(ours, seed)
        first, info = theirs.reset(seed=seed)
        assert seen.startswith(first.strip()) and info.get("suffix", "") in seen
        for turn in range(30):
            answer = ours.random_answer(random.Random(seed * 100 + turn))
            boxed = answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
            state = random.getstate()
            result = calls.step(ours, answer)
            assert random.getstate() == state
            observation, reward, terminated, truncated, _ = theirs.step(boxed)
            assert result.observation.startswith(observation.strip())
            assert (result.reward, result.terminated) == (reward, terminated)
            if terminated or truncated:
                break


def test_an_answer_to_gem_is_put_into_a_box() -> None:
    pytest.importorskip("gem", reason="needs the extra gem")
    game = make("gem:game:GuessTheNumber-v0-easy")
    calls.reset(game, 3)
    low, high = 1, 10
    while True:
        guess = (low + high) // 2
        result = calls.step(game, str(guess))
        if result.terminated:
            break
        low, high = (guess + 1, high) if "higher" in result.observation else (low, guess - 1)
    assert result.info["success"] and result.reward == 1.0


class _Masked(gymnasium.Env):
    """The second of three actions is forbidden after the reset, the first after a step."""

    action_space = gymnasium.spaces.Discrete(3, start=1)
    observation_space = gymnasium.spaces.Dict({})

    def reset(self, *, seed=None, options=None):
        self.moves = []
        return self._seen(), {"action_mask": np.array([1, 0, 1], np.int8)}

    def step(self, action):
        self.moves.append(action)
        return self._seen(), 1.0, False, False, {"action_mask": np.array([0, 1, 1], np.int8)}

    def _seen(self):
        held = np.array([1, 2])
        return {"at": np.int64(len(self.moves)), "held": held, "pair": (np.float32(0.5), True)}


def test_a_masked_action_is_invalid_and_numbers_are_pythons() -> None:
    gymnasium.register("mine/Masked-v0", entry_point=_Masked, disable_env_checker=True)
    world = make("gymnasium:mine/Masked-v0")
    assert world.reset(0) == "{'at': 0, 'held': [1, 2], 'pair': (0.5, True)}"
    refused = world.step("2")
    assert refused.info == {"is_action_valid": False} and refused.reward == 0.0
    assert world.step("1").reward == 1.0 and not world.step("1").info["is_action_valid"]
    assert world._environment.unwrapped.moves == [1]
