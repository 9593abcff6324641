"""The compiled attention of training against its formula in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from ragen_mega.data.forest import Forest
from ragen_mega.megatron.cpu.attention import KEYS, QUERIES, forest_attention


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tree_attention(q: Tensor, k: Tensor, v: Tensor, forest: Forest) -> Tensor:
    """Of every node over a mask of its ancestors."""
    nodes, ends = torch.arange(forest.num_nodes), torch.from_numpy(forest.ends)
    sees = (nodes <= nodes[:, None]) & (nodes[:, None] < ends)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)


FOREST = Forest.of([90, 70, 70, 3, 41], [0, 33, 65, 1, 0], multiple=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [(4, 2, 24), (7, 1, 64), (3, 3, 2), (14, 2, 6), (40, 1, 14)])
def test_attention_over_a_forest(
    heads: tuple[int, int, int], dtype: torch.dtype, threads: int
) -> None:
    num_heads, kv_heads, d = heads
    shapes = [(FOREST.num_nodes, count, d) for count in (num_heads, kv_heads, kv_heads)]
    drawn_inputs = (drawn(*shape).add(0.1 * i) for i, shape in enumerate(shapes))
    found = [x.to(dtype).requires_grad_() for x in drawn_inputs]
    exact = [x.detach().double().requires_grad_() for x in found]
    output, expected = forest_attention(*found, FOREST, d**-0.5), tree_attention(*exact, FOREST)
    weight = drawn(*output.shape).to(dtype)
    gradients = torch.autograd.grad(output, found, weight)
    truths = torch.autograd.grad(expected, exact, weight.double())
    for one, truth in zip((output, *gradients), (expected, *truths), strict=True):
        bound = 256 * torch.finfo(dtype).eps * max(1.0, float(truth.detach().abs().max()))
        torch.testing.assert_close(one.double(), truth, rtol=0, atol=bound)


def test_attention_to_keys_that_all_point_away() -> None:
    """Scores of -89 must not make places without a key infinite, as exp(89) is nearly."""
    num_nodes, d, direction = KEYS + QUERIES + 1, 4, torch.tensor([178.8**0.5, 0.0, 0.0, 0.0])
    q, k = (sign * direction + drawn(num_nodes, 1, d, scale=0.01).float() for sign in (1.0, -1.0))
    v, upstream = drawn(num_nodes, 1, d).float(), drawn(num_nodes, d).float()
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    out = forest_attention(*ours, Forest.of([num_nodes], [0]), 0.5)
    out.backward(upstream)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    heads = (x.transpose(0, 1) for x in exact)
    truth = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.5)[0]
    truth.backward(upstream.double())
    assert_close(out, truth.float(), rtol=1e-3, atol=1e-3)
    for found, expected in zip(ours, exact, strict=True):
        assert_close(
            found.grad, expected.grad.float(), rtol=0, atol=1e-3 * expected.grad.abs().max()
        )


def test_attention_in_bfloat16_rounds_its_result_once() -> None:
    query, key, value = (drawn(60, heads, 16).bfloat16() for heads in (6, 2, 3))
    key, value = key[:, :2], value[:, :2]
    forest = Forest.of([30, 30], [0, 0])
    found, expected = (
        forest_attention(*(x.to(dtype) for x in (query, key, value)), forest, 0.25).double()
        for dtype in (torch.bfloat16, torch.float64)
    )
    assert ((found - expected).abs() <= 2.0**-8 * (expected.abs() + 1e-3)).all()
