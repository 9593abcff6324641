"""Random inputs for the loss kernels, and their truth: float64 autograd of the textbook formulas,
nothing fused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from ragen_kernels import PolicyObjective
from ragen_kernels.objective import Likeliest, TokenTerms
from torch import Tensor

OBJECTIVES = {
    "clip": PolicyObjective(),
    "entropy": PolicyObjective(entropy_coef=0.05),
    "dual_clip": PolicyObjective(dual_clip=1.4),
    "k1": PolicyObjective(kl_kind="k1", kl_coef=0.3),
    "k2": PolicyObjective(kl_kind="k2", kl_coef=0.3),
    "k3": PolicyObjective(kl_kind="k3", kl_coef=0.3, entropy_coef=0.02),
    "importance": PolicyObjective(importance_cap=1.1),
    "everything": PolicyObjective(0.1, 0.3, 1.5, "k3", 0.2, 0.03, 1.05),
    "cispo": PolicyObjective(1.0, 0.3, surrogate="cispo", kl_kind="k2", kl_coef=0.1),
    "icepop": PolicyObjective(
        importance_mode="mask", importance_floor=0.7, importance_cap=1.3, entropy_coef=0.02
    ),
    "cispo masked": PolicyObjective(
        0.1, 0.2, surrogate="cispo", importance_mode="mask", importance_cap=1.1
    ),
    "forking tokens": PolicyObjective(dual_clip=1.4, min_entropy=4.9),
    "forking tokens of few words": PolicyObjective(
        0.1, 0.2, None, "k3", 0.1, 0.02, importance_cap=1.1, min_entropy=3.4
    ),
    "gspo": PolicyObjective(0.05, 0.1, surrogate="gspo", entropy_coef=0.02),
    "gspo and importance": PolicyObjective(0.05, 0.1, surrogate="gspo", importance_cap=1.1),
    "sequence importance": PolicyObjective(importance_cap=1.4, importance_level="sequence"),
    "sequence mask": PolicyObjective(
        0.1,
        0.1,
        surrogate="gspo",
        importance_cap=1.6,
        importance_mode="mask",
        importance_floor=0.4,
        importance_level="sequence",
        kl_kind="k3",
        kl_coef=0.1,
    ),  # fmt: skip
    "teacher": PolicyObjective(teacher_coef=0.7),
    "teacher and everything": PolicyObjective(
        0.1, 0.3, 1.5, "k3", 0.2, 0.03, 1.05, min_entropy=4.9, teacher_coef=0.4
    ),
    "teacher and gspo": PolicyObjective(0.05, 0.1, surrogate="gspo", teacher_coef=0.3),
}

TOKEN_OBJECTIVES = [
    name for name, one in OBJECTIVES.items() if not (one.is_over_sequences or one.teacher_coef)
]
"""Those that the row operations know."""


@dataclass(frozen=True)
class Case:
    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    labels: Tensor  # [T]
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    temperature: float
    vocab_valid: int | None
    cu_seqlens: Tensor  # [S + 1]
    teacher_ids: Tensor  # [T, K]
    teacher_logprobs: Tensor  # [T, K]

    @property
    def logits(self) -> Tensor:
        return self.hidden @ self.weight.T

    @property
    def token_terms(self) -> TokenTerms:
        return TokenTerms(*self.constants, self.ref_logprobs, self.rollout_logprobs)

    @property
    def terms(self) -> dict[str, Any]:
        names = ("ref_logprobs", "rollout_logprobs", "cu_seqlens")
        teacher = Likeliest(self.teacher_ids, self.teacher_logprobs)
        return {name: getattr(self, name) for name in names} | {"teacher": teacher}

    @property
    def constants(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.old_logprobs, self.advantages, self.weights

    def to(self, device: str, dtype: torch.dtype) -> Case:
        """Operands in `dtype`; the per-token constants stay at least float32."""
        constant = torch.float64 if dtype == torch.float64 else torch.float32
        changes = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value.to(device, dtype if field.name in ("hidden", "weight") else constant)
            changes[field.name] = value.to(device) if isinstance(value, Tensor) else value
        return replace(self, **changes)


def make_case(
    num_tokens: int = 23,
    vocab: int = 53,
    width: int = 8,
    *,
    seed: int = 0,
    temperature: float = 0.8,
    vocab_valid: int | None = None,
    active: float = 0.6,
    scale: float = 1.0,
    shift: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """A case whose log-ratios straddle the clip bounds; operands are exactly representable in
    `dtype`.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    hidden, weight = normal(num_tokens, width), scale * normal(vocab, width) / width**0.5
    if shift:
        hidden[:, 0], weight[:, 0] = 1.0, shift
    hidden, weight = hidden.to(dtype).double(), weight.to(dtype).double()
    labels = torch.randint(0, vocab_valid or vocab, (num_tokens,), generator=random)
    logprobs, _ = logprob_entropy_truth(hidden @ weight.T, labels, temperature, vocab_valid)
    weights = torch.rand(num_tokens, generator=random, dtype=torch.float64) / max(1, num_tokens)
    is_active = torch.rand(num_tokens, generator=random) < active
    constants = (logprobs + 0.3 * normal(num_tokens), normal(num_tokens), weights * is_active)
    old, advantages, weights, ref, rollout = (
        x.float().double()
        for x in (
            *constants,
            logprobs + 0.5 * normal(num_tokens),
            logprobs + 0.4 * normal(num_tokens),
        )
    )
    likings = logprobs_of(2 * normal(num_tokens, vocab_valid or vocab), 1.0, None)
    teacher_logprobs, teacher_ids = likings.float().double().topk(min(5, likings.shape[1]))
    # sequences of one, of several and of no tokens
    offsets = [min(num_tokens, end) for end in (0, 1, 6, 6, 15, num_tokens)]
    return Case(
        hidden, weight, labels, old, advantages, weights, ref, rollout, temperature, vocab_valid,
        torch.tensor(sorted(offsets), dtype=torch.int32), teacher_ids, teacher_logprobs,
    )  # fmt: skip


