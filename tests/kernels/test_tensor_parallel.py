"""A vocabulary split over two gloo ranks gives the loss and gradients of the whole one."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ragen_kernels import dispatch, linear_logprobs, linear_policy_loss

from tests.kernels.kernel_cases import (
    OBJECTIVES,
    assert_stats,
    logprobs_of,
    make_case,
    relative_error,
    unfused_truth,
)
from tests.support.forked_ranks import on_ranks

WORLD_SIZE = 2
VOCAB, VALID = 64, 50


def check_linear(rank: int, dtype: torch.dtype, tolerance: float) -> None:
    width = VOCAB // WORLD_SIZE
    for name, active in (
        ("everything", 0.6),
        ("clip", 0.0),
        ("teacher and everything", 0.6),
        ("teacher", 0.0),
    ):
        case = make_case(7, VOCAB, 8, vocab_valid=VALID, active=active, seed=3)
        objective = OBJECTIVES[name]
        truth, inputs = unfused_truth(case, objective), case.to("cpu", dtype)
        shard = {
            "temperature": case.temperature,
            "vocab_start": rank * width,
            "vocab_valid": VALID,
            "group": dist.group.WORLD,
        }
        hidden = inputs.hidden.clone().requires_grad_()
        weight = inputs.weight.split(width)[rank].clone().requires_grad_()
        arguments = (hidden, weight, inputs.labels)
        loss, stats = linear_policy_loss(
            *arguments, *inputs.constants, objective, **inputs.terms, **shard, chunk_tokens=4
        )
        loss.backward()
        dist.all_reduce(hidden.grad)
        assert relative_error(loss, truth.loss) < tolerance
        assert relative_error(hidden.grad, truth.d_hidden) < tolerance
        assert relative_error(weight.grad, truth.d_weight.split(width)[rank]) < tolerance
        assert_stats(stats, truth.stats, max(1e-6, tolerance))
        for below in (VALID, 45, 20):  # ids on both ranks, and on one alone
            rows = linear_logprobs(
                *arguments,
                rows=(inputs.labels >= 0).nonzero().squeeze(1),
                **shard,
                top_k=20,
                top_below=below,
            )
            all_logprobs = logprobs_of(case.logits, case.temperature, VALID)
            top = all_logprobs[:, :below].topk(20)
            expected = (truth.logprobs, truth.entropy, *top.values.T, *top.indices.T)
            for actual, exact in zip(rows, expected, strict=True):
                assert relative_error(actual, exact.double()) < tolerance
    with pytest.raises(ValueError, match="vocab_start"):
        linear_logprobs(
            *arguments,
            rows=(inputs.labels >= 0).nonzero().squeeze(1),
            vocab_start=7,
            group=dist.group.WORLD,
        )


def run_reference(rank: int, rendezvous: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE
    )
    check_linear(rank, torch.float64, 1e-12)
    dist.destroy_process_group()


def run_triton(rank: int, rendezvous: str) -> None:
    from tests.kernels.interpreter_shim import sanitize  # it switches the interpreter on

    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE
    )
    dispatch.KERNEL_DEVICES.add("cpu")
    with sanitize(order=rank):
        check_linear(rank, torch.float32, 1e-5)
    dist.destroy_process_group()


@pytest.mark.forks
@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_two_ranks_agree_with_one(run, tmp_path: Path):
    if run is run_triton and importlib.util.find_spec("triton") is None:
        pytest.skip("the Triton kernels need triton, which CPU-only torch does not bring along")
    on_ranks(lambda: run(int(os.environ["RANK"]), str(tmp_path / "rendezvous")), WORLD_SIZE)
