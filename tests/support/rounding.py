"""Tolerances that follow from float32 arithmetic on this machine, not from a number that one CPU
happened to stay below.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

SLACK = 8
"""Two correct float32 programs round in another order each; both stay within a few times the
other's error.
"""


def exact_logprobs(
    model: PreTrainedModel, tokens: list[int], temperature: float
) -> tuple[Tensor, float]:
    """[L, V] log-probabilities of the token behind each position in float64, and how far float32
    may be from them.

    The bound is measured: what transformers itself loses in float32 over the whole [L, V], a few
    times, and the rounding of the result.
    """
    exact = _logprobs(copy.deepcopy(model).double(), tokens, temperature)
    in_float32 = _logprobs(model.float(), tokens, temperature).double()
    unit = torch.finfo(torch.float32).eps
    bound = SLACK * float((in_float32 - exact).abs().max()) + SLACK * unit * float(
        exact.abs().max()
    )
    return exact, bound


def _logprobs(model: PreTrainedModel, tokens: list[int], temperature: float) -> Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0] / temperature, dim=-1)
