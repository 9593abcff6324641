"""The exchange of keys and values among context-parallel ranks, each of which computes a run of a
forest's nodes.

A rank receives the keys of the one path above its first node (`data.forest`), and nothing else of
the forest. All ranks know the whole forest, so no sizes are exchanged.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from ragen_mega.data.forest import Forest


def exchange_keys(
    key: Tensor, value: Tensor, sent: Tensor, forest: Forest, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the keys and values [M, heads, d] that the nodes of this rank attend to, from those
    [N, heads, d] of the nodes: first what others sent. `sent`: nodes whose keys go to other ranks,
    rank by rank. Collective over the group, in the backward pass too.
    """
    sizes = [*forest.received], [len(nodes) for nodes in forest.sent]
    return _Exchange.apply(key, value, sent, sizes, group)


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        key: Tensor,
        value: Tensor,
        sent: Tensor,
        sizes: tuple[list[int], list[int]],
        group: ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(sent)
        ctx.sizes, ctx.group = sizes, group
        both = torch.stack([key.index_select(0, sent), value.index_select(0, sent)], 1)
        keys, values = _sent(both, *sizes, group).unbind(1)
        return torch.cat([keys, key]), torch.cat([values, value])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (sent,), (received, returned) = ctx.saved_tensors, ctx.sizes
        given = sum(received)
        both = torch.stack([gradient[:given] for gradient in gradients], 1)
        back = _sent(both, returned, received, ctx.group).unbind(1)
        own = (gradient[given:].clone() for gradient in gradients)
        return *(x.index_add_(0, sent, more) for x, more in zip(own, back)), None, None, None


def _sent(rows: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """Send each rank of the group its rows; return what every rank has sent."""
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows, received, sent, group=group)
    return arrived
