"""Float32 numbers in place of bfloat16 numbers, so that small changes outlast the next rounding."""

from zlib import crc32

import torch
from torch import Tensor


def spread_bits(tensor: Tensor, name: str) -> Tensor:
    """Return float32 numbers that round to the bfloat16 numbers of a tensor: one drawn uniformly
    for each, by the tensor's name. Return a tensor of another type as it is.

    The master copies of weights start from them, and adapters are merged into them. From the
    bfloat16 numbers themselves a change below half of the distance to the next one is lost, in all
    weights at once. From these numbers it changes as many weights as make up for it.
    """
    if tensor.dtype != torch.bfloat16:
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(crc32(name.encode()))
    low = torch.empty(tensor.shape, dtype=torch.int32, device=tensor.device)
    low.random_(-(2**15) + 1, 2**15, generator=generator)
    wide = tensor.float()
    return (wide.view(torch.int32) + low * (wide != 0)).view(torch.float32)
