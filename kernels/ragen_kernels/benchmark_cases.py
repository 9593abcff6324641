"""The jobs and shapes of the kernel benchmark, with our implementation and the one that a torch
user would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ragen_kernels as ours
from ragen_kernels.benchmark import Case, Provider, relative_error
from ragen_kernels.objective import PolicyObjective

OBJECTIVE = PolicyObjective(entropy_coef=0.001)
SAMPLED_ROWS = 256

LOGITS_SHAPES = {
    "cuda": (
        (8192, 151936),
        (8192, 32768),
        (2048, 151936),
        (16384, 75968),
        (32768, 18992),
        (4096, 128256),
        (8192, 151937),
    ),
    "cpu": ((512, 600),),
}
HIDDEN_SHAPES = {
    "cuda": tuple((8192, 151936, width) for width in (896, 1536, 3584, 5120, 8192)),
    "cpu": ((4096, 600, 128),),
}


@dataclass
class LossInputs:
    """One input set: rows of logits, or hidden states and weight; and the per-token constants."""

    labels: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    logits: Tensor | None = None
    scratch: Tensor | None = None
    hidden: Tensor | None = None
    weight: Tensor | None = None

    @property
    def constants(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.old_logprobs, self.advantages, self.weights

    def fresh_logits(self) -> Tensor:
        """A leaf that an in-place implementation may destroy."""
        self.scratch.copy_(self.logits)
        return self.scratch.detach().requires_grad_()


def loss_inputs(num_rows: int, vocab: int, active: float, device: str, seed: int) -> LossInputs:
    """Labels and per-token constants of `num_rows` tokens, a share `active` of them with a weight."""
    random = torch.Generator(device).manual_seed(seed)
    labels = torch.randint(0, vocab, (num_rows,), generator=random, device=device)
    old_logprobs = -torch.log(torch.tensor(float(vocab), device=device)) + 0.3 * torch.randn(
        num_rows, generator=random, device=device
    )
    advantages = torch.randn(num_rows, generator=random, device=device)
    is_active = torch.rand(num_rows, generator=random, device=device) < active
    return LossInputs(labels, old_logprobs, advantages, is_active / is_active.sum().clamp(min=1))


def torch_logprob_entropy(
    logits: Tensor, labels: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """What a torch user writes; in float64, the truth."""
    all_logprobs = torch.log_softmax(logits.to(dtype), dim=1)
    logprobs = all_logprobs.gather(1, labels[:, None]).squeeze(1)
    return logprobs, -(all_logprobs.exp() * all_logprobs).sum(dim=1)


def torch_policy_loss(
    logits: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The clipped surrogate with entropy bonus, as a torch user writes it; in float64, the truth."""
    logprobs, entropy = torch_logprob_entropy(logits, labels, dtype)
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - OBJECTIVE.clip_ratio_low, 1 + OBJECTIVE.clip_ratio_high)
    surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)
    return torch.sum(weights * (surrogate - OBJECTIVE.entropy_coef * entropy))


