"""The actor's gradient without anything fused, for tools/parity.py: transformers, full logits and
the textbook loss.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ragen_mega.config import LossConfig
from ragen_mega.data.types import TokenBatch


def unfused_gradients(
    model: PreTrainedModel, batch: TokenBatch, loss: LossConfig, temperature: float
) -> dict[str, Tensor]:
    """Gradients of the mean token loss by name, float64. `loss` has a dual clip, k3 and an
    importance cap.
    """
    exact = type(model)(model.config).double().eval()
    exact.load_state_dict(model.state_dict())
    offsets = batch.cu_seqlens.tolist()
    total = torch.zeros((), dtype=torch.float64)
    for start, end in zip(offsets[:-1], offsets[1:]):
        logits = exact(batch.tokens[None, start:end]).logits[0] / temperature
        keep = batch.loss_mask[start:end]
        total = (
            total
            + token_losses(
                logits[keep], {k: v[start:end][keep] for k, v in fields(batch).items()}, loss
            ).sum()
        )
    (total / batch.loss_mask.sum()).backward()
    return {name: parameter.grad for name, parameter in exact.named_parameters()}


def fields(batch: TokenBatch) -> dict[str, Tensor]:
    """What the loss of a token depends on beside its logits: labels, and the rest in float64."""
    numbers = ("old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs")
    return {"labels": batch.labels, **{name: getattr(batch, name).double() for name in numbers}}


def token_losses(logits: Tensor, tokens: dict[str, Tensor], loss: LossConfig) -> Tensor:
    """Loss [T] of tokens with logits [T, V], as the papers write it (formulas:
    `ragen_kernels.objective`).
    """
    all_logprobs = logits.log_softmax(-1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    logprobs = all_logprobs.gather(-1, tokens["labels"][:, None])[:, 0]
    advantages = tokens["advantages"]
    ratio = (logprobs - tokens["old_logprobs"]).exp()
    clipped = ratio.clamp(1 - loss.clip_ratio_low, 1 + loss.clip_ratio_high)
    surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)
    bounded = torch.minimum(surrogate, -advantages * loss.dual_clip)
    surrogate = torch.where(advantages < 0, bounded, surrogate)
    importance = (
        (tokens["old_logprobs"] - tokens["rollout_logprobs"]).exp().clamp(max=loss.importance_cap)
    )
    drift = tokens["ref_logprobs"] - logprobs
    return (
        importance * surrogate
        + loss.kl_coef * (drift.exp() - 1 - drift)
        - loss.entropy_coef * entropy
    )


def clipped(gradients: dict[str, Tensor], max_norm: float) -> tuple[dict[str, Tensor], float]:
    """The gradients scaled to at most `max_norm`, and the norm that they had."""
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    return {
        name: gradient * min(1.0, max_norm / norm) for name, gradient in gradients.items()
    }, norm
