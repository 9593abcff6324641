"""Credit assignment: turns the rewards of one packed batch into advantages, with the configured
estimator.

Rewards are credited along sequences of sampled tokens. A trajectory is one sequence. In a tree of
calls each branch is one: it holds the calls that were sampled in its segment, earns their rewards,
and earns at its last token all that the episode earned elsewhere.

The packaged estimators come first; `ragen_mega.algorithm.tables` lists them. GAE:
arXiv:1506.02438 Eq. 16. Bi-level GAE: RAGEN, arXiv:2504.20073. REINFORCE++: arXiv:2501.03262. Their
recursions run over sampled tokens only: the successor of a sampled token is the next sampled token
of its sequence, whatever the environment wrote in between. `ragen_kernels` computes them (Triton
for CUDA tensors), `advantages` the relative ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ragen_kernels
import torch
from ragen_kernels.reference import kl_estimate
from torch import Tensor

from ragen_mega.algorithm import advantages as starpo
from ragen_mega.algorithm.tables import ESTIMATORS, PlugInError, call, find_estimator
from ragen_mega.data.types import TokenBatch, Trajectory, move


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditInputs:
    """Inputs of an advantage estimator: S trajectories in T positions (see `TokenBatch`).

    Attributes:
        batch: mask, turns, offsets, group ids, log-probabilities; values for an estimator with a
            critic.
        trajectories: the trajectories of the batch, in its order.
        cu_sequences: int32 offsets of the sequences along which rewards are credited.
        rewards: float32 on sampled tokens: placed and normalised as configured, less a KL penalty.
        scores: float64 total rewards, normalised as configured.
    """

    batch: TokenBatch
    trajectories: Sequence[Trajectory]
    cu_sequences: Tensor  # [Q + 1]
    rewards: Tensor  # [T]
    scores: Tensor  # [S]

    def per_token(self, per_trajectory: Tensor) -> Tensor:
        """[S] -> [T], 0 where the label was not sampled."""
        spread = torch.repeat_interleave(
            per_trajectory, self.batch.lengths.long(), output_size=self.batch.num_positions
        )
        return spread * self.batch.loss_mask


def gae(inputs: CreditInputs, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimation over sampled tokens (arXiv:1506.02438 Eq. 16).

    A_i = delta_i + gamma lam A_{i+1},  delta_i = r_i + gamma V_{i+1} - V_i,  V = A = 0 after the
    last sampled token. The returns are A + V.
    """
    batch = inputs.batch
    assert batch.values is not None  # it uses a critic
    return ragen_kernels.gae(
        inputs.rewards, batch.values, batch.loss_mask, inputs.cu_sequences, gamma=gamma, lam=lam
    )


