"""Credit assignment: which functions of `starpo.advantages` a configuration asks for, applied to
one packed batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragen_mega.algorithm import advantages as starpo
from ragen_mega.config import AdvantageConfig
from ragen_mega.data.types import TokenBatch, Trajectory


def estimate_advantages(
    batch: TokenBatch,
    trajectories: Sequence[Trajectory],
    config: AdvantageConfig,
    *,
    group_weights: Tensor | None = None,
) -> TokenBatch:
    """`batch` with `advantages` and, for a critic, `returns`.

    `trajectories` are those of the batch, in its order. `group_weights` [S] scales each
    trajectory's advantages (soft reweighting). The batch must hold values for the GAE estimators
    and reference log-probabilities for a KL in the reward.
    """
    rewards = _token_rewards(batch, trajectories, config)
    if config.advantage_estimator in ("gae", "bilevel_gae"):
        batch = _generalized(batch, rewards, config)
    elif config.advantage_estimator == "reinforce_plus_plus":
        batch = batch.with_fields(
            advantages=starpo.reinforce_plus_plus(
                rewards, batch.loss_mask, batch.cu_seqlens, gamma=config.gamma
            )
        )
    else:
        scores = _scores(trajectories, config)
        relative = starpo.group_relative(
            scores,
            batch.group_ids,
            normalize_std=config.advantage_estimator == "grpo",
            leave_one_out=config.advantage_estimator == "rloo",
        )
        batch = batch.with_fields(advantages=_per_token(relative, batch))
    advantages = batch.advantages
    if config.whitens:
        advantages = starpo.whiten(advantages, batch.loss_mask)
    if group_weights is not None:
        advantages = advantages * _per_token(group_weights, batch)
    return batch.with_fields(advantages=advantages)


def _generalized(batch: TokenBatch, rewards: Tensor, config: AdvantageConfig) -> TokenBatch:
    if config.advantage_estimator == "gae":
        estimate, returns = starpo.gae(
            rewards,
            batch.values,
            batch.loss_mask,
            batch.cu_seqlens,
            gamma=config.gamma,
            lam=config.lam,
        )
    else:
        estimate, returns = starpo.bilevel_gae(
            rewards,
            batch.values,
            batch.loss_mask,
            batch.turn_ids,
            batch.cu_seqlens,
            gamma=config.gamma,
            lam=config.lam,
            turn_gamma=0.95 if config.turn_gamma is None else config.turn_gamma,
            turn_lam=1.0 if config.turn_lam is None else config.turn_lam,
        )
    return batch.with_fields(advantages=estimate, returns=returns)


def _token_rewards(
    batch: TokenBatch, trajectories: Sequence[Trajectory], config: AdvantageConfig
) -> Tensor:
    """[T] rewards on sampled tokens: per turn as they fell, or the (normalised) return on the last
    sampled token.
    """
    rewards = batch.rewards
    if config.reward_placement == "trajectory":
        rewards = starpo.place_at_end(
            _scores(trajectories, config), batch.loss_mask, batch.cu_seqlens
        )
    if config.kl_in_reward != "none":
        penalty = starpo.kl_penalty(batch.old_logprobs, batch.ref_logprobs, config.kl_in_reward)
        rewards = rewards - config.kl_reward_coef * penalty * batch.loss_mask
    return rewards


def _scores(trajectories: Sequence[Trajectory], config: AdvantageConfig) -> Tensor:
    """[S] total rewards, normalised as configured."""
    scores = torch.tensor([trajectory.total_reward for trajectory in trajectories])
    if config.reward_normalization == "identity":
        return scores
    if config.reward_normalization_scope == "group":
        keys = [trajectory.group_id for trajectory in trajectories]
    elif config.reward_normalization_scope == "environment":
        names = sorted({trajectory.environment for trajectory in trajectories})
        keys = [names.index(trajectory.environment) for trajectory in trajectories]
    else:
        keys = [0] * len(trajectories)
    return starpo.normalize_rewards(scores, torch.tensor(keys), method=config.reward_normalization)


def _per_token(per_trajectory: Tensor, batch: TokenBatch) -> Tensor:
    """[S] -> [T], zero where the label was not sampled."""
    return torch.repeat_interleave(per_trajectory, batch.lengths.long()) * batch.loss_mask
