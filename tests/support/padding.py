"""Products that would read memory between the rows of an operand."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")


class FinitePadding(TorchDispatchMode):
    """Inside, both operands of every product are finite, and so is what lies between their rows:
    oneDNN's bfloat16 products read it on processors with AMX. Counts operands with such padding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_padded = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function._schema.name in PRODUCTS:
            for operand in args[-2:]:
                self._check(operand)
        return function(*args, **(kwargs or {}))

    def _check(self, operand: Tensor) -> None:
        spanned = 1 + sum((n - 1) * step for n, step in zip(operand.shape, operand.stride()))
        if operand.numel():
            whole = torch.as_strided(operand, (spanned,), (1,), operand.storage_offset())
            place = f"{list(operand.shape)} with strides {operand.stride()}"
            assert torch.isfinite(whole).all(), f"an operand {place} has NaN between its rows"
            self.num_padded += spanned > operand.numel()
