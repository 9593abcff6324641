"""Metrics of a rollout for the log.

Source of the signals: StarPO, arXiv:2504.20073, section 4 (success, in-group reward deviation,
response length).
"""

from collections.abc import Sequence
from statistics import fmean

from ragen_mega.algorithm.diagnostics import entropy_by_prompt, repetition_across_prompts
from ragen_mega.algorithm.filters import group_uncertainty
from ragen_mega.data.types import Trajectory, TrajectoryGroup
from ragen_mega.environments.episode import ERROR

_MAX_REASON = 300
"""Characters, so that the place of an error is among them."""


def summarize(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Metrics of all trajectories, and again under `name/environment` if there are several
    environments.

    success, truncated_rate: share of trajectories. reward: mean total reward. in_group_std: mean
    over groups of the unbiased standard deviation of total rewards (StarPO Eq. 7), 0 for a group of
    one. num_turns: mean per trajectory. response_length: sampled tokens per turn. thought_length:
    words of the thought per turn, 0 for a turn without one. true_claims: share of the claims in
    thoughts that are true of the state, only where some can be checked. valid_format_rate,
    valid_action_rate: share of turns. num_trajectories, sampled_tokens: counts.
    environment_errors: trajectories that were ended by an error or the time limit of their
    environment. entropy, entropy_variance, distinct_openings, ngram_overlap: see
    `algorithm.diagnostics`. Without groups, no metrics.
    """
    if not groups:
        return {}
    metrics = _summarize(groups)
    by_environment: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        by_environment.setdefault(group.trajectories[0].environment, []).append(group)
    if len(by_environment) > 1:
        for name, own_groups in by_environment.items():
            metrics |= {f"{key}/{name}": value for key, value in _summarize(own_groups).items()}
    return metrics


def _summarize(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    checked = [turn.info["claims"] for turn in turns if "claims" in turn.info]
    num_true, num_claims = (sum(counts[i] for counts in checked) for i in (0, 1))
    return {
        "success": fmean(trajectory.success for trajectory in trajectories),
        "reward": fmean(trajectory.total_reward for trajectory in trajectories),
        "in_group_std": fmean(
            float(group_uncertainty([group.total_rewards])) if len(group.trajectories) > 1 else 0.0
            for group in groups
        ),
        "response_length": fmean(turn.end - turn.start for turn in turns),
        "thought_length": fmean(len(turn.info.get("thought", "").split()) for turn in turns),
        **({"true_claims": num_true / num_claims} if num_claims else {}),
        "valid_format_rate": fmean(bool(turn.info.get("is_format_valid", False)) for turn in turns),
        "valid_action_rate": fmean(bool(turn.info.get("is_action_valid", False)) for turn in turns),
        "num_turns": fmean(len(trajectory.turns) for trajectory in trajectories),
        "truncated_rate": fmean(trajectory.truncated for trajectory in trajectories),
        "num_trajectories": float(len(trajectories)),
        "sampled_tokens": float(sum(trajectory.num_sampled_tokens for trajectory in trajectories)),
        "environment_errors": float(len(environment_errors(groups))),
        **entropy_by_prompt(groups),
        **repetition_across_prompts(groups),
    }


def environment_errors(groups: Sequence[TrajectoryGroup]) -> list[tuple[Trajectory, str]]:
    """The trajectories that were ended by an error or the time limit of their environment, each
    with the reason.
    """
    return [
        (trajectory, trajectory.turns[-1].info[ERROR])
        for group in groups
        for trajectory in group.trajectories
        if trajectory.turns and ERROR in trajectory.turns[-1].info
    ]


def describe_errors(groups: Sequence[TrajectoryGroup]) -> str | None:
    """One line about the trajectories of `environment_errors`, None if there are none."""
    errors = environment_errors(groups)
    if not errors:
        return None
    trajectory, reason = errors[0]
    return (
        f"environment errors closed {len(errors)} of"
        f" {sum(len(group.trajectories) for group in groups)} trajectories as truncated; the first:"
        f" {trajectory.environment} with seed {trajectory.seed} and outcome seed"
        f" {trajectory.outcome_seed}: {' '.join(reason.split())[:_MAX_REASON]}"
    )
