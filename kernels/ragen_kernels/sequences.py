"""Objectives whose ratio or importance belongs to a whole sequence, brought back to the token
objective by a change of its constants.

The row operations see one token at a time. With o' = logprob - mean log-ratio in place of a token's
old log-probability, the ratio exp(logprob - o') is the sequence's, and its derivative in the
token's own logprob equals the derivative of GSPO-token (arXiv:2507.18071 eq. 14). With m' = o' -
(old - rollout) in place of its rollout log-probability, exp(o' - m') is still the token's
importance, and with the sum of these differences the product over its sequence.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ragen_kernels.objective import MAX_LOG_RATIO, PolicyObjective, TokenTerms


def over_sequences(
    terms: TokenTerms,
    current: Callable[[], Tensor],
    rows: Tensor,
    cu_seqlens: Tensor,
    objective: PolicyObjective,
    group: ProcessGroup | None = None,
) -> TokenTerms:
    """Return the terms of M tokens under which the token objective is the one over sequences.

    Args:
        terms: [M] each.
        current: log-probabilities [M] under the current weights; only called where they are needed.
        rows: [M] positions of the tokens, in any order.
        cu_seqlens: [S + 1] offsets of the sequences among the positions.
        group: ranks that have other tokens of the same S sequences, for an all-reduce of [S] a sum.
    """
    ends = cu_seqlens.to(rows.dtype)
    order = rows.argsort()
    offsets = torch.searchsorted(rows[order], ends)  # [S + 1] among the sorted rows
    owners = torch.searchsorted(ends[1:], rows, right=True)  # [M]

    def sums(values: Tensor) -> Tensor:
        """[M] -> [M], for each token the sum over its sequence; without atomics, so that it is the
        same in every run.
        """
        found = torch.segment_reduce(values[order], "sum", offsets=offsets, unsafe=True)
        if group is not None:
            dist.all_reduce(found, group=group)
        return found[owners]

    old, rollout = terms.old_logprobs, terms.rollout_logprobs
    if objective.surrogate == "gspo" and old is not None:  # without them every ratio is 1
        now = current().double()
        log_ratio = torch.clamp(now - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        mean = sums(log_ratio) / sums(torch.ones_like(log_ratio))
        terms = terms._replace(old_logprobs=(now - mean).to(old.dtype))
    is_product = objective.importance_level == "sequence"
    # The importance of a single token also has to survive the change of its old log-probability.
    if is_product or (objective.importance_cap is not None and old is not None):
        assert rollout is not None  # `check_inputs`
        base = current() if old is None else old
        drift = base.double() - rollout
        drift = sums(drift) if is_product else drift
        base = base if terms.old_logprobs is None else terms.old_logprobs
        terms = terms._replace(rollout_logprobs=(base - drift).to(rollout.dtype))
    return terms
