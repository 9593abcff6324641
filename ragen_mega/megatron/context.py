"""The exchange of keys and values among context-parallel ranks, each of which computes a run of a
forest's nodes.

A rank receives the keys of the one path above its first node (`data.forest`), and nothing else of
the forest. All ranks know the whole forest, so no sizes are exchanged. An implementation of
attention keeps what has arrived for the backward pass, or has it exchanged again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from ragen_mega.data.forest import Forest


@contextmanager
def exchanged_keys(
    key: Tensor,
    value: Tensor,
    sent: Tensor,
    forest: Forest,
    group: ProcessGroup | None,
    order: Tensor | None = None,
    *,
    again: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the keys and values [M, heads, d] that the nodes of this rank attend to, from those
    [N, heads, d] of the nodes: first what others sent; or, of these, those that `order` names.
    `sent`: nodes whose keys go to other ranks, rank by rank. Collective over the group, in the
    backward pass too.

    With `again` what is yielded is not saved for the backward pass within the context: the backward
    pass exchanges it anew when it needs it.
    """
    sizes = [*forest.received], [len(nodes) for nodes in forest.sent]
    attended = _Exchange.apply(key, value, sent, sizes, group, again)
    exchange = attended[0].grad_fn
    if order is not None:
        attended = [x.index_select(0, order) for x in attended]
    if exchange is None or not again:
        yield attended[0], attended[1]
        return
    places = {x.untyped_storage().data_ptr(): place for place, x in enumerate(attended)}

    def pack(tensor: Tensor) -> Any:
        place = places.get(tensor.untyped_storage().data_ptr())
        if place is None:
            return tensor
        return place, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        place, *geometry = packed
        if exchange.arrived is None:
            _, own_key, own_value = exchange.saved_tensors
            found = _exchanged(own_key, own_value, sent, sizes, group)
            exchange.arrived = [x if order is None else x.index_select(0, order) for x in found]
        return exchange.arrived[place].as_strided(*geometry)

    with saved_tensors_hooks(pack, unpack):
        yield attended[0], attended[1]


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        key: Tensor,
        value: Tensor,
        sent: Tensor,
        sizes: tuple[list[int], list[int]],
        group: ProcessGroup,
        again: bool,
    ) -> tuple[Tensor, Tensor]:
        # a view of the values would hold the queries and keys that were projected beside them
        ctx.save_for_backward(sent, *((key, value.contiguous()) if again else ()))
        ctx.sizes, ctx.group, ctx.arrived = sizes, group, None
        return _exchanged(key, value, sent, sizes, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent, (received, returned), ctx.arrived = ctx.saved_tensors[0], ctx.sizes, None
        given = sum(received)
        both = torch.stack([gradient[:given] for gradient in gradients], 1)
        back = _sent(both, returned, received, ctx.group).unbind(1)
        own = (gradient[given:].clone() for gradient in gradients)
        return *(x.index_add_(0, sent, more) for x, more in zip(own, back)), *[None] * 4


def _exchanged(
    key: Tensor,
    value: Tensor,
    sent: Tensor,
    sizes: tuple[list[int], list[int]],
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    both = torch.stack([key.index_select(0, sent), value.index_select(0, sent)], 1)
    keys, values = _sent(both, *sizes, group).unbind(1)
    return torch.cat([keys, key]), torch.cat([values, value])


def _sent(rows: Tensor, received: list[int], sent: list[int], group: ProcessGroup | None) -> Tensor:
    """Send each rank of the group its rows; return what every rank has sent."""
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows, received, sent, group=group)
    return arrived
