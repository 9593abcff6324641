"""The worlds Lookup and Reverse: their references by enumeration, what is revealed when, and the
examples that their prompts show.
"""

from __future__ import annotations

import copy
from fractions import Fraction
from functools import cache
from itertools import permutations, product

import pytest

from ragen_mega.config import parse
from ragen_mega.environments.episode import EpisodeConfig
from ragen_mega.environments.protocol import Budget
from ragen_mega.environments.reference_players import baselines
from ragen_mega.environments.registry import make
from ragen_mega.environments.worlds.lookup.world import PEOPLE, Hint, Lookup
from ragen_mega.rollout.tasks import prompt_examples

CHAINS = [
    {},
    {"min_people": 1, "max_people": 4},
    {"dead_ends": 2},
]


def all_random_play(world: Lookup, turns: int) -> Fraction:
    """Return the success of uniform play over all of its choices."""
    if not turns:
        return Fraction(0)
    found = Fraction(0)
    for said in world.heard:
        after = copy.deepcopy(world)
        is_solved = after.step(said).terminated
        found += Fraction(1) if is_solved else all_random_play(after, turns - 1)
    return found / len(world.heard)


@pytest.mark.parametrize("options", CHAINS)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_random_rate_is_the_sum_over_all_play(options: dict, seed: int) -> None:
    world = make("lookup", **options)
    world.reset(seed)
    for turns in (2, 4, 5):
        expected = all_random_play(world, turns)
        assert world.solver.references(world, Budget(turns, 1, turns)).random == pytest.approx(
            float(expected), abs=1e-12
        )


def best_play(sizes: tuple[int, ...], turns: int) -> Fraction:
    """Return the success of the best player who does not see which of two people knows, by value
    iteration over the people who were not asked yet.
    """

    @cache
    def value(place: int, unknown: int, left: int) -> Fraction:
        if not left:
            return Fraction(0)
        if place == len(sizes):
            return Fraction(1)
        following = sizes[place + 1] if place + 1 < len(sizes) else 0
        found = value(place + 1, following, left - 1) / unknown
        if unknown > 1:
            found += value(place, unknown - 1, left - 1) * Fraction(unknown - 1, unknown)
        return found

    return value(0, sizes[0], turns)


@pytest.mark.parametrize("sizes", list(product((1, 2), repeat=3)) + [(1,), (2,)])
def test_the_optimum_is_the_best_of_a_player_who_cannot_see_who_knows(
    sizes: tuple[int, ...],
) -> None:
    world = make("lookup")
    world.reset(0)
    for turns in range(1, 2 * len(sizes) + 2):
        successes = []
        for known in product(*map(range, sizes)):
            names = iter(["Ann", "Tom", "Mia", "Ben", "Zoe", "Sam"])
            named = [tuple(next(names) for _ in range(size)) for size in sizes]
            played = copy.deepcopy(world)
            played.chain = [Hint(of, of[who]) for of, who in zip(named, known, strict=True)]
            results = []
            for _ in range(turns):
                for said in played.solver.optimal_actions(played, 1):
                    results.append(played.step(said).terminated)
            successes.append(any(results))
        expected = best_play(sizes, turns)
        assert Fraction(sum(successes), len(successes)) == expected
        assert played.solver.references(played, Budget(turns, 1, turns)).optimum == expected


def test_the_own_budget_is_enough_for_the_optimum() -> None:
    for options in CHAINS:
        world = make("lookup", **options)
        for seed in range(20):
            world.reset(seed)
            budget = Budget(world.max_turns, world.max_actions_per_turn, world.max_actions)
            assert world.solver.references(world, budget).optimum == 1.0


