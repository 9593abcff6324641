"""Metrics of a rollout for the log.

Source of the signals: StarPO, arXiv:2504.20073, section 4 (success, in-group reward deviation,
response length).
"""

from collections.abc import Sequence
from statistics import fmean

from ragen_mega.agents.call_tree import UNTRAINED
from ragen_mega.agents.served_episode import ASKED, UNDELIVERED
from ragen_mega.algorithm.diagnostics import entropy_by_prompt, repetition_across_prompts
from ragen_mega.algorithm.filters import by_environment, in_group_std, with_returns
from ragen_mega.data.types import TrajectoryGroup
from ragen_mega.environments.episode import CAUSES, QUOTED
from ragen_mega.rollout.endings import (
    cause,
    environment_errors,
    failed_attempts,
)


def summarize(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the metrics of all trajectories, and again under `name/environment` if there are
    several environments.

    Metrics of the trajectories that have a return (`filters.has_return`): success: share. reward:
    mean total reward. in_group_std: mean over groups of the unbiased standard deviation of total
    rewards (StarPO Eq. 7), 0 for a group of one. num_turns: mean. response_length: sampled tokens
    per turn. thought_length: words of the thought per turn, 0 for a turn without one. true_claims:
    share of the claims in thoughts that are true of the state, only where some can be checked.
    valid_format_rate, valid_action_rate: share of turns. cut_answer_rate: share of turns whose
    answer reached the limit of its length. quoted_markers: control markers and tags in what
    environments said, where there were any. ignored_sampling, untrained_answers,
    undelivered_answers: answers of agents whose request asked for another temperature or top_p than
    the trainer's, that are outside the loss mask, and that nobody waited for, where there were any.
    entropy, entropy_variance, distinct_openings,
    ngram_overlap: see `algorithm.diagnostics`. All of these are missing where there is none.

    Metrics of all trajectories: truncated_rate, and the shares of it by cause. num_trajectories,
    sampled_tokens (under the loss mask): counts. environment_errors: episodes that an error or the
    time limit of their environment ended. resampled: how many of these another attempt replaced.
    lost_trajectories: trajectories that have no return. Without groups, no metrics.
    """
    if not groups:
        return {}
    metrics = _summarize(groups)
    places_of = by_environment(groups)
    if len(places_of) > 1:
        for name, places in places_of.items():
            own = _summarize([groups[place] for place in places])
            metrics |= {f"{key}/{name}": value for key, value in own.items()}
    return metrics


def _summarize(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    causes = [cause(trajectory) for trajectory in trajectories]
    num_failed = sum(1 for _ in failed_attempts(groups))
    num_lost = len(environment_errors(groups))
    return _of_samples(groups) | {
        "truncated_rate": fmean(trajectory.truncated for trajectory in trajectories),
        **{f"truncated_by_{each}": causes.count(each) / len(causes) for each in CAUSES},
        "num_trajectories": float(len(trajectories)),
        "sampled_tokens": float(sum(trajectory.num_sampled_tokens for trajectory in trajectories)),
        "environment_errors": float(num_failed),
        "resampled": float(num_failed - num_lost),
        "lost_trajectories": float(num_lost),
    }


def _of_samples(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    samples = with_returns(groups, least=1)
    trajectories = [trajectory for group in samples for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if not turns:
        return {}
    checked = [turn.info["claims"] for turn in turns if "claims" in turn.info]
    num_quoted = sum(turn.info.get(QUOTED, 0) for turn in turns)
    infos = [turn.info for turn in turns]
    of_agents = {
        "ignored_sampling": sum(ASKED in info for info in infos),
        "untrained_answers": sum(len(info.get(UNTRAINED, ())) for info in infos),
        "undelivered_answers": sum(info.get(UNDELIVERED, 0) for info in infos),
    }
    num_true, num_claims = (sum(counts[i] for counts in checked) for i in (0, 1))
    return {
        "success": fmean(trajectory.success for trajectory in trajectories),
        "reward": fmean(trajectory.total_reward for trajectory in trajectories),
        "in_group_std": in_group_std(samples),
        "response_length": fmean(turn.end - turn.start for turn in turns),
        "thought_length": fmean(len(turn.info.get("thought", "").split()) for turn in turns),
        **({"true_claims": num_true / num_claims} if num_claims else {}),
        **({"quoted_markers": float(num_quoted)} if num_quoted else {}),
        **{name: float(count) for name, count in of_agents.items() if count},
        "valid_format_rate": fmean(bool(turn.info.get("is_format_valid", False)) for turn in turns),
        "valid_action_rate": fmean(bool(turn.info.get("is_action_valid", False)) for turn in turns),
        "cut_answer_rate": fmean(turn.info.get("finish_reason") == "length" for turn in turns),
        "num_turns": fmean(len(trajectory.turns) for trajectory in trajectories),
        **entropy_by_prompt(samples),
        **repetition_across_prompts(samples),
    }
