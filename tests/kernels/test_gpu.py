"""What only a GPU can show: full sizes, bit-equality, memory, no recompilation, and NVIDIA's
sanitizer.

The cases of `test_rows.py`, `test_policy.py` and `test_returns.py` run on the GPU too when there is
one; these tests come on top.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ragen_kernels
import torch
from ragen_kernels import PolicyObjective, reference
from ragen_kernels.dispatch import policy_rows_
from ragen_kernels.objective import TokenTerms
from ragen_kernels.policy import empty_rows
from ragen_kernels.vocab import vocab_shard

from tests.kernels.kernel_cases import logprob_entropy_truth, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.silicon,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 151936
OBJECTIVE = PolicyObjective(entropy_coef=0.001, dual_clip=3.0)
ROOT = Path(__file__).parents[2]


def token_terms(num_tokens: int, vocab: int, active: float = 1.0) -> tuple[torch.Tensor, ...]:
    """labels, old_logprobs, advantages, weights"""
    labels = torch.randint(0, vocab, (num_tokens,), device="cuda")
    old = torch.randn(num_tokens, device="cuda") - torch.log(torch.tensor(float(vocab)))
    mask = torch.rand(num_tokens, device="cuda") < active
    return labels, old, torch.randn(num_tokens, device="cuda"), mask / num_tokens


def policy_rows(logits: torch.Tensor, labels: torch.Tensor, terms: tuple) -> torch.Tensor:
    """Outputs of the row kernel, whose gradient replaces `logits`."""
    shard = vocab_shard(logits.shape[1], 0, None, None)
    return policy_rows_(logits, labels, TokenTerms(*terms, None, None), OBJECTIVE, shard, 1.0)


@pytest.mark.parametrize(
    ("num_tokens", "vocab"), [(8192, VOCAB), (1024, VOCAB + 1), (70_000, 1024)]
)
def test_full_size_against_float64(num_tokens, vocab):
    """70 000 rows are more than a grid axis of 65 535; an odd vocabulary has an odd rest."""
    logits = empty_rows(torch.empty(0, device="cuda", dtype=torch.bfloat16), num_tokens, vocab)
    logits.normal_()
    labels, *terms = token_terms(num_tokens, vocab)
    rows = torch.arange(0, num_tokens, num_tokens // 64, device="cuda")
    exact = logits[rows].double()
    truth = logprob_entropy_truth(exact, labels[rows], 1.0, None)
    for actual, expected in zip(ragen_kernels.logprob_entropy(logits, labels), truth, strict=True):
        torch.testing.assert_close(actual[rows].double(), expected, rtol=0, atol=2e-5)
    reference.policy_rows_(
        exact,
        labels[rows],
        TokenTerms(*(x[rows].double() for x in terms), None, None),
        OBJECTIVE,
        vocab_shard(vocab, 0, None, None),
        1.0,
    )
    policy_rows(logits, labels, terms)
    assert relative_error(logits[rows], exact.cpu()) < 4e-3


def test_twenty_runs_are_bit_equal():
    labels, *terms = token_terms(512, VOCAB, active=0.7)
    logits = torch.randn(512, VOCAB, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(VOCAB, 256, device="cuda", dtype=torch.bfloat16) / 16

    def run() -> list[torch.Tensor]:
        rows = logits.clone()
        outputs = policy_rows(rows, labels, terms)
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss, _ = ragen_kernels.linear_policy_loss(*leaves, labels, *terms, OBJECTIVE)
        return [outputs, rows, loss, *torch.autograd.grad(loss, leaves)]

    first = run()
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_peak_memory_of_the_lm_head():
    """Beside operands and gradients: one chunk of logits, and what keeps d_weight in float32 until
    it is cast.
    """
    labels, *terms = token_terms(8192, VOCAB)
    hidden = torch.randn(8192, 896, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCAB, 896, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient_bytes = hidden.nbytes + weight.nbytes * (1 + 2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss, _ = ragen_kernels.linear_policy_loss(hidden, weight, labels, *terms, OBJECTIVE)
    loss.backward()
    extra = torch.cuda.max_memory_allocated() - before - gradient_bytes
    # index_select of the active rows and its gradient are two more copies of hidden.
    assert extra - 2 * hidden.nbytes < 0.7 * 2**30


def test_no_compilation_per_sequence_length():
    from ragen_kernels.triton_policy import policy_row_kernel

    def variants() -> int:
        return len(policy_row_kernel.device_caches[torch.cuda.current_device()][0])

    def run(num_tokens: int) -> None:
        labels, *terms = token_terms(num_tokens, 1024)
        policy_rows(torch.randn(num_tokens, 1024, device="cuda"), labels, terms)

    run(100)
    before = variants()
    for num_tokens in (1, 7, 16, 128, 1000):
        run(num_tokens)
    assert variants() == before


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer(tool):
    """Without torch's pool every tensor is its own allocation, so that an access behind its end is
    seen.
    """
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    sanitizer = shutil.which(
        "compute-sanitizer", path=os.pathsep.join((os.environ["PATH"], str(toolkit)))
    )
    if sanitizer is None:
        pytest.skip(
            f"compute-sanitizer is neither on the PATH nor in {toolkit}; it comes with the CUDA"
            " toolkit"
        )
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
    ]
    process = subprocess.run(
        [
            *command,
            "-k",
            "not as_launched",
            "tests/kernels/test_rows.py",
            "tests/kernels/test_returns.py",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    assert process.returncode == 0, process.stdout[-2000:]
    assert "ERROR SUMMARY: 0 errors" in process.stdout or tool == "racecheck", process.stdout[
        -2000:
    ]
