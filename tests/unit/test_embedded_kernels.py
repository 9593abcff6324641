"""Compiled kernels of the embedded engine against brute force in float64. The result for one item
does not depend on the others, nor on the number of threads.
"""

from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from numba.core import caching
from numpy.typing import NDArray

from ragen_mega.compiled import jit
from ragen_mega.compiled.jit import in_parts
from ragen_mega.engines.embedded import kernels
from ragen_mega.engines.embedded.decoder import _PackedMatrix
from ragen_mega.engines.embedded.kernels import BLOCK, VOCABULARY_BLOCK
from ragen_mega.engines.embedded.products import Panels
from tests.support.kv_blocks import by_position

Reals = NDArray[np.float64]
REALS = (np.float32, np.float64)
THETA, EPSILON, CONTEXT = 1e4, 1e-6, 4 * BLOCK
SLOTS = 7
# (kv_heads, queries of each, d): widths of one vector, of several, and of what is left over
HEADS = [(2, 2, 24), (1, 1, 2), (3, 3, 14), (1, 7, 64), (2, 4, 38), (2, 8, 128)]


def close(ours: NDArray, exact: Reals) -> bool:
    error = np.abs(ours - exact).max()
    return error <= 32 * np.finfo(ours.dtype).eps * max(1.0, np.abs(exact).max())


@pytest.mark.parametrize("real", REALS)
def test_norm_and_gate(real: type) -> None:
    generator = np.random.default_rng(0)
    x, weight = generator.normal(size=(5, 37)).astype(real), generator.normal(size=37).astype(real)
    out = np.empty_like(x)
    kernels.normalize(x, weight, real(EPSILON), out)
    exact = x.astype(np.float64)
    assert close(out, exact / np.sqrt((exact**2).mean(-1, keepdims=True) + EPSILON) * weight)
    gate_up, out = (30 * generator.normal(size=(5, 2, 37))).astype(real), np.empty((5, 37), real)
    gate_up[0, 0, :4] = -1000.0, 1000.0, 0.0, -88.0
    kernels.gate(gate_up, out)
    gate, up = gate_up.astype(np.float64).swapaxes(0, 1)
    assert close(out, gate * np.exp(-np.logaddexp(0.0, -gate)) * up)


@pytest.mark.parametrize(("inputs", "outputs"), [(2, 48), (37, 61), (576, 100)])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, "AMX"])
def test_products_of_a_row_depend_on_no_other_row(
    kind: torch.dtype | str, inputs: int, outputs: int
) -> None:
    """In one thread and in two; in bfloat16 the results are float32."""
    is_bfloat16 = kind in (torch.bfloat16, "AMX")
    if is_bfloat16 and not torch.cpu.get_capabilities().get("avx512_bf16"):
        pytest.skip("needs a processor that multiplies bfloat16 (AVX512-BF16)")
    dtype, real = (torch.bfloat16, torch.float32) if is_bfloat16 else (kind, kind)
    generator = torch.Generator().manual_seed(0)
    rows, weight, total = (
        torch.randn(shape, generator=generator, dtype=real)
        for shape in ((300, inputs), (inputs, outputs), (300, outputs))
    )
    matrix = (_PackedMatrix if kind == "AMX" else Panels)(weight.to(dtype))
    expected = total.double() + rows.to(dtype).double() @ weight.to(dtype).double()
    sums, products, threads = total.clone(), torch.empty_like(total), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        matrix.add(rows, sums)
        torch.set_num_threads(1)
        matrix.put_exactly(rows, products)
        for start, count in ((0, 1), (5, 7), (290, 10), (3, 33), (100, 3)):
            some, part = slice(start, start + count), total[start : start + count].clone()
            matrix.add(rows[some], part)
            assert torch.equal(part, sums[some])
            matrix.put_exactly(rows[some], part)
            assert torch.equal(part, products[some])
    finally:
        torch.set_num_threads(threads)
    if kind != "AMX":  # whose products are rounded; `test_logits_of_bfloat16...` bounds that
        assert close((products + total).numpy(), expected.numpy())
        assert close(sums.numpy(), expected.numpy())


