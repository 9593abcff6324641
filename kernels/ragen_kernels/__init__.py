"""Fused policy-loss, advantage and value-loss operations for StarPO: Triton for CUDA tensors, plain
torch for others.

`reference.py` is the specification in plain torch; `policy.py` makes autograd functions of the row
operations there and in Triton; `dispatch.py` chooses by device.
"""

from ragen_kernels.dispatch import gae, group_normalize, value_loss, whiten
from ragen_kernels.objective import PolicyObjective, PolicyStats
from ragen_kernels.policy import linear_logprobs, linear_policy_loss, logprob_entropy

__all__ = [
    "PolicyObjective",
    "PolicyStats",
    "gae",
    "group_normalize",
    "linear_logprobs",
    "linear_policy_loss",
    "logprob_entropy",
    "value_loss",
    "whiten",
]
