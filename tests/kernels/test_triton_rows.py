"""The row kernels against unfused float64 autograd: log-probability, entropy, policy loss and their
gradients.
"""

from dataclasses import replace

import pytest
import torch
from ragen_kernels import PolicyObjective
from ragen_kernels.vocab import VocabShard, combine_shards

from tests.kernels.kernel_cases import (
    OBJECTIVES,
    Case,
    assert_stats,
    check_poisoned_tokens,
    logprob_entropy_truth,
    make_case,
    relative_error,
    unfused_truth,
)

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # unit roundoff of bfloat16
BLOCK = 256
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def triton_policy(kernel_device, monkeypatch):
    """The module under test, its blocks so small that a short row has full blocks and a tail."""
    from ragen_kernels import triton_policy, triton_rows, triton_token

    monkeypatch.setattr(triton_rows, "BLOCK", BLOCK)
    monkeypatch.setattr(triton_policy, "BLOCK", BLOCK)
    monkeypatch.setattr(triton_token, "BLOCK", 16)
    return triton_policy


def from_logits(case: Case, dtype: torch.dtype) -> Case:
    """The case with its logits rounded to `dtype`, as hidden = 1: truth and kernel see the same
    numbers.
    """
    logits = case.logits.to(dtype).double()
    return replace(
        case, hidden=torch.eye(len(logits), dtype=torch.float64), weight=logits.T.contiguous()
    )


def on(device: str, case: Case) -> Case:
    return case.to(device, torch.float32)


def run_policy_loss(triton_policy, device, case, objective, dtype, logits=None):
    logits = (case.logits if logits is None else logits).to(device, dtype).requires_grad_()
    inputs = on(device, case)
    loss, stats = triton_policy.policy_loss(
        logits,
        torch.where(inputs.weights != 0, inputs.labels, -100),
        *inputs.constants,
        objective,
        **inputs.terms,
        temperature=case.temperature,
        vocab_valid=case.vocab_valid,
    )
    (2.0 * loss).backward()
    return loss, stats, logits.grad / 2.0


# Below a block, a block, off by one on either side, odd, and more than one block of padding behind
# the valid columns.
WIDTHS = [(1, 1), (97, 97), (256, 256), (257, 257), (511, 511), (768, 700), (1300, 255), (600, 513)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "valid"), WIDTHS)
def test_logprob_and_entropy_of_any_vocabulary(triton_policy, kernel_device, vocab, valid, dtype):
    case = from_logits(make_case(5, vocab, 8, vocab_valid=valid, seed=vocab), dtype)
    logits = case.logits.requires_grad_()
    expected = logprob_entropy_truth(logits, case.labels, case.temperature, valid)
    upstream = torch.randn(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected_grad,) = torch.autograd.grad(expected, logits, tuple(upstream))
    logits = case.logits.to(kernel_device, dtype).requires_grad_()
    actual = triton_policy.logprob_entropy(
        logits, case.labels.to(kernel_device), temperature=case.temperature, vocab_valid=valid
    )
    (grad,) = torch.autograd.grad(actual, logits, tuple(upstream.float().to(kernel_device)))
    for ours, truth in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), truth.detach(), rtol=1e-5, atol=1e-5)
    assert relative_error(grad, expected_grad) < ROUNDING[dtype] or vocab == 1
    assert not grad[:, valid:].any()


