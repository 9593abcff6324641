"""The compiled operations of training against their formulas in float64, and a last layer that
computes wanted nodes alone against one that computes all.
"""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ragen_kernels.compiled import QUERIES, ROWS
from ragen_kernels.trained import Paths, forest_attention, rms_norm, swiglu
from torch import Tensor
from torch.testing import assert_close

from ragen_mega.config import LossConfig, ParallelConfig, TrainConfig
from ragen_mega.data.forest import Forest
from ragen_mega.data.types import TokenBatch
from ragen_mega.megatron import layers, model
from ragen_mega.megatron.critic import MegatronCritic
from ragen_mega.megatron.initialize import initialize
from ragen_mega.megatron.layers import PackedForest
from ragen_mega.megatron.policy import MegatronPolicy
from tools.parity import make_batch, random_model

EPSILON = 1e-6


def norm_formula(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def swiglu_formula(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES = {
    "norm": (
        lambda x, w: rms_norm(x, w, EPSILON), norm_formula,
        (drawn(2 * ROWS + 3, 1, 34), drawn(34)),
    ),
    "one row": (lambda x, w: rms_norm(x, w, EPSILON), norm_formula, (drawn(1, 1, 2), drawn(2))),
    "swiglu": (swiglu, swiglu_formula, (drawn(33, 1, 74, scale=10.0),)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    ours, formula, inputs = CASES[name]
    found = [x.to(dtype).requires_grad_() for x in inputs]
    exact = [x.to(dtype).double().requires_grad_() for x in inputs]
    output, expected = ours(*found), formula(*exact)
    assert output.dtype == dtype
    weight = drawn(*output.shape).to(dtype)
    gradients = torch.autograd.grad(output, found, weight)
    truths = torch.autograd.grad(expected, exact, weight.double())
    for one, truth in zip((output, *gradients), (expected, *truths), strict=True):
        bound = 64 * torch.finfo(dtype).eps * max(1.0, float(truth.detach().abs().max()))
        torch.testing.assert_close(one.double(), truth, rtol=0, atol=bound)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [N, heads, d] as d / 2 complex numbers, turned by angles [N, d / 2]."""
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


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
def test_attention_turns_queries_and_keys_and_answers_what_is_asked(
    heads: tuple[int, int, int], dtype: torch.dtype, threads: int
) -> None:
    num_heads, kv_heads, d = heads
    shapes = [(FOREST.num_nodes, count, d) for count in (num_heads, kv_heads, kv_heads)]
    drawn_inputs = (drawn(*shape).add(0.1 * i) for i, shape in enumerate(shapes))
    found = [x.to(dtype).requires_grad_() for x in drawn_inputs]
    exact = [x.detach().double().requires_grad_() for x in found]
    angles = drawn(FOREST.num_nodes, d // 2, scale=3.0).to(dtype).double()
    q, k, v = exact
    expected = tree_attention(rotated(q, angles), rotated(k, angles), v, FOREST)
    packed = PackedForest.of(FOREST, torch.device("cpu"), torch.arange(FOREST.num_nodes))
    for asks in (packed.paths.asks, np.arange(40, FOREST.num_nodes, 3), np.array([5])):
        paths = packed.paths.of_nodes(asks)
        output = forest_attention(*found, angles.cos(), angles.sin(), paths, d**-0.5)
        weight = drawn(*output.shape).to(dtype)
        gradients = torch.autograd.grad(output, found, weight)
        truths = torch.autograd.grad(expected[asks], exact, weight.double(), retain_graph=True)
        for one, truth in zip((output, *gradients), (expected[asks], *truths), strict=True):
            bound = 256 * torch.finfo(dtype).eps * max(1.0, float(truth.detach().abs().max()))
            torch.testing.assert_close(one.double(), truth, rtol=0, atol=bound)


def test_attention_to_keys_that_all_point_away() -> None:
    """Scores of -89, and in the second tile of queries a single one: what the first left behind
    beside it, exp(89), must not become infinite.
    """
    num_nodes, d, direction = QUERIES + 1, 4, torch.tensor([178.8**0.5, 0.0, 0.0, 0.0])
    q, k = (sign * direction + drawn(num_nodes, 1, d, scale=0.01).float() for sign in (1.0, -1.0))
    v, upstream = drawn(num_nodes, 1, d).float(), drawn(num_nodes, d).float()
    ends = np.array([0, num_nodes])
    nodes = np.arange(num_nodes)
    cosines, sines = torch.ones(num_nodes, d // 2), torch.zeros(num_nodes, d // 2)
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    out = forest_attention(*ours, cosines, sines, Paths(ends, ends, nodes, nodes, ends), 0.5)
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


def results(batch: TokenBatch, reference, parallel: ParallelConfig) -> list[Tensor]:
    """Log-probabilities, entropies, values, and the gradients of an update of both models."""
    weights = {name: value.detach() for name, value in reference.state_dict().items()}
    hf, groups, train = reference.config, initialize(parallel), TrainConfig(clip_grad=1e9)
    policy = MegatronPolicy(hf, groups, parallel, train, LossConfig(), temperature=0.7)
    critic = MegatronCritic(hf, groups, parallel, train, LossConfig())
    found = []
    for trained in (policy, critic):
        trained.load_weights(weights.get)
    torch.nn.init.normal_(critic.module.output_layer.weight)
    critic.trainer.optimizer.reload_model_params()
    found += [*policy.logprobs_and_entropies(batch), critic.values(batch)]
    for trained in (policy, critic):
        metrics = trained.update(batch)
        found += [torch.tensor(value) for value in metrics.values()]
        found += trained.trainer.gradients().values()
    return [one.clone() for one in found]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_the_last_layer_may_leave_out_what_nobody_uses(
    architecture: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = random_model(architecture)
    batch, parallel = make_batch(reference), ParallelConfig(recompute=recompute)
    asked: list[int] = []
    ask = layers.PackedForest.of_wanted.func

    def of_wanted(packed: PackedForest) -> PackedForest:
        part = ask(packed)
        asked.append(len(part.paths.asks))
        return part

    monkeypatch.setattr(layers.PackedForest, "of_wanted", property(of_wanted))
    torch.manual_seed(3)
    part = results(batch, reference, parallel)
    assert asked and max(asked) < batch.num_positions
    for module in (layers, model):
        monkeypatch.setattr(module, "leaves_out", lambda config: False)
    asked.clear()
    torch.manual_seed(3)
    whole = results(batch, reference, parallel)
    assert not asked
    for one, other in itertools.zip_longest(part, whole):
        bound = 1e-5 * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=bound)
