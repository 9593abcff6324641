"""A vocabulary split over two gloo ranks gives the loss and gradients of the whole one."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.kernels.kernel_cases import (
    OBJECTIVES,
    assert_stats,
    make_case,
    relative_error,
    unfused_truth,
)

WORLD_SIZE = 2
VOCAB, VALID = 64, 50


def check_linear(implementation, rank: int, dtype: torch.dtype, tolerance: float) -> None:
    group = dist.group.WORLD
    width = VOCAB // WORLD_SIZE
    for name, active in (("everything", 0.6), ("clip", 0.0)):
        case, objective = (
            make_case(7, VOCAB, 8, vocab_valid=VALID, active=active, seed=3),
            OBJECTIVES[name],
        )
        truth, inputs = unfused_truth(case, objective), case.to("cpu", dtype)
        shard = {
            "temperature": case.temperature,
            "vocab_start": rank * width,
            "vocab_valid": VALID,
            "group": group,
        }
        for mode in ("save", "chunk", "recompute"):
            hidden = inputs.hidden.clone().requires_grad_()
            weight = inputs.weight.split(width)[rank].clone().requires_grad_()
            loss, stats = implementation.linear_policy_loss(
                hidden,
                weight,
                inputs.labels,
                *inputs.constants,
                objective,
                **inputs.terms,
                **shard,
                mode=mode,
                chunk_tokens=4,
            )
            loss.backward()
            dist.all_reduce(hidden.grad)
            assert relative_error(loss, truth.loss) < tolerance
            assert relative_error(hidden.grad, truth.d_hidden) < tolerance
            assert relative_error(weight.grad, truth.d_weight.split(width)[rank]) < tolerance
            assert_stats(stats, truth.stats, max(1e-6, tolerance))
        logprobs, entropy = implementation.linear_logprobs(
            inputs.hidden, weight.detach(), inputs.labels, **shard, with_entropy=True
        )
        assert relative_error(logprobs, truth.logprobs) < tolerance
        assert relative_error(entropy, truth.entropy) < tolerance


def check_logits(implementation, rank: int, dtype: torch.dtype, tolerance: float) -> None:
    case, objective = make_case(9, VOCAB, 8, vocab_valid=VALID, seed=4), OBJECTIVES["everything"]
    truth, inputs = unfused_truth(case, objective), case.to("cpu", dtype)
    width = VOCAB // WORLD_SIZE
    logits = case.logits.split(width, dim=1)[rank].to(dtype).contiguous().requires_grad_()
    loss, stats = implementation.policy_loss(
        logits,
        inputs.labels,
        *inputs.constants,
        objective,
        **inputs.terms,
        temperature=case.temperature,
        vocab_start=rank * width,
        vocab_valid=VALID,
        group=dist.group.WORLD,
    )
    loss.backward()
    assert relative_error(loss, truth.loss) < tolerance
    assert relative_error(logits.grad, truth.d_logits.split(width, dim=1)[rank]) < tolerance
    assert_stats(stats, truth.stats, max(1e-6, tolerance))
    with pytest.raises(ValueError, match="vocab_start"):
        implementation.logprob_entropy(logits, inputs.labels, vocab_start=7, group=dist.group.WORLD)


def run_reference(rank: int, rendezvous: str) -> None:
    from ragen_kernels import reference, reference_linear

    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE
    )
    check_linear(reference_linear, rank, torch.float64, 1e-12)
    check_logits(reference, rank, torch.float64, 1e-12)
    dist.destroy_process_group()


def run_triton(rank: int, rendezvous: str) -> None:
    from ragen_kernels import triton_linear, triton_policy

    from tests.kernels.interpreter_shim import sanitize  # first: it switches the interpreter on

    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE
    )
    with sanitize(order=rank):
        check_linear(triton_linear, rank, torch.float32, 1e-5)
        check_logits(triton_policy, rank, torch.float32, 1e-5)
    dist.destroy_process_group()


@pytest.mark.parametrize("run", [run_reference, run_triton])
def test_two_ranks_agree_with_one(run, tmp_path: Path):
    if run is run_triton and importlib.util.find_spec("triton") is None:
        pytest.skip("the Triton kernels need triton, which CPU-only torch does not bring along")
    mp.spawn(run, args=(str(tmp_path / "rendezvous"),), nprocs=WORLD_SIZE)
