"""Transformer Engine's permutation of a mixture's tokens in plain torch, where its Triton kernels
would be interpreted for seconds a layer: each function counts as one operation.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.fake_cuda.counts import one_operation


def in_plain_torch(permutation: ModuleType) -> None:
    """Replace the functions of `transformer_engine.pytorch.triton.permutation` that megatron-core's
    layers come to.
    """
    for function in (
        make_row_id_map,
        permute_with_mask_map,
        unpermute_with_mask_map,
        make_chunk_sort_map,
        sort_chunks_by_map,
    ):
        setattr(permutation, function.__name__, one_operation(torch.no_grad()(function)))


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """[T, 2E + 1] as Transformer Engine's; the first E columns alone are filled, with the row of a
    token's copy for each expert, -1 without one. Rows are sorted by expert, then token.
    """
    routed = routing_map.bool().t()  # [E, T]
    rows = routed.flatten().cumsum(0).reshape(routed.shape) - 1
    rows = torch.where(routed, rows, -1).t().int()
    return torch.nn.functional.pad(rows, (0, num_experts + 1), value=-1)


def _copies(row_id_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(token, expert, row) of each copy."""
    token, expert = (row_id_map >= 0).nonzero().unbind(1)
    return token, expert, row_id_map[token, expert].long()


def permute_with_mask_map(
    x: Tensor,  # [T, H]
    row_id_map: Tensor,
    probs: Tensor | None,  # [T, E]
    scale: None,
    num_tokens: int,
    num_experts: int,
    num_rows: int,
    hidden_size: int,
    scale_size: int | None,
) -> tuple[Tensor, None, Tensor | None]:
    """A copy of a token for each of its experts, with its probability."""
    token, expert, row = _copies(row_id_map)
    permuted = x.new_empty(num_rows, hidden_size)
    permuted[row] = x[token]
    if probs is None:
        return permuted, None, None
    permuted_probs = probs.new_empty(num_rows)
    permuted_probs[row] = probs[token, expert]
    return permuted, None, permuted_probs


def unpermute_with_mask_map(
    permuted: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """The sum of a token's copies; and the probabilities as a matrix."""
    assert merging_probs is None, "not used by megatron-core here"
    token, expert, row = _copies(row_id_map)
    sums = torch.zeros(num_tokens, hidden_size, device=permuted.device)
    x = sums.index_add_(0, token, permuted[row].float()).to(permuted.dtype)
    if permuted_probs is None:
        return x, None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[token, expert] = permuted_probs[row]
    return x, probs


def make_chunk_sort_map(
    split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int
) -> Tensor:
    """[T] the new row of each row when chunks of these sizes change their order."""
    sorted_sizes = split_sizes[sorted_indices]
    begins = torch.empty_like(split_sizes)
    begins[sorted_indices] = sorted_sizes.cumsum(0) - sorted_sizes
    shift = begins - (split_sizes.cumsum(0) - split_sizes)
    rows = torch.arange(num_tokens, device=split_sizes.device)
    return (rows + shift.repeat_interleave(split_sizes)).int()


def sort_chunks_by_map(
    x: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rows, and their probabilities, in the other order, or back."""

    def move(values: Any) -> Any:
        if values is None or not is_forward:
            return values if values is None else values[row_id_map.long()]
        moved = torch.empty_like(values)
        moved[row_id_map.long()] = values
        return moved

    return move(x), move(probs)
