"""Weights of the sampled tokens in the loss of a minibatch.

Aggregation: token-mean, DAPO arXiv:2503.14476 Eq. 8; seq-mean-token-mean, GRPO arXiv:2402.03300 Eq.
3; seq-mean-token-sum, Dr.GRPO arXiv:2503.20783 sec. 3. The per-token losses themselves live in
`ragen_kernels`.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from ragen_mega.data.types import counts_of

AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


def aggregation_weights(loss_mask: Tensor, cu_seqlens: Tensor, mode: AggregationMode) -> Tensor:
    """Return the weights w such that the loss of the minibatch is the sum of w * token_loss over
    all its tokens, however they are divided among ranks and microbatches.

        token-mean            w = 1 / sampled tokens of the minibatch
        seq-mean-token-mean   w = 1 / (trajectories * sampled tokens of the trajectory)
        seq-mean-token-sum    w = 1 / trajectories

    Args:
        loss_mask: [T] bool, True where the policy sampled the token.
        cu_seqlens: [S + 1] offsets of all trajectories of the minibatch.

    Returns:
        [T] float32, 0 outside the mask.
    """
    mask, num_trajectories = loss_mask.float(), len(cu_seqlens) - 1
    if mode == "token-mean":
        return mask / max(int(loss_mask.sum()), 1)
    if mode == "seq-mean-token-sum":
        return mask / num_trajectories
    # [S] sampled tokens of each trajectory
    counts = counts_of(loss_mask, cu_seqlens)
    owned = counts.clamp(min=1).repeat_interleave(cu_seqlens.diff())
    per_token = F.pad(owned, (0, len(mask) - len(owned)), value=1)
    return mask / (num_trajectories * per_token)
