"""The blocks of the embedded engine's cache against a plain list per row, over random histories."""

import random

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from ragen_mega.engines.embedded.kernels import BLOCK
from ragen_mega.engines.embedded.kv_cache import KVCache
from ragen_mega.models.shape import ModelShape
from tests.support.kv_blocks import by_position

SLOTS, CONTEXT = 5, 4 * BLOCK - 3


def make_cache() -> KVCache:
    config = Qwen2Config(
        vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return KVCache(ModelShape.of(config), num_slots=SLOTS, max_context=CONTEXT, dtype=torch.float32)


def places(cache: KVCache, slot: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(blocks, places in them) of the first `length` positions of a slot."""
    positions = np.arange(length)
    return cache.table[slot, positions // BLOCK], positions % BLOCK


@pytest.mark.parametrize("seed", range(20))
def test_rows_keep_what_they_have_written_whoever_shares_it(seed: int) -> None:
    generator, cache = random.Random(seed), make_cache()
    rows: list[list[int]] = [[] for _ in range(SLOTS)]  # what each position should hold
    stamps = iter(range(1, 100_000))
    for _ in range(300):
        slot = generator.randrange(SLOTS)
        action = generator.choice(("write", "write", "cut", "share", "free"))
        if action == "write":
            count = min(generator.randint(1, 2 * BLOCK), CONTEXT - len(rows[slot]))
            start = len(rows[slot])
            rows[slot] += [next(stamps) for _ in range(count)]
            cache.reserve(np.array([slot]), np.array([len(rows[slot])]))
            blocks, inside = (x[start:] for x in places(cache, slot, len(rows[slot])))
            for number, layer in enumerate(cache.layers):
                stamped = np.array(rows[slot][start:])[:, None, None] + number
                keys, values = by_position(layer)
                keys[blocks, :, inside], values[blocks, :, inside] = stamped, -stamped
        elif action == "cut":
            length = generator.randint(0, len(rows[slot]))
            cache.cut(slot, length)
            del rows[slot][length:]
        elif action == "free":
            cache.cut(slot, 0)
            rows[slot].clear()
        elif not rows[slot]:
            source = max(range(SLOTS), key=lambda other: len(rows[other]))
            length = generator.randint(0, len(rows[source]))
            cache.share(source, slot, length)
            rows[slot] = rows[source][:length]
        for other, expected in enumerate(rows):
            blocks, inside = places(cache, other, len(expected))
            for number, layer in enumerate(cache.layers):
                keys, values = (x[blocks, :, inside] for x in by_position(layer))
                stamped = np.array(expected)[:, None, None] + number
                assert (keys == stamped).all() and (values == -stamped).all()
    for slot in range(SLOTS):
        cache.cut(slot, 0)
    # Every block is free again: all rows can be filled.
    cache.reserve(np.arange(SLOTS), np.full(SLOTS, CONTEXT))
    assert np.unique(cache.table).size == cache.table.size


def test_a_prefix_is_held_once() -> None:
    cache = make_cache()
    length = 2 * BLOCK + 5
    cache.reserve(np.array([0]), np.array([length]))
    for slot in range(1, SLOTS):
        cache.share(0, slot, length)
    assert np.unique(cache.table[:, :2]).size == 2  # full blocks
    assert np.unique(cache.table[:, 2]).size == SLOTS  # each may write after position 5
