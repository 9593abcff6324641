"""The scripted players tell the truth, checked by playing the move they describe, and act at random
level.
"""

import copy
import re

import numpy as np
import pytest

from ragen_mega.environments.claims import check_claims
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.protocol import Solver
from ragen_mega.environments.reference_players import baselines
from ragen_mega.environments.registry import make
from ragen_mega.environments.scripted import scripted_response
from ragen_mega.environments.worlds.frozen_lake.narrator import describe as describe_frozen_lake
from ragen_mega.environments.worlds.sokoban.narrator import describe as describe_sokoban


def distance(a: tuple[int, int], b: tuple[int, int]) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def wander(environment, seed: int, num_actions: int) -> bool:
    """Take random actions; False if the episode ended."""
    environment.reset(seed)
    generator = np.random.default_rng(seed)
    return not any(
        environment.step(str(generator.choice(environment.actions))).terminated
        for _ in range(num_actions)
    )


@pytest.mark.parametrize("seed", range(40))
def test_sokoban_effects_are_what_the_moves_do(seed: int) -> None:
    environment = make("sokoban", observation="cells")
    if not wander(environment, seed, seed % 5):
        return
    before = environment.facts()
    (box,), (target,) = before["boxes"], before["targets"]
    standing = [
        tuple(map(int, cell))
        for cell in re.findall(r"stand\((\d), (\d)\)", describe_sokoban(environment, ()))
    ]
    assert standing
    pattern = r" (Up|Down|Left|Right) to\S+ \S+(?: push\S+ \S+)? (\w+)"
    for action, effect in re.findall(pattern, describe_sokoban(environment, ())):
        world = copy.deepcopy(environment)
        effective = world.step(action).info["is_action_effective"]
        after = world.facts()
        moved = after["boxes"][0] != box
        nearer = min(distance(after["player"], c) for c in standing) < min(
            distance(before["player"], c) for c in standing
        )
        if not effective:
            assert effect in ("wall", "stuck")
        elif moved:
            assert effect == (
                "closer" if distance(after["boxes"][0], target) < distance(box, target) else "away"
            )
        else:
            assert effect == ("near" if nearer else "far")


@pytest.mark.parametrize("seed", range(40))
def test_sokoban_looks_ahead_at_the_states_that_the_moves_lead_to(seed: int) -> None:
    environment = make("sokoban", observation="cells")
    if not wander(environment, seed, seed % 5):
        return
    generator = np.random.default_rng(seed)
    actions = [str(action) for action in generator.choice(environment.actions, size=3)]
    thought = describe_sokoban(environment, actions)
    world, parts = copy.deepcopy(environment), []
    for action in actions:
        seen = describe_sokoban(world, ())
        effect = re.search(rf" {action} to\S+ \S+(?: push\S+ \S+)? (\w+)", seen)[1]
        parts.append(f"{seen} go {effect} {action}")
        if world.step(action).terminated:
            break
    assert " then".join(parts) == thought.removesuffix(" solved")
    assert thought.endswith(" solved") == (len(parts) < len(actions))
    claims = check_claims(environment, thought)
    assert len(claims) == 4 * len(parts) and all(claims)
    # Behind a move, what was true before it holds only as far as it is still so.
    form = environment.narrator.statement
    still = set(re.findall(form, "".join(parts[1:2])))
    said_again = check_claims(environment, f"{parts[0]} then{parts[0]}")[4:]
    assert said_again == [claim in still for claim in re.findall(form, parts[0])]


@pytest.mark.parametrize(
    ("untold", "gone"),
    [
        ("standing", r" stand\(\d, \d\)"),
        ("cells", r" (?:to|push)\(\d, \d\)"),
        ("effects", r" (?:wall|stuck|closer|away|near|far)\b"),
        ("ahead", r"(?<= then)(?: stand\S+ \S+)*(?: \w+ to\S+ \S+(?: push\S+ \S+)? \w+){4} go \w+"),
    ],
)
def test_sokoban_leaves_out_one_kind_of_fact(untold: str, gone: str) -> None:
    """And nothing else."""
    whole, less = make("sokoban", dim=7), make("sokoban", dim=7, untold=untold)
    for seed in range(20):
        for environment in (whole, less):
            environment.reset(seed)
        every = describe_sokoban(whole, ("Up", "Left"))
        told = describe_sokoban(less, ("Up", "Left"))
        shorter = re.sub(gone, " go" if untold == "ahead" else "", every)
        assert told == shorter != every


@pytest.mark.parametrize(
    ("untold", "gone"),
    [
        ("cells", r" to\(\d, \d\)"),
        ("kinds", r"(?<=[a-z)]) (?:edge|hole|goal|(?:closer|farther)(?: brink)?)(?= [LDRU]| \S+/)"),
        ("behind", r"[a-z-]+/"),
        ("ahead", r"/(?:hole|on|off)"),
    ],
)
def test_frozen_lake_leaves_out_one_kind_of_fact(untold: str, gone: str) -> None:
    """And nothing else."""
    whole, less = make("frozen_lake"), make("frozen_lake", untold=untold)
    for seed in range(20):
        for environment in (whole, less):
            environment.reset(seed)
        every = describe_frozen_lake(whole, ("Up", "Left"))
        assert describe_frozen_lake(less, ("Up", "Left")) == re.sub(gone, "", every) != every


