"""CPU tensors need no triton, and both implementations of an operation take the same arguments."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from ragen_kernels import dispatch
from torch._subclasses import FakeTensorMode

OPERATIONS = {
    "row_statistics": "triton_rows",
    "logits_gradient": "triton_rows",
    "token_losses": "triton_token",
    "policy_rows_": "triton_policy",
    "gae": "triton_returns",
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_signatures_agree(name, kernel_device):
    module = import_module(f"ragen_kernels.{OPERATIONS[name]}")
    assert inspect.signature(getattr(module, name)) == inspect.signature(getattr(dispatch, name))


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_device_decides(name, kernel_device, monkeypatch):
    """Without a GPU, on a tensor that only claims to be on one: the Triton function of the same
    name gets the call.
    """
    module = import_module(f"ragen_kernels.{OPERATIONS[name]}")
    monkeypatch.setattr(module, name, lambda *args, **kwargs: ("triton", args, kwargs))
    with FakeTensorMode():
        tensor = torch.empty(2, device="cuda")
        expected = ("triton", (tensor, 1), {"last": 2})
        assert getattr(dispatch, name)(tensor, 1, last=2) == expected


def test_cpu_tensors_do_not_import_triton():
    program = """
import sys, torch
from ragen_kernels import PolicyObjective, linear_policy_loss
hidden, weight = torch.randn(4, 8), torch.randn(16, 8)
ones = torch.ones(4)
linear_policy_loss(hidden, weight, ones.long(), -ones, ones, ones, PolicyObjective())
assert "triton" not in sys.modules, "triton was imported for CPU tensors"
"""
    subprocess.run([sys.executable, "-c", program], check=True)
