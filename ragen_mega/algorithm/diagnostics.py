"""Early signs that reasoning collapses: the Echo Trap monitor, and how much the reasoning depends
on its input.

Echo Trap: arXiv:2504.20073 sec. 4. Template collapse and its mutual-information estimate: RAGEN-2,
arXiv:2604.06268.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from statistics import fmean, median, pvariance, variance
from typing import Any

import torch
from torch import Tensor

from ragen_mega.data.packing import pack
from ragen_mega.data.types import Completion, TokenBatch, Trajectory, TrajectoryGroup, Turn

SIGNALS = ("reward_std", "entropy", "grad_norm", "success_rate")
"""Signals that `EchoTrapMonitor.observe` accepts: in-group reward std, token-mean policy entropy in
nats, gradient norm before clipping, success rate in [0, 1].
"""

_OPENING, _NGRAM = 16, 4
"""Tokens of an opening, and of what two responses may share."""

_REMEDIES = {
    "reward_std_cliff": "keep fewer groups (filter_value), drop the KL term, raise clip_ratio_high",
    "reward_std_lost": (
        "stop; start again with a stronger filter (filter_value), a critic, or other initial states"
    ),
    "entropy_collapse": "raise clip_ratio_high or entropy_coef, lower the learning rate",
    "entropy_rise": (
        "read some trajectories; if they turn to gibberish or untruths lower entropy_coef and the"
        " learning rate, or add a KL term (kl_kind k3, kl_coef 0.1)"
    ),
    "grad_norm_spike": "if it stays, start again with a lower learning rate or gradient clip",
} | {
    f"{name}_not_finite": "look for overflow in logits and rewards; such updates must be skipped"
    for name in SIGNALS
}


def distinct_responses(groups: Sequence[TrajectoryGroup]) -> float:
    """Return the share of distinct ones among the first responses of all groups, in (0, 1]; a
    metric.
    """
    responses = [tuple(response) for group in groups for response in _first_responses(group)]
    return len(set(responses)) / max(1, len(responses))


def _first_responses(group: TrajectoryGroup) -> list[Sequence[int]]:
    """Return the tokens of the first turns; none of a trajectory that could not be played."""
    return [_first_response(member) for member in _answered(group)]


def _answered(group: TrajectoryGroup) -> list[Trajectory]:
    """Return the members with tokens in their first turn."""
    return [m for m in group.trajectories if m.turns and _first_response(m)]


def _first_response(trajectory: Trajectory) -> Sequence[int]:
    first = trajectory.first_turn
    return trajectory.tokens[first.start : first.end]


def repetition_across_prompts(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Measure the similarity of the first responses to different prompts, by one trajectory of each
    prompt.

    distinct_openings: share of distinct ones among their first 16 tokens. ngram_overlap:
    probability that a 4-gram of one prompt's response is in another prompt's response too. Both are
    free, and both are missing where fewer than two prompts were answered.
    """
    responses = [found[0] for group in groups if (found := _first_responses(group))]
    if len(responses) < 2:
        return {}
    openings = {tuple(response[:_OPENING]) for response in responses}
    owners = Counter(
        gram
        for response in responses
        for gram in set(zip(*(response[shift:] for shift in range(_NGRAM))))
    )
    shared = sum(count * (count - 1) for count in owners.values())
    return {
        "distinct_openings": len(openings) / len(responses),
        "ngram_overlap": shared / max(1, owners.total() * (len(responses) - 1)),
    }


