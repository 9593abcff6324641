"""The device decides, by the first tensor of a call: CUDA runs Triton, everything else the
plain-torch definition.

Triton is imported by the first CUDA call, so that CPU users need not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

from torch import Tensor

from ragen_kernels import reference, reference_linear, reference_returns

P = ParamSpec("P")
R = TypeVar("R")


def by_device(definition: Callable[P, R], triton_module: str) -> Callable[P, R]:
    """`definition` for CPU tensors, and the function of the same name in `triton_module` for CUDA
    tensors.
    """

    @wraps(definition)
    def dispatched(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0] if args else next(iter(kwargs.values()))
        if isinstance(first, Tensor) and first.is_cuda:
            return getattr(import_module(f"ragen_kernels.{triton_module}"), definition.__name__)(
                *args, **kwargs
            )
        return definition(*args, **kwargs)

    return dispatched


logprob_entropy = by_device(reference.logprob_entropy, "triton_policy")
policy_loss = by_device(reference.policy_loss, "triton_policy")
policy_loss_from_logprobs = by_device(reference.policy_loss_from_logprobs, "triton_token")
linear_logprobs = by_device(reference_linear.linear_logprobs, "triton_linear")
linear_policy_loss = by_device(reference_linear.linear_policy_loss, "triton_linear")
gae = by_device(reference_returns.gae, "triton_returns")
group_normalize = by_device(reference_returns.group_normalize, "triton_returns")
whiten = by_device(reference_returns.whiten, "triton_returns")
value_loss = by_device(reference_returns.value_loss, "triton_returns")