@pytest.mark.parametrize("width", [151936, 151936 // 2, 151936 // 4, 151936 // 8, 151937, 32768])
def test_vocabularies_of_models_in_blocks_as_launched(kernel_device, width):
    """Qwen2.5's padded vocabulary, its tensor-parallel shards, an odd and an even number of blocks."""
    from ragen_kernels import triton_policy

    valid = width - 271 if width == 151936 else width  # the entries that Qwen2.5's tokenizer has
    case = from_logits(
        make_case(3, width, 4, vocab_valid=valid, active=1.0, seed=width), torch.bfloat16
    )
    truth = unfused_truth(case, OBJECTIVES["everything"])
    loss, stats, d_logits = run_policy_loss(
        triton_policy, kernel_device, case, OBJECTIVES["everything"], torch.bfloat16
    )
    assert relative_error(d_logits, truth.d_logits) < ROUNDING[torch.bfloat16]
    assert not d_logits[:, valid:].any()
    assert_stats(stats, truth.stats, 1e-5)
    logprobs, entropy = triton_policy.logprob_entropy(
        case.logits.to(kernel_device, torch.bfloat16),
        case.labels.to(kernel_device),
        temperature=case.temperature,
        vocab_valid=valid,
    )
    torch.testing.assert_close(logprobs.cpu().double(), truth.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.cpu().double(), truth.entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_policy_loss_of_every_objective(triton_policy, kernel_device, name, dtype):
    case, objective = (
        from_logits(make_case(7, 700, 8, vocab_valid=650, seed=len(name)), dtype),
        OBJECTIVES[name],
    )
    truth = unfused_truth(case, objective)
    loss, stats, d_logits = run_policy_loss(triton_policy, kernel_device, case, objective, dtype)
    assert relative_error(loss, truth.loss) < 1e-5
    assert relative_error(d_logits, truth.d_logits) < ROUNDING[dtype]
    assert not d_logits[case.weights.to(kernel_device) == 0].any()
    assert_stats(stats, truth.stats, 1e-5)


@pytest.mark.parametrize(("scale", "shift"), [(30.0, 0.0), (1.0, -200.0)])
def test_extreme_logits(triton_policy, kernel_device, scale, shift):
    case = from_logits(make_case(6, 520, 8, scale=scale, shift=shift, seed=3), torch.float32)
    truth = unfused_truth(case, OBJECTIVES["k3"])
    loss, stats, d_logits = run_policy_loss(
        triton_policy, kernel_device, case, OBJECTIVES["k3"], torch.float32
    )
    assert relative_error(d_logits, truth.d_logits) < 1e-4
    assert_stats(stats, truth.stats, 1e-4)


def test_low_temperature_does_not_overflow(triton_policy, kernel_device):
    case = from_logits(make_case(4, 300, 8, temperature=0.01, seed=4), torch.float32)
    logits = case.logits.to(kernel_device, torch.float32)
    logprobs, entropy = triton_policy.logprob_entropy(
        logits, case.labels.to(kernel_device), temperature=0.01
    )
    truth = logprob_entropy_truth(case.logits, case.labels, 0.01, None)
    torch.testing.assert_close(logprobs.cpu().double(), truth[0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(entropy.cpu().double(), truth[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_all_rows_masked_or_none_there(triton_policy, kernel_device, num_tokens):
    case = from_logits(make_case(num_tokens, 300, 8, active=0.0), torch.float32)
    loss, stats, d_logits = run_policy_loss(
        triton_policy, kernel_device, case, OBJECTIVES["everything"], torch.float32
    )
    assert loss == 0 and not d_logits.any() and not stats.logprobs.any()


def test_poisoned_masked_rows_and_outputs(triton_policy, kernel_device, monkeypatch):
    """Rows of weight 0 hold NaN and float buffers start as NaN: what is finite afterwards, the
    kernels wrote.
    """
    new_empty = torch.Tensor.new_empty

    def new_poison(self, *args, **kwargs):
        buffer = new_empty(self, *args, **kwargs)
        return buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer

    monkeypatch.setattr(torch.Tensor, "new_empty", new_poison)
    case, objective = (
        from_logits(make_case(6, 300, 8, seed=5), torch.float32),
        OBJECTIVES["everything"],
    )
    truth = unfused_truth(case, objective)
    masked = case.weights == 0
    assert masked.any() and not masked.all()
    logits = torch.where(masked[:, None], torch.nan, case.logits)
    loss, stats, d_logits = run_policy_loss(
        triton_policy, kernel_device, case, objective, torch.float32, logits
    )
    assert (
        relative_error(loss, truth.loss) < 1e-5 and relative_error(d_logits, truth.d_logits) < 1e-5
    )
    assert_stats(stats, truth.stats, 1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ratio_exactly_at_the_clip_bound_keeps_its_gradient(kernel_device, advantage):
    from ragen_kernels.triton_token import policy_loss_from_logprobs

    logprobs = torch.tensor([-1.5, -0.25, -30.0], device=kernel_device, requires_grad=True)
    ones = torch.ones(3, device=kernel_device)
    old = torch.tensor(
        [-1.5, -0.25, -1.0], device=kernel_device
    )  # the last lies beyond the clamp of the log-ratio
    loss, stats = policy_loss_from_logprobs(
        logprobs, ones, old, advantage * ones, ones, PolicyObjective(0.0, 0.0)
    )
    loss.backward()
    assert logprobs.grad.tolist() == [-advantage, -advantage, 0.0]
    assert not stats.is_clipped_low[:2].any() and not stats.is_clipped_high[:2].any()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_beyond_the_clamp_the_reference_gives_no_gradient(kernel_device, kind):
    from ragen_kernels.triton_token import policy_loss_from_logprobs

    logprobs = torch.tensor([-1.0, -30.0, -1.0], device=kernel_device, requires_grad=True)
    ref = torch.tensor([-30.0, -1.0, -2.0], device=kernel_device)  # the last is inside
    nothing, ones = torch.zeros(3, device=kernel_device), torch.ones(3, device=kernel_device)
    objective = PolicyObjective(kl_kind=kind, kl_coef=1.0)
    loss, stats = policy_loss_from_logprobs(
        logprobs, ones, logprobs.detach(), nothing, ones, objective, ref_logprobs=ref
    )
    loss.backward()
    d = torch.tensor([20.0, -20.0, 1.0], dtype=torch.float64)
    expected = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[kind]
    torch.testing.assert_close(stats.ref_kl.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    slope = {"k1": 1.0, "k2": 1.0, "k3": 1 - torch.tensor(-1.0).exp()}[kind]
    torch.testing.assert_close(logprobs.grad.cpu(), torch.tensor([0.0, 0.0, slope]))


@pytest.mark.parametrize("name", ["k1", "k2", "everything"])
def test_token_kernel(triton_policy, kernel_device, name):
    from ragen_kernels.triton_token import policy_loss_from_logprobs

    case, objective = make_case(37, seed=8), OBJECTIVES[name]
    truth = unfused_truth(case, objective)
    inputs = on(kernel_device, case)
    logprobs, entropy = (
        x.float().to(kernel_device).requires_grad_() for x in (truth.logprobs, truth.entropy)
    )
    loss, stats = policy_loss_from_logprobs(
        logprobs, entropy, *inputs.constants, objective, **inputs.terms
    )
    (-3 * loss).backward()
    assert relative_error(loss, truth.loss) < 1e-5
    assert_stats(stats, truth.stats, 1e-5)
    from ragen_kernels.reference import policy_loss_from_logprobs as reference

    exact = [x.clone().requires_grad_() for x in (truth.logprobs, truth.entropy)]
    (-3 * reference(*exact, *case.constants, objective, **case.terms)[0]).backward()
    assert (
        relative_error(logprobs.grad, exact[0].grad) < 1e-5
        and relative_error(entropy.grad, exact[1].grad) < 1e-5
    )


def test_token_kernel_ignores_poisoned_tokens(triton_policy, kernel_device):
    from ragen_kernels.triton_token import policy_loss_from_logprobs

    check_poisoned_tokens(policy_loss_from_logprobs, kernel_device)


@pytest.mark.parametrize(("num_shards", "valid"), [(2, 512), (4, 505), (4, 300)])
def test_tensor_parallel_shards(triton_policy, kernel_device, num_shards, valid):
    """Shards of one vocabulary, the last partly or wholly padding, combined by hand instead of by a
    collective.
    """
    from ragen_kernels.triton_rows import launch_gradient, launch_statistics

    width = 512 // num_shards
    case = from_logits(make_case(5, 512, 8, vocab_valid=valid, seed=valid), torch.float32)
    case = replace(
        case, labels=torch.tensor([0, width - 1, width, valid - 1, case.labels[4]])
    )  # first and last columns
    logits = case.logits.requires_grad_()
    outputs = logprob_entropy_truth(logits, case.labels, case.temperature, valid)
    upstream = torch.randn(2, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (expected,) = torch.autograd.grad(outputs, logits, tuple(upstream))
    labels = case.labels.to(kernel_device)
    pieces = [
        piece.contiguous() for piece in case.logits.float().to(kernel_device).split(width, dim=1)
    ]
    shards = [
        VocabShard(i * width, min(max(valid - i * width, 0), width), valid, None)
        for i in range(num_shards)
    ]
    local = [
        launch_statistics(x, labels, shard, case.temperature)
        for x, shard in zip(pieces, shards, strict=True)
    ]
    rows = combine_shards(
        *(
            torch.stack([getattr(part, name) for part in local])
            for name in ("lse", "mean", "target")
        )
    )
    torch.testing.assert_close(
        rows.logprobs.cpu().double(), outputs[0].detach(), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        rows.entropy.cpu().double(), outputs[1].detach(), rtol=1e-5, atol=1e-5
    )
    d_logprobs, d_entropy = upstream.float().to(kernel_device)
    for piece, shard in zip(pieces, shards, strict=True):
        launch_gradient(piece, piece, labels, rows, d_logprobs, d_entropy, shard, case.temperature)
    assert relative_error(torch.cat(pieces, dim=1), expected) < 1e-5


def test_label_outside_the_vocabulary_is_nan(triton_policy, kernel_device):
    labels = torch.tensor([0, -100, 300, 299, 257], device=kernel_device)
    logprobs, entropy = triton_policy.logprob_entropy(
        torch.zeros(5, 300, device=kernel_device), labels, vocab_valid=257
    )
    assert logprobs.isnan().tolist() == [False, True, True, True, True]
    assert entropy.isfinite().all()


@pytest.mark.parametrize("inplace", [False, True])
def test_backward_in_place_is_a_choice_and_runs_once(triton_policy, kernel_device, inplace):
    logits = torch.randn(3, 300, device=kernel_device, requires_grad=True)
    copy = logits.detach().clone()
    labels = torch.tensor([1, 2, 3], device=kernel_device)
    logprobs, _ = triton_policy.logprob_entropy(logits, labels, inplace_backward=inplace)
    (grad,) = torch.autograd.grad(logprobs.sum(), logits, retain_graph=True)
    expected = torch.nn.functional.one_hot(labels, 300) - torch.softmax(copy, dim=1)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)
    assert (grad.data_ptr() == logits.data_ptr()) is inplace
    if inplace:
        with pytest.raises(RuntimeError, match="inplace"):
            torch.autograd.grad(logprobs.sum(), logits)
    else:
        assert torch.equal(torch.autograd.grad(logprobs.sum(), logits)[0], grad)


def test_gradient_of_policy_loss_is_handed_out_once(triton_policy, kernel_device):
    case = on(kernel_device, make_case(3, 60))
    logits = case.logits.requires_grad_()
    loss, _ = triton_policy.policy_loss(logits, case.labels, *case.constants, PolicyObjective())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out"):
        loss.backward()


def test_rows_may_be_strided(triton_policy, kernel_device):
    case = from_logits(make_case(4, 300, 8, seed=9), torch.bfloat16)
    buffer = torch.full((4, 331), float("nan"), dtype=torch.bfloat16, device=kernel_device)
    buffer[:, 3:303] = case.logits.bfloat16()
    logprobs, entropy = triton_policy.logprob_entropy(
        buffer[:, 3:303], case.labels.to(kernel_device), temperature=case.temperature
    )
    truth = logprob_entropy_truth(case.logits, case.labels, case.temperature, None)
    torch.testing.assert_close(logprobs.cpu().double(), truth[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.cpu().double(), truth[1], rtol=1e-5, atol=1e-5)
