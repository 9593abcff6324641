"""Flags of the policy loss and of the critic's."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ragen_mega.config.sections.section import (
    Bounds,
    NonNegative,
    OnlyWith,
    Positive,
    Section,
    Share,
)

_CAPPED = OnlyWith("importance_cap", "--importance-cap 2")


@dataclass(frozen=True)
class LossConfig(Section):
    """The policy loss and the critic's."""

    policy_loss: Literal["clip", "cispo", "gspo"] = "clip"
    """PPO's clipped surrogate; CISPO (arXiv:2506.13585), whose clipped ratio only weighs the
    gradient, so that no token loses it; or GSPO (arXiv:2507.18071): one ratio for a whole
    trajectory, the geometric mean of its tokens' ratios.
    """
    clip_ratio_low: Share = 0.2
    """Lower clip bound of the ratio, 1 - this."""
    clip_ratio_high: NonNegative = 0.28
    """Upper clip bound of the ratio, 1 + this (StarPO-S: clip-higher)."""
    dual_clip: Annotated[float, Bounds("above 1", 1, is_open=True)] | None = None
    """Bound of the loss where the advantage is negative (arXiv:1912.09729), e.g. 3."""
    kl_kind: Literal["none", "k1", "k2", "k3"] = "none"
    """KL to the reference policy as a loss term: k2 has the gradient of KL(policy || reference), k3
    the gradient of KL(reference || policy). k1 has none and is refused; it is right in rewards
    (--kl-in-reward).
    """
    kl_coef: NonNegative = 0.0
    """Coefficient of the KL in the loss."""
    entropy_coef: float = 0.001
    """Coefficient of the entropy bonus."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = (
        "token-mean"
    )
    """Mean over tokens of the minibatch, or over trajectories of their token mean or token sum."""
    loss_mask: Literal["sampled", "legacy"] = "sampled"
    """Tokens that are trained on: those that the policy sampled, or (legacy) everything behind the
    first message, states and rewards included, as in the runs published as arXiv:2504.20073.
    """
    old_logprobs: Literal["auto", "recompute", "engine"] = "auto"
    """Denominator of the ratio: log-probabilities that the policy computes for all trajectories
    before the update (recompute); those that the engine sampled with, which saves that pass, so
    that the ratio also holds what engine and trainer compute differently (engine; watch
    mismatch/...); or (auto) the log-probabilities of the update's own forward pass where a step
    takes one optimizer step and nothing else needs them (the ratio is 1), else the engine's where
    the embedded one computes what the trainer does (float32, the same weights), and else a separate
    pass.
    """
    importance_cap: Positive | None = None
    """Importance correction of the loss by w = pi_old / pi_rollout, at most this, between the
    trainer's policy and the one that sampled (decoupled PPO, arXiv:2110.00641).
    """
    importance_mode: Annotated[Literal["truncate", "mask"], _CAPPED] = "truncate"
    """Treatment of tokens whose w is beyond its cap: w is set to the cap (truncate), or the tokens
    are left out of the policy loss (mask).
    """
    importance_floor: Annotated[Positive | None, _CAPPED] = None
    """Tokens whose w is below this are left out too (mask only; IcePop, arXiv:2510.18855: 0.5, with
    --importance-cap 5).
    """
    importance_level: Annotated[Literal["token", "sequence"], _CAPPED] = "token"
    """w of each token, or the product over its trajectory, which corrects without bias but varies
    more.
    """
    min_entropy: NonNegative = 0.0
    """Leave tokens out of the policy loss where the policy is surer than this many nats: choices
    are trained on, not what it knows to say (forking tokens, arXiv:2506.01939), e.g. 0.3.
    """
    value_clip: Positive | None = 0.5
    """Clip range of the critic's values around the old ones."""

    def check(self) -> None:
        if self.kl_kind == "k1":
            raise ValueError(
                "kl_kind k1 must not be a loss term: over samples of the policy the gradient of log"
                f" policy - log reference has the mean 0, so kl_coef {self.kl_coef} would add noise"
                " alone; set --kl-kind k2, which has the gradient of this KL, or subtract k1 from"
                f" rewards by --kl-in-reward k1 --kl-reward-coef {self.kl_coef or 0.01}"
            )
        if (self.kl_kind == "none") != (self.kl_coef == 0.0):
            raise ValueError(
                f"kl_kind ({self.kl_kind}) and kl_coef ({self.kl_coef}) need each other; set both"
                " or none"
            )
        if self.old_logprobs == "engine" and self.loss_mask == "legacy":
            raise ValueError(
                "loss_mask legacy trains on tokens that no engine sampled; drop --old-logprobs"
                " engine"
            )
        if self.old_logprobs == "engine" and self.importance_cap is not None:
            raise ValueError(
                "importance_cap compares old_logprobs with the engine's, which they are with"
                " old_logprobs engine; drop --importance-cap or --old-logprobs"
            )
        if self.dual_clip is not None and self.policy_loss != "clip":
            raise ValueError(
                f"dual_clip bounds the clipped surrogate, and policy_loss is {self.policy_loss};"
                " drop --dual-clip"
            )
        if self.clip_ratio_low == 1.0 and self.policy_loss != "cispo":
            raise ValueError(
                "clip_ratio_low 1 leaves the ratio unbounded from below, which only policy_loss"
                " cispo does; set --clip-ratio-low 0.2"
            )
        floor, cap = self.importance_floor, self.importance_cap
        is_mask = self.importance_mode == "mask"
        if floor is not None and cap is not None and not (is_mask and floor < cap):
            raise ValueError(
                f"importance_floor ({floor}) must be below importance_cap ({cap}) and needs"
                " importance_mode mask; set --importance-mode mask --importance-floor 0.5"
                " --importance-cap 5"
            )
        if self.policy_loss == "gspo" and self.loss_aggregation != "seq-mean-token-mean":
            raise ValueError(
                f"policy_loss gspo is a mean over trajectories, and loss_aggregation is"
                f" {self.loss_aggregation}; set --loss-aggregation seq-mean-token-mean"
            )
