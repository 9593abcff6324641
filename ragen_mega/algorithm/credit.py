"""Credit assignment: the rewards of one packed batch become its advantages, by the estimator that a
configuration names.

The estimators of the package stand first; `ragen_mega.algorithm.tables` lists them. Their
arithmetic is in `advantages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ragen_mega.algorithm import advantages as starpo
from ragen_mega.algorithm.tables import ESTIMATORS, PlugInError, call, find_estimator
from ragen_mega.data.types import TokenBatch, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditInputs:
    """What an advantage estimator sees: S trajectories in T positions (see `TokenBatch`)."""

    batch: TokenBatch
    """Mask, turns, offsets, group ids, log-probabilities; values for an estimator with a critic."""
    trajectories: Sequence[Trajectory]
    """Those of the batch, in its order."""
    rewards: Tensor
    """[T] float32, on sampled tokens: placed and normalised as configured, less a KL penalty."""
    scores: Tensor
    """[S] float32 total rewards, normalised as configured."""

    def per_token(self, per_trajectory: Tensor) -> Tensor:
        """[S] -> [T], 0 where the label was not sampled."""
        return _per_token(per_trajectory, self.batch)


class CreditSettings(Protocol):
    """What credit assignment reads of a configuration (`config.AdvantageConfig`)."""

    advantage_estimator: str
    gamma: float
    lam: float
    turn_gamma: float | None
    turn_lam: float | None
    reward_placement: str
    reward_normalization: starpo.NormalizationMethod
    reward_normalization_scope: str
    kl_in_reward: str
    kl_reward_coef: float
    whitens: bool


def gae(inputs: CreditInputs, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over sampled tokens: `advantages.gae`."""
    batch = inputs.batch
    return starpo.gae(
        inputs.rewards, batch.values, batch.loss_mask, batch.cu_seqlens, gamma=gamma, lam=lam
    )


