"""Muon, which the warm start may take in place of Adam: steps of equal length in every direction of
a matrix.

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); the scale
that makes Adam's learning rates fit is Moonlight's (arXiv:2502.16982, Eq. 4).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor, nn

from ragen_mega.megatron.model import Chunks
from ragen_mega.megatron.weights import held
from ragen_mega.models.layout import Slot

MOMENTUM = 0.9
_RMS = 0.2
"""Root mean square of a step over the learning rate: what Adam's steps have."""
_ITERATIONS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan et al.: singular values between 0.001 and 1 come to lie between 0.7 and
1.2.
"""


def orthogonalised(matrices: Tensor) -> Tensor:
    """[B, m, n] float32 -> the same with all singular values about 1, by a quintic Newton-Schulz
    iteration; zeros stay zeros.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Optimizer of parameters that are matrices, each a slice of its slot's matrix over
    tensor-parallel ranks.

    The optimizer orthogonalises the whole matrices of the model, q, k, v, gate and up apart, so
    that a step does not depend on the layout. `step` is collective over tensor-parallel ranks.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot], ranks: dist.ProcessGroup
    ) -> None:
        super().__init__([{"params": list(parameters)}], {"lr": 0.0, "weight_decay": 0.0})
        self._slots = slots
        self._ranks = ranks

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing calls back
        """Apply Nesterov's momentum, orthogonalised."""
        (group,) = self.param_groups
        wholes = [
            slot.unshard(self._slices(slot, self._momentum(parameter)))
            for parameter, slot in zip(group["params"], self._slots, strict=True)
        ]
        steps = iter(steps_of([matrix for matrices in wholes for matrix in matrices]))
        for parameter, slot, matrices in zip(group["params"], self._slots, wholes, strict=True):
            whole = [next(steps) for _ in matrices]
            mine = slot.shard(whole, self._ranks.rank(), self._ranks.size())
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            parameter.add_(mine, alpha=-group["lr"])

    def _momentum(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None  # megatron-core has set it
        gradient, state = parameter.grad.float(), self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].mul_(MOMENTUM).add_(gradient)
        return gradient.add(state["momentum"], alpha=MOMENTUM)

    def _slices(self, slot: Slot, mine: Tensor) -> list[Tensor]:
        """Gather the slices of all tensor-parallel ranks."""
        if slot.weight.cut.num_parts(self._ranks.size()) == 1:
            return [mine]
        slices = [torch.empty_like(mine) for _ in range(self._ranks.size())]
        dist.all_gather(slices, mine.contiguous(), group=self._ranks)
        return slices


def chain_muon(
    build_adam: Callable[[], MegatronOptimizer], chunks: Chunks, config: OptimizerConfig
) -> ChainedOptimizer:
    """Build Muon for the matrices of the layers; for everything else, embedding, head, norms and
    biases, the optimizer that `build_adam` builds for what requires gradients.
    """
    ours = [
        (slot, parameter)
        for slot, parameter in held(chunks)
        if slot.layer is not None and slot.weight.is_matrix
    ]
    matrices = [parameter for _, parameter in ours]
    _require_gradients(matrices, False)
    adam = build_adam()
    _require_gradients(matrices, True)
    rest = getattr(adam, "chained_optimizers", [adam])
    by_group = defaultdict(list)
    for slot, matrix in ours:
        by_group[slot.group].append((slot, matrix))

    tp_group, groups = chunks[-1].tp_group, chunks[-1].pg_collection

    def build(
        chosen: list[tuple[Slot, nn.Parameter]], ranks_of_norm: dist.ProcessGroup
    ) -> MegatronOptimizer:
        inner = Muon([matrix for _, matrix in chosen], [slot for slot, _ in chosen], tp_group)
        inner.param_groups[0] |= _GROUP | {"max_lr": config.lr, "min_lr": config.min_lr}
        if config.bf16:
            muon = Float16OptimizerWithFloat16Params(inner, config, None, None)
        else:
            muon = FP32Optimizer(inner, config, None)
        muon.grad_stats_parallel_group, muon.tp_group = ranks_of_norm, tp_group
        return muon

    of_norm = {"dense": rest[0].get_grad_stats_parallel_group(), "expert": groups.tp_ep_pp}
    muons = [build(chosen, of_norm[group]) for group, chosen in sorted(by_group.items())]
    return ChainedOptimizer([*muons, *rest])


_GROUP: dict[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0}
"""Entries that megatron-core's schedule reads in a group of parameters."""


def _require_gradients(parameters: Iterable[Tensor], required: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad = required


def steps_of(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalise and scale each matrix; matrices of one shape are batched."""
    by_shape = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(index)
    steps: list[Tensor] = [torch.empty(0)] * len(matrices)
    for shape, indices in by_shape.items():
        together = orthogonalised(torch.stack([matrices[index] for index in indices]))
        for index, step in zip(indices, together * (_RMS * max(shape) ** 0.5), strict=True):
            steps[index] = step
    return steps
