"""Fused policy-loss, advantage and value-loss operations for StarPO: Triton for CUDA tensors, plain
torch for others.

The plain-torch modules `reference*.py` define every operation and hold its documentation.
"""

from ragen_kernels.dispatch import (
    gae,
    group_normalize,
    linear_logprobs,
    linear_policy_loss,
    logprob_entropy,
    policy_loss,
    policy_loss_from_logprobs,
    value_loss,
    whiten,
)
from ragen_kernels.objective import MAX_LOG_RATIO, PolicyObjective, PolicyStats
from ragen_kernels.reference_returns import AdvantageEstimate

__all__ = [
    "MAX_LOG_RATIO",
    "AdvantageEstimate",
    "PolicyObjective",
    "PolicyStats",
    "gae",
    "group_normalize",
    "linear_logprobs",
    "linear_policy_loss",
    "logprob_entropy",
    "policy_loss",
    "policy_loss_from_logprobs",
    "value_loss",
    "whiten",
]