def sampled_rows(inputs: LossInputs) -> Tensor:
    """Evenly spaced active rows on which errors are measured."""
    rows = inputs.weights.nonzero().squeeze(1)
    return rows[:: max(1, len(rows) // SAMPLED_ROWS)][:SAMPLED_ROWS]


def true_d_logits(inputs: LossInputs, rows: Tensor, logits: Tensor) -> Tensor:
    """Gradient of the loss in the given rows, by float64 autograd."""
    logits = logits.double().requires_grad_()
    constants = (x[rows].double() for x in inputs.constants)
    loss = torch_policy_loss(logits, inputs.labels[rows], *constants, dtype=torch.float64)
    return torch.autograd.grad(loss, logits)[0]


def forward_error(inputs: LossInputs, output: tuple[Tensor, Tensor]) -> float:
    """Larger error of log-probabilities and entropies on the sampled rows."""
    rows = sampled_rows(inputs)
    truth = torch_logprob_entropy(inputs.logits[rows], inputs.labels[rows], torch.float64)
    return max(
        relative_error(actual[rows], exact) for actual, exact in zip(output, truth, strict=True)
    )


def logits_gradient_error(inputs: LossInputs, output: tuple[Tensor, ...]) -> float:
    """Error of d_logits on the sampled rows."""
    rows = sampled_rows(inputs)
    return relative_error(output[0][rows], true_d_logits(inputs, rows, inputs.logits[rows]))


def hidden_gradient_error(inputs: LossInputs, output: tuple[Tensor, ...]) -> float:
    """Error of d_hidden on the sampled rows."""
    rows = sampled_rows(inputs)
    weight = inputs.weight.double()
    truth = true_d_logits(inputs, rows, inputs.hidden[rows].double() @ weight.T) @ weight
    return relative_error(output[0][rows], truth)


def gradients(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a scalar in leaves, without touching their `.grad`."""
    return torch.autograd.grad(loss, leaves)


def logits_inputs(
    num_rows: int, vocab: int, active: float, device: str
) -> Callable[[int], LossInputs]:
    """Maker of input sets that share one buffer for what an in-place operation destroys."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    scratch = torch.empty(num_rows, vocab, dtype=dtype, device=device)

    def make(seed: int) -> LossInputs:
        inputs = loss_inputs(num_rows, vocab, active, device, seed)
        inputs.logits = torch.randn(num_rows, vocab, device=device, dtype=dtype)
        inputs.scratch = scratch
        return inputs

    return make


def logits_cases(device: str, compiled: Callable[[Any], Any] | None) -> Iterator[Case]:
    """Logits in: statistics forward, in-place backward, and the whole policy loss."""
    itemsize = 2 if device == "cuda" else 4
    for num_rows, vocab in LOGITS_SHAPES[device]:
        shape, make = {"N": num_rows, "V": vocab}, logits_inputs(num_rows, vocab, 1.0, device)
        one_pass = float(itemsize * num_rows * vocab)

        def forward(function: Callable[..., Any]) -> Callable[[LossInputs], Any]:
            return torch.no_grad()(lambda inputs: function(inputs.logits, inputs.labels))

        providers = [
            Provider("ragen", forward(ours.logprob_entropy), error=forward_error),
            Provider("torch", forward(torch_logprob_entropy), error=forward_error),
        ]
        if compiled is not None:
            providers.append(
                Provider(
                    "torch.compile", forward(compiled(torch_logprob_entropy)), error=forward_error
                )
            )
        yield Case("logprob+entropy forward", shape, make, tuple(providers), min_bytes=one_pass)
        yield Case(
            "logprob+entropy backward", shape, make, backward_providers(), min_bytes=2 * one_pass
        )
        for active in (1.0, 0.3):
            make = logits_inputs(num_rows, vocab, active, device)
            yield Case(
                "policy loss forward+backward",
                shape | {"active": active},
                make,
                policy_providers(compiled),
                min_bytes=(1 + active) * one_pass,
            )


def backward_providers() -> tuple[Provider, ...]:
    """Backward alone: the graph is built outside the timed region."""

    def graph(
        function: Callable[..., Any], **options: bool
    ) -> Callable[[LossInputs], tuple[Tensor, Tensor]]:
        def prepare(inputs: LossInputs) -> tuple[Tensor, Tensor]:
            logits = inputs.fresh_logits()
            logprobs, entropy = function(logits, inputs.labels, **options)
            return torch.dot(logprobs, inputs.advantages) - 0.001 * entropy.sum(), logits

        return prepare

    def run(state: tuple[Tensor, Tensor]) -> Any:
        return gradients(*state)

    return (
        Provider("ragen", run, graph(ours.logprob_entropy, inplace_backward=True)),
        Provider("torch", run, graph(torch_logprob_entropy)),
    )


def policy_providers(compiled: Callable[[Any], Any] | None) -> tuple[Provider, ...]:
    """Policy loss and its gradient, logits in."""

    def prepare(inputs: LossInputs) -> tuple[Tensor, LossInputs]:
        return inputs.fresh_logits(), inputs

    def fused(state: tuple[Tensor, LossInputs]) -> tuple[Tensor, ...]:
        logits, inputs = state
        return gradients(
            ours.policy_loss(logits, inputs.labels, *inputs.constants, OBJECTIVE)[0], logits
        )

    def unfused(
        function: Callable[..., Tensor],
    ) -> Callable[[tuple[Tensor, LossInputs]], tuple[Tensor, ...]]:
        return lambda state: gradients(
            function(state[0], state[1].labels, *state[1].constants), state[0]
        )

    providers = [
        Provider("ragen", fused, prepare, logits_gradient_error),
        Provider("torch", unfused(torch_policy_loss), prepare, logits_gradient_error),
    ]
    if compiled is not None:
        providers.append(
            Provider(
                "torch.compile",
                unfused(compiled(torch_policy_loss)),
                prepare,
                logits_gradient_error,
            )
        )
    return tuple(providers)


def hidden_inputs(
    num_rows: int, vocab: int, width: int, active: float, device: str
) -> Callable[[int], LossInputs]:
    """Maker of input sets of hidden states and an LM head."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def make(seed: int) -> LossInputs:
        inputs = loss_inputs(num_rows, vocab, active, device, seed)
        inputs.hidden = torch.randn(num_rows, width, device=device).to(dtype)
        inputs.weight = (torch.randn(vocab, width, device=device) / width**0.5).to(dtype)
        return inputs

    return make


def hidden_cases(device: str, compiled: Callable[[Any], Any] | None) -> Iterator[Case]:
    """Hidden states in: loss and both gradients of the LM head."""
    for num_rows, vocab, width in HIDDEN_SHAPES[device]:
        for active in (1.0, 0.3):
            shape = {"N": num_rows, "V": vocab, "H": width, "active": active}
            num_active = int(active * num_rows)
            yield Case(
                "linear policy loss",
                shape,
                hidden_inputs(num_rows, vocab, width, active, device),
                hidden_providers(compiled),
                flops=6.0 * num_active * vocab * width,
                gemms=(num_active, vocab, width),
            )


def hidden_providers(compiled: Callable[[Any], Any] | None) -> tuple[Provider, ...]:
    """Policy loss and its gradients, hidden states in."""

    def leaves(inputs: LossInputs) -> tuple[Tensor, Tensor]:
        return inputs.hidden.detach().requires_grad_(), inputs.weight.detach().requires_grad_()

    def fused(**options: Any) -> Callable[[LossInputs], tuple[Tensor, ...]]:
        def run(inputs: LossInputs) -> tuple[Tensor, ...]:
            hidden, weight = leaves(inputs)
            loss, _ = ours.linear_policy_loss(
                hidden, weight, inputs.labels, *inputs.constants, OBJECTIVE, **options
            )
            return gradients(loss, hidden, weight)

        return run

    def unfused(function: Callable[..., Tensor]) -> Callable[[LossInputs], tuple[Tensor, ...]]:
        def run(inputs: LossInputs) -> tuple[Tensor, ...]:
            hidden, weight = leaves(inputs)
            return gradients(
                function(hidden @ weight.T, inputs.labels, *inputs.constants), hidden, weight
            )

        return run

    named = {f"ragen {mode}": fused(mode=mode) for mode in ("save", "chunk", "recompute")}
    named |= {
        "ragen chunk, fp32 logits": fused(fp32_logits=True),
        "torch": unfused(torch_policy_loss),
    }
    if compiled is not None:
        named["torch.compile"] = unfused(compiled(torch_policy_loss))
    return tuple(Provider(name, run, error=hidden_gradient_error) for name, run in named.items())