@pytest.mark.parametrize("options", CHAINS)
def test_turns_in_which_nobody_succeeds_are_said_with_the_turns_that_are_needed(
    options: dict,
) -> None:
    """Each person of the chain takes a turn, and the code another."""
    world, said = make("lookup", **options), []
    world.reset(7)
    needed = len(world.chain) + 1
    for turns in range(1, needed + 2):
        known = baselines("lookup", [(7, None)], EpisodeConfig(max_turns=turns), options)
        assert bool(known.turns_say) == (known.optimum == 0) == (turns < needed)
        said += known.notes
    assert said == [
        f"lookup: --max-turns {turns} is too few for any success: the first state that is"
        f" evaluated needs {needed}"
        for turns in range(1, needed)
    ]
    limits = EpisodeConfig(max_turns=1, max_actions=1)  # more turns would have no action
    assert baselines("lookup", [(7, None)], limits, options).notes == []


def test_a_rate_that_rounding_lifts_above_one_is_one() -> None:
    world = make("lookup", min_people=2, max_people=2, dead_ends=1)
    world.reset(0)
    protocol = EpisodeConfig(max_turns=132, max_actions=132)
    assert world.solver.references(world, protocol.budget(world)).random > 1.0
    options = {"min_people": 2, "max_people": 2, "dead_ends": 1}
    assert baselines("lookup", [(0, None), (2, None)], protocol, options).random == 1.0


def test_nothing_pays_before_it_was_heard() -> None:
    world = make("lookup", min_people=3, max_people=3)
    world.reset(5)
    first, second, third = (link.knows for link in world.chain)
    code = world.facts()["code"]
    for unheard in (code, second, third, "", "the code", first + second):
        result = world.step(unheard)
        assert result.reward == 0 and not result.terminated and not world.facts()["asked"]
    rewards = [world.step(said) for said in (first.upper(), first, f" {second}.", third, code)]
    assert [result.reward for result in rewards] == [0.3, 0.0, 0.3, 0.3, 1.0]
    assert [result.info["success"] for result in rewards] == [False] * 4 + [True]
    assert code not in "".join(result.observation for result in rewards[:3])
    with pytest.raises(RuntimeError, match="call reset"):
        world.step(code)


def test_an_example_shows_an_episode_from_the_first_turn_to_success() -> None:
    flags = ["--no-think", "--prompt-style", "compact", "--prompt-examples", "2"]
    config = parse(["--environments", "lookup", *flags])
    said = prompt_examples(config.environment, "lookup")
    assert [message.role for message in said] == ["user", "assistant"] * 4
    for question, name, told, code in zip(*[iter(message.content for message in said)] * 4):
        person = name.removeprefix("<answer>").removesuffix("</answer>")
        assert person in question and f"{person} says: the code is" in told
        assert code.removeprefix("<answer>")[:3] in told
        assert person not in PEOPLE, "an example would give away a name that is played"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_reverse_pays_the_right_order_and_counts_all_orders_as_random(count: int) -> None:
    options = {"min_words": count, "max_words": count}
    for score in ("exact", "in_place"):
        world = make("reverse", score=score, **options)
        world.reset(3)
        words = list(world.words)
        right = words[::-1]
        wins, total = 0, 0
        for order in permutations(words):
            world.reset(3)
            result = world.step(" ".join(order))
            share = sum(a == b for a, b in zip(order, right, strict=True)) / count
            expected = share if score == "in_place" else float(list(order) == right)
            assert result.reward == pytest.approx(expected, abs=1e-12)
            assert result.info["success"] == (list(order) == right)
            wins, total = wins + result.info["success"], total + 1
        world.reset(3)
        references = world.solver.references(world, Budget(1, 1, 1))
        assert references.random == wins / total and references.optimum == 1.0
    world.reset(3)  # an answer that is too long is not right, whatever it begins with
    result = world.step(" ".join([*right, "cat"]))
    assert result.reward == pytest.approx(count / (count + 1)) and not result.info["success"]


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("lookup", {"min_people": 0}, "min_people"),
        ("lookup", {"min_people": 4}, "min_people"),
        ("lookup", {"dead_ends": 4}, "dead_ends"),
        ("lookup", {"people": ("Ann", "ann", "Tom")}, "different names"),
        ("lookup", {"people": ("Ann",)}, "different names"),
        ("reverse", {"min_words": 1}, "min_words"),
        ("reverse", {"max_words": 100}, "max_words"),
    ],
)
def test_impossible_options_are_refused(name: str, options: dict, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        make(name, **options)
