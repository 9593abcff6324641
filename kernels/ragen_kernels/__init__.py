"""Fused policy-loss and advantage operations for StarPO: Triton for CUDA tensors, plain
torch for others.

`reference.py` is the specification in plain torch; `policy.py` makes autograd functions of the row
operations there and in Triton; `dispatch.py` chooses by device.
"""

from ragen_kernels.dispatch import gae
from ragen_kernels.objective import Likeliest, PolicyObjective, PolicyStats
from ragen_kernels.policy import linear_logprobs, linear_policy_loss, logprob_entropy

__all__ = [
    "Likeliest",
    "PolicyObjective",
    "PolicyStats",
    "gae",
    "linear_logprobs",
    "linear_policy_loss",
    "logprob_entropy",
]
