"""The jobs and shapes of the kernel benchmark: our implementation and, where there is one, what a
torch user would write.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ragen_kernels as ours
import torch
from ragen_kernels.dispatch import policy_rows_
from ragen_kernels.objective import PolicyObjective, TokenTerms
from ragen_kernels.vocab import vocab_shard
from torch import Tensor

Function = Callable[..., Any]

OBJECTIVE = PolicyObjective(entropy_coef=0.001)
SAMPLED_ROWS = 256

# By `sizes`: those for a GPU, and small ones for a CPU.
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
    "cuda": tuple((8192, 151936, width) for width in (896, 3584, 1536, 5120, 8192)),
    "cpu": ((4096, 600, 128),),
}
RETURNS_SHAPES = {"cuda": ((64, 4096), (256, 8192), (512, 32768)), "cpu": ((16, 256),)}


@dataclass(frozen=True)
class Provider:
    """One implementation. `prepare` turns an input set into the state that the timed `run`
    consumes.
    """

    name: str
    run: Function
    prepare: Function = lambda inputs: inputs
    error: Callable[[Any, Any], float] | None = None
    """(inputs, output of `run`) -> relative error against float64."""
    remark: str = ""


@dataclass(frozen=True)
class Case:
    """One job at one shape, and the least that it has to move and multiply."""

    name: str
    shape: Mapping[str, int | float]
    make_inputs: Callable[[int], Any]  # by seed
    providers: tuple[Provider, ...]
    min_bytes: float = 0.0
    flops: float = 0.0
    gemms: tuple[int, int, int] | None = None
    """(N, V, H), when the job contains the three GEMMs of an LM head."""


_ABSENT = torch.empty(0)  # a field that an input set does not have


@dataclass(frozen=True)
class LossInputs:
    """One input set: rows of logits, or hidden states and weight; and the per-token constants."""

    labels: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    logits: Tensor = _ABSENT
    scratch: Tensor = _ABSENT
    hidden: Tensor = _ABSENT
    weight: Tensor = _ABSENT

    @property
    def constants(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.old_logprobs, self.advantages, self.weights

    def fresh_logits(self) -> Tensor:
        """Return a leaf that an in-place implementation may destroy."""
        self.scratch.copy_(self.logits)
        return self.scratch.detach().requires_grad_()


def loss_inputs(num_rows: int, vocab: int, active: float, device: str, seed: int) -> LossInputs:
    """Return the labels and per-token constants of `num_rows` tokens; a share `active` has a
    weight.
    """
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
    """Compute both as a torch user writes them; in float64, the ground truth."""
    all_logprobs = torch.log_softmax(logits.to(dtype), dim=1)
    logprobs = all_logprobs.gather(1, labels[:, None]).squeeze(1)
    return logprobs, -(all_logprobs.exp() * all_logprobs).sum(dim=1)


def surrogate_loss(
    logprobs: Tensor, entropy: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor
) -> Tensor:
    """Return the clipped surrogate with entropy bonus."""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - OBJECTIVE.clip_ratio_low, 1 + OBJECTIVE.clip_ratio_high)
    surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)
    return torch.sum(weights * (surrogate - OBJECTIVE.entropy_coef * entropy))


def torch_policy_loss(
    logits: Tensor, labels: Tensor, *constants: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the policy loss as a torch user writes it; in float64, the ground truth."""
    return surrogate_loss(*torch_logprob_entropy(logits, labels, dtype), *constants)


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """Return the Frobenius norm of the error, divided by the norm of the truth."""
    return float((actual.double() - truth).norm() / truth.norm())


