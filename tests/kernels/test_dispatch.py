"""CPU tensors need no triton, and both implementations of an operation take the same arguments."""

import inspect
import subprocess
import sys

import pytest
import ragen_kernels
import torch
from ragen_kernels import dispatch
from torch._subclasses import FakeTensorMode

OPERATIONS = {
    "logprob_entropy": "triton_policy",
    "policy_loss": "triton_policy",
    "policy_loss_from_logprobs": "triton_token",
    "linear_logprobs": "triton_linear",
    "linear_policy_loss": "triton_linear",
    "gae": "triton_returns",
    "group_normalize": "triton_returns",
    "whiten": "triton_returns",
    "value_loss": "triton_returns",
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_signatures_agree(name, kernel_device):
    module = __import__(f"ragen_kernels.{OPERATIONS[name]}", fromlist=[name])
    assert inspect.signature(getattr(module, name)) == inspect.signature(getattr(dispatch, name))
    assert getattr(ragen_kernels, name) is getattr(dispatch, name)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_device_decides(name, kernel_device, monkeypatch):
    """Without a GPU, on a tensor that only claims to be on one: the Triton function of the same
    name gets the call.
    """
    module = __import__(f"ragen_kernels.{OPERATIONS[name]}", fromlist=[name])
    monkeypatch.setattr(module, name, lambda *args, **kwargs: ("triton", args, kwargs))
    with FakeTensorMode():
        tensor = torch.empty(2, device="cuda")
        assert getattr(ragen_kernels, name)(tensor, 1, last=2) == (
            "triton",
            (tensor, 1),
            {"last": 2},
        )


def test_cpu_tensors_do_not_import_triton():
    program = """
import sys, torch, ragen_kernels
hidden, weight = torch.randn(4, 8), torch.randn(16, 8)
ones = torch.ones(4)
ragen_kernels.linear_policy_loss(hidden, weight, ones.long(), -ones, ones, ones, ragen_kernels.PolicyObjective())
assert "triton" not in sys.modules, "triton was imported for CPU tensors"
"""
    subprocess.run([sys.executable, "-c", program], check=True)
