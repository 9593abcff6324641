"""Flags of optimizer steps and their schedule."""

import math
from dataclasses import dataclass
from typing import Literal

from ragen_mega.config.sections.section import (
    BelowOne,
    Count,
    Natural,
    NonNegative,
    Positive,
    Section,
    Seed,
)

MOST_TOKENS = 16384
"""Positions of a microbatch, unless a flag says otherwise or the memory is too small."""


@dataclass(frozen=True)
class TrainConfig(Section):
    """Optimizer steps and their schedule."""

    num_steps: Natural = 200
    """StarPO steps: one rollout and its updates (0: only the warm start and the evaluation)."""
    minibatch_size: Count = 32
    """Trajectories per optimizer step (E); it divides those that the filter keeps, or is larger
    and one step takes them all. Where constant groups leave fewer, the steps are as equal as can
    be.
    """
    updates_per_rollout: Count = 1
    """Passes over the kept trajectories of a rollout (Online-k)."""
    max_tokens_per_microbatch: Count | None = None
    """Token positions that one forward pass computes, at most (default: 16384, or the half, quarter
    and so on that fits into the memory of a rank).
    """
    shared_prefixes: Literal["auto", "on", "off"] = "auto"
    """Compute once what trajectories of a microbatch share from their beginning: `on` wherever
    any do, `auto` where it saves at least 3% of the positions, and never with --fp8, which rounds
    by what else is in a tensor.
    """
    routing_replay: Literal["none", "policy", "engine"] = "none"
    """Experts of a mixture that a token goes through in training. The weights of its router, or
    rounding, may choose others than it had when its log-probability was computed, and the ratio of
    the two then jumps. `engine` (called R3, arXiv:2510.11370) repeats in every pass of the policy
    and of the reference policy the choices that the engine made when it sampled; `policy` (R2) in
    the update the choices of the pass of --old-logprobs recompute; with `none` every pass chooses
    for itself. Routers are trained under all three.
    """
    lr: Positive = 1e-6
    """Learning rate of the policy."""
    decoupled_lr: Positive | None = None
    """Learning rate of the policy's embedding and LM head (default: the learning rate of its
    layers), as in Megatron-LM. There a policy learns which words it prefers while its layers keep
    what they know.
    """
    critic_lr: Positive = 1e-5
    """Learning rate of the critic."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule over the run."""
    lr_warmup: Natural = 0
    """Steps of linear warm-up of both learning rates: step n of W is trained at n / W of the full
    rates. The policy's begins with its first update, after --critic-warmup.
    """
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, as in AdamW."""
    adam_beta1: BelowOne = 0.9
    """Decay of Adam's mean of gradients."""
    adam_beta2: BelowOne = 0.999
    """Decay of Adam's mean of squared gradients."""
    adam_eps: Positive = 1e-8
    """Added to the root mean square of the policy's gradient in Adam. Well above it, Adam becomes
    gradient descent with momentum, which leaves weights with little gradient where they are: noisy
    rewards then spare what was learned before.
    """
    clip_grad: Positive = 1.0
    """Largest global gradient norm."""
    critic_warmup: Natural = 0
    """First steps in which only the critic is updated."""
    max_nonfinite_updates: Count = 3
    """Updates of one model in a row that may be skipped for a non-finite loss or gradient; after
    that many the run stops.
    """
    max_empty_steps: Natural = 10
    """Steps in a row of which the filter may keep nothing; after that many the run stops and says
    why (0: it goes on).
    """
    seed: Seed = 0
    """Seed of initial states, outcomes, sampling and minibatches, from 0 to 2**63 - 1."""

    @property
    def microbatch_tokens(self) -> int:
        """Return the positions of a microbatch where the memory does not decide."""
        return self.max_tokens_per_microbatch or MOST_TOKENS

    def schedule(self, step: int, first: int = 0) -> float:
        """Return the share of its learning rate with which a step trains a model whose first one is
        `first`.
        """
        highest = first + max(0, self.lr_warmup - 1)
        if step < highest:
            return max(step - first + 1, 1) / max(self.lr_warmup, 1)
        done = min((step - highest) / max(self.num_steps - highest, 1), 1.0)
        cosine = (1 + math.cos(math.pi * done)) / 2
        return {"constant": 1.0, "linear": 1 - done, "cosine": cosine}[self.lr_decay]

    def shares(self, step: int) -> dict[str, float]:
        """Return the flag of each learning rate -> the share of it with which a step is trained."""
        actor = self.schedule(step, self.critic_warmup)
        return {"lr": actor, "decoupled_lr": actor, "critic_lr": self.schedule(step)}

    def trains_actor(self, step: int) -> bool:
        """Return whether a step updates the policy too."""
        return step >= self.critic_warmup
