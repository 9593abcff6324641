"""Tolerances that follow from float32 arithmetic on this machine, not from a number that one CPU
happened to stay below.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

FLOAT32 = torch.finfo(torch.float32)
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
    in_float32 = _logprobs(model.float(), tokens, temperature)
    return exact, float32_bound(exact, in_float32)


def float32_bound(exact: Tensor, in_float32: Tensor) -> float:
    """How far another float32 program may be from `exact`, of which `in_float32` is one result."""
    measured = (in_float32.double() - exact).abs().max()
    return SLACK * float(measured + FLOAT32.eps * exact.abs().max())


def forward_bound(hf: PretrainedConfig, length: int) -> float:
    """Relative to its size, how far a float32 result of a whole forward pass over `length` tokens
    may be from the exact one: n roundings in a row leave at most n u / (1 - n u) (Higham, Accuracy
    and Stability of Numerical Algorithms, 3.1), where products of matrices sum over their inner
    size, softmax and attention over the tokens, and the logarithm of the head over the vocabulary.
    """
    in_a_layer = 6 * hf.hidden_size + hf.intermediate_size + 2 * length
    chain = hf.num_hidden_layers * in_a_layer + 2 * hf.hidden_size + hf.vocab_size
    error = chain * FLOAT32.eps / 2
    return error / (1 - error)


def _logprobs(model: PreTrainedModel, tokens: list[int], temperature: float) -> Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0] / temperature, dim=-1)
