"""The fused LM head on Triton against unfused float64 autograd."""

import pytest
import torch
from ragen_kernels import PolicyObjective

from tests.kernels.kernel_cases import (
    OBJECTIVES,
    assert_stats,
    make_case,
    relative_error,
    unfused_truth,
)

MODES = ("save", "chunk", "recompute")


@pytest.fixture
def triton_linear(kernel_device, monkeypatch):
    from ragen_kernels import triton_linear, triton_policy, triton_rows

    monkeypatch.setattr(triton_rows, "BLOCK", 128)
    monkeypatch.setattr(triton_policy, "BLOCK", 128)
    return triton_linear


def run(triton_linear, device, case, objective, dtype, **options):
    inputs = case.to(device, dtype)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    loss, stats = triton_linear.linear_policy_loss(
        hidden,
        weight,
        torch.where(inputs.weights != 0, inputs.labels, -100),
        *inputs.constants,
        objective,
        **inputs.terms,
        temperature=case.temperature,
        vocab_valid=case.vocab_valid,
        **options,
    )
    (2.0 * loss).backward()
    return loss, stats, hidden.grad / 2, weight.grad / 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["clip", "everything"])
def test_loss_and_gradients_in_float32(triton_linear, kernel_device, name, mode):
    case, objective = make_case(21, 301, 16, vocab_valid=290, seed=1), OBJECTIVES[name]
    truth = unfused_truth(case, objective)
    loss, stats, d_hidden, d_weight = run(
        triton_linear, kernel_device, case, objective, torch.float32, mode=mode, chunk_tokens=5
    )
    assert relative_error(loss, truth.loss) < 1e-5
    assert relative_error(d_hidden, truth.d_hidden) < 1e-5
    assert relative_error(d_weight, truth.d_weight) < 1e-5
    assert not d_weight[290:].any() and not d_hidden[case.weights.to(kernel_device) == 0].any()
    assert_stats(stats, truth.stats, 1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fp32_logits", [False, True])
def test_bf16_operands(triton_linear, kernel_device, fp32_logits, mode):
    case, objective = (
        make_case(21, 300, 16, seed=2, dtype=torch.bfloat16, active=1.0),
        OBJECTIVES["everything"],
    )
    truth = unfused_truth(case, objective)
    loss, stats, d_hidden, d_weight = run(
        triton_linear,
        kernel_device,
        case,
        objective,
        torch.bfloat16,
        mode=mode,
        chunk_tokens=8,
        fp32_logits=fp32_logits,
    )
    assert d_hidden.dtype == d_weight.dtype == torch.bfloat16
    # Rounded logits of about 3 are off by up to 2^-8; only float32 logits deserve the tight bounds.
    assert_stats(stats, truth.stats, 1e-5 if fp32_logits else 2e-2)
    tolerance = 4e-3 if fp32_logits else 1e-2
    assert relative_error(d_hidden, truth.d_hidden) < tolerance
    assert relative_error(d_weight, truth.d_weight) < tolerance


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [0, 6])
def test_without_an_active_row(triton_linear, kernel_device, num_tokens, mode):
    case = make_case(num_tokens, 60, 8, active=0.0)
    inputs = case.to(kernel_device, torch.float32)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    loss, stats = triton_linear.linear_policy_loss(
        hidden, weight, inputs.labels, *inputs.constants, PolicyObjective(), mode=mode
    )
    loss.backward()
    assert (
        loss == 0
        and not hidden.grad.any()
        and not weight.grad.any()
        and stats.ratio.shape == (num_tokens,)
    )


@pytest.mark.parametrize("mode", MODES)
def test_rows_without_weight_never_reach_a_gemm(triton_linear, kernel_device, mode):
    """In a GEMM a NaN of theirs times a gradient of 0 would be NaN in d_weight."""
    case = make_case(21, 60, 8, seed=5)
    truth, inputs = unfused_truth(case, PolicyObjective()), case.to(kernel_device, torch.float32)
    masked = inputs.weights == 0
    assert masked.any() and not masked.all()
    hidden = torch.where(masked[:, None], torch.nan, inputs.hidden).requires_grad_()
    weight = inputs.weight.requires_grad_()
    loss, _ = triton_linear.linear_policy_loss(
        hidden,
        weight,
        inputs.labels,
        *inputs.constants,
        PolicyObjective(),
        temperature=case.temperature,
        mode=mode,
    )
    loss.backward()
    assert (
        relative_error(loss, truth.loss) < 1e-5
        and relative_error(weight.grad, truth.d_weight) < 1e-5
    )
    assert relative_error(hidden.grad, truth.d_hidden) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_handed_out_once_except_by_recompute(triton_linear, kernel_device, mode):
    inputs = make_case(5, 60, 8, active=1.0).to(kernel_device, torch.float32)
    leaves = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    loss, _ = triton_linear.linear_policy_loss(
        *leaves, inputs.labels, *inputs.constants, PolicyObjective(), mode=mode
    )
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    if mode == "recompute":
        assert all(map(torch.equal, first, torch.autograd.grad(loss, leaves)))
    else:
        with pytest.raises(RuntimeError, match="handed out"):
            torch.autograd.grad(loss, leaves)


def test_linear_logprobs(triton_linear, kernel_device):
    case = make_case(11, 301, 16, vocab_valid=300, seed=3)
    truth = unfused_truth(case, PolicyObjective())
    inputs, active = case.to(kernel_device, torch.float32), (case.weights != 0).to(kernel_device)
    logprobs, entropy = triton_linear.linear_logprobs(
        inputs.hidden,
        inputs.weight,
        inputs.labels,
        temperature=case.temperature,
        vocab_valid=300,
        active=active,
        with_entropy=True,
        chunk_tokens=4,
    )
    keep = active.cpu()
    torch.testing.assert_close(
        logprobs.cpu().double(), torch.where(keep, truth.logprobs, 0), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        entropy.cpu().double(), torch.where(keep, truth.entropy, 0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("vocab", [97, 151936, 151937, 151944])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_any_vocabulary_are_aligned(triton_linear, vocab, dtype):
    """Triton learns of a stride only whether 16 divides it, elements not bytes; else it loads
    element by element.
    """
    from ragen_kernels.triton_policy import has_aligned_rows

    rows = triton_linear.empty_rows(torch.empty(0), 3, vocab, dtype)
    assert rows.shape == (3, vocab) and has_aligned_rows(rows) and not has_aligned_rows(rows[:, 1:])


def test_default_chunks_are_whole_tiles_of_equal_size(triton_linear):
    from ragen_kernels.vocab import vocab_shard

    shard = vocab_shard(151936, 0, None, None)
    sizes = [part.stop - part.start for part in triton_linear.chunk_rows(8192, shard, 2, None)]
    assert sizes == [2048] * 4
    sizes = [part.stop - part.start for part in triton_linear.chunk_rows(2457, shard, 2, None)]
    assert sizes == [1280, 1177]
    assert 2048 * 151936 * 2 < 0.7 * 2**30