class Batch:
    """Tokens of three rows, and what a token's head sees, by brute force in float64."""

    def __init__(self, heads: tuple[int, int, int], real: type, *, has_bias: bool, has_norm: bool):
        self.kv_heads, self.group, self.d = heads
        self.real = real
        generator = np.random.default_rng(1)
        counts, starts = np.array([1, 21, 9]), np.array([BLOCK, 0, 3 * BLOCK - 5])
        self.rows = np.repeat([4, 2, 0], counts)
        self.positions = np.concatenate([*map(np.arange, starts, starts + counts)])
        self.last = counts.cumsum() - 1
        per_slot = 4
        self.table = generator.permutation(SLOTS * per_slot).reshape(SLOTS, per_slot)
        size = (SLOTS * per_slot, self.kv_heads, 2, self.d * BLOCK)
        self.blocks = generator.normal(size=size).astype(real)
        num_heads, half = self.kv_heads * (self.group + 2), (2, self.d // 2)

        def normal(*size: int) -> NDArray:
            return generator.normal(size=(*size, *half)).astype(real)

        self.qkv = normal(len(self.rows), num_heads)
        self.bias = normal(num_heads if has_bias else 0)
        self.q_norm, self.k_norm = (normal(1 if has_norm else 0) for _ in range(2))
        angles = np.outer(np.arange(CONTEXT), THETA ** -(np.arange(0, self.d, 2) / self.d))
        self.cosines, self.sines = np.cos(angles).astype(real), np.sin(angles).astype(real)
        self.angles = angles[self.positions][:, None]  # [T, 1, d / 2]

    def exact_heads(self) -> Reals:
        """q, k and v after bias, norm, rotation and scale [T, heads + 2 * kv_heads, d]."""
        x = self.qkv.astype(np.float64)  # before the kernel changes it
        x = x + self.bias if len(self.bias) else x
        num_q = self.kv_heads * self.group
        num_qk = num_q + self.kv_heads
        if len(self.q_norm):
            normed = x / np.sqrt((x**2).mean((-1, -2), keepdims=True) + EPSILON)
            x[:, :num_q] = normed[:, :num_q] * self.q_norm[0]
            x[:, num_q:num_qk] = normed[:, num_q:num_qk] * self.k_norm[0]
        pairs = (x[:, :num_qk, 0] + 1j * x[:, :num_qk, 1]) * np.exp(1j * self.angles)
        x[:, :num_qk, 0], x[:, :num_qk, 1] = pairs.real, pairs.imag
        x[:, :num_q] *= self.d**-0.5
        return x.reshape(*x.shape[:2], self.d)

    def store(self) -> None:
        kernels.rotate_and_store(
            self.qkv, self.bias, self.q_norm, self.k_norm, self.real(EPSILON), self.cosines,
            self.sines, self.rows, self.positions, self.table, self.blocks,
        )  # fmt: skip

    def attend(self, queries: NDArray[np.int64]) -> NDArray:
        out = np.empty((len(queries), self.kv_heads * self.group, self.d), self.real)
        in_parts(
            kernels.attend, len(queries), self.qkv, queries, self.rows, self.positions,
            self.table, self.blocks, out,
        )  # fmt: skip
        return out

    def cached(self, token: int) -> tuple[Reals, Reals]:
        """Keys and values [kv_heads, positions, d] that the token sees, read block by block."""
        end = self.positions[token] + 1
        keys, values = (
            np.concatenate(x, axis=1)[:, :end].astype(np.float64)
            for x in by_position(self.blocks[self.table[self.rows[token]]])
        )
        return keys, values


@pytest.mark.parametrize("heads", HEADS)
def test_a_cache_in_bfloat16_holds_the_nearest_numbers(
    heads: tuple[int, int, int], threads: int
) -> None:
    in_floats, in_halves = (
        Batch(heads, np.float32, has_bias=False, has_norm=False) for _ in range(2)
    )
    in_halves.blocks = np.zeros(in_floats.blocks.shape, dtype=np.uint16)
    in_floats.blocks[:] = 0
    for batch in (in_floats, in_halves):
        batch.store()
    nearest = torch.from_numpy(in_floats.blocks).bfloat16()
    assert np.array_equal(in_halves.blocks, nearest.view(torch.uint16).numpy())
    in_floats.blocks = nearest.float().numpy()
    queries = np.arange(len(in_floats.rows))
    assert np.array_equal(in_halves.attend(queries), in_floats.attend(queries))


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("has_bias", "has_norm"), [(True, False), (False, True), (False, False)])
def test_attention(
    heads: tuple[int, int, int], real: type, threads: int, has_bias: bool, has_norm: bool
) -> None:
    batch = Batch(heads, real, has_bias=has_bias, has_norm=has_norm)
    kv_heads, group, d = heads
    exact, before = batch.exact_heads(), batch.blocks.copy()
    batch.store()
    num_q = kv_heads * group
    assert close(batch.qkv.reshape(exact.shape)[:, :num_q], exact[:, :num_q])
    written = np.zeros(before.shape, dtype=bool)
    written_keys, written_values = by_position(written)
    for token, (row, position) in enumerate(zip(batch.rows, batch.positions, strict=True)):
        keys, values = batch.cached(token)
        assert close(keys[:, -1].astype(real), exact[token, num_q : num_q + kv_heads])
        assert close(values[:, -1].astype(real), exact[token, num_q + kv_heads :])
        block, place = batch.table[row, position // BLOCK], position % BLOCK
        written_keys[block, :, place] = written_values[block, :, place] = True
    assert np.array_equal(batch.blocks[~written], before[~written])  # nothing else

    out = batch.attend(np.arange(len(batch.rows)))
    for token in range(len(batch.rows)):
        keys, values = batch.cached(token)
        q = exact[token, :num_q].reshape(kv_heads, group, d)
        scores = np.einsum("hgd,hld->hgl", q, keys)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        assert close(out[token], np.einsum("hgl,hld->hgd", weights, values).reshape(num_q, d))
    # To the bit the same without the other queries.
    assert np.array_equal(batch.attend(batch.last), out[batch.last])
    alone = [batch.attend(np.array([token]))[0] for token in range(len(out))]
    assert np.array_equal(alone, out)


@pytest.mark.parametrize("real", REALS)
def test_a_number_that_is_none_stays_one(real: type) -> None:
    """Diverged weights must show in the logits."""
    batch = Batch((2, 2, 24), real, has_bias=False, has_norm=False)
    batch.qkv[3, 0, 0, 1] = np.nan
    batch.store()
    out = batch.attend(np.arange(len(batch.rows)))
    assert np.isnan(out[3, 0]).all() and np.isfinite(out[3, 1:]).all()
    gate_up, out = np.zeros((1, 2, 20), real), np.empty((1, 20), real)
    gate_up[0, 0, 5] = np.nan
    kernels.gate(gate_up, out)
    assert np.isnan(out[0, 5]) and np.isfinite(np.delete(out[0], 5)).all()


@pytest.mark.parametrize("real", REALS)
def test_exponentials(real: type, threads: int) -> None:
    """Of all differences that a softmax meets, with a temperature, and summed by blocks."""
    size = 2 * VOCABULARY_BLOCK + 77
    logits = np.stack([np.linspace(-90.0, 3.0, size), np.linspace(5.0, 4.999, size)]).astype(real)
    weights, masses = logits.copy(), np.empty((2, 3))
    inverse_temperature = np.array([1.0, 2.0], real)
    in_parts(kernels.exponentiate, 2, weights, inverse_temperature, masses)
    scaled = (logits * inverse_temperature[:, None]).astype(np.float64)
    distance = scaled - scaled.max(-1, keepdims=True)
    lost = distance < -87.0
    # A difference is rounded as its size is.
    bound = (4 + np.abs(distance)) * np.finfo(real).eps
    relative = np.abs(weights / np.exp(distance) - 1)
    assert (relative[~lost] <= bound[~lost]).all()
    assert (weights[lost] <= np.exp(-87.0)).all()
    parts = np.array_split(np.exp(distance), range(VOCABULARY_BLOCK, size, VOCABULARY_BLOCK), 1)
    exact = np.stack([part.sum(-1) for part in parts], axis=1)
    assert np.abs(masses / exact - 1).max() < 64 * np.finfo(real).eps


def test_where_no_cache_can_be_written_kernels_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    double = jit.jit(fastmath=())(lambda x: 2 * x)
    assert double(21) == 42


def test_a_changed_helper_compiles_its_kernels_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba itself looks at the file of the kernel alone."""

    def is_compiled(helpers: str) -> bool:
        """Make the kernel while the helpers have this text: is it compiled, or loaded?"""
        monkeypatch.setattr(jit, "_helpers", lambda: helpers)
        kernel = jit.jit(fastmath=())(_twice)
        assert kernel(21) == 42
        return not kernel.stats.cache_hits

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    texts = ("old", "old", "new", "new")
    assert [is_compiled(text) for text in texts] == [True, False, True, False]


def _twice(x: int) -> int:
    return 2 * x
