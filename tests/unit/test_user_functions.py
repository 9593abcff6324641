"""Functions of users: what they write into what they get changes nothing, and the numbers that they
return may be NumPy's and torch's.
"""

import copy
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ragen_mega.agents.runner import REWARDS as AGENT_REWARDS
from ragen_mega.agents.runner import AgentEpisode, Outcome, judged
from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.algorithm.filters import filter_groups
from ragen_mega.algorithm.rewards import shape_rewards
from ragen_mega.algorithm.tables import ESTIMATORS, FILTERS, METRICS, REWARDS, PlugInError
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.environments import calls
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.protocol import StepResult
from ragen_mega.environments.registry import ENVIRONMENTS, make, register
from ragen_mega.extensions.registry import Registry
from ragen_mega.extensions.scalars import as_number
from ragen_mega.report.step_metrics import custom_metrics

HALVES = [
    0.5,
    np.float16(0.5),
    np.float32(0.5),
    np.float64(0.5),
    np.array(0.5),
    np.array([0.5], np.float32),
    torch.tensor(0.5),
    torch.tensor([0.5], dtype=torch.bfloat16),
    torch.tensor(0.5, requires_grad=True),
    Decimal("0.5"),
    Fraction(1, 2),
]
NO_NUMBERS = [
    "0.5",
    None,
    1j,
    np.complex64(1),
    np.str_("0.5"),
    [0.5],
    np.array([0.5, 0.5]),
    np.array([]),
    torch.zeros(2),
    {"reward": 0.5},
]


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[Registry, Any], str]:
    """Return a function that gives a thing a name until the test ends."""

    def give(table: Registry, thing: Any) -> str:
        monkeypatch.setitem(table._known, "of_a_user", thing)
        return "of_a_user"

    return give


def played() -> list[TrajectoryGroup]:
    groups = []
    for group_id in range(2):
        members = []
        for member in range(2):
            one = Trajectory(group_id=group_id)
            for turn in range(3):
                one.append_observation([7, 8])
                said = one.append_action(Completion([1, 2, 3 + turn], [-1.0, -0.5, -0.1], "stop"))
                said.reward, said.info = member + 0.25 * turn, {"success": member == 1}
            members.append(one)
        groups.append(TrajectoryGroup(group_id, members))
    return groups


def test_numbers_of_libraries_are_numbers() -> None:
    assert [as_number(value) for value in HALVES] == [0.5] * len(HALVES)
    assert [type(as_number(value)) for value in HALVES] == [float] * len(HALVES)
    assert [as_number(value) for value in NO_NUMBERS] == [None] * len(NO_NUMBERS)
    truths = [True, np.bool_(True), np.array(True), torch.tensor(True), np.int64(1), 1]
    assert [as_number(value) for value in truths] == [1.0] * len(truths)
    assert as_number(10**400) == math.inf and math.isnan(as_number(np.float32("nan")))


@pytest.mark.parametrize("value", HALVES, ids=repr)
def test_a_step_may_return_numbers_of_libraries(value: Any) -> None:
    class World:
        format_penalty = -1 * value

        def reset(self, seed: int) -> str:
            return "Go."

        def step(self, action: str) -> tuple[Any, ...]:
            info = {"success": np.bool_(True), "is_action_valid": torch.tensor(False)}
            return np.str_("Done."), value, np.array(True), torch.tensor([False]), info

    result = calls.step(World(), "go")
    assert result == StepResult(
        "Done.", 0.5, True, False, {"success": True, "is_action_valid": False}
    )
    flags = result.reward, result.terminated, result.truncated, *result.info.values()
    assert [*map(type, flags)] == [float, bool, bool, bool, bool]
    episode = Episode(World(), EpisodeConfig(think=False))
    episode.start(0)
    earned = episode.respond("<answer>go</answer>").reward
    assert earned == 0.0 and type(earned) is float, "0.5, and the penalty of an invalid action"


@pytest.mark.parametrize(
    ("reward", "ended", "info", "kind"),
    [
        *((value, True, {}, TypeError) for value in NO_NUMBERS),
        (np.float32("nan"), True, {}, FloatingPointError),
        (torch.tensor(math.inf), True, {}, FloatingPointError),
        (1.0, np.nan, {}, FloatingPointError),
        (1.0, True, {"success": torch.tensor(math.nan)}, FloatingPointError),
    ],
    ids=repr,
)
def test_what_is_no_number_is_refused(
    reward: Any, ended: Any, info: dict[str, Any], kind: type[Exception]
) -> None:
    world = SimpleNamespace(step=lambda action: ("", reward, ended, False, info))
    with pytest.raises(kind, match=r"must be (a|true)"):
        calls.step(world, "go")


