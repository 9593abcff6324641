"""The row operations, in plain torch and on Triton, against unfused float64 autograd:
log-probability, entropy, token objective and their gradients.
"""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from ragen_kernels import PolicyObjective, PolicyStats, dispatch, logprob_entropy, reference
from ragen_kernels.objective import TokenTerms
from ragen_kernels.policy import empty_rows
from ragen_kernels.vocab import VocabShard, combine_shards, vocab_shard

from tests.kernels.kernel_cases import (
    OBJECTIVES,
    TOKEN_OBJECTIVES,
    Case,
    assert_stats,
    logprob_entropy_truth,
    make_case,
    relative_error,
    unfused_truth,
)

# Unit roundoff of bfloat16; in the others the roundoff of a few operations.
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-8}


def from_logits(case: Case, dtype: torch.dtype) -> Case:
    """The case with its logits rounded to `dtype`, as hidden = 1: truth and kernel see the same
    numbers.
    """
    logits = case.logits.to(dtype).double()
    return replace(
        case, hidden=torch.eye(len(logits), dtype=torch.float64), weight=logits.T.contiguous()
    )


def lose_rows(device, case, objective, dtype):
    """(loss, statistics, d_logits) of rows that lie as the LM head lays them out."""
    inputs = case.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    logits = empty_rows(torch.empty(0, device=device, dtype=dtype), *case.logits.shape)
    logits.copy_(case.logits)
    shard = vocab_shard(logits.shape[1], 0, case.vocab_valid, None)
    outputs = dispatch.policy_rows_(
        logits, inputs.labels, inputs.token_terms, objective, shard, case.temperature
    )
    stats = PolicyStats(*outputs[1:])
    if objective.kl_kind is None:
        stats = replace(stats, ref_kl=None)
    return outputs[0].sum(), stats, logits


# Below a block, a block, off by one on either side, odd, and more than one block of padding behind
# the valid columns.
WIDTHS = [(1, 1), (97, 97), (256, 256), (257, 257), (511, 511), (768, 700), (1300, 255), (600, 513)]


@pytest.mark.parametrize(("vocab", "valid"), WIDTHS)
def test_logprob_and_entropy_of_any_vocabulary(backend, vocab, valid):
    for dtype in (backend.dtype, torch.bfloat16):
        case = from_logits(make_case(5, vocab, 8, vocab_valid=valid, seed=vocab), dtype)
        logits = case.logits.requires_grad_()
        expected = logprob_entropy_truth(logits, case.labels, case.temperature, valid)
        random = torch.Generator().manual_seed(1)
        upstream = torch.randn(2, 5, generator=random, dtype=torch.float64)
        (expected_grad,) = torch.autograd.grad(expected, logits, tuple(upstream))
        logits = case.logits.to(backend.device, dtype).requires_grad_()
        actual = logprob_entropy(
            logits, case.labels.to(backend.device), temperature=case.temperature, vocab_valid=valid
        )
        upstream = upstream.to(backend.device, actual[0].dtype)
        (grad,) = torch.autograd.grad(actual, logits, tuple(upstream))
        for ours, truth in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours.cpu().double(), truth.detach(), rtol=1e-5, atol=1e-5)
        assert relative_error(grad, expected_grad) < ROUNDING[dtype] or vocab == 1
        assert not grad[:, valid:].any()