def bilevel_gae(
    inputs: CreditInputs,
    *,
    gamma: float,
    lam: float,
    turn_gamma: float = 0.95,
    turn_lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """RAGEN's bi-level GAE: a turn-level pass over turn ends, then a token-level pass within each
    turn.

    With e_k the last sampled token of turn k and V the critic's value of the state before a token:

        turn level    A_{e_k} = r_{e_k} + turn_gamma V_{e_{k+1}} - V_{e_k}
                                + turn_gamma turn_lam A_{e_{k+1}}
        token level   A_i = r_i + gamma V_{i+1} - V_i + gamma lam A_{i+1}
                      for the other tokens i of turn k,

    V = A = 0 after the last turn. So the token level of turn k ends with the turn's return A_{e_k}
    + V_{e_k} and never crosses turns. A reward inside a turn (a per-token KL penalty) is
    credited to that turn's tokens only. Turn ends come from the turns of the tokens; RAGEN takes
    them from reward != 0, which merges turns that earned exactly 0.
    """
    batch = inputs.batch
    assert batch.values is not None  # it uses a critic
    return ragen_kernels.gae(
        inputs.rewards,
        batch.values,
        batch.loss_mask,
        inputs.cu_sequences,
        gamma=gamma,
        lam=lam,
        turn_ends=_turn_ends(inputs),
        turn_gamma=turn_gamma,
        turn_lam=turn_lam,
    )


def _turn_ends(inputs: CreditInputs) -> Tensor:
    """[T] bool, True at the last sampled token of each turn of a sequence."""
    mask = inputs.batch.loss_mask
    positions = mask.nonzero().squeeze(1)
    bounds = inputs.cu_sequences[1:].to(positions.dtype)
    owners = torch.searchsorted(bounds, positions, right=True)
    turns = inputs.batch.turn_ids[positions]
    is_end = torch.ones_like(positions, dtype=torch.bool)
    is_end[:-1] = (owners[1:] != owners[:-1]) | (turns[1:] != turns[:-1])
    return torch.zeros_like(mask).index_copy(0, positions, is_end)


def _relative(inputs: CreditInputs, **how: bool) -> tuple[Tensor, None]:
    relative = starpo.group_relative(inputs.scores, inputs.batch.group_ids, **how)
    return inputs.per_token(relative), None


# (R - mean) / std of the group, R - mean of the group, R - mean of its others.
grpo = partial(_relative, normalize_std=True)
dr_grpo = partial(_relative, normalize_std=False)
rloo = partial(_relative, normalize_std=False, leave_one_out=True)


def reinforce_plus_plus(inputs: CreditInputs, *, gamma: float) -> tuple[Tensor, None]:
    """REINFORCE++ (arXiv:2501.03262): the returns-to-go G_i = r_i + gamma G_{i+1} over sampled
    tokens, whitened over the batch.
    """
    mask = inputs.batch.loss_mask
    # GAE with a critic that is 0 everywhere and without trace decay.
    to_go, _ = ragen_kernels.gae(
        inputs.rewards,
        torch.zeros_like(inputs.rewards),
        mask,
        inputs.cu_sequences,
        gamma=gamma,
        lam=1.0,
    )
    return starpo.whiten(to_go, mask), None


def none(inputs: CreditInputs) -> tuple[Tensor, None]:
    """No advantage from rewards: all of it comes from the teacher (`taught`)."""
    return torch.zeros_like(inputs.rewards), None


def taught(batch: TokenBatch, weight: float) -> Tensor:
    """[T] advantages of on-policy distillation (GKD, arXiv:2306.13649, with the reverse KL on the
    policy's samples): weight x (d - b), d = log teacher - log policy of the sampled token.

    b is the mean of d over the tokens at the same place of the same turn of the other trajectories,
    0 where there are none. The sampled token has no part in it, so that the expected gradient of
    the loss is weight x the gradient of KL(policy || teacher) at each token, with the tokens before
    it as they are: a discount of 0.
    """
    ratios, mask = batch.teacher_log_ratios, batch.loss_mask
    assert ratios is not None  # of a run with a teacher
    positions = mask.nonzero().squeeze(1)
    found, turns = ratios[positions].double(), batch.turn_ids[positions].long()
    owners = torch.searchsorted(batch.cu_seqlens[1:].long(), positions, right=True)
    numbers = torch.arange(len(positions), device=positions.device)
    begins = torch.ones_like(mask[positions])
    begins[1:] = (turns[1:] != turns[:-1]) | (owners[1:] != owners[:-1])
    places = numbers - torch.where(begins, numbers, 0).cummax(0).values
    keys = turns * (len(positions) + 1) + places
    _, members, sizes = torch.unique(keys, return_inverse=True, return_counts=True)
    totals = found.new_zeros(len(sizes)).index_add(0, members, found)
    others = (sizes[members] - 1).clamp(min=1)
    mean = torch.where(sizes[members] > 1, (totals[members] - found) / others, 0.0)
    return torch.zeros_like(ratios).index_copy(0, positions, (weight * (found - mean)).float())


def estimate_advantages(
    batch: TokenBatch,
    trajectories: Sequence[Trajectory],
    settings: Any,
    *,
    group_weights: Tensor | None = None,
    device: torch.device | None = None,
) -> TokenBatch:
    """`batch` with `advantages` and, for a critic, `returns`; they are computed on `device` (None:
    the batch's device).

    `trajectories` are the trajectories of the batch, in its order; `settings` has the fields of
    `config.AdvantageConfig`. `group_weights` [S] scales each trajectory's advantages (soft
    reweighting). The batch must hold values for an estimator with a critic and reference
    log-probabilities for a KL in the reward. A teacher's log-ratios, where the batch holds them,
    are added to what the estimator gives, after whitening and reweighting, unless its likeliest
    tokens are in the loss. Raises PlugInError, in
    one line, if a user's estimator fails or returns something else.
    """
    name = settings.advantage_estimator
    estimator = find_estimator(name)
    home = batch.tokens.device
    device = device or home
    scores = _scores(trajectories, settings, device)
    there = batch.to(device)
    cu_sequences, owners = (move(part, device) for part in _sequences(batch, trajectories))
    inputs = CreditInputs(
        batch=there,
        trajectories=trajectories,
        cu_sequences=cu_sequences,
        rewards=_token_rewards(there, scores, cu_sequences, owners, settings),
        scores=scores,
    )
    # If a setting is None, the default of the estimator applies.
    options = {
        key: value for key in estimator.options if (value := getattr(settings, key)) is not None
    }
    answer = call(ESTIMATORS, name, estimator.function, inputs, **options)
    advantages, returns = _checked(name, answer, there, uses_critic=estimator.uses_critic)
    if settings.whitens:
        advantages = starpo.whiten(advantages, there.loss_mask)
    if group_weights is not None:
        advantages = advantages * inputs.per_token(move(group_weights, device))
    if there.teacher_log_ratios is not None and not settings.teacher_top_k:
        advantages = advantages + taught(there, settings.teacher_weight)
    credited = {"advantages": advantages} | ({} if returns is None else {"returns": returns})
    return batch.with_fields(**{name: value.to(home) for name, value in credited.items()})


def _checked(
    name: str, answer: object, batch: TokenBatch, *, uses_critic: bool
) -> tuple[Tensor, Tensor | None]:
    """Return advantages and, with a critic, returns: checked for shape and finite values, and set
    to 0 where nothing was sampled.
    """
    mask = batch.loss_mask
    parts = answer if isinstance(answer, tuple) else (answer,)
    pair = [part.to(mask.device) if isinstance(part, Tensor) else part for part in parts]
    is_right = [
        isinstance(part, Tensor)
        and part.shape == mask.shape
        and bool((part.isfinite() | ~mask).all())
        for part in pair
    ]
    if len(pair) != 2 or is_right != [True, uses_critic] or (pair[1] is None) == uses_critic:
        got = [list(p.shape) if isinstance(p, Tensor) else type(p).__name__ for p in pair]
        raise PlugInError(
            f"advantage estimator {name} must return (advantages [T],"
            f" {'returns [T]' if uses_critic else 'None, for it declares no critic'}) with T ="
            f" {len(mask)} and finite on sampled tokens, not {got}"
            f"{' with nan or inf' if is_right[0] is False and got[0] == [len(mask)] else ''};"
            " inputs.per_token spreads a number per trajectory"
        )
    return (
        torch.where(mask, pair[0].detach(), 0.0),
        torch.where(mask, pair[1].detach(), 0.0) if uses_critic else None,
    )


def _sequences(batch: TokenBatch, trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """Return the offsets [Q + 1] int32 of the sequences and the trajectory [Q] of each."""
    is_tree = torch.tensor([trajectory.is_tree for trajectory in trajectories])
    offsets, bounds = batch.cu_seqlens, batch.cu_seqlens[1:].contiguous()
    if batch.cu_segments is not None:
        starts = batch.cu_segments[:-1]
        owners = torch.bucketize(starts, bounds, right=True)
        begins = is_tree[owners] | torch.isin(starts, offsets)
        offsets = torch.cat([starts[begins], offsets[-1:]])
    return offsets, torch.bucketize(offsets[:-1], bounds, right=True)


def _token_rewards(
    batch: TokenBatch, scores: Tensor, cu_sequences: Tensor, owners: Tensor, settings: Any
) -> Tensor:
    """[T] rewards on sampled tokens: per turn as they occurred, or the (normalised) return on the
    last sampled token of each sequence.
    """
    rewards, mask = batch.rewards, batch.loss_mask
    if settings.reward_placement == "trajectory":
        rewards = starpo.place_at_end(scores[owners], mask, cu_sequences).float()
    elif len(owners) > len(scores):
        so_far = torch.nn.functional.pad(rewards.double().cumsum(0), (1, 0))  # [T + 1]
        earned = [so_far[offsets.long()].diff() for offsets in (batch.cu_seqlens, cu_sequences)]
        elsewhere = earned[0][owners] - earned[1]  # [Q]
        rewards = rewards + starpo.place_at_end(elsewhere, mask, cu_sequences).float()
    if settings.kl_in_reward != "none":
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None  # as documented
        penalty = kl_estimate(batch.old_logprobs, batch.ref_logprobs, settings.kl_in_reward)
        rewards = rewards - settings.kl_reward_coef * penalty * batch.loss_mask
    return rewards


def _scores(trajectories: Sequence[Trajectory], settings: Any, device: torch.device) -> Tensor:
    """[S] float64 total rewards, normalised as configured: as exact as what the filter ranks."""
    rewards = [trajectory.total_reward for trajectory in trajectories]
    scores = move(torch.tensor(rewards, dtype=torch.float64), device)
    keys_of: dict[str, Sequence[int | str]] = {
        "group": [trajectory.group_id for trajectory in trajectories],
        "environment": [trajectory.environment for trajectory in trajectories],
        "batch": [0 for _ in trajectories],
    }
    keys = keys_of[settings.reward_normalization_scope]
    places = {key: place for place, key in enumerate(sorted(set(keys)))}
    ids = move(torch.tensor([places[key] for key in keys]), device)
    return starpo.normalize_rewards(scores, ids, method=settings.reward_normalization)