def test_rewards_and_metrics_may_be_numbers_of_libraries(named: Callable[..., str]) -> None:
    groups = played()
    for value in HALVES:
        name = named(REWARDS, lambda trajectory, value=value: value)
        if getattr(value, "ndim", 0) == 0:  # an array of one is a reward for one turn
            shaped, _ = shape_rewards(groups, {name: 1.0})
            assert [turn.reward for turn in shaped[0].trajectories[0].turns] == [0, 0, 0.5]
        name = named(REWARDS, lambda trajectory, value=value: [value] * 3)
        assert shape_rewards(groups, {name: 2.0})[0][1].trajectories[1].total_reward == 3.0
        name = named(REWARDS, lambda group, value=value: (value, np.ones(3)))
        if getattr(value, "ndim", 0) == 0:
            assert shape_rewards(groups, {name: 1.0})[0][0].total_rewards == [0.5, 3.0]
        name = named(METRICS, lambda groups, value=value: {"half": value})
        assert custom_metrics(groups, [name]) == {"half": 0.5}
    for value in (*NO_NUMBERS, math.nan, np.float32("inf"), {0: 1.0, 1: 1.0, 2: 1.0}, "123"):
        with pytest.raises(PlugInError, match="at most 1e"):
            shape_rewards(groups, {named(REWARDS, lambda trajectory, value=value: value): 1.0})
        with pytest.raises(PlugInError, match="finite number"):
            custom_metrics(groups, [named(METRICS, lambda groups, value=value: {"x": value})])
    with pytest.raises(PlugInError, match="at most 1e"):  # infinite in float32
        shape_rewards(groups, {named(REWARDS, lambda trajectory: 1e39): 1.0})
    for answer in (np.array(1.0), torch.tensor(1.0), {0: 1.0, 1: 1.0}, 1.0):
        with pytest.raises(PlugInError, match="an answer for each"):
            shape_rewards(groups, {named(REWARDS, lambda group, answer=answer: answer): 1.0})


def test_an_agent_may_return_numbers_of_libraries(named: Callable[..., str]) -> None:
    call = {"index": 0, "answer": 0, "id": "call-0-0", "reply": {"tool_calls": []}}
    whole = copy.deepcopy(call)
    for value in HALVES:
        given = {"reward": value, "success": np.bool_(True), "calls": {0: value}, "note": value}
        outcome = judged(AgentEpisode({}, [call], given, None), None)
        assert outcome == Outcome(0.5, True, {(0, 0): 0.5}, {"note": 0.5})
    for given in (*NO_NUMBERS[:-1], np.nan, {"reward": 1, "success": np.nan}):
        with pytest.raises(ValueError, match="must"):
            judged(AgentEpisode({}, [call], given, None), None)

    def reward(episode: AgentEpisode) -> float:
        episode.calls[0].clear()
        return 1.0

    named(AGENT_REWARDS, reward)
    assert judged(AgentEpisode({}, [call], None, None), "of_a_user").reward == 1.0
    assert call == whole


def spoil(trajectory: Trajectory) -> None:
    trajectory.tokens.clear()
    trajectory.loss_mask[:] = [False] * len(trajectory.loss_mask)
    trajectory.rollout_logprobs[0] = 9.0
    trajectory.turns[0].reward = 9.0
    trajectory.turns[0].info.clear()
    trajectory.turns.pop()


def test_what_plug_ins_write_is_not_trained_on(named: Callable[..., str]) -> None:
    groups, untouched = played(), played()

    def reward(trajectory: Trajectory) -> list[float]:
        spoil(trajectory)
        return [1.0, 2.0, 3.0]

    def of_group(group: TrajectoryGroup) -> list[float]:
        for member in group.trajectories:
            spoil(member)
        group.trajectories.reverse()
        return [1.0, 2.0]

    def metric(groups: list[TrajectoryGroup]) -> float:
        for member in groups[0].trajectories:
            spoil(member)
        groups.clear()
        return 1.0

    def keep(returns: list[list[float]], *, value: float | None, keep_zero: bool) -> list[int]:
        returns[1][:] = returns[0][:] = [0.0, 0.0]
        return [0, 1]

    def credit(inputs: Any) -> tuple[torch.Tensor, None]:
        advantages = inputs.rewards.clone()
        for written in (inputs.rewards, inputs.scores, inputs.batch.rewards, inputs.batch.tokens):
            written.zero_()
        inputs.batch.loss_mask.numpy()[:] = False
        for member in inputs.trajectories:
            spoil(member)
        return advantages, None

    shaped, _ = shape_rewards(groups, {named(REWARDS, reward): 1.0})
    assert [each.total_rewards for each in shaped] == [[6.0, 6.0]] * 2
    shaped, _ = shape_rewards(groups, {named(REWARDS, of_group): 1.0})
    assert [each.total_rewards for each in shaped] == [[1.0, 2.0]] * 2
    assert custom_metrics(groups, [named(METRICS, metric)]) == {"of_a_user": 1.0}
    strategy = named(FILTERS, keep)
    assert filter_groups(groups, strategy=strategy, value=None, keep_zero=False) == untouched
    trajectories = [member for group in groups for member in group.trajectories]
    batch = pack(trajectories)
    before = copy.deepcopy(batch)
    settings = SimpleNamespace(
        advantage_estimator=named(ESTIMATORS, credit),
        reward_normalization="none",
        reward_normalization_scope="batch",
        reward_placement="turn",
        kl_in_reward="none",
        whitens=False,
    )
    credited = estimate_advantages(batch, trajectories, settings)
    assert torch.equal(credited.advantages, before.rewards) and before.rewards.any()
    for field in ("tokens", "rewards", "loss_mask"):
        assert torch.equal(getattr(credited, field), getattr(before, field))
    assert groups == untouched


def test_no_two_environments_share_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drawer:
        def __init__(self, cards: list[int], rules: dict[str, Any]) -> None:
            self.cards, self.rules = cards, rules

        def reset(self, seed: int) -> str:
            self.rules["decks"][0].append(seed)
            return f"{self.cards.pop()} {self.rules}"

        def step(self, action: str) -> tuple[Any, ...]:
            return "", 0.0, True, False, {}

    monkeypatch.setattr(ENVIRONMENTS, "_known", dict(ENVIRONMENTS._known))  # none is kept
    register("drawer_of_a_test", Drawer, rules={"decks": [[]]})
    options = {"cards": [1, 2, 3]}
    assert {make("drawer_of_a_test", **options).reset(0) for _ in range(3)} == {
        "3 {'decks': [[0]]}"
    }
    assert options == {"cards": [1, 2, 3]}