def sampled_rows(inputs: LossInputs) -> Tensor:
    """Return evenly spaced active rows on which errors are measured."""
    rows = inputs.weights.nonzero().squeeze(1)
    return rows[:: max(1, len(rows) // SAMPLED_ROWS)][:SAMPLED_ROWS]


def true_d_logits(inputs: LossInputs, rows: Tensor, logits: Tensor) -> Tensor:
    """Return the gradient of the loss in the given rows, by float64 autograd."""
    logits = logits.double().requires_grad_()
    constants = (x[rows].double() for x in inputs.constants)
    loss = torch_policy_loss(logits, inputs.labels[rows], *constants, dtype=torch.float64)
    return torch.autograd.grad(loss, logits)[0]


def forward_error(inputs: LossInputs, output: tuple[Tensor, Tensor]) -> float:
    """Return the larger error of log-probabilities and entropies on the sampled rows."""
    rows = sampled_rows(inputs)
    truth = torch_logprob_entropy(inputs.logits[rows], inputs.labels[rows], torch.float64)
    return max(
        relative_error(actual[rows], exact) for actual, exact in zip(output, truth, strict=True)
    )


def logits_gradient_error(inputs: LossInputs, output: tuple[Tensor, ...]) -> float:
    """Return the error of d_logits on the sampled rows."""
    rows = sampled_rows(inputs)
    return relative_error(output[0][rows], true_d_logits(inputs, rows, inputs.logits[rows]))


def hidden_gradient_error(inputs: LossInputs, output: tuple[Tensor, ...]) -> float:
    """Return the error of d_hidden on the sampled rows."""
    rows = sampled_rows(inputs)
    weight = inputs.weight.double()
    truth = true_d_logits(inputs, rows, inputs.hidden[rows].double() @ weight.T) @ weight
    return relative_error(output[0][rows], truth)


def make_logits(num_rows: int, vocab: int, device: str) -> Callable[[int], LossInputs]:
    """Return a maker of input sets that share one buffer for data that an operation destroys."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    scratch = torch.empty(num_rows, vocab, dtype=dtype, device=device)

    def make(seed: int) -> LossInputs:
        inputs = loss_inputs(num_rows, vocab, 1.0, device, seed)
        logits = torch.randn(num_rows, vocab, device=device, dtype=dtype)
        return replace(inputs, logits=logits, scratch=scratch)

    return make


def make_hidden(
    num_rows: int, vocab: int, width: int, active: float, device: str, seed: int
) -> LossInputs:
    """Return an input set of hidden states and an LM head."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = loss_inputs(num_rows, vocab, active, device, seed)
    hidden = torch.randn(num_rows, width, device=device).to(dtype)
    weight = (torch.randn(vocab, width, device=device) / width**0.5).to(dtype)
    return replace(inputs, hidden=hidden, weight=weight)


def make_returns(num_trajectories: int, length: int, device: str, seed: int) -> dict[str, Tensor]:
    """Return an input set of packed trajectories, half of their tokens sampled."""
    total = num_trajectories * length
    random = torch.Generator(device).manual_seed(seed)
    values, old_values, rewards = torch.randn(3, total, generator=random, device=device)
    mask = torch.rand(total, generator=random, device=device) < 0.5
    return {
        "values": values,
        "old_values": old_values,
        "rewards": rewards,
        "mask": mask,
        "turn_ends": mask & (rewards > 2.0),
        "cu_seqlens": torch.arange(0, total + 1, length, dtype=torch.int32, device=device),
        "weights": mask / mask.sum(),
    }


def with_torch(
    run: Callable[[Function], Function], function: Function, compiled: Function | None
) -> dict[str, Function]:
    """Return a torch user's function, eager and compiled; `run` turns the function into a job."""
    named = {"torch": function} | ({"torch.compile": compiled(function)} if compiled else {})
    return {name: run(function) for name, function in named.items()}


def forward_providers(compiled: Function | None) -> tuple[Provider, ...]:
    """Return the log-probability and entropy, logits in."""

    def run(function: Function) -> Function:
        return torch.no_grad()(lambda inputs: function(inputs.logits, inputs.labels))

    named = {"ragen": run(ours.logprob_entropy)} | with_torch(run, torch_logprob_entropy, compiled)
    return tuple(Provider(name, job, error=forward_error) for name, job in named.items())


def backward_providers() -> tuple[Provider, ...]:
    """Time the backward pass alone: the graph is built outside the timed region."""

    def prepare(function: Function, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        logits = inputs.fresh_logits()
        logprobs, entropy = function(logits, inputs.labels)
        return torch.dot(logprobs, inputs.advantages) - 0.001 * entropy.sum(), logits

    functions: dict[str, Function] = {"ragen": ours.logprob_entropy, "torch": torch_logprob_entropy}
    return tuple(
        Provider(name, lambda state: torch.autograd.grad(*state), partial(prepare, function))
        for name, function in functions.items()
    )


def fused_rows(state: tuple[Tensor, LossInputs]) -> tuple[Tensor]:
    """Return the gradient of the policy loss, written over the logits."""
    logits, inputs = state
    terms = TokenTerms(*inputs.constants, None, None)
    shard = vocab_shard(logits.shape[1], 0, None, None)
    policy_rows_(logits.detach(), inputs.labels, terms, OBJECTIVE, shard, 1.0)
    return (logits.detach(),)


def policy_providers(compiled: Function | None) -> tuple[Provider, ...]:
    """Return the policy loss and its gradient, logits in."""

    def run(function: Function) -> Function:
        return lambda state: torch.autograd.grad(
            function(state[0], state[1].labels, *state[1].constants), state[0]
        )

    named = {"ragen": fused_rows} | with_torch(run, torch_policy_loss, compiled)
    return tuple(
        Provider(name, job, lambda inputs: (inputs.fresh_logits(), inputs), logits_gradient_error)
        for name, job in named.items()
    )


def logits_cases(device: str, sizes: str, compiled: Function | None) -> Iterator[Case]:
    """Yield the cases that take logits: statistics, their backward pass, and the policy loss with
    its gradient.
    """
    itemsize = 2 if device == "cuda" else 4
    for num_rows, vocab in LOGITS_SHAPES[sizes]:
        shape, one_pass = {"N": num_rows, "V": vocab}, float(itemsize * num_rows * vocab)
        make = make_logits(num_rows, vocab, device)
        for name, providers, passes in (
            ("logprob+entropy forward", forward_providers(compiled), 1),
            ("logprob+entropy backward", backward_providers(), 2),
            ("policy loss forward+backward", policy_providers(compiled), 2),
        ):
            yield Case(name, shape, make, providers, min_bytes=passes * one_pass)


def linear_gradients(function: Function, inputs: LossInputs) -> tuple[Tensor, ...]:
    """Return the gradients of function(hidden, weight) in both."""
    leaves = [x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight)]
    return torch.autograd.grad(function(*leaves), leaves)


def hidden_providers(compiled: Function | None) -> tuple[Provider, ...]:
    """Return the policy loss and its gradients, hidden states in."""

    def fused(inputs: LossInputs) -> tuple[Tensor, ...]:
        constants = (inputs.labels, *inputs.constants, OBJECTIVE)
        return linear_gradients(lambda h, w: ours.linear_policy_loss(h, w, *constants)[0], inputs)

    def run(function: Function) -> Function:
        return lambda inputs: linear_gradients(
            lambda h, w: function(h @ w.T, inputs.labels, *inputs.constants), inputs
        )

    named = {"ragen": fused} | with_torch(run, torch_policy_loss, compiled)
    return tuple(Provider(name, job, error=hidden_gradient_error) for name, job in named.items())


def hidden_cases(device: str, sizes: str, compiled: Function | None) -> Iterator[Case]:
    """Yield the cases that take hidden states: loss and both gradients of the LM head."""
    for num_rows, vocab, width in HIDDEN_SHAPES[sizes]:
        for active in (1.0, 0.3):
            num_active = int(active * num_rows)
            yield Case(
                "linear policy loss",
                {"N": num_rows, "V": vocab, "H": width, "active": active},
                partial(make_hidden, num_rows, vocab, width, active, device),
                hidden_providers(compiled),
                flops=6.0 * num_active * vocab * width,
                gemms=(num_active, vocab, width),
            )


def estimate(x: dict[str, Tensor], turn_ends: str | None = None) -> tuple[Tensor, Tensor]:
    """GAE of an input set, bi-level with the name of its turn ends."""
    packed = (x["rewards"], x["values"], x["mask"], x["cu_seqlens"])
    ends = None if turn_ends is None else x[turn_ends]
    return ours.gae(*packed, gamma=1.0, lam=0.95, turn_ends=ends, turn_gamma=0.95)


def returns_cases(device: str, sizes: str) -> Iterator[Case]:
    """GAE, which is bound by launches."""
    jobs: dict[str, tuple[dict[str, Function], float]] = {
        "gae": ({"ragen": estimate}, 17.0),
        "bi-level gae": ({"ragen": partial(estimate, turn_ends="turn_ends")}, 18.0),
    }
    for num_trajectories, length in RETURNS_SHAPES[sizes]:
        for name, (named, token_bytes) in jobs.items():
            yield Case(
                name,
                {"S": num_trajectories, "T": length},
                partial(make_returns, num_trajectories, length, device),
                tuple(Provider(provider, run) for provider, run in named.items()),
                min_bytes=token_bytes * num_trajectories * length,
            )
