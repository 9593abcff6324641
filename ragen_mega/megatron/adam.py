"""The optimizer's tensors of every parameter, whichever optimizer of megatron-core holds them, and
updates for which these tensors leave host memory part by part.

The device computes, by the same kernel and with the same result to the bit as if it held
everything. megatron-core's Adam on the host (`HybridDeviceOptimizer`, 0.16.1) needs CUDA and
Transformer Engine, keeps its state where no checkpoint finds it, and rounds as a processor does.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from ragen_mega.megatron.offload import Offloadable
from ragen_mega.models.layout import group_by_size

PART_BYTES = 512 * 2**20
"""Bytes of optimizer state that an update brings to the device at a time, or one parameter's."""
MAIN = "param"
"""The float32 copy of a lower-precision parameter, under megatron-core's name."""


@dataclass(frozen=True, slots=True, eq=False)
class Updated:
    """A parameter, and the part of it that this rank updates."""

    name: str
    parameter: nn.Parameter
    optimizer: MegatronOptimizer
    main: Tensor | None
    """The tensor that the inner optimizer updates, for a float32 parameter (a part of) the
    parameter itself; None if other data-parallel ranks update the whole parameter.
    """
    part: slice
    """Elements of the flattened parameter."""

    @property
    def own(self) -> Tensor | None:
        """`main` where it is not the parameter itself."""
        return None if self.parameter.dtype == torch.float32 else self.main

    @property
    def state(self) -> dict[str, Tensor]:
        """The moments, empty before the first step."""
        state = self.optimizer.optimizer.state.get(self.main, {}) if self.main is not None else {}
        # the number of steps is left out
        return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim()}

    def start(self, values: Tensor) -> None:
        """Start from the values that the parameter was rounded from. From the rounded ones most
        steps would change no bfloat16 number at first, since each would have to cross half of the
        distance to the next one.
        """
        if (own := self.own) is not None:
            own.copy_(values.reshape(-1)[self.part].view_as(own))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of what the optimizer keeps besides the parameter."""
        values = self.state | ({} if (own := self.own) is None else {MAIN: own})
        yield from ((f"{self.name}.{kind}", value) for kind, value in values.items())


def find_updated(
    chunks: nn.ModuleList, optimizers: Sequence[MegatronOptimizer]
) -> dict[nn.Parameter, Updated]:
    """Return what this rank updates of each parameter, in the order of the parameters."""
    shards = [_shards(o) if isinstance(o, DistributedOptimizer) else {} for o in optimizers]
    inner = [
        {id(main) for group in o.optimizer.param_groups for main in group["params"]}
        for o in optimizers
    ]
    found = {}
    for name, parameter in chunks.named_parameters():
        if not parameter.requires_grad:
            continue
        main = getattr(parameter, "main_param", parameter)
        for optimizer, own, updates in zip(optimizers, shards, inner, strict=True):
            if not isinstance(optimizer, DistributedOptimizer):
                if id(main) in updates:
                    found[parameter] = Updated(name, parameter, optimizer, main, slice(None))
            elif any(parameter in buffer.param_index_map for buffer in optimizer.buffers):
                shard, part = own.get(parameter), slice(0, 0)
                if shard is not None:
                    owned = optimizer._get_model_param_range_map(parameter)["param"]
                    part = slice(owned.start, owned.end)
                found[parameter] = Updated(name, parameter, optimizer, shard, part)
        assert parameter in found, f"no optimizer updates {name}"
    return found


def _shards(optimizer: DistributedOptimizer) -> dict[nn.Parameter, Tensor]:
    """Return a map: model parameter -> the part of it that this rank updates.

    The optimizer's own `model_param_group_index_map` gives the wrong part where float32 parameters
    (the value head) stand among bfloat16 ones: the inner optimizer lists those first.
    """
    groups = (
        *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    )
    return {
        parameter: shard for models, shards in groups for parameter, shard in zip(models, shards)
    }


def update_in_parts(updated: Iterable[Updated], memory: Offloadable) -> None:
    """From now on, let each optimizer bring its tensors from host memory part by part when it
    steps.
    """
    by_optimizer: dict[MegatronOptimizer, list[Updated]] = {}
    for item in updated:
        if item.main is not None:
            by_optimizer.setdefault(item.optimizer, []).append(item)
    for optimizer, items in by_optimizer.items():
        inner = optimizer.optimizer
        inner.step = partial(_step, inner.step, inner, items, memory)
        # each part is copied while it is on the device
        optimizer._copy_main_params_to_model_params = lambda: None


def _tensors(part: Iterable[Updated]) -> Iterator[tuple[str, Tensor]]:
    return chain.from_iterable(item.tensors() for item in part)


def _step(
    step: Callable[[], None],
    inner: torch.optim.Optimizer,
    items: Sequence[Updated],
    memory: Offloadable,
) -> None:
    """Take one step of an inner optimizer whose tensors are away."""
    groups = inner.param_groups
    before, after = [dict(group) for group in groups], [dict(group) for group in groups]
    for part in group_by_size(
        items, lambda item: 3 * 4 * item.parameter.view(-1)[item.part].numel(), PART_BYTES
    ):
        chosen = {id(item.main) for item in part}
        with memory.borrowed("optimizer", partial(_tensors, part)):
            for group, was in zip(groups, before, strict=True):
                group.pop("step", None)  # Transformer Engine's Adam counts steps once for a group
                group |= was | {"params": [main for main in was["params"] if id(main) in chosen]}
            step()
            for item in part:
                if (own := item.own) is not None:
                    item.parameter.data.view(-1)[item.part].copy_(own.flatten())
        for group, result in zip(groups, after, strict=True):
            if group["params"] and "step" in group:
                result["step"] = group["step"]
    for group, result in zip(groups, after, strict=True):
        group |= result