@pytest.mark.parametrize("width", [151936, 151936 // 2, 151936 // 4, 151936 // 8, 151937, 32768])
def test_vocabularies_of_models_in_blocks_as_launched(kernel_device, width):
    """Qwen2.5's padded vocabulary, its shards, an odd and an even number of blocks."""
    valid = width - 271 if width == 151936 else width  # the entries that Qwen2.5's tokenizer has
    case = make_case(3, width, 4, vocab_valid=valid, active=1.0, seed=width)
    case = from_logits(case, torch.bfloat16)
    truth = unfused_truth(case, OBJECTIVES["everything"])
    _, stats, d_logits = lose_rows(kernel_device, case, OBJECTIVES["everything"], torch.bfloat16)
    assert relative_error(d_logits, truth.d_logits) < ROUNDING[torch.bfloat16]
    assert not d_logits[:, valid:].any()
    assert_stats(stats, truth.stats, 1e-5)
    actual = logprob_entropy(
        case.logits.to(kernel_device, torch.bfloat16),
        case.labels.to(kernel_device),
        temperature=case.temperature,
        vocab_valid=valid,
    )
    for ours, expected in zip(actual, (truth.logprobs, truth.entropy), strict=True):
        torch.testing.assert_close(ours.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TOKEN_OBJECTIVES)
def test_policy_rows_of_every_objective(backend, name):
    for dtype in (backend.dtype, torch.bfloat16):
        case = make_case(7, 700, 8, vocab_valid=650, active=1.0, seed=len(name))
        case, objective = from_logits(case, dtype), OBJECTIVES[name]
        truth = unfused_truth(case, objective)
        loss, stats, d_logits = lose_rows(backend.device, case, objective, dtype)
        # its terms are up to 1 and may cancel
        torch.testing.assert_close(loss.cpu().double(), truth.loss, rtol=1e-5, atol=1e-6)
        assert relative_error(d_logits, truth.d_logits) < ROUNDING[dtype]
        assert not d_logits[:, 650:].any()
        assert_stats(stats, truth.stats, 1e-5)


def test_low_temperature_does_not_overflow(backend):
    case = from_logits(make_case(4, 300, 8, temperature=0.01, seed=4), torch.float32)
    logits = case.logits.to(backend.device, torch.float32)
    actual = logprob_entropy(logits, case.labels.to(backend.device), temperature=0.01)
    truth = logprob_entropy_truth(case.logits, case.labels, 0.01, None)
    for ours, expected in zip(actual, truth, strict=True):
        torch.testing.assert_close(ours.cpu().double(), expected, rtol=1e-4, atol=1e-3)


def test_every_output_is_written(backend, monkeypatch):
    """Float buffers start as NaN: what is finite afterwards was written."""
    new_empty = torch.Tensor.new_empty

    def new_poison(self, *args, **kwargs):
        buffer = new_empty(self, *args, **kwargs)
        return buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer

    monkeypatch.setattr(torch.Tensor, "new_empty", new_poison)
    case = from_logits(make_case(6, 300, 8, seed=5, active=1.0), torch.float32)
    truth = unfused_truth(case, OBJECTIVES["everything"])
    loss, stats, d_logits = lose_rows(backend.device, case, OBJECTIVES["everything"], torch.float32)
    assert relative_error(loss, truth.loss) < 1e-5
    assert relative_error(d_logits, truth.d_logits) < 1e-5
    assert_stats(stats, truth.stats, 1e-5)


@pytest.fixture(params=["reference", "triton_token"])
def token_losses(request):
    """The token objective of each implementation, and its device."""
    is_triton = request.param == "triton_token"
    device = request.getfixturevalue("small_blocks") if is_triton else "cpu"
    return import_module(f"ragen_kernels.{request.param}").token_losses, device


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_ratio_exactly_at_the_clip_bound_keeps_its_gradient(token_losses, advantage):
    lose, device = token_losses
    logprobs = torch.tensor([-1.5, -0.25, -30.0, -1.0], device=device)
    old = torch.tensor([-1.5, -0.25, -1.0, -30.0], device=device)  # the last two beyond the clamp
    ones = torch.ones(4, device=device)
    terms = TokenTerms(old, advantage * ones, ones, None, None)
    outputs, d_logprobs, _ = lose(logprobs, ones, terms, PolicyObjective(0.0, 0.0))
    assert d_logprobs.tolist() == [-advantage, -advantage, 0.0, 0.0]
    stats = PolicyStats(*outputs[1:])
    assert not stats.is_clipped_low[:2].any() and not stats.is_clipped_high[:2].any()
    assert stats.ratio.isfinite().all()


def test_cispo_bounds_the_ratio_whatever_the_sign(token_losses):
    lose, device = token_losses
    ones = torch.ones(4, device=device)
    old = torch.tensor([-2.0, -2.0, 0.0, 0.0], device=device)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], device=device)
    terms = TokenTerms(old, advantages, ones, None, None)
    outputs, slopes, _ = lose(-ones, ones, terms, PolicyObjective(0.2, 0.3, surrogate="cispo"))
    torch.testing.assert_close(slopes.cpu(), torch.tensor([-1.3, 1.3, -0.8, 0.8]))
    stats = PolicyStats(*outputs[1:])
    assert stats.is_clipped_high.tolist() == [1, 1, 0, 0]
    assert stats.is_clipped_low.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_beyond_the_clamp_the_reference_gives_no_gradient(token_losses, kind):
    lose, device = token_losses
    logprobs = torch.tensor([-1.0, -30.0, -1.0], device=device)
    ref = torch.tensor([-30.0, -1.0, -2.0], device=device)  # the last is inside
    zeros, ones = torch.zeros(3, device=device), torch.ones(3, device=device)
    terms = TokenTerms(logprobs, zeros, ones, ref, None)
    objective = PolicyObjective(kl_kind=kind, kl_coef=1.0)
    outputs, d_logprobs, _ = lose(logprobs, ones, terms, objective)
    d = torch.tensor([20.0, -20.0, 1.0], dtype=torch.float64)
    expected = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[kind]
    torch.testing.assert_close(outputs[-1].cpu().double(), expected, rtol=1e-5, atol=1e-6)
    slope = {"k1": 1.0, "k2": 1.0, "k3": 1 - torch.tensor(-1.0).exp()}[kind]
    torch.testing.assert_close(d_logprobs.cpu(), torch.tensor([0.0, 0.0, slope]))


