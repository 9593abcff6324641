"""Whether two places hold exactly the same weights: their names, and one checksum per name.

Needs torch and numpy alone, because rollout servers get a copy of this file. The checksum is a
multilinear hash of the bit pattern (Lemire and Kaser, arXiv:1202.4961): the sum modulo 2^64 of
32-bit words times pseudo-random 64-bit weights of their positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROW_WORDS = 1 << 18
_ROWS_AT_ONCE = 128
"""On a GPU, a whole bucket of weights, to save launches; on a CPU it is one row, whose products
stay in the cache.
"""
_SHOWN = 3
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of splitmix64."""


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit hash of shape and bits, equal on every device and for every memory layout.

    A change of any one element, an exchange of rows or halves, a shift by a row, zeros in place of
    values all change it; two tensors that differ by accident agree with a probability of about
    2^-64, at worst 2^-32. It is no protection against an attacker: the weights of positions are
    public. Costs one pass at the speed of memory, on a GPU two operations and 256 MiB of memory for
    every 128 MiB.
    """
    return checksum_each([tensor])[0]


def checksum_each(tensors: Sequence[Tensor]) -> list[int]:
    """Return the checksums of tensors on one device; the host waits for it once."""
    if not tensors:
        return []
    words = [_words(tensor.detach()) for tensor in tensors]
    counts = [-(-len(part) // _ROW_WORDS) for part in words]
    sums = torch.empty(sum(counts), dtype=torch.int64, device=words[0].device)
    for part, own in zip(words, sums.split(counts)):
        _sum_rows(part, own)
    rows = np.split(sums.cpu().numpy().view(np.uint64), np.cumsum(counts)[:-1])
    return [_combine(own, tensor.shape) for own, tensor in zip(rows, tensors)]


def check_names(sent: Collection[str], expected: Collection[str]) -> None:
    """Raise ValueError unless exactly the expected names were sent, each once."""
    counts, wanted = Counter(list(sent)), set(expected)
    for what, names in (
        ("missing", wanted - counts.keys()),
        ("unknown", counts.keys() - wanted),
        ("sent twice", {name for name, count in counts.items() if count > 1}),
    ):
        if names:
            raise ValueError(
                f"the engine needs each of its {len(wanted)} weights exactly once; {what}:"
                f" {_few(names)}; check that the weights belong to the model config"
            )


def _few(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _words(tensor: Tensor) -> Tensor:
    """Return the bits as int32 words, with zeros after the last."""
    data = tensor.contiguous().reshape(-1)
    if data.numel() * data.element_size() % 4:
        data = data.view(torch.uint8)
        data = torch.cat([data, data.new_zeros(-len(data) % 4)])
    return data.view(torch.int32)


def _sum_rows(words: Tensor, sums: Tensor) -> None:
    """Write the sums [rows] int64 of each row's words times the weights of their places."""
    weights = _weights_on(words.device)
    whole = len(words) // _ROW_WORDS
    step = _ROWS_AT_ONCE if words.is_cuda else 1
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        rows = words[start * _ROW_WORDS : stop * _ROW_WORDS].view(-1, _ROW_WORDS)
        torch.sum(rows * weights, 1, out=sums[start:stop])
    if len(rest := words[whole * _ROW_WORDS :]):
        torch.sum(rest * weights[: len(rest)], 0, out=sums[whole])


def _combine(rows: NDArray[np.uint64], shape: torch.Size) -> int:
    value = int((rows * (_position_weights()[: len(rows)] | np.uint64(1))).sum())
    for size in shape:
        value = (value ^ size) * _GOLDEN + 1
    return value % 2**64


@cache
def _weights_on(device: torch.device) -> Tensor:
    return torch.from_numpy(_position_weights().view(np.int64)).to(device)


@cache
def _position_weights() -> NDArray[np.uint64]:
    """Return splitmix64 of 1 .. _ROW_WORDS, whose products wrap modulo 2^64."""
    values = np.arange(1, _ROW_WORDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))
