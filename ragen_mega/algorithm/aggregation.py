"""Weights of the sampled tokens in the loss, for any split of a minibatch into ranks and
microbatches.

Aggregation: token-mean, DAPO arXiv:2503.14476 Eq. 8; seq-mean-token-mean, GRPO arXiv:2402.03300 Eq.
3; seq-mean-token-sum, Dr.GRPO arXiv:2503.20783 sec. 3. The per-token losses themselves live in
`ragen_kernels`.
"""

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from ragen_mega.data.types import counts_of

AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


def aggregation_weights(
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    mode: AggregationMode,
    num_tokens: int,
    num_trajectories: int,
) -> Tensor:
    """Return the weights w such that the loss of the minibatch is the sum of w * token_loss over
    all its tokens.

        token-mean            w = 1 / num_tokens
        seq-mean-token-mean   w = 1 / (num_trajectories * sampled tokens of the trajectory)
        seq-mean-token-sum    w = 1 / num_trajectories

    The counts are those of the whole minibatch, over all data-parallel ranks and microbatches; each
    part passes the same ones and the parts' sums add up. A trajectory must not be split.

    Args:
        loss_mask: [T] bool, True where the policy sampled the token.
        cu_seqlens: [S + 1] offsets of the trajectories of this part.
        num_tokens, num_trajectories: sampled tokens and trajectories of the minibatch.

    Returns:
        [T] float32, 0 outside the mask.
    """
    if mode not in get_args(AggregationMode):
        raise ValueError(
            f"unknown loss aggregation {mode!r}; choose one of"
            f" {', '.join(get_args(AggregationMode))}"
        )
    mask = loss_mask.float()
    # [S] sampled tokens of each trajectory
    counts = counts_of(loss_mask, cu_seqlens)
    if num_tokens < counts.sum() or num_trajectories < (counts > 0).sum():
        raise ValueError(
            f"the normaliser counts the whole minibatch, but num_tokens={num_tokens} and"
            f" num_trajectories={num_trajectories} are below this part's {int(counts.sum())} tokens"
            f" and {int((counts > 0).sum())} trajectories; sum the counts over ranks and"
            " microbatches"
        )
    if mode == "token-mean":
        return mask / max(num_tokens, 1)
    if mode == "seq-mean-token-sum":
        return mask / max(num_trajectories, 1)
    owned = counts.clamp(min=1).repeat_interleave(cu_seqlens.diff())
    per_token = F.pad(owned, (0, len(mask) - len(owned)), value=1)
    return mask / (max(num_trajectories, 1) * per_token)