@pytest.mark.parametrize("name", TOKEN_OBJECTIVES)
def test_token_losses_of_several_blocks(token_losses, name):
    """Those that work on tokens alone: loss and statistics against unfused float64, derivatives
    against the definition's.
    """
    lose, device = token_losses
    case, objective = make_case(37, seed=8, active=1.0), OBJECTIVES[name]
    truth, inputs = unfused_truth(case, objective), case.to(device, torch.float32)
    rows = truth.logprobs, truth.entropy
    expected = reference.token_losses(*rows, case.token_terms, objective)
    actual = lose(*(x.float().to(device) for x in rows), inputs.token_terms, objective)
    assert (actual[2] is None) is (expected[2] is None) is (objective.entropy_coef == 0)
    for ours, exact in zip(actual, expected, strict=True):
        assert exact is None or relative_error(ours, exact) < 1e-5
    assert relative_error(actual[0][0].sum(), truth.loss) < 1e-5
    stats = PolicyStats(*actual[0][1:])
    assert_stats(
        replace(stats, ref_kl=None) if objective.kl_kind is None else stats, truth.stats, 1e-5
    )


@pytest.mark.parametrize(("num_shards", "valid"), [(2, 512), (4, 505), (4, 300)])
def test_tensor_parallel_shards(backend, num_shards, valid):
    """Shards of one vocabulary, the last partly or wholly padding, combined by hand instead of by a
    collective.
    """
    width = 512 // num_shards
    case = from_logits(make_case(5, 512, 8, vocab_valid=valid, seed=valid), torch.float32)
    labels = torch.tensor([0, width - 1, width, valid - 1, case.labels[4]])  # columns at the edges
    logits = case.logits.requires_grad_()
    outputs = logprob_entropy_truth(logits, labels, case.temperature, valid)
    upstream = torch.randn(2, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (expected,) = torch.autograd.grad(outputs, logits, tuple(upstream))
    labels = labels.to(backend.device)
    logits = case.logits.to(backend.device, torch.float32)
    pieces = [piece.contiguous() for piece in logits.split(width, dim=1)]
    shards = [
        VocabShard(i * width, min(max(valid - i * width, 0), width), valid, None)
        for i in range(num_shards)
    ]
    local = [
        dispatch.row_statistics(x, labels, shard, case.temperature)
        for x, shard in zip(pieces, shards, strict=True)
    ]
    rows = combine_shards(*(torch.stack(column) for column in zip(*local, strict=True)))
    for ours, truth in zip((rows.logprobs, rows.entropy), outputs, strict=True):
        torch.testing.assert_close(ours.cpu().double(), truth.detach(), rtol=1e-5, atol=1e-5)
    derivatives = upstream.float().to(backend.device)
    for piece, shard in zip(pieces, shards, strict=True):
        dispatch.logits_gradient(piece, piece, labels, rows, *derivatives, shard, case.temperature)
    assert relative_error(torch.cat(pieces, dim=1), expected) < 1e-5


def test_label_outside_the_vocabulary_is_nan(small_blocks):
    labels = torch.tensor([0, -100, 300, 299, 257], device=small_blocks)
    logprobs, entropy = logprob_entropy(
        torch.zeros(5, 300, device=small_blocks), labels, vocab_valid=257
    )
    assert logprobs.isnan().tolist() == [False, True, True, True, True]
    assert entropy.isfinite().all()


def test_rows_may_be_strided(backend):
    case = from_logits(make_case(4, 300, 8, seed=9), torch.bfloat16)
    buffer = torch.full((4, 331), float("nan"), dtype=torch.bfloat16, device=backend.device)
    buffer[:, 3:303] = case.logits.bfloat16()
    actual = logprob_entropy(
        buffer[:, 3:303], case.labels.to(backend.device), temperature=case.temperature
    )
    truth = logprob_entropy_truth(case.logits, case.labels, case.temperature, None)
    for ours, expected in zip(actual, truth, strict=True):
        torch.testing.assert_close(ours.cpu().double(), expected, rtol=1e-5, atol=1e-5)
