"""Credit along the branches of random trees of calls, against their definition in float64."""

import math
import random
import statistics
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from ragen_mega.agents.call_tree import CALL, CallTree, ChatMessage
from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.config import AdvantageConfig
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, TokenBatch, Trajectory
from ragen_mega.rollout.renderer import ChatRenderer
from tests.support.published_tokenizers import small_qwen3

TOLERANCE = 1e-4
"""Sums of at most 50 float32 terms below 10."""
Node = tuple[int, int]
"""Number of a call and of one of its answers."""


@dataclass
class Branch:
    """What is credited along one sequence: calls with their tokens, and what each earns."""

    nodes: list[Node]
    earned: list[float]


def play(renderer: ChatRenderer, group: int, rng: random.Random) -> tuple[Trajectory, list[Branch]]:
    """A random tree, and its branches by recursion over parents and children."""
    tree = CallTree(renderer, max_context_length=10_000)
    histories = [[ChatMessage("user", "go")]]
    nodes: list[tuple[Node, Node | None, list[int], bool]] = []
    parents: list[Node | None] = [None]
    for number in range(rng.randint(1, 9)):
        which = rng.randrange(len(histories))
        call = tree.begin(histories[which], None)
        word = f"{rng.choice('abc')}{number}"
        tokens = [*renderer.tokenizer.encode(word), renderer.end_of_turn]
        is_trained = number == 0 or rng.random() < 0.7
        tree.answer(call, Completion(tokens, [-1.0] * len(tokens), "stop"), is_trained=is_trained)
        node = (call.index, len(call.answers) - 1)
        nodes.append((node, parents[which], [*call.added, -1, *tokens], is_trained))
        follow = [ChatMessage("assistant", word), ChatMessage("user", rng.choice("xyz"))]
        histories.append([*histories[which], *follow])
        parents.append(node)
    rewards = {node: rng.choice([0.0, rng.uniform(-2, 2)]) for node, *_ in nodes}
    reward = rng.uniform(-3, 3)
    trajectory = tree.trajectory(Trajectory(group), reward=reward, call_rewards=rewards)
    total = reward + sum(rewards.values())
    assert trajectory.total_reward == pytest.approx(total)

    def leads_to_training(node: Node, is_trained: bool) -> bool:
        return is_trained or any(
            leads_to_training(child, trained)
            for child, parent, _, trained in nodes
            if parent == node
        )

    def children(node: Node | None) -> list[tuple[Node, bool]]:
        found = [
            (tokens, child, is_trained)
            for child, parent, tokens, is_trained in nodes
            if parent == node and leads_to_training(child, is_trained)
        ]
        return [(child, is_trained) for _, child, is_trained in sorted(found)]

    branches: list[Branch] = []

    def begin(node: Node, is_trained: bool) -> None:
        path: list[Node] = []
        rest: list[tuple[Node, bool]] = []
        while True:
            path += [node] * is_trained
            first, *others = children(node) or [None]
            rest += others
            if first is None:
                break
            node, is_trained = first
        earned = [rewards[node] for node in path]
        earned[-1] += total - sum(earned)
        branches.append(Branch(path, earned))
        for other in rest:
            begin(*other)

    for root in children(None):
        begin(*root)
    return trajectory, branches


def window(trajectory: Trajectory) -> Trajectory:
    """The same turns, as if the policy had seen windows of one conversation."""
    return replace(trajectory, is_tree=False)


