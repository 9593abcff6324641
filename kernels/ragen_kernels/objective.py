"""The StarPO token objective and its statistics, shared by every implementation.

Clipped surrogate: PPO, arXiv:1707.06347 eq. (7), with the decoupled bounds of DAPO,
arXiv:2503.14476 eq. (8); dual clip: arXiv:1912.09729 eq. (5); CISPO: arXiv:2506.13585 eq. (4), (5);
GSPO: arXiv:2507.18071 eq. (5) to (7), as GSPO-token, eq. (13), (14); decoupled PPO:
arXiv:2110.00641 eq. (3); masked importance sampling: IcePop, arXiv:2510.18855 sec. 3; forking
tokens: arXiv:2506.01939 eq. (5); KL estimators k1, k2, k3: http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]
KL_KINDS: tuple[str, ...] = get_args(KLKind)
Surrogate = Literal["clip", "cispo", "gspo"]
ImportanceMode = Literal["truncate", "mask"]
IMPORTANCE_MODES: tuple[str, ...] = get_args(ImportanceMode)
Level = Literal["token", "sequence"]
NUM_OUTPUTS = 10
"""Number of outputs of the objective per token: the weighted loss, then the fields of `PolicyStats`
in their order.
"""

MAX_LOG_RATIO = 20.0
"""Every difference of log-probabilities is clamped to +-20 before `exp`; outside, its gradient is
zero.
"""


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Contribution of one sampled token to the loss, before its weight.

    token_loss = importance * surrogate + kl_coef * KL(ref) - entropy_coef * H + teacher_coef * D

    clip:   surrogate = max(-A r, -A clip(r, 1 - low, 1 + high)),  r = exp(logprob - old_logprob)
    cispo:  surrogate = -A stop_gradient(clip(r, 1 - low, 1 + high)) logprob
    gspo:   as clip, with one r for all tokens of a sequence: exp of their mean log-ratio, whose
            gradient goes to each token's own logprob

    At a tie the unclipped branch is taken. Over sequences whose tokens share an advantage and have
    weights 1 / (number of tokens), loss and gradient of gspo equal the loss and gradient of the
    sequence's ratio.

    Attributes:
        clip_ratio_low: r is clipped from below at 1 - clip_ratio_low.
        clip_ratio_high: r is clipped from above at 1 + clip_ratio_high.
        dual_clip: for A < 0 the surrogate is bounded by -A * dual_clip; None leaves it unbounded.
        kl_kind: estimator of the KL divergence to the reference policy; None means no KL term. Over
            samples of the policy the gradient of k1 has the mean 0.
        kl_coef: factor of that KL term. With 0 the divergence is only reported.
        entropy_coef: factor of the entropy bonus.
        importance_cap: bound of the importance w = exp(old_logprob - rollout_logprob), the factor
            of the surrogate that corrects for samples of another policy: an engine whose arithmetic
            differs, or older weights. None means no correction.
        surrogate: `clip` (PPO), `cispo` or `gspo`.
        importance_mode: beyond the cap w is the cap (`truncate`), or 0 (`mask`).
        importance_floor: below it w is 0 (`mask` only).
        importance_level: w of each token, or the product of all w in its sequence.
        min_entropy: tokens whose distribution has less entropy than this, in nats, have no
            surrogate, only their KL and entropy terms. 0 leaves none out.
        teacher_coef: factor of the divergence from the likeliest tokens of a teacher
            (`reference.divergence`).
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    dual_clip: float | None = None
    kl_kind: KLKind | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance_cap: float | None = None
    surrogate: Surrogate = "clip"
    importance_mode: ImportanceMode = "truncate"
    importance_floor: float | None = None
    importance_level: Level = "token"
    min_entropy: float = 0.0
    teacher_coef: float = 0.0

    def __post_init__(self) -> None:
        cap, floor = self.importance_cap, self.importance_floor
        choices = {
            "surrogate": get_args(Surrogate),
            "importance_mode": IMPORTANCE_MODES,
            "importance_level": get_args(Level),
        }
        _raise_unless(
            *(
                (
                    getattr(self, name) in known,
                    f"{name} must be one of {known}, got {getattr(self, name)!r}",
                )
                for name, known in choices.items()
            ),
            (
                0.0 <= self.clip_ratio_low < 1.0
                or (self.clip_ratio_low == 1.0 and self.surrogate == "cispo"),
                f"clip_ratio_low must be in [0, 1), got {self.clip_ratio_low}: the lower bound of"
                " the ratio is 1 - clip_ratio_low and a ratio is positive; use 0.2",
            ),
            (
                self.dual_clip is None or self.surrogate == "clip",
                f"dual_clip={self.dual_clip} bounds the clipped surrogate, got"
                f" surrogate={self.surrogate!r}; pass dual_clip=None",
            ),
            (
                cap is not None or (self.importance_mode, floor) == ("truncate", None),
                f"importance_mode={self.importance_mode!r} and importance_floor={floor} bound an"
                " importance that is not computed; pass importance_cap",
            ),
            (
                cap is not None or self.importance_level == "token",
                "importance_level='sequence' does nothing without importance_cap; pass it",
            ),
            (
                floor is None
                or (self.importance_mode == "mask" and cap is not None and 0.0 < floor < cap),
                f"importance_floor must be above 0 and below importance_cap={cap}, and needs"
                f" importance_mode='mask', got {floor} with {self.importance_mode!r}; use 0.5",
            ),
            (
                0.0 <= self.clip_ratio_high < math.inf,
                f"clip_ratio_high must be finite and >= 0, got {self.clip_ratio_high}; use 0.28",
            ),
            (
                self.dual_clip is None or self.dual_clip > 1.0,
                f"dual_clip must be > 1, got {self.dual_clip}; use 3.0, or None to disable it",
            ),
            (
                self.kl_kind in (None, *KL_KINDS),
                f"kl_kind must be one of {KL_KINDS} or None, got {self.kl_kind!r}",
            ),
            (
                0.0 <= self.kl_coef < math.inf,
                f"kl_coef must be finite and >= 0, got {self.kl_coef}; use 0.001",
            ),
            (
                self.kl_kind is not None or self.kl_coef == 0.0,
                f"kl_coef={self.kl_coef} needs a kl_kind, got None; choose one of {KL_KINDS}",
            ),
            (
                math.isfinite(self.entropy_coef),
                f"entropy_coef must be finite, got {self.entropy_coef}; use 0.001",
            ),
            (
                0.0 <= self.min_entropy < math.inf,
                f"min_entropy must be finite and >= 0, got {self.min_entropy}; use 0.3, or 0 to"
                " train on all tokens",
            ),
            (
                0.0 <= self.teacher_coef < math.inf,
                f"teacher_coef must be finite and >= 0, got {self.teacher_coef}; use 0.1",
            ),
            (
                self.importance_cap is None or self.importance_cap > 0.0,
                f"importance_cap must be > 0, got {self.importance_cap}; use 2.0, or None to"
                " disable it",
            ),
        )

    @property
    def is_over_sequences(self) -> bool:
        """Whether a term of a token's loss depends on the other tokens of its sequence."""
        return self.surrogate == "gspo" or self.importance_level == "sequence"

    def arguments(self) -> dict[str, float | bool | int]:
        """Return the kernel arguments in order: coefficients (run time), then one switch per term
        (compile time).
        """
        return {
            "lower": 1.0 - self.clip_ratio_low,
            "upper": 1.0 + self.clip_ratio_high,
            "dual_clip": float(self.dual_clip or 0.0),
            "importance_cap": float(self.importance_cap or 0.0),
            "importance_floor": float(self.importance_floor or 0.0),
            "kl_coef": float(self.kl_coef),
            "entropy_coef": float(self.entropy_coef),
            "min_entropy": float(self.min_entropy),
            "CISPO": self.surrogate == "cispo",
            "DUAL_CLIP": self.dual_clip is not None,
            "KL": 0 if self.kl_kind is None else 1 + KL_KINDS.index(self.kl_kind),
            "IMPORTANCE": 0
            if self.importance_cap is None
            else 1 + IMPORTANCE_MODES.index(self.importance_mode),
            "MIN_ENTROPY": self.min_entropy > 0.0,
        }

    def check_inputs(
        self,
        ref_logprobs: Tensor | None,
        rollout_logprobs: Tensor | None,
        cu_seqlens: Tensor | None,
        teacher: Likeliest | None,
    ) -> None:
        """Raise ValueError when a term of the objective lacks its inputs."""
        _raise_unless(
            (
                self.teacher_coef == 0.0 or teacher is not None,
                f"teacher_coef={self.teacher_coef} needs the teacher's likeliest tokens, got None;"
                " pass them or set teacher_coef=0",
            ),
            (
                not self.is_over_sequences or cu_seqlens is not None,
                f"surrogate={self.surrogate!r} with importance_level={self.importance_level!r}"
                " needs cu_seqlens, got None; pass the offsets of the sequences",
            ),
            (
                self.kl_kind is None or ref_logprobs is not None,
                f"kl_kind={self.kl_kind!r} needs ref_logprobs, got None; pass them or set"
                " kl_kind=None",
            ),
            (
                self.importance_cap is None or rollout_logprobs is not None,
                f"importance_cap={self.importance_cap} needs rollout_logprobs, got None; pass them"
                " or set importance_cap=None",
            ),
        )


