"""The layout of the embedded engine's cache, for tests that read or write it."""

import numpy as np

from ragen_mega.engines.embedded.kernels import BLOCK


def by_position(layer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [blocks, kv_heads, BLOCK, d], which share the memory of a layer [blocks,
    kv_heads, 2, d * BLOCK].
    """
    keys, values = layer.transpose(2, 0, 1, 3)
    shape = keys.shape[:2]
    columns = keys.reshape(*shape, -1, BLOCK)
    return columns.swapaxes(2, 3), values.reshape(*shape, BLOCK, -1)