@pytest.fixture(scope="module")
def played() -> tuple[list[Trajectory], list[list[Branch]], TokenBatch]:
    renderer, rng = ChatRenderer(small_qwen3(), think=False), random.Random(3)
    trees = [play(renderer, number // 8, rng) for number in range(48)]
    trajectories = [trajectory for trajectory, _ in trees]
    branches = [found for _, found in trees]
    assert sum(len(found) > 1 for found in branches) > 20
    for number in range(0, 48, 5):
        trajectory = trajectories[number] = window(trajectories[number])
        nodes = [(turn.info[CALL]["index"], turn.info[CALL]["answer"]) for turn in trajectory.turns]
        branches[number] = [Branch(nodes, [turn.reward for turn in trajectory.turns])]
    batch = pack(trajectories)
    values = torch.randn(batch.num_positions, generator=torch.Generator().manual_seed(0))
    return trajectories, branches, batch.with_fields(values=values)


def rows(played, values: torch.Tensor) -> list[dict[Node, list[float]]]:
    """The values at the sampled tokens of every answer of each trajectory."""
    trajectories, _, batch = played
    found, bounds = [], pairwise(batch.cu_seqlens.tolist())
    for trajectory, (start, end) in zip(trajectories, bounds, strict=True):
        own, turns = values[start:end], batch.turn_ids[start:end]
        found.append(
            {
                (turn.info[CALL]["index"], turn.info[CALL]["answer"]): own[turns == number].tolist()
                for number, turn in enumerate(trajectory.turns)
            }
        )
    return found


def placed(branch: Branch, placement: str) -> list[float]:
    if placement == "turn":
        return branch.earned
    return [0.0] * (len(branch.earned) - 1) + [sum(branch.earned)]


def gae(earned, values, *, gamma, lam):
    """A_i = sum over j >= i of (gamma lam)^(j - i) (r_j + gamma V_{j+1} - V_j)."""
    v = [value for own in values for value in own] + [0.0]
    r = [x for own, pay in zip(values, earned, strict=True) for x in [0.0] * (len(own) - 1) + [pay]]
    deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(r))]
    flat = iter(
        math.fsum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(r)))
        for i in range(len(r))
    )
    return [[next(flat) for _ in own] for own in values]


def bilevel(earned, values, *, gamma, lam, turn_gamma, turn_lam):
    """The ends of calls first, as a separate sequence, then the tokens of each call."""
    ends = [[own[-1]] for own in values]
    at_ends = gae(earned, ends, gamma=turn_gamma, lam=turn_lam)
    return [
        gae([at_end[0] + own[-1]], [own], gamma=gamma, lam=lam)[0]
        for at_end, own in zip(at_ends, values, strict=True)
    ]


DISCOUNTS = [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0)]


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("gae", "trajectory"),
        ("gae", "turn"),
        ("bilevel_gae", "turn"),
        ("reinforce_plus_plus", "trajectory"),
        ("reinforce_plus_plus", "turn"),
    ],
)
def test_branches_are_sequences_of_their_own(played, name, placement, gamma, lam) -> None:
    settings = AdvantageConfig(
        advantage_estimator=name,
        reward_placement=placement,
        gamma=gamma,
        **({} if name == "reinforce_plus_plus" else {"lam": lam, "whiten_advantages": False}),
    )
    trajectories, branches, batch = played
    credited = estimate_advantages(batch, trajectories, settings)
    found = rows(played, credited.advantages)
    critic, expected = rows(played, batch.values), []
    for own, values in zip(branches, critic, strict=True):
        expected.append({})
        for branch in own:
            path = [values[node] for node in branch.nodes]
            earned = placed(branch, placement)
            if name == "gae":
                answer = gae(earned, path, gamma=gamma, lam=lam)
            elif name == "bilevel_gae":
                answer = bilevel(earned, path, gamma=gamma, lam=lam, turn_gamma=0.95, turn_lam=1.0)
            else:
                nothing = [[0.0] * len(each) for each in path]
                answer = gae(earned, nothing, gamma=gamma, lam=1.0)
            expected[-1] |= dict(zip(branch.nodes, answer, strict=True))
    if name == "reinforce_plus_plus":
        whole = [x for own in expected for answer in own.values() for x in answer]
        mean, std = statistics.mean(whole), statistics.stdev(whole)
        expected = [
            {node: [(x - mean) / std for x in answer] for node, answer in own.items()}
            for own in expected
        ]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for node, answer in theirs.items():
            assert ours[node] == pytest.approx(answer, abs=TOLERANCE)


def test_relative_estimators_give_all_branches_the_advantage_of_the_episode(played) -> None:
    trajectories, _, batch = played
    credited = estimate_advantages(batch, trajectories, AdvantageConfig(advantage_estimator="grpo"))
    for trajectory, own in zip(trajectories, rows(played, credited.advantages), strict=True):
        peers = [each.total_reward for each in trajectories if each.group_id == trajectory.group_id]
        relative = trajectory.total_reward - statistics.mean(peers)
        for answer in own.values():
            assert answer == pytest.approx([relative / statistics.stdev(peers)] * len(answer))
