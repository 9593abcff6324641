"""Fused policy-loss, advantage and value-loss kernels for StarPO.

The plain-torch definitions are the specification of every operation.
"""

from ragen_kernels.reference_linear import linear_logprobs, linear_policy_loss
from ragen_kernels.objective import MAX_LOG_RATIO, PolicyObjective, PolicyStats
from ragen_kernels.reference import logprob_entropy, policy_loss, policy_loss_from_logprobs
from ragen_kernels.reference_returns import AdvantageEstimate, gae, group_normalize, value_loss, whiten

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