def _raise_unless(*rules: tuple[bool, str]) -> None:
    for holds, message in rules:
        if not holds:
            raise ValueError(message)


class TokenTerms(NamedTuple):
    """The constants of the objective, one number per token: [T] each.

    Attributes:
        old_logprobs: None takes the log-probabilities of the evaluation itself.
        weights: mask, aggregation and global normaliser in one factor.
        ref_logprobs: needed with `kl_kind`.
        rollout_logprobs: needed with `importance_cap`.
    """

    old_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None

    def each(self, function: Callable[[Tensor], Tensor]) -> TokenTerms:
        """Return `function` of every term that is there."""
        return TokenTerms._make(None if term is None else function(term) for term in self)

    def at(self, index: Tensor | slice) -> TokenTerms:
        """Return the terms of some tokens."""
        return self.each(lambda term: term[index])


class Likeliest(NamedTuple):
    """The K tokens that a model gives the most, of each of T distributions.

    Attributes:
        ids: [T, K] int64 global ids, distinct in a row.
        logprobs: [T, K].
    """

    ids: Tensor
    logprobs: Tensor

    def at(self, index: Tensor | slice) -> Likeliest:
        """Return what belongs to some of the distributions."""
        return Likeliest(self.ids[index], self.logprobs[index])


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Per-token facts of one loss evaluation: all [T] float32, detached, 0 where the token's weight
    is 0.

    Attributes:
        logprobs: log-probability of the label under the current weights.
        entropy: entropy of the whole next-token distribution, nats.
        ratio: exp(logprobs - old_logprobs), the log-ratio clamped to +-20; for gspo the sequence's
            ratio.
        is_clipped_low: 1 where A < 0 (cispo: any A) and the ratio is below 1 - clip_ratio_low.
        is_clipped_high: 1 where A > 0 (cispo: any A) and the ratio is above 1 + clip_ratio_high.
        is_dual_clipped: 1 where A < 0 and the ratio is above dual_clip.
        kl: k3 estimate of KL(old || new) from that ratio, known as approx_kl.
        importance: factor that multiplied the surrogate (1 without importance_cap, 0 where masked).
        ref_kl: KL estimate to the reference, of the objective's kind; None without kl_kind.
        teacher_kl: divergence from the teacher's likeliest tokens; None without teacher_coef.
    """

    logprobs: Tensor
    entropy: Tensor
    ratio: Tensor
    is_clipped_low: Tensor
    is_clipped_high: Tensor
    is_dual_clipped: Tensor
    kl: Tensor
    importance: Tensor
    ref_kl: Tensor | None = None
    teacher_kl: Tensor | None = None
