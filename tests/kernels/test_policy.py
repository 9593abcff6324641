"""The fused LM head, in plain torch and on Triton, against unfused float64 autograd."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from ragen_kernels import (
    Likeliest,
    PolicyObjective,
    linear_logprobs,
    linear_policy_loss,
    logprob_entropy,
)
from ragen_kernels.launch import CHUNK_BYTES
from ragen_kernels.policy import _active_rows, chunk_rows, empty_rows

from tests.kernels.kernel_cases import (
    OBJECTIVES,
    assert_stats,
    logprob_entropy_truth,
    logprobs_of,
    make_case,
    relative_error,
    unfused_truth,
)
from tests.support.padding import FinitePadding


def fused(case, objective, device, dtype, upstream=2.0, **options):
    """Loss, statistics and (d_hidden, d_weight), gradients divided by `upstream` again."""
    inputs = case.to(device, dtype)
    hidden, weight = (x.clone().requires_grad_() for x in (inputs.hidden, inputs.weight))
    loss, stats = linear_policy_loss(
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
    (loss * upstream).backward()
    return loss, stats, hidden.grad.double() / upstream, weight.grad.double() / upstream


def assert_gradients(actual, truth, tolerance):
    assert relative_error(actual[0], truth.d_hidden) < tolerance
    assert relative_error(actual[1], truth.d_weight) < tolerance


@pytest.mark.parametrize("name", OBJECTIVES)
def test_fused_gradient_is_the_unfused_gradient(backend, name):
    case, objective = make_case(21, 301, seed=len(name), vocab_valid=290), OBJECTIVES[name]
    truth = unfused_truth(case, objective)
    loss, stats, *gradients = fused(
        case, objective, backend.device, backend.dtype, upstream=-3.0, chunk_tokens=5
    )
    assert relative_error(loss, truth.loss) < backend.tolerance
    assert_gradients(gradients, truth, backend.tolerance)
    assert not gradients[1][290:].any() and not gradients[0][case.weights == 0].any()
    assert_stats(stats, truth.stats, max(1e-6, backend.tolerance))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_old_logprobs_those_of_the_evaluation_serve(backend, name):
    case, objective = make_case(21, 301, seed=len(name), vocab_valid=290), OBJECTIVES[name]
    own = unfused_truth(case, objective).stats["logprobs"].detach()
    truth = unfused_truth(replace(case, old_logprobs=own), objective)
    inputs = case.to(backend.device, backend.dtype)
    hidden, weight = (x.clone().requires_grad_() for x in (inputs.hidden, inputs.weight))
    loss, stats = linear_policy_loss(
        hidden,
        weight,
        inputs.labels,
        None,
        *inputs.constants[1:],
        objective,
        **inputs.terms,
        rows=inputs.weights.nonzero().squeeze(1),
        temperature=case.temperature,
        vocab_valid=case.vocab_valid,
    )
    loss.backward()
    active = inputs.weights != 0
    assert (stats.ratio[active] == 1).all() and not stats.kl.any()
    assert relative_error(loss, truth.loss) < backend.tolerance
    assert_gradients((hidden.grad.double(), weight.grad.double()), truth, backend.tolerance)
    assert_stats(stats, truth.stats, max(1e-6, backend.tolerance))


def test_gspo_is_the_objective_of_whole_sequences(backend):
    """arXiv:2507.18071 eq. (5): mean over sequences of min(s A, clip(s) A), with s as written there
    and the gradient of autograd through it.
    """
    case = make_case(21, 60, seed=9, active=1.0)
    ends = case.cu_seqlens.tolist()
    lengths = case.cu_seqlens.diff().long()
    owners = torch.arange(len(lengths)).repeat_interleave(lengths)
    num_sequences = int((lengths > 0).sum())
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.3, 1.5], dtype=torch.float64)
    case = replace(
        case, advantages=advantages[owners], weights=1 / (num_sequences * lengths[owners].double())
    )
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    logprobs, _ = logprob_entropy_truth(hidden @ weight.T, case.labels, case.temperature, None)
    log_ratio, losses = logprobs - case.old_logprobs, []
    for start, end, advantage in zip(ends, ends[1:], advantages):
        if end > start:
            s = (log_ratio[start:end].sum() / (end - start)).exp()
            losses.append(-torch.minimum(s * advantage, s.clamp(0.95, 1.1) * advantage))
    truth = torch.stack(losses).mean()
    truth.backward()
    objective = PolicyObjective(0.05, 0.1, surrogate="gspo")
    loss, _, *gradients = fused(case, objective, backend.device, backend.dtype, chunk_tokens=4)
    assert relative_error(loss, truth) < backend.tolerance
    for actual, exact in zip(gradients, (hidden.grad, weight.grad), strict=True):
        assert exact.any() and relative_error(actual, exact) < backend.tolerance


def test_every_branch_of_the_objective_is_taken():
    case = make_case(num_tokens=400, seed=1)
    stats = unfused_truth(case, OBJECTIVES["everything"]).stats
    for name in ("is_clipped_low", "is_clipped_high", "is_dual_clipped"):
        assert 0 < stats[name].mean() < 0.5, name
    assert (stats["importance"] < 1.05).any()
    masked = unfused_truth(case, OBJECTIVES["sequence mask"]).stats["importance"] == 0
    assert 0 < masked[case.weights != 0].double().mean() < 1


def test_nothing_of_an_inactive_token_leaks(backend):
    """In a GEMM a NaN of theirs times a gradient of 0 would be NaN in d_weight."""
    case, objective = make_case(31, seed=3), OBJECTIVES["everything"]
    truth, masked = unfused_truth(case, objective), case.weights == 0
    assert masked.any() and not masked.all()
    poison = {
        name: torch.where(masked, torch.nan, getattr(case, name))
        for name in ("old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs")
    }
    poisoned = replace(case, hidden=torch.where(masked[:, None], torch.nan, case.hidden), **poison)
    loss, stats, *gradients = fused(poisoned, objective, backend.device, backend.dtype)
    assert relative_error(loss, truth.loss) < backend.tolerance
    assert_gradients(gradients, truth, backend.tolerance)
    assert_stats(stats, truth.stats, max(1e-6, backend.tolerance))


@pytest.mark.parametrize("num_tokens", [0, 9])
def test_without_an_active_row_loss_and_gradients_are_zero(backend, num_tokens):
    case = make_case(num_tokens, active=0.0)
    loss, stats, d_hidden, d_weight = fused(
        case, OBJECTIVES["everything"], backend.device, backend.dtype
    )
    assert loss == 0 and not d_hidden.any() and not d_weight.any()
    assert stats.logprobs.shape == (num_tokens,) and not stats.entropy.any()


@pytest.mark.parametrize(("scale", "shift", "tolerance"), [(30.0, 0.0, 4e-5), (1.0, -200.0, 2e-3)])
def test_extreme_logits_in_float32(backend, scale, shift, tolerance):
    """exp(x) is off by |x| units of rounding, here 150 of 6e-8. The shift multiplies the rounding
    of sum(d_logits) = 0 by 200 in one column of d_hidden.
    """
    case = make_case(scale=scale, shift=shift, dtype=torch.float32, seed=5)
    truth = unfused_truth(case, OBJECTIVES["k3"])
    _, stats, *gradients = fused(case, OBJECTIVES["k3"], backend.device, torch.float32)
    assert_gradients(gradients, truth, tolerance)
    assert_stats(stats, truth.stats, 1e-4)


def test_bf16_operands(backend):
    """Logits are rounded once on CUDA, and have 16 bits on a processor; from there to the gradient
    of the logits all is float32.
    """
    case = make_case(60, 300, 16, dtype=torch.bfloat16, seed=6, active=1.0)
    objective = OBJECTIVES["everything"]
    _, stats, *gradients = fused(case, objective, backend.device, torch.bfloat16, chunk_tokens=16)
    # Rounded logits of about 3 are off by up to 2^-8.
    assert_gradients(gradients, unfused_truth(case, objective), 1e-2)
    rounded = replace(
        case,
        hidden=torch.eye(60, dtype=torch.float64),
        weight=case.logits.bfloat16().double().T.contiguous(),
    )
    if backend.device == "cpu":
        assert_stats(stats, unfused_truth(case, objective).stats, 1e-4)
    else:
        assert_stats(stats, unfused_truth(rounded, objective).stats, 1e-5)


def test_the_factor_of_the_loss_is_not_rounded(backend):
    """As bfloat16, 1/3 is off by 0.2 %; the roundings of single elements average out."""
    case = make_case(60, 300, 16, dtype=torch.bfloat16, seed=6, active=1.0)
    arguments = (case, OBJECTIVES["clip"], backend.device, torch.bfloat16)
    for once, third in zip(fused(*arguments)[2:], fused(*arguments, upstream=1 / 3)[2:]):
        assert abs(third.double().norm() / once.double().norm() - 1) < 1e-3


def test_a_retained_graph_gives_its_gradients_again(backend):
    inputs = make_case(5, 60, 8, active=1.0).to(backend.device, backend.dtype)
    leaves = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    loss, _ = linear_policy_loss(*leaves, inputs.labels, *inputs.constants, PolicyObjective())
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, leaves)))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_tokens_may_share_a_row(backend, name):
    """Several tokens behind one hidden state and label, in another order."""
    drawn, objective = make_case(21, 301, 16, seed=3, active=1.0), OBJECTIVES[name]
    repeats = torch.tensor([3, 1, 6, 1, 1, 7, 2])
    row_of = torch.arange(7).repeat_interleave(repeats)
    rows = torch.randperm(21, generator=torch.Generator().manual_seed(0))
    shared = replace(drawn, hidden=drawn.hidden[:7], labels=drawn.labels[:7])
    hidden, labels = torch.empty_like(drawn.hidden), torch.empty_like(drawn.labels)
    hidden[rows], labels[rows] = shared.hidden[row_of], shared.labels[row_of]
    truth = unfused_truth(replace(drawn, hidden=hidden, labels=labels), objective)
    inputs = shared.to(backend.device, backend.dtype)
    leaves = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    loss, stats = linear_policy_loss(
        *leaves, inputs.labels, *inputs.constants, objective, rows=rows.to(backend.device),
        repeats=repeats, temperature=drawn.temperature, chunk_tokens=3, **inputs.terms,
    )  # fmt: skip
    assert relative_error(loss, truth.loss) < backend.tolerance
    gradients = torch.autograd.grad(loss, leaves)
    d_hidden = torch.zeros(7, 16).double().index_add_(0, row_of, truth.d_hidden[rows])
    assert relative_error(gradients[0].double(), d_hidden) < backend.tolerance
    assert relative_error(gradients[1].double(), truth.d_weight) < backend.tolerance
    assert_stats(stats, truth.stats, max(1e-6, backend.tolerance))


def test_linear_logprobs_skips_inactive_rows(backend):
    case = make_case(21, 301, 16, seed=8, vocab_valid=290)
    truth, active = unfused_truth(case, PolicyObjective()), case.weights != 0
    inputs = case.to(backend.device, backend.dtype)
    actual = linear_logprobs(
        inputs.hidden,
        inputs.weight,
        torch.where(inputs.weights != 0, inputs.labels, -100),
        rows=inputs.weights.nonzero().squeeze(1),
        temperature=case.temperature,
        vocab_valid=290,
        chunk_tokens=4,
        top_k=3,
        top_below=280,
    )
    top = logprobs_of(case.logits, case.temperature, 290)[:, :280].topk(3)
    close = {"rtol": backend.tolerance, "atol": backend.tolerance}
    for ours, expected in zip(
        actual, (truth.logprobs, truth.entropy, *top.values.T, *top.indices.T), strict=True
    ):
        torch.testing.assert_close(
            ours.cpu().double(), torch.where(active, expected.double(), 0), **close
        )


def test_a_teacher_that_is_the_policy_has_no_gradient(backend):
    """Exactly: with its own likeliest tokens there is no loss and no slope."""
    inputs = make_case(21, 301, 16, seed=8, vocab_valid=290, active=1.0)
    inputs = inputs.to(backend.device, torch.float32)
    arguments, rows = (inputs.hidden, inputs.weight, inputs.labels), torch.arange(21)
    vocabulary = {"temperature": inputs.temperature, "vocab_valid": 290}
    found = linear_logprobs(*arguments, rows=rows.to(backend.device), top_k=4, **vocabulary)
    logprobs, ids = torch.stack(found[2:]).T.split(4, dim=1)
    objective = PolicyObjective(teacher_coef=1.0)
    for shift in (0, 1):  # a teacher that is shifted by a token teaches something
        teacher = Likeliest(ids.roll(shift, 0).long(), logprobs.roll(shift, 0))
        inputs.hidden.grad = None
        loss, _ = linear_policy_loss(
            inputs.hidden.requires_grad_(), *arguments[1:], inputs.old_logprobs,
            torch.zeros_like(inputs.advantages), inputs.weights, objective, teacher=teacher,
            **vocabulary,
        )  # fmt: skip
        loss.backward()
        assert (float(loss) > 0.1) == bool(inputs.hidden.grad.any()) == bool(shift)


@pytest.mark.parametrize("top_k", [3, 290])
def test_the_terms_of_all_tokens_are_the_kl_of_the_whole_vocabulary(top_k):
    """And the terms of some tokens are less, but not negative."""
    case = make_case(21, 301, 16, seed=8, vocab_valid=290, active=1.0)
    likings = 2 * torch.randn(21, 290, generator=torch.Generator().manual_seed(0)).double()
    teacher = Likeliest(*reversed(likings.log_softmax(1).topk(top_k)))
    options = {"temperature": case.temperature, "vocab_valid": 290, "teacher": teacher}
    arguments = (case.hidden, case.weight, case.labels, *case.constants)
    _, stats = linear_policy_loss(*arguments, PolicyObjective(teacher_coef=1.0), **options)
    policy = logprobs_of(case.logits, case.temperature, 290)
    exact = torch.nn.functional.kl_div(policy, likings.softmax(1), reduction="none").sum(1)
    if top_k == 290:
        torch.testing.assert_close(stats.teacher_kl, exact.float())
    else:
        assert ((stats.teacher_kl > 0) & (stats.teacher_kl < exact)).all()


@pytest.mark.parametrize("vocab", [97, 151936, 151937, 151944])
def test_rows_of_any_vocabulary_are_aligned(vocab):
    """Triton learns of a stride only whether 16 divides it, elements not bytes; else it loads
    element by element.
    """
    rows = empty_rows(torch.empty(0, dtype=torch.bfloat16), 3, vocab)
    assert rows.shape == (3, vocab)
    assert rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0


def test_default_chunks_are_whole_tiles_of_equal_size():
    def sizes(num_rows: int) -> list[int]:
        chunks = chunk_rows(num_rows, 2 * 151936, CHUNK_BYTES["cuda"], None)
        return [part.stop - part.start for part in chunks]

    assert sizes(8192) == [2048] * 4
    assert sizes(2457) == [1280, 1177]
    assert sizes(0) == [0]
    assert 2048 * 151936 * 2 < 0.7 * 2**30


def test_chunks_count_the_logits_as_they_are():
    """They are float32 on a CPU, whatever the hidden states are."""
    hidden, weight = (torch.empty(size, 8, dtype=torch.bfloat16) for size in (1024, 4096))
    labels = torch.zeros(1024, dtype=torch.int64)
    _, _, _, chunks = _active_rows(hidden, weight, labels, None, 1.0, (0, None, None), None)
    assert chunks[0].stop * len(weight) * 4 <= CHUNK_BYTES["cpu"]


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
        linear_logprobs(
            case.hidden, case.weight, case.labels, rows=torch.arange(len(case.labels)), **change
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"weight": torch.zeros(8, 53).double()}, "weight"),
        ({"weight": torch.zeros(53, 8)}, "one dtype"),
        ({"labels": torch.zeros(22, dtype=torch.int64)}, "one label per row"),
    ],
)
def test_bad_linear_arguments_are_refused(change, message):
    case = make_case()
    arguments = {"hidden": case.hidden, "weight": case.weight, "labels": case.labels}
    arguments |= dict(zip(("old_logprobs", "advantages", "weights"), case.constants, strict=True))
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(**arguments | change, objective=PolicyObjective())


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_read_no_memory_that_nobody_wrote(dtype):
    """Rows of 301 words are padded; chunks are reused, the last one is short."""
    case = make_case(21, 301, 16, dtype=dtype, seed=6)
    with FinitePadding() as products:
        _, _, *gradients = fused(case, OBJECTIVES["clip"], "cpu", dtype, chunk_tokens=8)
    is_copied = dtype == torch.bfloat16  # from padded float32 logits, without their padding
    assert (products.num_padded > 0) != is_copied
    assert_gradients(gradients, unfused_truth(case, OBJECTIVES["clip"]), 2e-2)


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "AMX")),
    reason="the tests above run under AVX2",
)
def test_bfloat16_products_under_another_instruction_set():
    """What oneDNN computes depends on the processor; AVX2 is what all of them have."""
    tests = "(nobody_wrote or bf16_operands) and not triton"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
        + ["-k", tests],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
