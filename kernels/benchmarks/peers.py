"""Public implementations of the same jobs, each added to the cases it can do when it is installed.

None of them computes all of our objective; the remark says what a peer leaves out. A peer that is
not installed, or that refuses a shape, is listed with its reason instead of a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from .cases import (
    OBJECTIVE,
    Case,
    LossInputs,
    Provider,
    linear_gradients,
    surrogate_loss,
)

PACKAGES = ("liger-kernel", "cut-cross-entropy", "verl")
LIGER_LENGTH = 1024
"""Rows per sequence, of which the last is a padding row by its calling convention."""
CROSS_ENTROPY_ONLY = "cross entropy only: no ratio, no entropy, no advantage"


def liger_grpo() -> Provider:
    """Liger's Triton GRPO loss: logits in, in place; one advantage per sequence."""
    function = import_module("liger_kernel.ops.grpo_loss").GrpoLossFunction

    def prepare(inputs: LossInputs) -> tuple[Tensor, tuple[Tensor, ...]]:
        rows, vocab = inputs.logits.shape
        if rows % LIGER_LENGTH:
            raise ValueError(f"{rows} rows are no multiple of the sequence length {LIGER_LENGTH}")

        def completions(x: Tensor) -> Tensor:
            return x.view(-1, LIGER_LENGTH)[:, :-1].contiguous()

        constants = (
            completions(inputs.old_logprobs),
            completions(inputs.labels),
            inputs.advantages.view(-1, LIGER_LENGTH)[:, 0].contiguous(),
            completions(inputs.weights != 0),
        )
        return inputs.fresh_logits(), constants

    def run(state: tuple[Tensor, tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        logits, (old_logprobs, labels, advantages, mask) = state
        loss, *_ = function.apply(
            logits.view(-1, LIGER_LENGTH, logits.shape[1]),
            old_logprobs,
            None,
            labels,
            advantages,
            mask,
            1.0,
            0.0,
            OBJECTIVE.clip_ratio_low,
            OBJECTIVE.clip_ratio_high,
            True,
            "dapo",
        )
        return torch.autograd.grad(loss, logits)

    return Provider(
        "liger grpo",
        run,
        prepare,
        remark="no entropy, one advantage per sequence, 1023 of 1024 rows",
    )


def linear_cross_entropy(
    name: str, function: Callable[[Tensor, Tensor, Tensor], Tensor], remark: str
) -> Provider:
    """A fused LM head with cross entropy; rows of weight 0 are ignored labels."""

    def run(inputs: LossInputs) -> tuple[Tensor, ...]:
        labels = torch.where(inputs.weights != 0, inputs.labels, -100)
        return linear_gradients(lambda h, w: function(h, w, labels), inputs)

    return Provider(name, run, remark=remark)


def liger_linear() -> Provider:
    """Liger's fused linear cross entropy."""
    function = import_module(
        "liger_kernel.ops.fused_linear_cross_entropy"
    ).LigerFusedLinearCrossEntropyFunction
    return linear_cross_entropy(
        "liger flce", lambda h, w, y: function.apply(h, w, y)[0], CROSS_ENTROPY_ONLY
    )


def cut_cross_entropy() -> Provider:
    """Apple's cut cross entropy."""
    function = import_module("cut_cross_entropy").linear_cross_entropy
    return linear_cross_entropy(
        "cut-cross-entropy", function, CROSS_ENTROPY_ONLY + ", drops small gradients"
    )


def torch_linear() -> Provider:
    """torch's own chunked linear cross entropy."""
    function = import_module("torch.nn.functional").linear_cross_entropy
    return linear_cross_entropy("F.linear_cross_entropy", function, CROSS_ENTROPY_ONLY)


def verl_linear() -> Provider:
    """verl's linear cross entropy: log-probabilities and entropies of all rows from hidden states,
    no loss.
    """
    function = import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, inputs: LossInputs) -> Tensor:
        logprobs, entropy = function(hidden, weight, inputs.labels, 1.0, "none")
        return surrogate_loss(logprobs, entropy, *inputs.constants)

    def run(inputs: LossInputs) -> tuple[Tensor, ...]:
        return linear_gradients(lambda h, w: loss(h, w, inputs), inputs)

    return Provider("verl", run, remark="the loss itself in torch")


PEERS: dict[str, tuple[Callable[[], Provider], ...]] = {
    "policy loss forward+backward": (liger_grpo,),
    "linear policy loss": (liger_linear, cut_cross_entropy, torch_linear, verl_linear),
}


def failures() -> tuple[type[Exception], ...]:
    """How a peer says no: it is absent, its interface changed, or it refuses the device, the shape
    or the memory.
    """
    triton = (import_module("triton.errors").TritonError,) if find_spec("triton") else ()
    return (
        ImportError, AttributeError, TypeError, ValueError, AssertionError, RuntimeError, *triton,
    )  # fmt: skip


def add_peers(case: Case) -> tuple[Case, dict[str, str]]:
    """The case with every peer that can run it once, and why the others do not."""
    providers, refused, inputs = list(case.providers), {}, case.make_inputs(0)
    for build in PEERS.get(case.name, ()):
        try:
            provider = build()
            provider.run(provider.prepare(inputs))
        except failures() as error:
            refused[build.__name__] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        else:
            providers.append(provider)
    return replace(case, providers=tuple(providers)), refused