def logprobs_of(logits: Tensor, temperature: float, vocab_valid: int | None) -> Tensor:
    """[T, V] log-probabilities of all tokens."""
    return torch.log_softmax(logits[:, :vocab_valid] / temperature, dim=1)


def logprob_entropy_truth(
    logits: Tensor, labels: Tensor, temperature: float, vocab_valid: int | None
) -> tuple[Tensor, Tensor]:
    all_logprobs = logprobs_of(logits, temperature, vocab_valid)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=1)
    return all_logprobs[torch.arange(len(labels)), labels], entropy


def policy_loss_truth(
    logits: Tensor, case: Case, objective: PolicyObjective
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss as papers write it: torch.maximum, torch.minimum and a mask; and the statistics."""
    logprobs, entropy = logprob_entropy_truth(
        logits, case.labels, case.temperature, case.vocab_valid
    )
    active = case.weights != 0
    advantages = case.advantages
    log_ratio = (logprobs - case.old_logprobs).clamp(-20, 20)
    if objective.surrogate == "gspo":  # sg(s) * pi / sg(pi), arXiv:2507.18071 eq. (14)
        mean = over_each_sequence(case, torch.mean)(log_ratio.detach())
        log_ratio = mean + logprobs - logprobs.detach()
    ratio = log_ratio.exp()
    low, high = 1 - objective.clip_ratio_low, 1 + objective.clip_ratio_high
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    is_cispo = torch.tensor(objective.surrogate == "cispo")
    if is_cispo:  # arXiv:2506.13585 eq. (4)
        loss = -advantages * ratio.clamp(low, high).detach() * logprobs
    dual = torch.zeros_like(active)
    if objective.dual_clip is not None:
        bound = -advantages * objective.dual_clip
        dual = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    loss = loss * (entropy.detach() >= objective.min_entropy)  # arXiv:2506.01939 eq. (5)
    importance = torch.ones_like(loss)
    if objective.importance_cap is not None:
        drift = case.old_logprobs - case.rollout_logprobs
        if objective.importance_level == "sequence":
            drift = over_each_sequence(case, torch.sum)(drift)
        importance = drift.exp()
        if objective.importance_mode == "mask":
            bounds = (objective.importance_floor or 0.0, objective.importance_cap)
            importance[(importance < bounds[0]) | (importance > bounds[1])] = 0.0
        importance = importance.clamp(max=objective.importance_cap)
    loss = loss * importance - objective.entropy_coef * entropy
    ref_kl = None
    if objective.kl_kind is not None:
        d = logprobs - case.ref_logprobs
        ref_kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[objective.kl_kind]
        loss = loss + objective.kl_coef * ref_kl
    teacher_kl = None
    if objective.teacher_coef:
        wanted = torch.zeros_like(logits)  # the terms of KL(teacher || policy) that are kept
        wanted.scatter_(1, case.teacher_ids, case.teacher_logprobs.exp())
        found = logprobs_of(logits, case.temperature, case.vocab_valid)
        found = torch.nn.functional.pad(found, (0, wanted.shape[1] - found.shape[1]))
        terms = torch.xlogy(wanted, wanted) - wanted * found - wanted + found.exp()
        teacher_kl = torch.where(wanted > 0, terms, 0).sum(1)
        loss = loss + objective.teacher_coef * teacher_kl
    stats = {
        "teacher_kl": teacher_kl,
        "logprobs": logprobs,
        "entropy": entropy,
        "ratio": ratio,
        "is_clipped_low": (((advantages < 0) | is_cispo) & (ratio < low)).double(),
        "is_clipped_high": (((advantages > 0) | is_cispo) & (ratio > high)).double(),
        "is_dual_clipped": dual.double(),
        "kl": ratio - 1 - log_ratio,
        "importance": importance,
        "ref_kl": ref_kl,
    }
    stats = {
        name: None if x is None else torch.where(active, x.detach(), 0) for name, x in stats.items()
    }
    return (case.weights * loss)[active].sum(), stats


def over_each_sequence(
    case: Case, reduce: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """What gives every active token of a sequence the `reduce`d values of them all, by a loop."""

    def spread(values: Tensor) -> Tensor:
        result = torch.zeros_like(values)
        for start, end in pairwise(case.cu_seqlens.tolist()):
            rows = [row for row in range(start, end) if case.weights[row] != 0]
            if rows:
                result[rows] = reduce(values[rows])
        return result

    return spread


@dataclass(frozen=True)
class Truth:
    loss: Tensor
    stats: dict[str, Tensor]
    logprobs: Tensor
    entropy: Tensor
    d_logits: Tensor
    d_hidden: Tensor
    d_weight: Tensor


def unfused_truth(case: Case, objective: PolicyObjective) -> Truth:
    """Loss, statistics and all gradients of a float64 case."""
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    logits = hidden @ weight.T
    logits.retain_grad()
    loss, stats = policy_loss_truth(logits, case, objective)
    loss.backward()
    logprobs, entropy = logprob_entropy_truth(
        logits, case.labels, case.temperature, case.vocab_valid
    )
    return Truth(
        loss.detach(),
        stats,
        logprobs.detach(),
        entropy.detach(),
        logits.grad,
        hidden.grad,
        weight.grad,
    )


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the error, divided by the norm of the truth (absolute where the truth is
    zero); NaN counts as infinite.
    """
    error = (actual.detach().cpu().double() - truth.detach().double()).norm()
    error = error / truth.norm() if truth.norm() > 0 else error
    return float(torch.nan_to_num(error, nan=float("inf")))


def assert_stats(stats: object, truth: dict[str, Tensor], tolerance: float) -> None:
    for name, expected in truth.items():
        actual = getattr(stats, name)
        if expected is None:
            assert actual is None, name
            continue
        error = (
            (actual.cpu().double() - expected).abs().max()
            if expected.numel()
            else torch.tensor(0.0)
        )
        assert error <= tolerance * max(
            1.0, float(expected.abs().max()) if expected.numel() else 1.0
        ), (name, error)
