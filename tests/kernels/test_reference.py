"""The plain-torch definitions against unfused float64 autograd."""

from dataclasses import replace

import pytest
import torch
from ragen_kernels import PolicyObjective
from ragen_kernels.reference import logprob_entropy, policy_loss, policy_loss_from_logprobs
from ragen_kernels.reference_linear import linear_logprobs, linear_policy_loss

from tests.kernels.kernel_cases import (
    OBJECTIVES,
    assert_stats,
    check_poisoned_tokens,
    make_case,
    relative_error,
    unfused_truth,
)

MODES = ("save", "chunk", "recompute")


def fused(case, objective, upstream=1.0, **options):
    """Loss, statistics and (d_hidden, d_weight) of the fused reference, gradients divided by
    `upstream` again.
    """
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    loss, stats = linear_policy_loss(
        hidden,
        weight,
        case.labels,
        *case.constants,
        objective,
        **case.terms,
        temperature=case.temperature,
        vocab_valid=case.vocab_valid,
        **options,
    )
    (loss * upstream).backward()
    return loss, stats, hidden.grad / upstream, weight.grad / upstream


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_fused_gradient_is_the_unfused_gradient(name, mode):
    case, objective = make_case(seed=len(name), vocab_valid=50), OBJECTIVES[name]
    truth = unfused_truth(case, objective)
    loss, stats, d_hidden, d_weight = fused(
        case, objective, upstream=-3.0, mode=mode, chunk_tokens=5
    )
    assert relative_error(loss, truth.loss) < 1e-12
    assert relative_error(d_hidden, truth.d_hidden) < 1e-12
    assert relative_error(d_weight, truth.d_weight) < 1e-12
    assert_stats(stats, truth.stats, 1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_logits_in_gradient_is_the_unfused_gradient(name):
    case, objective = make_case(seed=7, vocab_valid=41), OBJECTIVES[name]
    truth = unfused_truth(case, objective)
    logits = case.logits.requires_grad_()
    loss, stats = policy_loss(
        logits,
        torch.where(case.weights != 0, case.labels, -100),
        *case.constants,
        objective,
        **case.terms,
        temperature=case.temperature,
        vocab_valid=case.vocab_valid,
    )
    loss.backward()
    assert relative_error(loss, truth.loss) < 1e-12
    assert relative_error(logits.grad, truth.d_logits) < 1e-12
    assert_stats(stats, truth.stats, 1e-6)


def test_every_branch_of_the_objective_is_taken():
    case = make_case(num_tokens=400, seed=1)
    stats = unfused_truth(case, OBJECTIVES["everything"]).stats
    for name in ("is_clipped_low", "is_clipped_high", "is_dual_clipped"):
        assert 0 < stats[name].mean() < 0.5, name
    assert (stats["importance"] < 1.05).any()


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_ratio_exactly_at_the_clip_bound_keeps_its_gradient(advantage):
    logprobs = torch.tensor([-1.5, -0.25], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(2, dtype=torch.float64)
    loss, stats = policy_loss_from_logprobs(
        logprobs, ones, logprobs.detach(), advantage * ones, ones, PolicyObjective(0.0, 0.0)
    )
    loss.backward()
    assert torch.equal(logprobs.grad, -advantage * ones)
    assert not stats.is_clipped_low.any() and not stats.is_clipped_high.any()


def test_log_ratio_beyond_the_clamp_has_no_gradient():
    logprobs = torch.tensor([-30.0, -1.0], requires_grad=True)
    loss, stats = policy_loss_from_logprobs(
        logprobs,
        torch.zeros(2),
        torch.tensor([-1.0, -30.0]),
        torch.ones(2),
        torch.ones(2),
        PolicyObjective(),
    )
    loss.backward()
    assert torch.equal(logprobs.grad, torch.zeros(2))
    assert torch.isfinite(stats.ratio).all()


def test_nothing_of_an_inactive_token_leaks():
    case = make_case(seed=3)
    truth = unfused_truth(case, OBJECTIVES["everything"])
    masked = case.weights == 0
    hidden = torch.where(masked[:, None], torch.nan, case.hidden)
    poisoned = replace(
        case, hidden=hidden, advantages=torch.where(masked, torch.nan, case.advantages)
    )
    loss, stats, d_hidden, d_weight = fused(poisoned, OBJECTIVES["everything"])
    assert relative_error(loss, truth.loss) < 1e-12
    assert (
        relative_error(d_hidden, truth.d_hidden) < 1e-12
        and relative_error(d_weight, truth.d_weight) < 1e-12
    )
    assert_stats(stats, truth.stats, 1e-6)


def test_poisoned_tokens_are_ignored():
    check_poisoned_tokens(policy_loss_from_logprobs, "cpu")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [0, 9])
def test_without_an_active_row_loss_and_gradients_are_zero(mode, num_tokens):
    case = make_case(num_tokens=num_tokens, active=0.0)
    loss, stats, d_hidden, d_weight = fused(case, OBJECTIVES["everything"], mode=mode)
    assert loss == 0 and not d_hidden.any() and not d_weight.any()
    assert stats.logprobs.shape == (num_tokens,) and not stats.entropy.any()


@pytest.mark.parametrize(("scale", "shift", "tolerance"), [(30.0, 0.0, 1e-5), (1.0, -200.0, 2e-3)])
def test_extreme_logits_in_float32(scale, shift, tolerance):
    """The shift multiplies the rounding of sum(d_logits) = 0 by 200 in one column of d_hidden;
    hence its tolerance.
    """
    case = make_case(scale=scale, shift=shift, dtype=torch.float32, seed=5)
    truth = unfused_truth(case, OBJECTIVES["k3"])
    loss, stats, d_hidden, d_weight = fused(case.to("cpu", torch.float32), OBJECTIVES["k3"])
    assert (
        relative_error(d_hidden, truth.d_hidden) < tolerance
        and relative_error(d_weight, truth.d_weight) < tolerance
    )
    assert_stats(stats, truth.stats, 1e-4)


def test_bf16_operands_keep_float32_arithmetic():
    case = make_case(dtype=torch.bfloat16, seed=6, num_tokens=60)
    truth = unfused_truth(case, OBJECTIVES["k3"])
    loss, stats, d_hidden, d_weight = fused(
        case.to("cpu", torch.bfloat16), OBJECTIVES["k3"], fp32_logits=True
    )
    assert d_hidden.dtype == d_weight.dtype == torch.bfloat16
    assert relative_error(loss, truth.loss) < 1e-5
    assert (
        relative_error(d_hidden, truth.d_hidden) < 3e-3
        and relative_error(d_weight, truth.d_weight) < 3e-3
    )
    rounded = replace(
        case,
        hidden=torch.eye(60, dtype=torch.float64),
        weight=case.logits.bfloat16().double().T.contiguous(),
    )
    _, stats, *_ = fused(case.to("cpu", torch.bfloat16), OBJECTIVES["k3"])
    assert_stats(stats, unfused_truth(rounded, OBJECTIVES["k3"]).stats, 1e-5)


def test_linear_logprobs_skips_inactive_rows():
    case = make_case(seed=8, vocab_valid=47)
    truth = unfused_truth(case, PolicyObjective())
    active = case.weights != 0
    labels = torch.where(active, case.labels, -100)
    logprobs, entropy = linear_logprobs(
        case.hidden,
        case.weight,
        labels,
        temperature=0.8,
        vocab_valid=47,
        active=active,
        with_entropy=True,
        chunk_tokens=4,
    )
    torch.testing.assert_close(logprobs, torch.where(active, truth.logprobs, 0), rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, torch.where(active, truth.entropy, 0), rtol=0, atol=1e-12)
    assert linear_logprobs(case.hidden, case.weight, case.labels)[1] is None


@pytest.mark.parametrize("inplace", [False, True])
def test_logprob_entropy_backward(inplace):
    case = make_case(seed=9)
    logits = case.logits.requires_grad_()
    d_logprobs, d_entropy = torch.randn(2, 23, dtype=torch.float64)
    expected = torch.autograd.functional.vjp(
        lambda x: (
            (torch.log_softmax(x / 0.8, 1)).gather(1, case.labels[:, None])[:, 0],
            torch.distributions.Categorical(logits=x / 0.8).entropy(),
        ),
        case.logits,
        (d_logprobs, d_entropy),
    )[1]
    outputs = logprob_entropy(logits, case.labels, temperature=0.8, inplace_backward=inplace)
    (actual,) = torch.autograd.grad(outputs, logits, (d_logprobs, d_entropy))
    assert relative_error(actual, expected) < 1e-12
    assert (actual.data_ptr() == logits.data_ptr()) is inplace


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"vocab_start": 53}, "vocab_start"),
        ({"vocab_valid": 54}, "vocab_valid"),
        ({"vocab_valid": 1}, "labels"),
    ],
)
def test_bad_vocabulary_arguments_are_refused(change, message):
    case = make_case()
    with pytest.raises(ValueError, match=message):
        logprob_entropy(case.logits, case.labels, **change)
    with pytest.raises(ValueError, match=message):
        linear_logprobs(case.hidden, case.weight, case.labels, **change)


def test_bad_linear_arguments_are_refused():
    case, objective = make_case(), PolicyObjective()
    with pytest.raises(ValueError, match="mode"):
        linear_policy_loss(
            case.hidden, case.weight, case.labels, *case.constants, objective, mode="fast"
        )
    with pytest.raises(ValueError, match="chunk_tokens"):
        linear_policy_loss(
            case.hidden, case.weight, case.labels, *case.constants, objective, chunk_tokens=0
        )
    with pytest.raises(ValueError, match="weight"):
        linear_policy_loss(case.hidden, case.weight.T, case.labels, *case.constants, objective)
    with pytest.raises(ValueError, match="one label per row"):
        linear_policy_loss(case.hidden, case.weight, case.labels[1:], *case.constants, objective)