@pytest.mark.parametrize("seed", range(40))
def test_frozen_lake_moves_lead_ahead_and_never_behind(seed: int) -> None:
    environment = make("frozen_lake", observation="cells")
    if not wander(environment, seed, seed % 3):
        return
    thought = describe_frozen_lake(environment, ("Up", "Right"))
    words = "(edge|hole|goal|(?:closer|farther)(?: brink)?)"
    facts = re.match(rf"(?: (?:Left|Down|Right|Up)(?: to\(\d, \d\))? {words})" + "{4}", thought)
    neighbours = dict(re.findall(rf" (\w+)(?: to\(\d, \d\))? {words}", facts[0]))
    form = r" ([a-z-]+)/(hole|on|off) (Left|Down|Right|Up)"
    moves = re.findall(form, thought[facts.end() :])
    assert [action for _, _, action in moves] == ["Left", "Down", "Right", "Up", "Up", "Right"]
    assert len(neighbours) == 4 and moves[4] == moves[3] and moves[5] == moves[2]
    opposite = dict(zip(("Left", "Down", "Right", "Up"), ("Right", "Up", "Left", "Down")))
    for behind, ahead, action in moves:
        assert behind == neighbours[opposite[action]].replace(" ", "-")
        word = neighbours[action].split()[0]
        assert ahead == {"hole": "hole", "goal": "on", "closer": "on"}.get(word, "off")
        ends = _possible_ends(environment, action)
        assert (word == "edge") <= (environment.facts()["player"] in ends)
        assert len(ends & environment.facts()["holes"]) == list(neighbours.values()).count(
            "hole"
        ) - (behind == "hole")
        assert (environment.facts()["goal"] in ends) == (
            "goal" in neighbours.values() and behind != "goal"
        )


def _possible_ends(environment, action: str) -> set[tuple[int, int]]:
    """Where a move led in 60 plays with different outcomes."""
    ends = set()
    for draw in range(60):
        world = copy.deepcopy(environment)
        world._rng = np.random.default_rng(draw)
        world.step(action)
        ends.add(world.facts()["player"])
    return ends


@pytest.mark.parametrize("seed", range(40))
def test_frozen_lake_neighbours_are_what_they_are_called(seed: int) -> None:
    environment = make("frozen_lake", observation="cells")
    if not wander(environment, seed, seed % 3):
        return
    facts = environment.facts()
    pattern = r" (?:Left|Down|Right|Up) to\((\d), (\d)\) (\w+)( brink)?"
    for row, column, word, brink in re.findall(pattern, describe_frozen_lake(environment, ())):
        cell = int(row), int(column)
        assert (word == "hole") == (cell in facts["holes"]) and (word == "goal") == (
            cell == facts["goal"]
        )
        if word in ("closer", "farther"):
            nearer = distance(cell, facts["goal"]) < distance(facts["player"], facts["goal"])
            assert (word == "closer") == nearer
            assert bool(brink) == any(distance(cell, hole) == 1 for hole in facts["holes"])


@pytest.mark.parametrize("name", ["sokoban", "frozen_lake", "bandit"])
def test_actions_are_uniform_and_answers_parse(name: str) -> None:
    options = {} if name == "bandit" else {"observation": "cells"}
    episode = Episode(make(name, **options), EpisodeConfig(prompt_style="compact"))
    counts: dict[str, int] = {}
    for seed in range(150):
        episode.start(seed)
        generator = np.random.default_rng(seed)
        while not episode.done:
            result = episode.respond(scripted_response(episode, generator))
            assert result.info["is_format_valid"] and result.info["is_action_valid"]
            for action in result.info["actions"]:
                counts[action] = counts.get(action, 0) + 1
    total = sum(counts.values())
    expected = 1 / len(episode.environment.actions)
    for action in episode.environment.actions:
        assert (
            abs(counts[action] / total - expected) < 4 * (expected * (1 - expected) / total) ** 0.5
        )


def test_skill_plays_the_shortest_plan() -> None:
    episode = Episode(
        make("sokoban", max_shortest=5), EpisodeConfig(max_actions_per_turn=1, max_turns=10)
    )
    for seed in range(20):
        episode.start(seed)
        generator = np.random.default_rng(seed)
        while not episode.done:
            result = episode.respond(scripted_response(episode, generator, skill=1.0))
        assert result.info["success"]


class Dwindling:
    """Each state has an action less, the last one none; the solver keeps what it is told."""

    is_instant = True
    max_turns = max_actions = 6
    max_actions_per_turn = 2

    def __init__(self) -> None:
        self.told: list[int] = []
        self.solver = Solver(lambda world, budget: None, self.plan)

    def plan(self, world, actions_left: int) -> list[str]:
        self.told.append(actions_left)
        return list(self.actions[:1])

    def reset(self, seed: int) -> str:
        self.actions = ("a", "b", "c")
        return "Go."

    def step(self, action: str):
        self.actions = self.actions[1:]
        return "On.", 0.0, False, False, {}


def test_the_solver_hears_how_many_actions_are_left_and_a_state_may_have_none() -> None:
    episode = Episode(Dwindling(), EpisodeConfig(think=False))
    episode.start(0)
    said = []
    while not episode.done:
        said.append(scripted_response(episode, np.random.default_rng(0), skill=1.0))
        episode.respond(said[-1])
    assert said == [f"<answer> {action}</answer>" for action in ("a", "b", "c", "", "", "")]
    assert episode.environment.told == [6, 5, 4, 3, 3, 2]
    episode.environment.solver = None
    found = baselines("dwindling", [(0, None)], episode.config, build=lambda: episode.environment)
    assert (found.random, found.errors_say) == (0.0, None)
