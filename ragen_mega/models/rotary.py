"""Rotary positions: the angle by which each pair of channels turns from a position to the next.

Source: RoPE (arXiv:2104.09864), and the scaling of Llama 3.1 (`rope_type` `llama3` of
transformers), which slows the pairs that do not turn once in the context of pretraining.
"""

from math import tau

import torch
from torch import Tensor

from ragen_mega.models.shape import ModelShape


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """Return the angles in radians, [head_dim / 2], on the processor. They are float32, as in
    transformers and megatron-core: at theta 1e6 the rounding is visible.
    """
    channels = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device="cpu")
    exponents = channels / shape.head_dim
    frequencies = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.pretrained_length * frequencies / tau
    kept = (turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
