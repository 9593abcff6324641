"""Every flag of AdvantageConfig and the soft reweighting, against loops over trajectories in the
standard library.
"""

import dataclasses
import math
import random
import statistics

import pytest
import torch

from ragen_mega.algorithm.credit import estimate_advantages
from ragen_mega.algorithm.tables import ESTIMATORS, PlugInError, find_estimator
from ragen_mega.config import AdvantageConfig, FilterConfig
from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, Trajectory, TrajectoryGroup
from ragen_mega.report.step_metrics import group_weights

SHIPPED = {"gae", "bilevel_gae", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus"}
TOLERANCE = 1e-4
"""Sums of at most 12 float32 terms below 100, divided by deviations above 0.1."""


def play(group_id, environment, rng):
    """One to three turns of one to three tokens behind ragged observations; some turns earn 0."""
    trajectory = Trajectory(group_id, environment=environment)
    for _ in range(rng.randint(1, 3)):
        trajectory.append_observation([0] * rng.randint(1, 4))
        size = rng.randint(1, 3)
        turn = trajectory.append_action(Completion([1] * size, [-1.0] * size, "stop"))
        turn.reward = rng.choice([0.0, rng.uniform(-3, 9)])
    return trajectory


@pytest.fixture(scope="module")
def played():
    """Groups of two environments, and their batch with all that an estimator may look at."""
    rng = random.Random(5)
    groups = [
        TrajectoryGroup(10 * n, [play(10 * n, "ba"[n % 2], rng) for _ in range(5 + n % 2)])
        for n in range(4)
    ]
    trajectories = [one for group in groups for one in group.trajectories]
    batch = pack(trajectories)
    generator = torch.Generator().manual_seed(0)
    values, old, ref = torch.randn(3, batch.num_positions, generator=generator)
    # Observations have no such values; whatever stands there must have no part.
    return trajectories, batch.with_fields(
        values=values, old_logprobs=old - 2, ref_logprobs=ref - 2
    )


def sampled(played, per_token):
    """Per trajectory, per turn: the numbers of its sampled tokens."""
    trajectories, batch = played
    rows, offset = [], 0
    for trajectory in trajectories:
        place = offset - 1  # position t predicts the next token
        rows.append(
            [per_token[place + turn.start : place + turn.end].tolist() for turn in trajectory.turns]
        )
        offset += len(trajectory) - 1
    return rows


def flat(rows):
    return [x for turns in rows for turn in turns for x in turn]


def normalised(played, config):
    """Total reward of each trajectory among the trajectories of its key."""
    trajectories, _ = played
    key = {
        "group": lambda one: one.group_id,
        "environment": lambda one: one.environment,
        "batch": lambda one: 0,
    }[config.reward_normalization_scope]
    scores = []
    for own in trajectories:
        peers = [sum(t.reward for t in one.turns) for one in trajectories if key(one) == key(own)]
        score = sum(turn.reward for turn in own.turns)
        if config.reward_normalization != "identity":
            score -= statistics.mean(peers)
        if config.reward_normalization in ("mean_std", "asym_clip"):
            score /= statistics.stdev(peers)
        if config.reward_normalization == "asym_clip":
            score = min(3.0, max(-1.0, score))
        scores.append(score)
    return scores


def token_rewards(played, config):
    """[trajectory][turn][token]: the reward where it enters, less the KL to the reference."""
    trajectories, batch = played
    scores, rows = normalised(played, config), []
    gaps = sampled(played, batch.old_logprobs - batch.ref_logprobs)  # k1
    for score, trajectory, gap in zip(scores, trajectories, gaps):
        turns = []
        for number, (turn, own) in enumerate(zip(trajectory.turns, gap)):
            kl = {
                "none": lambda d: 0.0,
                "k1": lambda d: d,
                "k2": lambda d: d * d / 2,
                "k3": lambda d: math.exp(-d) - 1 + d,
            }[config.kl_in_reward]
            rewards = [-config.kl_reward_coef * kl(d) for d in own]
            is_last = number == len(trajectory.turns) - 1
            if config.reward_placement == "turn":
                rewards[-1] += turn.reward
            elif is_last:
                rewards[-1] += score
            turns.append(rewards)
        rows.append(turns)
    return rows


def discounted(deltas, factor):
    """A_i = sum over j >= i of factor^(j - i) delta_j."""
    return [
        math.fsum(factor ** (j - i) * deltas[j] for j in range(i, len(deltas)))
        for i in range(len(deltas))
    ]


def brute_force(played, config):
    """(advantages, returns or None) of the sampled tokens, in order, before whitening."""
    trajectories, batch = played
    rewards, values = token_rewards(played, config), sampled(played, batch.values)
    name, advantages = config.advantage_estimator, []
    if name in ("gae", "reinforce_plus_plus"):
        lam = config.lam if name == "gae" else 1.0
        for r, v in zip(rewards, values):
            r, v = flat([r]), flat([v]) if name == "gae" else [0.0] * len(flat([v]))
            deltas = [a + config.gamma * c - b for a, b, c in zip(r, v, [*v[1:], 0.0])]
            advantages += discounted(deltas, config.gamma * lam)
    elif name == "bilevel_gae":
        turn_gamma = 0.95 if config.turn_gamma is None else config.turn_gamma
        turn_lam = 1.0 if config.turn_lam is None else config.turn_lam
        for r, v in zip(rewards, values):
            ends = [turn[-1] for turn in v]
            deltas = [
                turn[-1] + turn_gamma * after - before
                for turn, before, after in zip(r, ends, [*ends[1:], 0.0])
            ]
            for own_r, own_v, at_end in zip(r, v, discounted(deltas, turn_gamma * turn_lam)):
                own = [
                    a + config.gamma * after - before
                    for a, before, after in zip(own_r, own_v, own_v[1:])
                ]
                advantages += discounted([*own, at_end], config.gamma * config.lam)
    else:
        scores = normalised(played, config)
        for n, (own, turns) in enumerate(zip(trajectories, rewards)):
            peers = [m for m, one in enumerate(trajectories) if one.group_id == own.group_id]
            others = [scores[m] for m in peers if m != n]
            members = [scores[m] for m in peers]
            advantage = scores[n] - statistics.mean(others if name == "rloo" else members)
            if name == "grpo":
                advantage /= statistics.stdev(members)
            advantages += [advantage] * len(flat([turns]))
    if not name.endswith("gae"):
        return (whitened(advantages) if name == "reinforce_plus_plus" else advantages), None
    return advantages, [a + v for a, v in zip(advantages, flat(values))]


def whitened(numbers):
    return [(x - statistics.mean(numbers)) / statistics.stdev(numbers) for x in numbers]


CASES = [
    {},
    {"gamma": 0.9},
    {"lam": 0.7},
    {"gamma": 0.9, "lam": 0.8, "reward_placement": "turn"},
    {"whiten_advantages": False},
    {"reward_normalization": "mean"},
    {"reward_normalization": "mean_std"},
    {"reward_normalization": "asym_clip"},
    {"reward_normalization": "mean", "reward_normalization_scope": "environment"},
    {"reward_normalization": "mean_std", "reward_normalization_scope": "batch"},
    *({"kl_in_reward": kind, "kl_reward_coef": 0.3} for kind in ("k1", "k2", "k3")),
    {"kl_in_reward": "k1", "kl_reward_coef": -0.3, "reward_placement": "turn"},
    {"advantage_estimator": "bilevel_gae", "reward_placement": "turn"},
    {"advantage_estimator": "bilevel_gae", "reward_placement": "turn", "turn_gamma": 0.8},
    {"advantage_estimator": "bilevel_gae", "reward_placement": "turn", "turn_lam": 0.5},
    {
        "advantage_estimator": "bilevel_gae",
        "reward_placement": "turn",
        "gamma": 0.9,
        "lam": 0.6,
        "kl_in_reward": "k2",
        "kl_reward_coef": 0.2,
    },
    {"advantage_estimator": "grpo"},
    {"advantage_estimator": "dr_grpo"},
    {"advantage_estimator": "rloo"},
    {"advantage_estimator": "rloo", "whiten_advantages": True},
    {"advantage_estimator": "dr_grpo", "reward_normalization": "asym_clip"},
    {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.95},
    {"advantage_estimator": "reinforce_plus_plus", "reward_placement": "turn"},
    {"advantage_estimator": "reinforce_plus_plus", "kl_in_reward": "k1", "kl_reward_coef": 0.2},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_advantages_and_returns(played, options):
    trajectories, batch = played
    config = AdvantageConfig(**options)
    estimate = estimate_advantages(batch, trajectories, config)
    expected, returns = brute_force(played, config)
    is_whitened = {"gae", "bilevel_gae"} & {config.advantage_estimator}
    if config.whiten_advantages if "whiten_advantages" in options else is_whitened:
        expected = whitened(expected)
    assert flat(sampled(played, estimate.advantages)) == pytest.approx(
        expected, rel=TOLERANCE, abs=TOLERANCE
    )
    assert not estimate.advantages[~batch.loss_mask].any()
    if returns is None:
        assert estimate.returns is None
    else:
        assert flat(sampled(played, estimate.returns)) == pytest.approx(
            returns, rel=TOLERANCE, abs=TOLERANCE
        )


def test_every_case_has_an_outcome_of_its_own(played):
    """No flag of the cases is without effect, and every flag is in some case."""
    keys = {}
    for options in CASES:
        advantages, _ = brute_force(played, AdvantageConfig(**options))
        outcome = (str(options.get("whiten_advantages")), *(round(a, 6) for a in advantages))
        assert outcome not in keys, f"{options} gives what {keys[outcome]} gives"
        keys[outcome] = options
    flags = {item.name for item in dataclasses.fields(AdvantageConfig)}
    flags -= {"reward", "teacher_top_k"}  # which credit does not depend on
    assert flags == {name for options in CASES for name in options}
    estimators = {options.get("advantage_estimator", "gae") for options in CASES}
    assert estimators == SHIPPED


def test_soft_reweighting_scales_by_the_share_of_the_environments_largest_deviation(played):
    trajectories, batch = played
    groups: dict[int, list[Trajectory]] = {}
    for one in trajectories:
        groups.setdefault(one.group_id, []).append(one)
    kept = [TrajectoryGroup(key, members) for key, members in groups.items()]
    assert group_weights(kept, FilterConfig()) is None
    weights = group_weights(kept, FilterConfig(soft_reweighting=True))
    config = AdvantageConfig(advantage_estimator="dr_grpo")
    plain = estimate_advantages(batch, trajectories, config)
    scaled = estimate_advantages(batch, trajectories, config, group_weights=weights)
    spread = {
        key: statistics.stdev(sum(t.reward for t in one.turns) for one in members)
        for key, members in groups.items()
    }
    rows = zip(trajectories, sampled(played, plain.advantages), sampled(played, scaled.advantages))
    for one, before, after in rows:
        rivals = (
            spread[other.group_id] for other in trajectories if other.environment == one.environment
        )
        share = spread[one.group_id] / max(rivals)
        assert flat([after]) == pytest.approx([share * a for a in flat([before])], abs=TOLERANCE)
    assert len(set(spread.values())) == len(spread)


def test_an_estimator_of_the_users_sees_everything_and_takes_its_options(played):
    trajectories, batch = played
    seen = {}

    def mine(inputs, *, gamma, turn_gamma=0.5, patience=3):
        seen.update(inputs=inputs, gamma=gamma, turn_gamma=turn_gamma, patience=patience)
        return inputs.per_token(inputs.scores), None

    ESTIMATORS.register("mine_for_credit", mine)
    assert find_estimator("mine_for_credit").options == ("gamma", "turn_gamma")
    config = AdvantageConfig(advantage_estimator="mine_for_credit", gamma=0.9)
    estimate = estimate_advantages(batch, trajectories, config)
    assert (seen["gamma"], seen["turn_gamma"], seen["patience"]) == (0.9, 0.5, 3)
    assert seen["inputs"].trajectories == trajectories, "copies"
    for one, row in zip(trajectories, sampled(played, estimate.advantages)):
        assert flat([row]) == pytest.approx([one.total_reward] * len(flat([row])), abs=1e-5)
    with pytest.raises(ValueError, match="turn_lam .* mine_for_credit"):
        AdvantageConfig(advantage_estimator="mine_for_credit", turn_lam=0.5)


def nothing(inputs):
    return None


def no_pair(inputs):
    return inputs.rewards


def per_trajectory(inputs):
    return inputs.scores, None


def a_list(inputs):
    return [0.0], None


def not_a_number(inputs):
    return inputs.rewards / 0.0 * 0.0, None


def returns_without_critic(inputs):
    return inputs.rewards, inputs.rewards


def raises(inputs):
    return {}["gone"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (nothing, "return .*, not .*NoneType"),
        (no_pair, r"return .*, not \[\[\d+\]\]"),
        (per_trajectory, r"T = \d+ .* not \[\[22\], .NoneType.\]; inputs.per_token"),
        (a_list, "must return"),
        (not_a_number, "finite .* nan or inf"),
        (returns_without_critic, "declares no critic"),
        (raises, r"failed: KeyError: 'gone' \(.*test_credit.py:\d+\)"),
        ("no function", "cannot import no function"),
        (3, "TypeError: 3 is not"),
    ],
)
def test_bad_estimators_are_one_line(played, function, message):
    trajectories, batch = played
    name = f"bad_{getattr(function, '__name__', type(function).__name__)}"
    ESTIMATORS.register(name, function)
    with pytest.raises(ValueError, match=message) as caught:
        estimate_advantages(batch, trajectories, AdvantageConfig(advantage_estimator=name))
    assert "\n" not in str(caught.value) and name in str(caught.value)
    assert isinstance(caught.value, PlugInError) or function == "no function"


class OnAnotherDevice(torch.Tensor):
    """Takes part in no operation but the move to the device of the others."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        assert function is torch.Tensor.to, "tensors on two devices"
        with torch._C.DisableTorchFunctionSubclass():
            return arguments[0].as_subclass(torch.Tensor)


def test_an_estimator_may_answer_on_another_device(played):
    trajectories, batch = played
    found = []
    for kind in (torch.Tensor, OnAnotherDevice):
        name = f"on_{kind.__name__}"
        ESTIMATORS.register(
            name, lambda inputs, kind=kind: (inputs.rewards.as_subclass(kind), None)
        )
        settings = AdvantageConfig(advantage_estimator=name)
        found.append(estimate_advantages(batch, trajectories, settings).advantages)
    assert torch.equal(*found)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_large_returns_keep_the_differences_that_the_filter_sees(estimator):
    """1e8 + {0..7} is 1e8 + 8 {0, 1} in float32."""
    group = [Trajectory(0) for _ in range(8)]
    for member, one in enumerate(group):
        one.append_observation([0])
        one.append_action(Completion([1], [-1.0], "stop")).reward = 1e8 + member
    config = AdvantageConfig(advantage_estimator=estimator)
    batch = pack(group)
    found = estimate_advantages(batch, group, config).advantages[batch.loss_mask].tolist()
    scale = {"grpo": statistics.stdev(range(8)), "dr_grpo": 1.0, "rloo": 7 / 8}[estimator]
    assert found == pytest.approx([(member - 3.5) / scale for member in range(8)])
