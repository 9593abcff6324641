"""The device decides, by the first tensor of a call: CUDA runs Triton, everything else the
plain-torch definition.

Triton is imported by the first CUDA call, so that CPU users need not have it.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

from torch import Tensor

from ragen_kernels import reference

P = ParamSpec("P")
R = TypeVar("R")

KERNEL_DEVICES = {"cuda"}
"""Device types whose tensors go to the kernels; with Triton's interpreter also "cpu"."""


def by_device(definition: Callable[P, R], triton_module: str) -> Callable[P, R]:
    """`definition`, and for tensors on KERNEL_DEVICES the function of the same name in
    `triton_module`.
    """

    @wraps(definition)
    def dispatched(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0] if args else next(iter(kwargs.values()))
        device = first.device.type if isinstance(first, Tensor) else None
        if device not in KERNEL_DEVICES:
            return definition(*args, **kwargs)
        module = import_module(f"ragen_kernels.{triton_module}")
        return getattr(module, definition.__name__)(*args, **kwargs)

    return dispatched


row_statistics = by_device(reference.row_statistics, "triton_rows")
logits_gradient = by_device(reference.logits_gradient, "triton_rows")
token_losses = by_device(reference.token_losses, "triton_token")
policy_rows_ = by_device(reference.policy_rows_, "triton_policy")
gae = by_device(reference.gae, "triton_returns")