def bilevel_gae(
    inputs: CreditInputs,
    *,
    gamma: float,
    lam: float,
    turn_gamma: float = 0.95,
    turn_lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Turn-level, then token-level estimation: `advantages.bilevel_gae`."""
    batch = inputs.batch
    return starpo.bilevel_gae(
        inputs.rewards,
        batch.values,
        batch.loss_mask,
        batch.turn_ids,
        batch.cu_seqlens,
        gamma=gamma,
        lam=lam,
        turn_gamma=turn_gamma,
        turn_lam=turn_lam,
    )


def grpo(inputs: CreditInputs) -> tuple[Tensor, None]:
    """(R - mean) / std of the group: `advantages.group_relative`."""
    relative = starpo.group_relative(inputs.scores, inputs.batch.group_ids, normalize_std=True)
    return inputs.per_token(relative), None


def dr_grpo(inputs: CreditInputs) -> tuple[Tensor, None]:
    """R - mean of the group: `advantages.group_relative`."""
    relative = starpo.group_relative(inputs.scores, inputs.batch.group_ids, normalize_std=False)
    return inputs.per_token(relative), None


def rloo(inputs: CreditInputs) -> tuple[Tensor, None]:
    """R - mean of the others of the group: `advantages.group_relative`."""
    relative = starpo.group_relative(
        inputs.scores, inputs.batch.group_ids, normalize_std=False, leave_one_out=True
    )
    return inputs.per_token(relative), None


def reinforce_plus_plus(inputs: CreditInputs, *, gamma: float) -> tuple[Tensor, None]:
    """Returns-to-go, whitened over the batch: `advantages.reinforce_plus_plus`."""
    batch = inputs.batch
    return starpo.reinforce_plus_plus(
        inputs.rewards, batch.loss_mask, batch.cu_seqlens, gamma=gamma
    ), None


def estimate_advantages(
    batch: TokenBatch,
    trajectories: Sequence[Trajectory],
    settings: CreditSettings,
    *,
    group_weights: Tensor | None = None,
) -> TokenBatch:
    """`batch` with `advantages` and, for a critic, `returns`.

    `trajectories` are those of the batch, in its order. `group_weights` [S] scales each
    trajectory's advantages (soft reweighting). The batch must hold values for an estimator with a
    critic and reference log-probabilities for a KL in the reward. Raises PlugInError, in one line,
    if an estimator of the user's fails or answers with something else.
    """
    name = settings.advantage_estimator
    estimator = find_estimator(name)
    scores = _scores(trajectories, settings)
    inputs = CreditInputs(
        batch=batch,
        trajectories=trajectories,
        rewards=_token_rewards(batch, scores, settings),
        scores=scores,
    )
    # Without a value (None) the estimator's own default holds.
    options = {key: getattr(settings, key) for key in estimator.options}
    options = {key: value for key, value in options.items() if value is not None}
    answer = call(ESTIMATORS, name, estimator.function, inputs, **options)
    advantages, returns = _checked(name, answer, batch, uses_critic=estimator.uses_critic)
    if returns is not None:
        batch = batch.with_fields(returns=returns)
    if settings.whitens:
        advantages = starpo.whiten(advantages, batch.loss_mask)
    if group_weights is not None:
        advantages = advantages * _per_token(group_weights, batch)
    return batch.with_fields(advantages=advantages)


def _checked(
    name: str, answer: object, batch: TokenBatch, *, uses_critic: bool
) -> tuple[Tensor, Tensor | None]:
    """Advantages and, with a critic, returns: finite and 0 where nothing was sampled."""
    rule = f"advantage estimator {name} must return (advantages [T], returns [T] or None)"
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise PlugInError(f"{rule}, not {type(answer).__name__}; return both")
    if (answer[1] is not None) != uses_critic:
        raise PlugInError(
            f"{rule}, with returns if and only if it has a critic; return"
            f" {'returns' if uses_critic else 'None for them, or declare uses_critic'}"
        )
    for value in answer[: 1 + uses_critic]:
        if not isinstance(value, Tensor) or value.shape != batch.loss_mask.shape:
            what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise PlugInError(
                f"{rule} with T = {batch.num_positions}, not {what}; spread a number per trajectory"
                " by inputs.per_token"
            )
        if not torch.isfinite(value[batch.loss_mask]).all():
            raise PlugInError(f"{rule}, finite on sampled tokens; it answered with nan or inf")
    advantages, returns = (
        None if value is None else torch.where(batch.loss_mask, value.detach(), 0.0)
        for value in answer
    )
    return advantages, returns


def _token_rewards(batch: TokenBatch, scores: Tensor, settings: CreditSettings) -> Tensor:
    """[T] rewards on sampled tokens: per turn as they fell, or the (normalised) return on the last
    sampled token.
    """
    rewards = batch.rewards
    if settings.reward_placement == "trajectory":
        rewards = starpo.place_at_end(scores, batch.loss_mask, batch.cu_seqlens)
    if settings.kl_in_reward != "none":
        penalty = starpo.kl_penalty(batch.old_logprobs, batch.ref_logprobs, settings.kl_in_reward)
        rewards = rewards - settings.kl_reward_coef * penalty * batch.loss_mask
    return rewards


def _scores(trajectories: Sequence[Trajectory], settings: CreditSettings) -> Tensor:
    """[S] total rewards, normalised as configured."""
    scores = torch.tensor([trajectory.total_reward for trajectory in trajectories])
    if settings.reward_normalization == "identity":
        return scores
    if settings.reward_normalization_scope == "group":
        keys = [trajectory.group_id for trajectory in trajectories]
    elif settings.reward_normalization_scope == "environment":
        names = sorted({trajectory.environment for trajectory in trajectories})
        keys = [names.index(trajectory.environment) for trajectory in trajectories]
    else:
        keys = [0] * len(trajectories)
    return starpo.normalize_rewards(
        scores, torch.tensor(keys), method=settings.reward_normalization
    )


def _per_token(per_trajectory: Tensor, batch: TokenBatch) -> Tensor:
    """[S] -> [T], zero where the label was not sampled."""
    return torch.repeat_interleave(per_trajectory, batch.lengths.long()) * batch.loss_mask
