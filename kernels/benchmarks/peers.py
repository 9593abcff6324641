"""Public implementations of the same jobs, each added to the cases it can do when it is installed.

None of them computes all of our objective; the remark says what a peer leaves out. A peer that is
not installed, or that refuses a shape, is listed with its reason instead of a time.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pkgutil import resolve_name

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


def liger_grpo() -> Provider:
    """Return Liger's Triton GRPO loss: logits in, in place; one advantage per sequence."""
    function = resolve_name("liger_kernel.ops.grpo_loss:GrpoLossFunction.apply")

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
        loss, *_ = function(
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


def linear_cross_entropy(name: str, place: str, remark: str) -> Provider:
    """Return the fused LM head with cross entropy at `place`; it ignores labels of weight 0."""
    function = resolve_name(place)

    def run(inputs: LossInputs) -> tuple[Tensor, ...]:
        labels = torch.where(inputs.weights != 0, inputs.labels, -100)

        def loss(hidden: Tensor, weight: Tensor) -> Tensor:
            found = function(hidden, weight, labels)
            return found[0] if isinstance(found, tuple) else found

        return linear_gradients(loss, inputs)

    return Provider(name, run, remark=f"cross entropy only: no ratio, no entropy, {remark}")


def verl_linear() -> Provider:
    """verl's linear cross entropy: log-probabilities and entropies of all rows from hidden states,
    no loss.
    """
    function = resolve_name("verl.utils.kernel.linear_cross_entropy:linear_cross_entropy")

    def loss(hidden: Tensor, weight: Tensor, inputs: LossInputs) -> Tensor:
        logprobs, entropy = function(hidden, weight, inputs.labels, 1.0, "none")
        return surrogate_loss(logprobs, entropy, *inputs.constants)

    def run(inputs: LossInputs) -> tuple[Tensor, ...]:
        return linear_gradients(lambda h, w: loss(h, w, inputs), inputs)

    return Provider("verl", run, remark="the loss itself in torch")


PEERS: dict[str, dict[str, Callable[[], Provider]]] = {
    "policy loss forward+backward": {"liger_grpo": liger_grpo},
    "linear policy loss": {
        "liger_linear": partial(
            linear_cross_entropy,
            "liger flce",
            "liger_kernel.ops.fused_linear_cross_entropy"
            ":LigerFusedLinearCrossEntropyFunction.apply",
            "no advantage",
        ),
        "cut_cross_entropy": partial(
            linear_cross_entropy,
            "cut-cross-entropy",
            "cut_cross_entropy:linear_cross_entropy",
            "no advantage, drops small gradients",
        ),
        "torch_linear": partial(
            linear_cross_entropy,
            "F.linear_cross_entropy",
            "torch.nn.functional:linear_cross_entropy",
            "no advantage",
        ),
        "verl_linear": verl_linear,
    },
}
"""Job -> peer -> what builds it, if it is installed."""


def failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of a peer that cannot run: it is absent, its interface changed, or the
    device, the shape or the memory does not suit it.
    """
    triton = (resolve_name("triton.errors:TritonError"),) if find_spec("triton") else ()
    return (
        ImportError, AttributeError, TypeError, ValueError, AssertionError, RuntimeError, *triton,
    )  # fmt: skip


def add_peers(case: Case) -> tuple[Case, dict[str, str]]:
    """Return the case with every peer that can run it once, and why the others do not."""
    providers, refused, inputs = list(case.providers), {}, case.make_inputs(0)
    for name, build in PEERS.get(case.name, {}).items():
        try:
            provider = build()
            provider.run(provider.prepare(inputs))
        except failures() as error:
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        else:
            providers.append(provider)
    return replace(case, providers=tuple(providers)), refused
