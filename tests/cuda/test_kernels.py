"""What launches every Triton kernel, with CUDA tensors: interpreted, against plain torch on the
host.
"""

from collections.abc import Callable
from typing import Any

import pytest
import ragen_kernels
import torch
from ragen_kernels import PolicyObjective, dispatch
from torch import Tensor

native = pytest.importorskip("fake_cuda_device", reason="real kernels: tests/kernels/test_gpu.py")
pytest.importorskip("triton")
from tests.fake_cuda.counts import counted  # noqa: E402 there only beside the device

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, VOCAB = 10, 32, 80
OBJECTIVE = PolicyObjective(
    dual_clip=3.0, kl_kind="k3", kl_coef=0.01, entropy_coef=0.01, importance_cap=2.0
)
Inputs = dict[str, Tensor]
Outputs = tuple[Tensor, ...]


def inputs(dtype: torch.dtype) -> Inputs:
    torch.manual_seed(0)
    weights = torch.rand(TOKENS)
    weights[::3] = 0
    return dict(
        hidden=torch.randn(TOKENS, HIDDEN).to(dtype),
        head=(torch.randn(VOCAB, HIDDEN) * 0.3).to(dtype),
        logits=torch.randn(TOKENS, VOCAB).to(dtype),
        labels=torch.randint(0, VOCAB, (TOKENS,)),
        old=torch.randn(TOKENS) * 0.1 - 4,
        advantages=torch.randn(TOKENS),
        values=torch.randn(TOKENS),
        weights=weights,
        mask=weights > 0,
        cu_seqlens=torch.tensor([0, 4, TOKENS], dtype=torch.int32),
    )


def with_gradients(x: Inputs, *names: str) -> list[Tensor]:
    return [x[name].requires_grad_() for name in names]


def policy_loss(x: Inputs) -> Outputs:
    hidden, head = with_gradients(x, "hidden", "head")
    loss, stats = ragen_kernels.linear_policy_loss(
        hidden,
        head,
        x["labels"],
        x["old"],
        x["advantages"],
        x["weights"],
        OBJECTIVE,
        ref_logprobs=x["old"],
        rollout_logprobs=x["old"],
        temperature=0.7,
    )
    loss.backward()
    return loss, hidden.grad, head.grad, stats.entropy


def logprobs_of_hidden(x: Inputs) -> Outputs:
    return ragen_kernels.linear_logprobs(
        x["hidden"], x["head"], x["labels"], rows=x["mask"].nonzero().squeeze(1)
    )[:1]


def logprobs_of_logits(x: Inputs) -> Outputs:
    (logits,) = with_gradients(x, "logits")
    logprobs, entropy = ragen_kernels.logprob_entropy(logits, x["labels"])
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    return logprobs, entropy, logits.grad


def advantages(x: Inputs) -> Outputs:
    return ragen_kernels.gae(
        x["advantages"], x["values"], x["mask"], x["cu_seqlens"], gamma=0.99, lam=0.95
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "compute",
    [
        policy_loss,
        logprobs_of_hidden,
        logprobs_of_logits,
        advantages,
    ],
)
def test_kernels_launch_on_cuda_tensors(
    compute: Callable[[Inputs], Outputs], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compute(inputs(dtype))
    monkeypatch.setattr(dispatch, "KERNEL_DEVICES", {"cuda"})
    on_device: dict[str, Any] = {name: x.cuda() for name, x in inputs(dtype).items()}
    with counted() as counts:
        actual = compute(on_device)
    assert counts.operations and all(x.is_cuda for x in actual)
    # a bfloat16 gradient rounds once where the kernel and twice where plain torch does
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            ours.detach().float().cpu(), theirs.detach().float(), rtol=tolerance, atol=tolerance
        )