def entropy_by_prompt(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the entropy of the sampled tokens, estimated for each prompt by the mean of -log p of
    its tokens.

    entropy: its mean over prompts, nats a token. entropy_variance: its variance over prompts; near
    0, the policy is as sure or unsure whatever it is asked. Nothing if no token was sampled.
    """
    surprises = [
        -sum(map(sum, (member.rollout_logprobs for member in group.trajectories))) / num_sampled
        for group in groups
        if (num_sampled := sum(member.num_sampled_tokens for member in group.trajectories))
    ]
    if not surprises:
        return {}
    return {"entropy": fmean(surprises), "entropy_variance": pvariance(surprises)}


@dataclass(frozen=True, slots=True)
class EchoTrapThresholds:
    """When a signal counts as a warning. Levels are medians of the last `window` steps.

    With the defaults, all five collapsing runs of arXiv:2504.20073 Fig. 6 give a warning, and the
    healthy one does not.
    """

    window: int = 10
    """Number of steps of the early level (a mean) and of the current level (a median)."""
    reward_std_cliff: float = 0.5
    """Warn when the level of the in-group reward std falls below this share of its early level,
    times the share of what was unsolved then that still is: groups that are solved stop differing,
    and only a fall beyond that is a sign of the Echo Trap.
    """
    reward_std_lost: float = 0.1
    """Warn when it stayed below this share for a whole window: RAGEN's criterion for stopping."""
    solved_success_rate: float = 0.9
    """A reward std or an entropy that falls while the success rate is at least this means
    convergence: no warning.
    """
    entropy_collapse: float = 0.1
    """Warn when the level of the entropy falls below this share of its early level."""
    entropy_rise: float = 0.2
    """Warn when it rises above its lowest level by this share of the early level; a healthy run
    decays steadily.
    """
    grad_norm_spike: float = 5.0
    """Warn when the gradient norm exceeds this multiple of its median over past steps, and the
    median of its early ones: where a task is solved hardly any gradient is left to compare with.
    """
    grad_norm_window: int = 50
    """Number of past steps of that median."""


@dataclass(frozen=True, slots=True)
class EchoTrapWarning:
    """`rule` fired because `value` crossed `limit`; `str()` adds what to do."""

    rule: str
    value: float
    limit: float

    def __str__(self) -> str:
        return (
            f"{self.rule}: {self.value:.4g} crossed the limit {self.limit:.4g};"
            f" {_REMEDIES[self.rule]}"
        )


class EchoTrapMonitor:
    """A state machine that gets one dict of signals per step; each rule warns once, when it starts
    to hold.

    The indicators come from arXiv:2504.20073 sec. 4: the reward std drops first, entropy turns
    erratic, and by the time the gradient norm spikes the collapse is hardly reversible.
    """

    thresholds = EchoTrapThresholds()

    def __init__(self) -> None:
        # The first `window` values of each signal, and the last `grad_norm_window` + 1.
        self._early: dict[str, list[float]] = {name: [] for name in SIGNALS}
        self._recent: dict[str, list[float]] = {name: [] for name in SIGNALS}
        self._lowest_entropy = math.inf
        self._active: list[str] = []

    def observe(self, signals: Mapping[str, float]) -> list[EchoTrapWarning]:
        """Record one step and return the warnings of rules that start to hold with it.

        Args:
            signals: any of `SIGNALS`; a step without an update has no entropy and no gradient norm.
                A value that is not finite warns as `<signal>_not_finite` and is otherwise left out.
        """
        holding = []
        for name, value in signals.items():
            if not math.isfinite(value):
                holding.append(EchoTrapWarning(f"{name}_not_finite", value, math.inf))
                continue
            if len(self._early[name]) < self.thresholds.window:
                self._early[name].append(value)
            past = self._recent[name][-self.thresholds.grad_norm_window :]
            self._recent[name] = [*past, value]
        holding += self._reward_std_warnings()
        holding += self._entropy_warnings() + self._grad_norm_warnings()
        begun = [warning for warning in holding if warning.rule not in self._active]
        self._active = [warning.rule for warning in holding]
        return begun

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs to give the same warnings, as plain Python
        objects.
        """
        return deepcopy(
            {
                "early": self._early,
                "recent": self._recent,
                "lowest_entropy": self._lowest_entropy,
                "active": self._active,
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._early, self._recent = deepcopy(state["early"]), deepcopy(state["recent"])
        self._lowest_entropy, self._active = state["lowest_entropy"], list(state["active"])

    def _reward_std_warnings(self) -> list[EchoTrapWarning]:
        if not self._has_level("reward_std") or self._is_solved:
            return []
        unsolved = 1.0
        if self._has_level("success_rate"):
            before, now = fmean(self._early["success_rate"]), median(self._window("success_rate"))
            unsolved = min(1.0, (1 - now) / (1 - before)) if before < 1 else 1.0
        early, recent = fmean(self._early["reward_std"]), self._window("reward_std")
        cliff = self.thresholds.reward_std_cliff * early * unsolved
        lost = self.thresholds.reward_std_lost * early
        warnings = []
        if median(recent) < cliff:
            warnings.append(EchoTrapWarning("reward_std_cliff", median(recent), cliff))
        if max(recent) <= lost:  # both are 0 if no group ever varied
            warnings.append(EchoTrapWarning("reward_std_lost", max(recent), lost))
        return warnings

    def _entropy_warnings(self) -> list[EchoTrapWarning]:
        if not self._has_level("entropy"):
            return []
        early, level = fmean(self._early["entropy"]), median(self._window("entropy"))
        self._lowest_entropy = min(self._lowest_entropy, level)
        floor = self.thresholds.entropy_collapse * early
        ceiling = self._lowest_entropy + self.thresholds.entropy_rise * early
        if level < floor:
            return [] if self._is_solved else [EchoTrapWarning("entropy_collapse", level, floor)]
        return [EchoTrapWarning("entropy_rise", level, ceiling)] if level > ceiling else []

    def _grad_norm_warnings(self) -> list[EchoTrapWarning]:
        if len(self._recent["grad_norm"]) <= self.thresholds.window:
            return []
        *past, last = self._recent["grad_norm"]
        spike = self.thresholds.grad_norm_spike * median(past)
        limit = max(spike, median(self._early["grad_norm"]))
        return [EchoTrapWarning("grad_norm_spike", last, limit)] if last > limit else []

    @property
    def _is_solved(self) -> bool:
        return self._has_level("success_rate") and (
            median(self._window("success_rate")) >= self.thresholds.solved_success_rate
        )

    def _has_level(self, name: str) -> bool:
        return len(self._early[name]) == self.thresholds.window

    def _window(self, name: str) -> list[float]:
        return self._recent[name][-self.thresholds.window :]


COLLAPSE_SIGNALS = ("success_rate", "entropy", "reward_std", "grad_norm", "distinct_openings")
"""Signals that `CollapseDetector.observe` accepts: success rate, entropy in nats, in-group reward
std and distinct openings of all sampled groups; the gradient norm before clipping.
"""


@dataclass(frozen=True, slots=True)
class CollapseThresholds:
    """When success has collapsed: levels are means over `window` steps, compared with those at the
    best level of success so far. docs/results/guard.md has the false alarms and misses.
    """

    window: int = 10
    fall: float = 5.0
    """Collapse: success fell by this many standard errors."""
    fall_with_sign: float = 1.5
    """Collapse: it fell by this many, and one of the signs below holds too."""
    fall_at_end: float = 4.0
    """Collapse at the last step: it fell by this many."""
    least_fall: float = 0.05
    """A smaller fall is never a collapse."""
    entropy_rise: float = 2.0
    """Sign: entropy above this multiple of its level at the best success."""
    entropy_fall: float = 0.25
    """Sign: entropy below this share."""
    reward_std_fall: float = 0.5
    """Sign: the in-group reward std below this share."""
    grad_norm_rise: float = 3.0
    """Sign: the gradient norm above this multiple."""
    openings_fall: float = 0.5
    """Sign: distinct openings below this share."""


class CollapseDetector:
    """Tells, step by step, whether success has fallen from its best level for good.

    Success of a step is noisy, for a few prompts are drawn for it, so a fall counts in standard
    errors: of a difference of two means over a window, from the variance of steps within each.
    """

    def __init__(self, thresholds: CollapseThresholds = CollapseThresholds()) -> None:
        self.thresholds = thresholds
        self._recent: dict[str, list[float]] = {name: [] for name in COLLAPSE_SIGNALS}
        self._best: dict[str, float] = {}
        """Levels at the best success so far, and the variance of its steps."""

    @property
    def success_level(self) -> float | None:
        """Mean success over the window; None until it is full."""
        return self._levels().get("success_rate")

    def observe(self, signals: Mapping[str, float], *, is_last: bool = False) -> str | None:
        """Record a step; returns what has collapsed, in words, None if nothing has.

        Args:
            signals: any of `COLLAPSE_SIGNALS`; those that are not finite are left out.
            is_last: no step follows in which a fall could be made good or become plain.
        """
        for name in COLLAPSE_SIGNALS:
            if math.isfinite(value := signals.get(name, math.nan)):
                past = self._recent[name][1 - self.thresholds.window :]
                self._recent[name] = [*past, value]
        now = self._levels()
        if "success_rate" not in now:
            return None
        fall = self._best.get("success_rate", -math.inf) - now["success_rate"]
        if fall <= 0:
            self._best = now
            return None
        signs = self._signs(now)
        bound = self.thresholds.fall_at_end if is_last else self.thresholds.fall
        bound = min(bound, self.thresholds.fall_with_sign) if signs else bound
        spread = self._best["variance"] + now["variance"]
        error = math.sqrt(spread / self.thresholds.window)
        if fall < max(self.thresholds.least_fall, bound * error):
            return None
        return (
            f"success fell from {self._best['success_rate']:.1%} to {now['success_rate']:.1%}"
            f" (means of {self.thresholds.window} steps, standard error {error:.1%})"
            + "".join(f", {sign}" for sign in signs)
        )

    def forget_recent(self) -> None:
        """Begin the window anew, since other weights follow; the best level stays."""
        self._recent = {name: [] for name in COLLAPSE_SIGNALS}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs to decide alike, as plain Python objects."""
        return deepcopy({"recent": self._recent, "best": self._best})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._recent, self._best = deepcopy(state["recent"]), dict(state["best"])

    def _levels(self) -> dict[str, float]:
        full = {
            name: values
            for name, values in self._recent.items()
            if len(values) == self.thresholds.window
        }
        levels = {name: fmean(values) for name, values in full.items()}
        if "success_rate" in levels:
            levels["variance"] = variance(full["success_rate"])
        return levels

    def _signs(self, now: Mapping[str, float]) -> list[str]:
        limits = self.thresholds
        rules = (
            ("entropy", "rose", limits.entropy_rise),
            ("entropy", "fell", limits.entropy_fall),
            ("reward_std", "fell", limits.reward_std_fall),
            ("grad_norm", "rose", limits.grad_norm_rise),
            ("distinct_openings", "fell", limits.openings_fall),
        )
        signs = []
        for name, how, limit in rules:
            if name in now and name in self._best:
                before, level = self._best[name], now[name]
                is_beyond = level > limit * before if how == "rose" else level < limit * before
                if is_beyond:
                    signs.append(f"{name} {how} from {before:.3g} to {level:.3g}")
        return signs


_MOST_GROUPS, _MOST_MEMBERS = 8, 4
"""Groups that `probes` selects at most, and members of each."""


def probes(groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Select the trajectories that `diagnose` reads: up to 4 members of each of up to 8 evenly
    spaced groups, each cut to its first prompt and response. They have the first prompt of the
    group's first member: an agent's trajectories may begin with another one.
    """
    step = max(1, math.ceil(len(groups) / _MOST_GROUPS))
    chosen = []
    for group in groups[::step]:
        if members := _answered(group):
            prompt = members[0].first_prompt
            alike = [m for m in members if m.first_prompt == prompt]
            firsts = list(map(_first_turn, alike[:_MOST_MEMBERS]))
            chosen.append(TrajectoryGroup(group.group_id, firsts))
    return chosen


def _first_turn(trajectory: Trajectory) -> Trajectory:
    first, size = trajectory.first_turn, len(trajectory.first_prompt)
    span = slice(first.start - size, first.end)
    turn = Turn(size, first.end - span.start, first.reward)
    cut = replace(trajectory, turns=[turn], breaks=[])
    cut.token_fields = {name: values[span] for name, values in trajectory.token_fields.items()}
    return cut


def diagnose(
    chosen: Sequence[TrajectoryGroup],
    logprobs: Callable[[TokenBatch], Tensor],
    *,
    reasoning_length: Callable[[Sequence[int]], int] = len,
) -> dict[str, float]:
    """Return whether reasoning still depends on its input: `mutual_information` of first responses.

    X is the context before the first sampled token, Z the reasoning sampled there. All reasonings
    are scored after the X of each group: at most 8 * 8 * 4 short sequences, in one pass. If
    environments are mixed, X also reveals which one is played.

    Args:
        chosen: groups of `probes`.
        logprobs: batch -> [T] log-probability of each label under the mask, as the policy that
            sampled the groups computes it.
        reasoning_length: how many leading tokens of a response are its reasoning (default: all).

    Returns:
        `mutual_information`'s numbers; nothing without groups.
    """
    if not chosen:
        return {}
    members = [group.trajectories for group in chosen]
    inputs = [group[0].first_prompt for group in members]
    reasonings = list(map(_first_response, sum(members, [])))
    reasonings = [tokens[: max(1, reasoning_length(tokens))] for tokens in reasonings]
    batch = pack([_continue(tokens, by) for by in reasonings for tokens in inputs])
    owners = torch.repeat_interleave(torch.arange(batch.num_trajectories), batch.lengths.long())
    scores = torch.zeros(batch.num_trajectories, dtype=torch.float64).index_add(
        0, owners, (logprobs(batch) * batch.loss_mask).double().cpu()
    )
    own = torch.arange(len(inputs)).repeat_interleave(torch.tensor(list(map(len, members))))
    return mutual_information(scores.view(len(reasonings), len(inputs)), own, input_keys=inputs)


def mutual_information(
    cross_logprobs: Tensor,
    input_ids: Tensor,
    *,
    input_keys: Sequence[Hashable] | None = None,
) -> dict[str, float]:
    """RAGEN-2's collapse estimate from teacher-forced log-probabilities (arXiv:2604.06268).

    matched_m = l[m, own]; marginal_m = logsumexp_g l[m, g] - log G; I(X; Z) = mean(matched -
    marginal). Sums over tokens give nats per reasoning; scores divided by the number of tokens of
    the reasoning give RAGEN-2's per-token variant.

    Args:
        cross_logprobs: [M, G] log p(z_m | x_g) of reasoning m under input g, finite.
        input_ids: [M] column of the input that reasoning m was sampled from.
        input_keys: [G] equal keys mark equal inputs (their columns agree); they count as one in the
            retrieval and by their frequency in the marginal. None: all inputs differ.

    Returns:
        mutual_information: 0 if the reasoning ignores its input; compare it only between equal
        maxima. max_mutual_information: its upper bound, log G, or less if inputs repeat.
        conditional_entropy: H(Z | X) = -mean matched. entropy: H(Z) = -mean marginal.
        retrieval_accuracy: share of reasonings whose own input explains them best (ties count as
        fractions). retrieval_chance: the same for a random guess. score: the mutual information in
        standard deviations of the marginals (RAGEN-2's z-score), comparable between maxima.
    """
    num_inputs = cross_logprobs.shape[1]
    keys = list(range(num_inputs) if input_keys is None else input_keys)
    distinct = list(dict.fromkeys(keys))
    merged = torch.tensor([distinct.index(key) for key in keys])  # [G] -> distinct input
    columns = torch.tensor([keys.index(key) for key in distinct])  # [D]
    frequencies = torch.bincount(merged).double() / num_inputs  # [D]
    scores = cross_logprobs.double()[:, columns]  # [M, D]
    own = scores.gather(1, merged[input_ids].unsqueeze(1))  # [M, 1]
    matched = own.mean().item()
    marginals = torch.logsumexp(scores + frequencies.log(), dim=1)  # [M]
    marginal = marginals.mean().item()
    is_best = (scores <= own).all(1)  # [M]
    num_tied = (scores == own).sum(1)  # [M], own input included
    return {
        "mutual_information": matched - marginal,
        "max_mutual_information": -frequencies[merged[input_ids]].log().mean().item(),
        "conditional_entropy": -matched,
        "entropy": -marginal,
        "retrieval_accuracy": (is_best / num_tied).mean().item(),
        "retrieval_chance": 1 / len(distinct),
        "score": (matched - marginal) / (marginals.std(correction=0).item() + 1e-3),
    }


def moving_average(before: float | None, value: float, decay: float = 0.9) -> float:
    """Return an exponential moving average after one more value; it begins with the first."""
    return value if before is None else decay * before + (1 - decay) * value


def _continue(tokens: Sequence[int], reasoning: Sequence[int]) -> Trajectory:
    """`reasoning` as if it had been sampled after `tokens`."""
    trajectory = Trajectory(group_id=0)
    trajectory.append_observation(tokens)
    trajectory.append_action(Completion(list(reasoning), [0.0] * len(reasoning), "stop"))
    return trajectory
